"""W-rows: 26 tables of a million keys, batches of 4,096, one id per table and example, forward + backward + update.

Our side is the public EmbeddingCollection with dynamic keys. FBGEMM's table-batched embedding gets static arrays and
dense ids, its best case. Both use the same ids, the same gradient and two threads, and alternate in one process.

The bytes that must move in a step (dim 16, row-wise Adagrad; 106,496 ids, 61,200 of them unique): rows read twice and
written once, 61,200 x 68 B x 3 = 12.5 MB; output written and gradient read, 106,496 x 64 B x 2 = 13.6 MB; index and
headers, a line each, 61,200 x 128 B = 7.8 MB. 34 MB at about 20 GB/s is 1.7 ms: 63 M ids/s is the limit.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hotrow import _core, child_process
from hotrow.batch import Jagged, KeyedBatch
from hotrow.bench.harness import Result, alternate, higher, lower, timing
from hotrow.errors import OptionError
from hotrow.nn import EmbeddingCollection
from hotrow.optim import Adam, Optimizer, RowWiseAdagrad
from hotrow.table import Table

TABLES, KEYS, BATCH, BATCHES, THREADS = 26, 1_000_000, 4096, 16, 2
WARMUP, REPEATS = 20, 60
CREATE_ROWS, CREATE_BAR, CREATE_TABLES = 10_000_000, 5.0, 7
OVERHEAD_BAR = 20.0


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    torch.set_num_threads(THREADS)
    _core.set_threads(THREADS)
    ids = draw_ids()
    for dim in (16, 64):
        yield f"row-wise Adagrad at dim {dim}, beside FBGEMM"
        peer = fbgemm_step(ids, dim)
        yield compare(f"rows/dim{dim}/rowwise_adagrad", "fbgemm", ids, dim, RowWiseAdagrad(lr=0.01), peer)
        del peer
        gc.collect()
    yield "bf16 rows at dim 64, beside fp32"
    peer = hotrow_step(ids, 64, RowWiseAdagrad(lr=0.01))
    yield compare("rows/dim64/bf16", "fp32", ids, 64, RowWiseAdagrad(lr=0.01), peer, "bf16")
    del peer
    gc.collect()
    yield "Adam at dim 16, beside torch's EmbeddingBag and SparseAdam"
    yield compare("rows/dim16/adam", "torch", ids, 16, Adam(lr=0.001), torch_step(ids, 16))
    gc.collect()
    yield "creating 10 million rows"
    yield from creation()
    yield "bytes a row from 5 to 20 million rows, in a process of its own"
    yield overhead()


def draw_ids() -> list[torch.Tensor]:
    """Batches of ids, [TABLES, BATCH] each: (zipf(1.1) - 1) mod 1e6."""
    rng = np.random.default_rng(0)
    return [torch.from_numpy((rng.zipf(1.1, (TABLES, BATCH)) - 1) % KEYS) for _ in range(BATCHES)]


def compare(
    name: str,
    peer: str,
    ids: list[torch.Tensor],
    dim: int,
    optimizer: Optimizer,
    peer_step: Callable[[int], None],
    dtype: str = "fp32",
) -> Result:
    """Our step beside the peer's, in M ids/s."""
    ours, theirs = alternate([hotrow_step(ids, dim, optimizer, dtype), peer_step], WARMUP, REPEATS)
    count = TABLES * BATCH / 1e6
    return higher(name, "M ids/s", count / ours.median, peer, count / theirs.median, ours.spread)


def gradient(dim: int) -> torch.Tensor:
    """The same random gradient for both sides."""
    return torch.randn(BATCH, TABLES * dim, generator=torch.Generator().manual_seed(0)) * 0.01


def hotrow_step(ids: list[torch.Tensor], dim: int, optimizer: Optimizer, dtype: str = "fp32") -> Callable[[int], None]:
    """Our side: dynamic tables in which every key already has a row."""
    names = [f"t{i}" for i in range(TABLES)]
    embeddings = EmbeddingCollection([Table(name, dim=dim, dtype=dtype) for name in names], optimizer=optimizer)
    for name in names:
        embeddings.table(name).create(torch.arange(KEYS))
    batches = [KeyedBatch({n: Jagged(row.contiguous()) for n, row in zip(names, b, strict=True)}) for b in ids]
    grad = gradient(dim)

    def step(i: int) -> None:
        embeddings.pooled(batches[i % BATCHES]).backward(grad)  # type: ignore[no-untyped-call]
        embeddings.step()

    return step


def fbgemm_step(ids: list[torch.Tensor], dim: int) -> Callable[[int], None]:
    """FBGEMM's table-batched embedding on the CPU, exact row-wise Adagrad."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        raise OptionError("the peer is missing: pip install 'hotrow[bench]', or run make bench") from None
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(KEYS, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
    )
    offsets = torch.arange(TABLES * BATCH + 1)
    flat = [batch.flatten().contiguous() for batch in ids]
    grad = gradient(dim)

    def step(i: int) -> None:
        module(flat[i % BATCHES], offsets).backward(grad)

    return step


def torch_step(ids: list[torch.Tensor], dim: int) -> Callable[[int], None]:
    """torch's EmbeddingBag with sparse gradients and SparseAdam."""
    bags = [torch.nn.EmbeddingBag(KEYS, dim, mode="sum", sparse=True) for _ in range(TABLES)]
    optimizer = torch.optim.SparseAdam([bag.weight for bag in bags], lr=0.001)
    offsets = torch.arange(BATCH)
    grad = gradient(dim)

    def step(i: int) -> None:
        optimizer.zero_grad()
        out = torch.cat([bag(row, offsets) for bag, row in zip(bags, ids[i % BATCHES], strict=True)], dim=1)
        out.backward(grad)  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def one_table(dim: int = 16) -> Any:
    """A table for creation and memory: dim 16, row-wise Adagrad, uniform initial values."""
    return EmbeddingCollection([Table("t", dim=dim)], optimizer=RowWiseAdagrad(lr=0.01)).table("t")


def creation() -> Iterator[Result]:
    """Rows created per second, random keys, growth included.

    A virtual machine gets a page from its host on first touch (at 0.4 GB/s where we measured, and it returns free pages
    after two seconds), and that takes most of the time. So seven tables are created, every part of the same keys is
    timed, and each part counts with its best time: the time of the store without the host's page faults.
    `rows/create_whole` is the median over the same tables, with page faults included.
    """
    keys = torch.arange(CREATE_ROWS).mul_(0x9E3779B97F4A7C1).split(1 << 17)
    parts = [[time_of(table.create, part) for part in keys] for table in (one_table() for _ in range(CREATE_TABLES))]
    whole = [sum(table) for table in parts]
    best = sum(map(min, zip(*parts, strict=True)))
    rate = CREATE_ROWS / 1e6
    yield higher("rows/create", "M rows/s", rate / best, "bar", CREATE_BAR)
    median = timing(whole)
    yield higher("rows/create_whole", "M rows/s", rate / median.median, "bar", CREATE_BAR, median.spread)


def time_of(call: Callable[..., object], *args: Any) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def overhead() -> Result:
    """The maximum overhead of a row in bytes beyond its payload, measured in a separate process."""
    code = "from hotrow.bench.storage.rows import measure_overhead; print(measure_overhead())"
    out = child_process.run([sys.executable, "-c", code], check=True)
    return lower("rows/overhead_bytes", "bytes a row", float(out.stdout.split()[-1]), "bar", OVERHEAD_BAR)


def measure_overhead(first: int = 5_000_000, last: int = 20_000_000, part: int = 1 << 16) -> float:
    """Grow one table from `first` to `last` rows. Returns the maximum of (process memory - payload) / rows."""
    _core.set_threads(THREADS)
    table = one_table()
    rows = 0
    while rows < min(first, 8 * part):  # scratch memory of the calls themselves is not the table's
        table.create(torch.arange(rows, rows + part).mul_(0x9E3779B97F4A7C1))
        rows += part
    before = resident() - table.memory()["total_bytes"]
    worst = 0.0
    while rows < last:
        table.create(torch.arange(rows, rows + part).mul_(0x9E3779B97F4A7C1))
        rows += part
        if rows >= first:
            worst = max(worst, (resident() - before) / len(table) - table.store.width * 4)
    return worst


def resident() -> int:
    """Resident bytes of this process, without file pages, whose number depends on the page cache."""
    with open("/proc/self/statm") as file:
        _, all_pages, file_pages = map(int, file.read().split()[:3])
    return (all_pages - file_pages) * os.sysconf("SC_PAGE_SIZE")
