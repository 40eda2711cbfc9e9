"""Rows on SSD: random batch reads, writes of evicted rows, and the RAM that a cold row costs.

4 million rows of 256 bytes, nearly all of them cold; 64 k random keys a batch; direct I/O, so nothing comes from the
page cache. A record is 272 bytes and a 4 KiB block holds 15; 64 k keys touch about 58 k of 267 k blocks, so a batch
must read 238 MB. The limit is the device's 4 KiB random reads/s (measured here, same files, same queue depth) times
the rows wanted in each block touched. RocksDB has the same rows, direct reads and a block cache of 8 MiB.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hotrow import _core, child_process
from hotrow.bench.harness import Result, higher, lower, timing
from hotrow.bench.storage.rows import resident
from hotrow.config import Memory
from hotrow.errors import OptionError
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.optim import SGD
from hotrow.table import Table, TableRows
from hotrow.train.trainer import Trainer

ROWS, DIM, BATCH, BATCHES, DEPTH, THREADS = 4_000_000, 64, 65_536, 9, 128, 2
RAM_BAR, WRITTEN = 16.0, 1_000_000
PAUSE_ROWS, PAUSE_BAR = 10_000_000, 100.0
KEY_STEP = 0x9E3779B97F4A7C1  # spreads the keys like hashes, for both stores


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    _core.set_threads(THREADS)
    torch.set_num_threads(THREADS)
    folder = tempfile.mkdtemp(prefix="hotrow-bench-", dir=os.environ.get("HOTROW_BENCH_DIR"))
    try:
        yield "writing a million changed rows from DRAM, three times"
        ours_written = write_ours(os.path.join(folder, "written"))
        yield f"filling the SSD with {ROWS / 1e6:.0f} million rows"
        collection = filled(os.path.join(folder, "ours"))
        table = collection.tables[0]
        yield "reading batches of 64 k random keys, and raw 4 KiB blocks between them"
        rows_per_second, limit, spread = read_ours(table, os.path.join(folder, "ours", "t"))
        del table, collection
        gc.collect()
        yield "the same with RocksDB"
        rocks_written, rocks_read = rocksdb(os.path.join(folder, "rocksdb"))
        yield higher("ssd/read", "k rows/s", rows_per_second / 1e3, "raw", limit / 1e3, spread)
        yield higher("ssd/read", "k rows/s", rows_per_second / 1e3, "rocksdb", rocks_read / 1e3, spread)
        yield higher("ssd/write", "M rows/s", ours_written / 1e6, "rocksdb", rocks_written / 1e6)
        yield "RAM of a cold row, in a process of its own"
        code = f"from hotrow.bench.storage.ssd import measure_ram; print(measure_ram({os.path.join(folder, 'ram')!r}))"
        out = child_process.run([sys.executable, "-c", code], check=True)
        yield lower("ssd/ram_per_row", "bytes a row", float(out.stdout.split()[-1]), "bar", RAM_BAR)
        yield "a checkpoint of 10 million rows"
        pause = measure_pause(os.path.join(folder, "checkpoints"))
        yield lower("ssd/checkpoint_pause", "ms", 1e3 * pause, "bar", PAUSE_BAR)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def collection_in(folder: str, dram: str = "64MiB") -> EmbeddingCollection:
    """One table of 256-byte rows over SSD."""
    return EmbeddingCollection([Table("t", dim=DIM)], optimizer=SGD(lr=0.1), memory=Memory(dram=dram, ssd=folder))


def write_ours(folder: str) -> float:
    """Rows/s evicted from DRAM to SSD, all of them changed: selection, write, and both indexes included."""
    seconds = []
    for i in range(3):
        table = collection_in(f"{folder}-{i}", dram="512MiB").tables[0]
        table.create(torch.arange(WRITTEN).mul_(KEY_STEP))
        start = time.perf_counter()
        evicted = table.store.core.evict(WRITTEN)
        seconds.append(time.perf_counter() - start)
        assert evicted == WRITTEN
    return WRITTEN / timing(seconds).median


def filled(folder: str) -> EmbeddingCollection:
    """A collection with all rows, most of them evicted to SSD while they are created."""
    collection = collection_in(folder)
    create_all(collection.tables[0])
    return collection


def create_all(table: TableRows) -> None:
    """Create the rows of all keys, in parts so that the keys themselves take no memory."""
    for at in range(0, ROWS, 1 << 16):
        table.create(torch.arange(at, min(ROWS, at + (1 << 16))).mul_(KEY_STEP))


def read_ours(table: TableRows, folder: str) -> tuple[float, float, float]:
    """Our rows/s, the device's limit in rows/s, and the spread. Raw reads alternate with ours."""
    generator = torch.Generator().manual_seed(1)
    files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".hrs")]
    ours, raw = [], []
    blocks = wanted = 0
    for i in range(BATCHES):
        keys = torch.randint(0, ROWS, (BATCH,), generator=generator).mul_(KEY_STEP)
        before = table.store.tier()
        start = time.perf_counter()
        values = table.read(keys)
        seconds = time.perf_counter() - start
        after = table.store.tier()
        assert values.shape == (BATCH, DIM)
        raw_seconds = _core.raw_reads(files, BATCH, 4096, DEPTH, i)
        if i == 0:
            continue  # warm-up
        blocks += after["blocks_read"] - before["blocks_read"]
        wanted += after["rows_read"] - before["rows_read"]
        ours.append(seconds)
        raw.append(raw_seconds)
    read, alone = timing(ours), timing(raw)
    return BATCH / read.median, BATCH / alone.median * (wanted / blocks), read.spread


def rocksdb(folder: str) -> tuple[float, float]:
    """Rows written (the first million) and read per second: write batches of 64 k rows; multi-gets of 64 k keys."""
    try:
        from rocksdict import AccessType, BlockBasedOptions, Cache, Options, Rdict, WriteBatch
    except ImportError:
        raise OptionError("rocksdict is not installed: pip install 'hotrow[bench]'") from None
    options: Any = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_use_direct_reads(True)
    options.set_use_direct_io_for_flush_and_compaction(True)
    options.increase_parallelism(THREADS)
    blocks: Any = BlockBasedOptions()
    blocks.set_block_cache(Cache(8 << 20))
    options.set_block_based_table_factory(blocks)
    db: Any = Rdict(folder, options, access_type=AccessType.read_write())
    keys = torch.arange(ROWS).mul_(KEY_STEP).numpy()
    values = np.random.default_rng(0).integers(0, 256, (1 << 16, DIM * 4), dtype=np.uint8)
    value_bytes = [row.tobytes() for row in values]
    writing = 0.0
    for at in range(0, ROWS, 1 << 16):
        part = [key.tobytes() for key in keys[at : at + (1 << 16)]]
        start = time.perf_counter()
        batch = WriteBatch(raw_mode=True)
        for key, value in zip(part, value_bytes, strict=False):
            batch.put(key, value)
        db.write(batch)
        if at < WRITTEN:
            writing += time.perf_counter() - start
    db.flush()
    db.close()
    db = Rdict(folder, options, access_type=AccessType.read_write())
    rng = np.random.default_rng(1)
    reading = []
    for _ in range(4):
        some = [key.tobytes() for key in keys[rng.integers(0, ROWS, BATCH)]]
        start = time.perf_counter()
        found = db[some]
        reading.append(time.perf_counter() - start)
        assert len(found) == BATCH and all(value is not None for value in found)
    db.close()
    return -(-WRITTEN // 65536) * 65536 / writing, BATCH / timing(reading[1:]).median


def measure_pause(folder: str) -> float:
    """Seconds that a save blocks training when all of 10 million rows have changed; the longer of two saves."""
    collection = EmbeddingCollection([Table("t", dim=16)], optimizer=SGD(lr=0.1))
    for at in range(0, PAUSE_ROWS, 1 << 17):
        collection.tables[0].create(torch.arange(at, min(PAUSE_ROWS, at + (1 << 17))).mul_(KEY_STEP))
    trainer = Trainer(Recommender(collection, nn.Identity()), checkpoints=folder)
    pauses = []
    for _ in range(2):
        pauses.append(trainer.save(wait=False).pause_seconds)
        trainer.wait()
        collection.tables[0].assign(torch.tensor([0]), torch.zeros(1, 16))
        collection.steps += 1
    return max(pauses)


def measure_ram(folder: str) -> float:
    """Bytes of process memory for each cold row, without hot rows and without the memory that was used before."""
    _core.set_threads(THREADS)
    collection_in(folder + "-warm-up").tables[0].create(torch.arange(1 << 18).mul_(KEY_STEP))
    gc.collect()
    before = resident()
    collection = collection_in(folder, dram="128MiB")
    table = collection.tables[0]
    create_all(table)
    memory, tier = table.memory(), table.store.tier()
    hot = memory["row_bytes"] + memory["header_bytes"] + tier["marks_bytes"]
    return float(resident() - before - hot) / tier["cold_rows"]
