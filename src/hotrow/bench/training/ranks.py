"""Two ranks beside one, each with its own core and batch, in turns; and the bytes that a rank sends.

W-dlrm at dim 16: 13 dense and 26 sparse features, Zipf 1.05 keys over 26 tables of 200,000 keys (tiers.py draws them),
tower bottom 512-256-16 and top 1024-1024-512-256-1, row-wise Adagrad, batch 2,048 a rank, batches drawn in advance.
`small` is the same with W-serve's tower (bottom 64-16, top 128-64-1), where the exchange is a larger part.

All three processes run during the whole benchmark: a single rank on the first core, and two ranks on the first and the
second core. While one side works, the other blocks on a pipe. Two ranks wait for each other, so a delay of either
delays both, and a shared machine slows two ranks more than one. So a turn of two ranks counts only if the single rank
was within 5% of its best speed right before and right after it; if there are fewer than three such turns, all count.

The upper bound is 2. A rank's own deduplication and sums stay the same, but it also sends half of its unique keys,
looks up the keys that both ranks need, and waits for the other rank, the exchange and the dense all-reduce.

`ranks/core_time` is the processor time of a step on rank 0, network threads included.
`ranks/volume` is the bytes that one rank sends for keys, rows and gradients, against the minimum: per remote unique
key, 8 bytes and two rows.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any

from hotrow import child_process
from hotrow.bench.harness import Result, higher, lower
from hotrow.errors import OptionError

BATCHES, WARMUP = 24, 2
STEPS = {"scaling": 12, "scaling_small": 120}  # steps of a turn, so many that the start and end of `fit` do not matter
TURNS, MIN_TURNS, MAX_TURNS, NOISE = (
    7,
    3,
    16,
    0.05,
)  # undisturbed turns: wanted, and enough; the most turns; the relative speed that counts as undisturbed
TOWERS = {"scaling": ((512, 256), (1024, 1024, 512, 256)), "scaling_small": ((64,), (128, 64))}
DIM, BATCH = 16, 2048


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise OptionError(f"hotrow bench ranks needs two cores, and this process may use {len(cores)}")
    for name, tower in TOWERS.items():
        yield f"{name}: setting up one rank and two"
        with _Side(1, cores, tower, STEPS[name]) as one, _Side(2, cores, tower, STEPS[name]) as two:
            for _ in range(WARMUP):
                one.work(), two.work()
            alone, both = [one.work()], list[dict[str, float]]()
            while len(both) < MAX_TURNS and len(_undisturbed(alone)) < TURNS:
                yield f"{name}: turn {len(both) + 1}, {len(_undisturbed(alone))} of {TURNS} undisturbed"
                both.append(two.work())
                alone.append(one.work())
        turns = _undisturbed(alone) if len(_undisturbed(alone)) >= MIN_TURNS else list(range(len(both)))
        yield f"{name}: {len(turns)} of {len(both)} turns count"
        speeds = [_speed(both[turn]) for turn in turns]
        peers = [(_speed(alone[turn]) + _speed(alone[turn + 1])) / 2 for turn in turns]
        speed = statistics.median(speeds)
        spread = (max(speeds) - min(speeds)) / 2 / speed
        yield higher(f"ranks/{name}", "k examples/s", speed / 1e3, "one", statistics.median(peers) / 1e3, spread)
        yield lower(
            f"ranks/{name.replace('scaling', 'core_time')}", "ms a step",
            statistics.median(both[turn]["core"] / STEPS[name] * 1e3 for turn in turns), "one",
            statistics.median(alone[turn]["core"] / STEPS[name] * 1e3 for turn in turns),
        )  # fmt: skip
        if name == "scaling":
            sent, least = (sum(turn[what] for turn in both) for what in ("sent", "least"))
            steps = len(both) * STEPS[name]
            yield lower("ranks/volume", "MB a step", sent / steps / 1e6, "keys and rows", least / steps / 1e6)


def _speed(turn: dict[str, float]) -> float:
    return turn["examples"] / turn["seconds"]


def _undisturbed(alone: list[dict[str, float]]) -> list[int]:
    """The turns of two ranks for which the single rank was near its best speed right before and after.

    >>> _undisturbed([{"examples": 100, "seconds": s} for s in (1.0, 1.02, 1.5, 1.01, 1.0)])
    [0, 3]
    """
    best = max(_speed(turn) for turn in alone)
    fast = [_speed(turn) > (1 - NOISE) * best for turn in alone]
    return [turn for turn in range(len(alone) - 1) if fast[turn] and fast[turn + 1]]


class _Side:
    """One or two rank processes, each on its own core, that run a turn on command."""

    def __init__(
        self, world: int, cores: list[int], tower: tuple[tuple[int, ...], tuple[int, ...]], steps: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.pipes: list[Any] = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, world, cores[rank], port, (tower, steps), there, os.getpid()), daemon=True
            )
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()  # "ready"

    def work(self) -> dict[str, float]:
        """Run one turn on all ranks. Returns rank 0's figures."""
        for pipe in self.pipes:
            pipe.send(True)
        reports = [pipe.recv() for pipe in self.pipes]
        return dict(reports[0])

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for pipe in self.pipes:
                pipe.send(False)
        for process in self.processes:
            process.join(30 if kind is None else 0)
            process.kill()


def _rank(
    rank: int,
    world: int,
    core: int,
    port: int,
    work: tuple[tuple[tuple[int, ...], tuple[int, ...]], int],
    pipe: Any,
    parent: int,
) -> None:
    child_process.end_with_parent(parent)
    tower, steps = work
    os.sched_setaffinity(0, {core})
    where = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    import torch

    import hotrow as hr

    torch.set_num_threads(1)
    hr.set_threads(1)
    ranks = hr.join_ranks("gloo", timeout=120)
    embeddings = hr.EmbeddingCollection([hr.Table(f"t{i}", dim=DIM) for i in range(26)], ranks=ranks)
    torch.manual_seed(0)
    dense = hr.models.DLRM(embeddings.features, dense_features=13, bottom=(*tower[0], DIM), top=tower[1])
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    trainer = hr.Trainer(hr.Recommender(embeddings, dense), optimizer)
    source = _Drawn(rank, world)
    pipe.send("ready")
    while pipe.recv():
        before, core_time = _sent(ranks), time.process_time()
        report = trainer.fit(source, steps=steps, progress=False)
        sent, keys = (now - then for now, then in zip(_sent(ranks), before, strict=True))
        pipe.send(
            {
                "examples": report.examples,
                "seconds": report.seconds,
                "core": time.process_time() - core_time,
                "sent": sent,
                "least": keys * (8 + 2 * 4 * DIM),
            }
        )


def _sent(ranks: Any) -> tuple[int, int]:
    if ranks is None:
        return 0, 0
    return ranks.bytes_sent["route"] + ranks.bytes_sent["rows"], ranks.remote_keys


class _Drawn:
    """Batches drawn in advance, different ones for each rank. A pass continues where the last one stopped."""

    examples = None

    def __init__(self, rank: int, world: int) -> None:
        from hotrow.bench.storage.tiers import draw

        self.drawn = [draw(number * world + rank) for number in range(BATCHES)]
        self.at = 0

    def batches(self, cursor: Any = None) -> Iterator[tuple[Any, Any]]:
        """Batches for ever."""
        while True:
            self.at += 1
            yield self.drawn[self.at % BATCHES], {"next": self.at}

    def every(self, number: int, of: int, cursor: Any = None) -> Iterator[tuple[Any, Any]]:
        """The same stream: each rank has drawn its own batches."""
        return self.batches(cursor)

    def describe(self) -> str:
        """One line for a log."""
        return "batches drawn in advance"
