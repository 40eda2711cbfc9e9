"""Overlapping stages: training over SSD beside training in DRAM, and with lookahead beside one batch at a time.

On the CPU the workload is that of `bench tiers` (26 tables, 998 MB of rows with Adam's state, DLRM with W-serve's
tower, batch 2,048), with batches drawn in advance, the default lookahead on both sides and a DRAM budget of a tenth of
the rows.

`pipeline/tiered` is examples/s over SSD beside all rows in DRAM. `pipeline/device` shows whether the device is the
limit: blocks/s that the run read, beside the device's raw 4 KiB random reads/s at the same queue depth, measured right
before and after with nothing else running. `pipeline/lookahead` is training over SSD with the default lookahead and
without.

On a machine with a GPU, the rows of pipeline_gpu.py follow.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence

import torch

from hotrow import _core
from hotrow.batch import KeyedBatch
from hotrow.bench.harness import Result, higher
from hotrow.bench.storage import tiers
from hotrow.config import Memory
from hotrow.data import Cursor
from hotrow.train.report import Report
from hotrow.train.trainer import LOOKAHEAD, Trainer

BATCHES, WARMUP, ROUNDS, SIDES, RAW = 32, 40, 3, 3, 65_536


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    yield from cpu_results()
    if torch.cuda.is_available():
        from hotrow.bench.gpu import pipeline_gpu

        yield from pipeline_gpu.results()


def cpu_results() -> Iterator[Result | str]:
    """Training over SSD and in DRAM, with and without lookahead, in turns."""
    torch.set_num_threads(tiers.THREADS)
    _core.set_threads(tiers.THREADS)
    folder = tempfile.mkdtemp(prefix="hotrow-bench-", dir=os.environ.get("HOTROW_BENCH_DIR"))
    try:
        drawn = [tiers.draw(i) for i in range(WARMUP + SIDES * ROUNDS * BATCHES)]
        yield "filling DRAM"
        in_dram = Job(Memory())
        yield "filling the SSD"
        tiered = Job(Memory(dram=tiers.DRAM, ssd=folder))
        yield "warming up"
        for job in (in_dram, tiered):
            job.fit(drawn[:WARMUP], LOOKAHEAD)
        yield from measure(in_dram, tiered, drawn[WARMUP:], folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(in_dram: Job, tiered: Job, drawn: Sequence[KeyedBatch], folder: str) -> Iterator[Result | str]:
    """Time the sides in turns, so that noise affects all, with batches that no side has trained on. Medians of the
    rounds."""
    speeds: dict[str, list[float]] = {"dram": [], "ahead": [], "one by one": []}
    raw, read = [device_reads(folder, 0)], []
    sides = (("dram", in_dram, LOOKAHEAD), ("ahead", tiered, LOOKAHEAD), ("one by one", tiered, 0))
    fresh = iter(drawn)
    for number in range(ROUNDS):
        for name, job, lookahead in sides:
            batches = list(itertools.islice(fresh, BATCHES))
            yield f"round {number + 1} of {ROUNDS}: {name}"
            before = job.blocks_read()
            report = job.fit(batches, lookahead)
            speeds[name].append(report.examples_per_second)
            if name == "ahead":
                read.append((job.blocks_read() - before) / report.seconds)
        raw.append(device_reads(folder, number + 1))
    ahead, dram, alone = (statistics.median(speeds[name]) / 1e3 for name in ("ahead", "dram", "one by one"))
    spread = (max(speeds["ahead"]) - min(speeds["ahead"])) / 2e3 / ahead
    yield higher("pipeline/tiered", "k examples/s", ahead, "dram", dram, spread)
    yield higher("pipeline/device", "k reads/s", statistics.median(read) / 1e3, "raw", statistics.median(raw) / 1e3)
    yield higher("pipeline/lookahead", "k examples/s", ahead, "none", alone, spread)


def device_reads(folder: str, seed: int) -> float:
    """Raw 4 KiB random reads a second."""
    files = [
        os.path.join(at, name) for at, _, names in os.walk(folder) for name in sorted(names) if name.endswith(".hrs")
    ]
    return RAW / float(_core.raw_reads(files, RAW, 4096, tiers.DEPTH, seed))


class Drawn:
    """A source of batches that were drawn in advance."""

    def __init__(self, batches: Sequence[KeyedBatch]) -> None:
        self.all = batches
        self.examples = sum(batch.size for batch in batches)

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """All batches."""
        for number, batch in enumerate(self.all):
            yield batch, {"batch": number + 1}

    def describe(self) -> str:
        """One line for a log."""
        return f"{len(self.all)} batches"


class Job:
    """A trainer over filled tables."""

    def __init__(self, memory: Memory) -> None:
        side = tiers.Side(memory)
        self.embeddings = side.model.embeddings
        self.trainer = Trainer(side.model, side.optimizer)

    def fit(self, batches: Sequence[KeyedBatch], lookahead: int) -> Report:
        """Train on these batches."""
        self.trainer.lookahead = lookahead
        return self.trainer.fit(Drawn(batches), progress=False)

    def blocks_read(self) -> int:
        """Blocks read from SSD so far."""
        return sum(rows.store.tier()["blocks_read"] for rows in self.embeddings.tables if rows.store.evicts)


def choose() -> None:
    """`python -m hotrow.bench.training.pipeline`: print examples/s and the stages for each lookahead depth.

    The default lookahead was chosen with it.
    """
    torch.set_num_threads(tiers.THREADS)
    _core.set_threads(tiers.THREADS)
    folder = tempfile.mkdtemp(prefix="hotrow-bench-", dir=os.environ.get("HOTROW_BENCH_DIR"))
    depths = (0, 1, 2, 3, 4, 8)
    try:
        drawn = [tiers.draw(i) for i in range(WARMUP + BATCHES)]
        for memory in (Memory(), Memory(dram=tiers.DRAM, ssd=folder)):
            job = Job(memory)
            job.fit(drawn[:WARMUP], 0)
            speeds: dict[int, list[float]] = {depth: [] for depth in depths}
            for _ in range(ROUNDS):
                for depth in depths:
                    report = job.fit(drawn[WARMUP:], depth)
                    speeds[depth].append(report.examples_per_second / 1e3)
                    print(depth, {stage.name: f"{stage.share:.0%}" for stage in report.stages}, file=sys.stderr)
            for depth, values in speeds.items():
                tier = "dram" if memory.ssd is None else "ssd"
                print(f"{tier} lookahead {depth}: {statistics.median(values):.1f} k examples/s of {values}")
            del job
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    choose()
