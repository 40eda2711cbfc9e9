"""Rows in HBM: W-find, W-gpu and W-gpu-cached, beside the peers' figures for the same GPU and work (H200).

The peers' figures were measured on an H200 with torch 2.11 and CUDA 13.0: FBGEMM TBE 1.6.0 on static arrays and with
its UVM cache, HierarchicalKV. Steps are timed with CUDA events around forward, backward and update. Ids are drawn anew
for every step, on the device, before the clock starts. HOTROW_BENCH_SCALE below 1 makes everything smaller.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.bench.gpu import hbm_find
from hotrow.bench.gpu.device_clock import pcie_rate
from hotrow.bench.harness import Result, lower
from hotrow.config import Memory
from hotrow.errors import OptionError
from hotrow.nn import EmbeddingCollection
from hotrow.table import Table
from hotrow.tiers.hbm.group_cache import slot_bytes

TABLES, ROWS, DIM, IDS = 10, 4_000_000, 128, 104_857
ALPHA = 1.05
TBE = {  # ms a step
    ("sgd", "all"): 1.19,
    ("rowwise_adagrad", "all"): 1.26,
    ("adam", "all"): 1.66,
    ("forward", "all"): 0.57,
    ("rowwise_adagrad", "20%"): 9.99,
    ("adam", "20%"): 21.76,
    ("rowwise_adagrad", "10%"): 12.98,
    ("adam", "10%"): 24.85,
}
OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.01),
    "rowwise_adagrad": optim.RowWiseAdagrad(lr=0.01),
    "adam": optim.Adam(lr=0.001),
}
FILL = 0.6  # load of the slots when all rows must fit: with two choices of eight ways, no row is evicted at this load


def scale() -> float:
    """The fraction of the full workload to run."""
    return float(os.environ.get("HOTROW_BENCH_SCALE", "1"))


def results() -> Iterator[Result | str]:
    """The benchmark's figures."""
    if not torch.cuda.is_available():
        raise OptionError("hotrow bench hbm needs a GPU, and torch sees none")
    for name in OPTIMIZERS:
        yield f"W-gpu, {name}"
        yield from all_in_hbm(name)
    for name in ("rowwise_adagrad", "adam"):
        for share in (0.2, 0.1):
            yield f"W-gpu-cached, {name}, {share:.0%}"
            yield from cached(name, share)
    yield from hbm_find.results()


class Ids:
    """Zipf ids of W-gpu, a fresh batch at every call."""

    def __init__(self, rows: int, ids: int, device: torch.device) -> None:
        self.rows, self.ids, self.device = rows, ids, device
        self.generator = torch.Generator(device=device).manual_seed(0)

    def batch(self) -> KeyedBatch:
        """One step's ids, table by table."""
        return KeyedBatch({f"f{t}": Jagged(self._draw()) for t in range(TABLES)})

    def _draw(self) -> Tensor:
        u = torch.rand(self.ids, dtype=torch.float64, device=self.device, generator=self.generator)
        rank = ((u * ((self.rows + 1) ** (1 - ALPHA) - 1) + 1) ** (1 / (1 - ALPHA))).floor() - 1
        keys: Tensor = (rank.clamp(0, self.rows - 1).to(torch.int64) * 2654435761 + 12345) % self.rows
        return keys


def collection(name: str, slots: int, rows: int) -> EmbeddingCollection:
    """Ten tables, a row for every key, `slots` slots in HBM."""
    optimizer = OPTIMIZERS[name]
    tables = [Table(f"t{t}", dim=DIM, features={f"f{t}": "none"}) for t in range(TABLES)]
    from hotrow.kernels.rows.layout import RowLayout

    layout = RowLayout(DIM, tuple(part.width for part in optimizer.state(DIM)), "fp32")
    embeddings = EmbeddingCollection(tables, optimizer, Memory(hbm=slots * slot_bytes(layout) + (1 << 20)), seed=1)
    for table in embeddings.tables:
        for begin in range(0, rows, 1 << 20):
            table.create(torch.arange(begin, min(rows, begin + (1 << 20))))
    return embeddings


class Steps:
    """Forward, backward and update of one collection, with random gradients."""

    def __init__(self, embeddings: EmbeddingCollection, ids: Ids) -> None:
        self.embeddings, self.source = embeddings, ids
        generator = torch.Generator(device=ids.device).manual_seed(1)
        shape = (ids.ids, DIM)
        self.gradients = [torch.randn(shape, device=ids.device, generator=generator) * 0.01 for _ in range(TABLES)]

    def warm(self, steps: int) -> None:
        """Steps that are not timed."""
        for _ in range(steps):
            self._step(self.source.batch())
        torch.cuda.synchronize()

    def time(self, steps: int = 20) -> tuple[list[float], list[float]]:
        """Milliseconds of whole steps, and of their forward parts."""
        whole, forward = [], []
        for _ in range(steps):
            batch = self.source.batch()
            torch.cuda.synchronize()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            self._step(batch, marks)
            torch.cuda.synchronize()
            whole.append(marks[0].elapsed_time(marks[2]))
            forward.append(marks[0].elapsed_time(marks[1]))
        return whole, forward

    def _step(self, batch: KeyedBatch, marks: Sequence[torch.cuda.Event] | None = None) -> None:
        if marks:
            marks[0].record()
        lookup = self.embeddings.route(batch).fetch()
        lookup.gather()
        if marks:
            marks[1].record()
        lookup.accept(list(self.gradients))
        self.embeddings._waiting.append(lookup)
        self.embeddings.step()
        if marks:
            marks[2].record()


def _result(kind: str, where: str, milliseconds: list[float]) -> Result:
    quarter = statistics.quantiles(milliseconds, n=4)
    median = statistics.median(milliseconds)
    spread = (quarter[2] - quarter[0]) / 2 / median
    return lower(f"hbm/{kind}/{where}", "ms", median, "tbe", TBE[kind, where], spread)


def all_in_hbm(name: str) -> Iterator[Result]:
    """W-gpu: every row in HBM."""
    rows, ids = int(ROWS * scale()), int(IDS * scale())
    embeddings = collection(name, int(TABLES * rows / FILL), rows)
    steps = Steps(embeddings, Ids(rows, ids, embeddings.device))
    load_all_rows(embeddings, rows, ids)
    steps.warm(40)
    before = embeddings.hbm_cache.report()["misses"] if embeddings.hbm_cache else 0
    whole, forward = steps.time()
    after = embeddings.hbm_cache.report()["misses"] if embeddings.hbm_cache else 0
    yield _result(name, "all", whole)
    if name == "sgd":
        yield _result("forward", "all", forward)
    if after != before:
        raise AssertionError(f"{after - before} ids were missing although every row fits in HBM")


def load_all_rows(embeddings: EmbeddingCollection, rows: int, ids: int) -> None:
    """Load every row into HBM, in two passes: large batches into an empty index evict a few."""
    everything = torch.arange(rows, device=embeddings.device)
    for begin in [*range(0, rows, ids)] * 2:
        keys = everything[begin : begin + ids]
        lookup = embeddings.route(KeyedBatch({f"f{t}": Jagged(keys) for t in range(TABLES)})).fetch()
        lookup.gather()
        lookup.plan.release()


def cached(name: str, share: float) -> Iterator[Result]:
    """W-gpu-cached: rows in host memory, slots for a share of them in HBM; one step at a time."""
    rows, ids = int(ROWS * scale()), int(IDS * scale())
    embeddings = collection(name, int(TABLES * rows * share), rows)
    steps = Steps(embeddings, Ids(rows, ids, embeddings.device))
    steps.warm(200)
    assert embeddings.hbm_cache is not None
    before = embeddings.hbm_cache.report()
    whole, _ = steps.time()
    after = embeddings.hbm_cache.report()
    yield _result(name, f"{share:.0%}", whole)
    # The time of the transfers alone, at the rate of a pinned copy measured now, both directions at once.
    moved = (after["evictions"] - before["evictions"]) / 20 * embeddings.tables[0].store.width * 4
    wire = moved / pcie_rate(embeddings.device)
    yield lower(f"hbm/{name}/{share:.0%}/wire", "ms", wire * 1e3, "step", statistics.median(whole))
