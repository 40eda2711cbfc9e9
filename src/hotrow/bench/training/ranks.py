"""Two ranks beside one, each with its own core and batch, in turns; and the bytes that a rank sends.

W-dlrm at dim 16: 13 dense and 26 sparse features, Zipf 1.05 keys over 26 tables of 200,000 keys (tiers.py draws them),
tower bottom 512-256-16 and top 1024-1024-512-256-1, row-wise Adagrad, batch 2,048 a rank, batches drawn in advance.
`small` is the same with W-serve's tower (bottom 64-16, top 128-64-1), where the exchange is a larger part.

A single rank runs on the first core, and two ranks on the first and the second core, in turns (rank_processes.py). Of
the turns those count that were undisturbed; if there are fewer than three such turns, all count.

The upper bound is 2. A rank's own deduplication and sums stay the same, but it also sends half of its unique keys,
looks up the keys that both ranks need, and waits for the other rank, the exchange and the dense all-reduce.

`ranks/core_time` is the processor time of a step on rank 0, network threads included.
`ranks/volume` is the bytes that one rank sends for keys, rows and gradients, against the minimum: per remote unique
key, 8 bytes and two rows.

`ranks/torchrec` is in torchrec_ranks.py.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from hotrow.bench.harness import Result, higher, lower
from hotrow.bench.training import torchrec_ranks
from hotrow.bench.training.rank_processes import Figures, RankProcesses, Turn, undisturbed
from hotrow.bench.training.repeated_batches import RepeatedBatches
from hotrow.errors import OptionError

BATCHES, WARMUP = 24, 2
STEPS = {"scaling": 12, "scaling_small": 120}  # steps of a turn, so many that the start and end of `fit` do not matter
TURNS, MIN_TURNS, MAX_TURNS = 7, 3, 16  # undisturbed turns: wanted, and enough; the most turns
TOWERS = {"scaling": ((512, 256), (1024, 1024, 512, 256)), "scaling_small": ((64,), (128, 64))}
DIM, BATCH, TABLES = 16, 2048, 26


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    first, second = two_cores("ranks")
    for name, tower in TOWERS.items():
        job = TrainingJob(tower, STEPS[name])
        yield f"{name}: setting up one rank and two"
        with (
            RankProcesses([[first]], prepare, job) as one,
            RankProcesses([[first], [second]], prepare, job) as two,
        ):
            alone, both = yield from in_turns(name, one, two)
        turns = counted(alone)
        yield f"{name}: {len(turns)} of {len(both)} turns count"
        speeds = [both[turn][0]["speed"] for turn in turns]
        speed, spread = statistics.median(speeds), (max(speeds) - min(speeds)) / 2 / statistics.median(speeds)
        yield higher(f"ranks/{name}", "k examples/s", speed / 1e3, "one", peer_speed(alone, turns) / 1e3, spread)
        yield lower(
            f"ranks/{name.replace('scaling', 'core_time')}", "ms a step",
            statistics.median(both[turn][0]["core"] / STEPS[name] * 1e3 for turn in turns), "one",
            statistics.median(alone[turn]["core"] / STEPS[name] * 1e3 for turn in turns),
        )  # fmt: skip
        if name == "scaling":
            sent, least = (sum(turn[0][what] for turn in both) for what in ("sent", "least"))
            steps = len(both) * STEPS[name]
            yield lower("ranks/volume", "MB a step", sent / steps / 1e6, "keys and rows", least / steps / 1e6)
    yield from torchrec_ranks.results(first, second)


def two_cores(name: str) -> tuple[int, int]:
    """The two cores of a benchmark over ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise OptionError(f"hotrow bench {name} needs two cores, and this process may use {len(cores)}")
    return cores[0], cores[1]


def in_turns(
    name: str, one: RankProcesses, several: RankProcesses, warmup: int = WARMUP
) -> Generator[str, None, tuple[list[Figures], list[list[Figures]]]]:
    """Run both sides in turns. Returns the figures of the single process before, between and after the turns of the
    other side, and the figures of its ranks by turn."""
    for _ in range(warmup):
        one.work(), several.work()
    alone: list[Figures] = one.work()
    both: list[list[Figures]] = []
    while len(both) < MAX_TURNS and len(undisturbed(speeds(alone))) < TURNS:
        yield f"{name}: turn {len(both) + 1}, {len(undisturbed(speeds(alone)))} of {TURNS} undisturbed"
        both.append(several.work())
        alone += one.work()
    return alone, both


def speeds(alone: list[Figures]) -> list[float]:
    """The speeds of the single process."""
    return [turn["speed"] for turn in alone]


def counted(alone: list[Figures]) -> list[int]:
    """The turns that count: undisturbed ones, or all if too few are."""
    turns = undisturbed(speeds(alone))
    return turns if len(turns) >= MIN_TURNS else list(range(len(alone) - 1))


def peer_speed(alone: list[Figures], turns: list[int]) -> float:
    """The median speed of the single process around these turns."""
    return statistics.median((alone[turn]["speed"] + alone[turn + 1]["speed"]) / 2 for turn in turns)


@dataclass(frozen=True)
class TrainingJob:
    """What a side trains: the tower's widths, steps of a turn, row ranks, and where the rows are."""

    tower: tuple[tuple[int, ...], tuple[int, ...]]
    steps: int
    row_ranks: int = 0
    precision: str = "fp32"
    dram: int | None = None
    ssd: str | None = None  # a folder; then the rows are Adam's, and all keys have one before the first turn


def prepare(rank: int, job: TrainingJob) -> Turn:
    """A rank that trains on batches drawn in advance."""
    import torch

    import hotrow as hr
    from hotrow.bench.storage.tiers import KEYS, draw

    torch.set_num_threads(1)
    hr.set_threads(1)
    ranks = hr.join_ranks("gloo", timeout=120, rows=job.row_ranks)
    memory = None if job.ssd is None else hr.Memory(dram=job.dram, ssd=job.ssd)
    rule = hr.optim.RowWiseAdagrad() if job.ssd is None else hr.optim.Adam(lr=1e-3)
    tables = [hr.Table(f"t{i}", dim=DIM) for i in range(TABLES)]
    embeddings = hr.EmbeddingCollection(tables, optimizer=rule, memory=memory, ranks=ranks)
    if job.ssd is not None and (ranks is None or ranks.owns_rows):
        for rows in embeddings.tables:
            for at in range(0, KEYS, 1 << 16):
                rows.create(torch.arange(at, min(KEYS, at + (1 << 16))))
    torch.manual_seed(0)
    dense = hr.models.DLRM(embeddings.features, dense_features=13, bottom=(*job.tower[0], DIM), top=job.tower[1])
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    trainer = hr.Trainer(hr.Recommender(embeddings, dense), optimizer, precision=job.precision)
    towers = 1 if ranks is None else len(ranks.roles.requesters)
    has_tower = ranks is None or ranks.has_tower
    source = RepeatedBatches([draw(number * towers + rank) for number in range(BATCHES)] if has_tower else [])

    def turn() -> Figures:
        before, core_time = _sent(ranks), time.process_time()
        report = trainer.fit(source, steps=job.steps, progress=False)
        core = time.process_time() - core_time
        sent, keys = (now - then for now, then in zip(_sent(ranks), before, strict=True))
        return {
            "speed": report.examples / report.seconds,
            "core": core,
            "busy": core / report.seconds,
            "sent": sent,
            "least": keys * (8 + 2 * 4 * DIM),
        }

    return turn


def _sent(ranks: Any) -> tuple[int, int]:
    if ranks is None:
        return 0, 0
    return ranks.bytes_sent["route"] + ranks.bytes_sent["rows"], ranks.remote_keys
