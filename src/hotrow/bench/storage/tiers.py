"""Training with a table ten times the DRAM budget, beside the same training with all rows in DRAM.

DLRM with W-serve's tower (13 dense and 26 sparse features, dim 16, bottom 64-16, top 128-64-1), Adam rows (192 bytes
of values and state), batch 2,048, Zipf 1.05 keys over 26 tables of 200,000 keys, all with rows before timing. The rows
take 998 MB and dram= is a tenth of that; about half of it is the index of the cold rows. Reads are direct, without the
page cache. Both sides get the same batches.

The device is the limit: a batch misses about ten thousand rows, each in a different block. `tiers/device` is reads/s
while training waits for them, beside the device's raw 4 KiB random reads/s at the same queue depth.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch

from hotrow import _core
from hotrow.batch import Jagged, KeyedBatch
from hotrow.bench.harness import Result, higher, timing
from hotrow.config import Memory
from hotrow.models import DLRM
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.optim import Adam
from hotrow.table import Table

TABLES, KEYS, DIM, BATCH, STEPS, WARMUP, THREADS, DEPTH = 26, 200_000, 16, 2048, 24, 40, 2, 128
ROW_BYTES = DIM * 4 * 3
DRAM = TABLES * KEYS * ROW_BYTES // 10


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    torch.set_num_threads(THREADS)
    _core.set_threads(THREADS)
    folder = tempfile.mkdtemp(prefix="hotrow-bench-", dir=os.environ.get("HOTROW_BENCH_DIR"))
    try:
        batches = [draw(i) for i in range(WARMUP + STEPS)]
        yield "all rows in DRAM"
        in_dram = Side(Memory())
        for batch in batches[:WARMUP]:
            in_dram.step(batch)
        dram_seconds = [in_dram.step(batch)[0] for batch in batches[WARMUP:]]
        del in_dram
        yield "filling the SSD"
        side = Side(Memory(dram=DRAM, ssd=folder))
        yield "DRAM a tenth of the rows, the rest on SSD"
        for batch in batches[:WARMUP]:
            side.step(batch)
        yield from measure(side, batches[WARMUP:], dram_seconds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(side: Side, batches: list[KeyedBatch], dram_seconds: list[float], folder: str) -> Iterator[Result | str]:
    """Hit rate, device reads and the share of the all-in-DRAM speed."""
    files = [
        os.path.join(at, name) for at, _, names in os.walk(folder) for name in sorted(names) if name.endswith(".hrs")
    ]
    before = side.totals()
    seconds, fetching, raw = [], [], []
    for i, batch in enumerate(batches):
        step, fetch = side.step(batch)
        seconds.append(step)
        fetching.append(fetch)
        if i % 4 == 0:
            raw.append(16384 / _core.raw_reads(files, 16384, 4096, DEPTH, i))
    after = side.totals()
    moved = {name: after[name] - before[name] for name in after}
    ours, all_dram = timing(seconds), timing(dram_seconds)
    hit_rate = moved["hits"] / (moved["hits"] + moved["misses"])
    reads = moved["reads"] / sum(fetching)
    used = side.model.embeddings.budget.used
    yield higher(
        "tiers/train", "k examples/s", BATCH / 1e3 / ours.median, "dram", BATCH / 1e3 / all_dram.median, ours.spread
    )
    yield higher("tiers/device", "k reads/s", reads / 1e3, "raw", float(np.median(raw)) / 1e3)
    yield higher("tiers/hit_rate", "% of unique keys", 100 * hit_rate, "all", 100.0)
    yield higher("tiers/dram", "MiB used", used / 2**20, "budget", DRAM / 2**20)


class Side:
    """A model in which every key already has a row."""

    def __init__(self, memory: Memory) -> None:
        torch.manual_seed(0)
        names = [f"t{i}" for i in range(TABLES)]
        embeddings = EmbeddingCollection([Table(n, dim=DIM) for n in names], optimizer=Adam(lr=1e-3), memory=memory)
        for rows in embeddings.tables:
            for at in range(0, KEYS, 1 << 16):
                rows.create(torch.arange(at, min(KEYS, at + (1 << 16))))
        tower = DLRM(embeddings.features, dense_features=13, bottom=(64, 16), top=(128, 64))
        self.model = Recommender(embeddings, tower)
        self.optimizer = torch.optim.Adam(tower.parameters(), lr=1e-3, fused=True)

    def step(self, batch: KeyedBatch) -> tuple[float, float]:
        """One training step. Returns its seconds, and the seconds of its fetch."""
        start = time.perf_counter()
        lookup = self.model.embeddings.route(batch)
        routed = time.perf_counter()
        lookup.fetch()
        fetched = time.perf_counter()
        assert batch.labels is not None
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(lookup), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.model.embeddings.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, fetched - routed

    def totals(self) -> dict[str, int]:
        """Counters over all tables."""
        tiers = [rows.store.tier() for rows in self.model.embeddings.tables]
        return {
            "hits": sum(t["hits"] for t in tiers),
            "misses": sum(t["misses"] for t in tiers),
            "reads": sum(t["blocks_read"] for t in tiers),
        }


def draw(number: int) -> KeyedBatch:
    """A batch of Zipf 1.05 keys, bounded to the table by W-gpu's formula, and random dense features and labels."""
    rng = np.random.default_rng(number)
    a = 1.05
    u = rng.random((TABLES, BATCH))
    x = np.floor((u * ((KEYS + 1) ** (1 - a) - 1) + 1) ** (1 / (1 - a))).astype(np.int64) - 1
    keys = (np.clip(x, 0, KEYS - 1) * 2654435761 + 12345) % KEYS
    return KeyedBatch(
        {f"t{i}": Jagged(torch.from_numpy(keys[i])) for i in range(TABLES)},
        dense=torch.from_numpy(rng.standard_normal((BATCH, 13), dtype=np.float32)),
        labels=torch.from_numpy((rng.random(BATCH) < 0.3).astype(np.float32)),
    )
