"""Two ranks against one, a core for each and the same batch for each, in turns; and the bytes that travel.

W-dlrm at dim 16: 13 dense and 26 sparse features, Zipf 1.05 keys over 26 tables of 200,000 keys (tiers.py draws them),
tower bottom 512-256-16 and top 1024-1024-512-256-1, row-wise Adagrad, batch 2,048 a rank, batches drawn beforehand.
`small` is the same with W-serve's tower (bottom 64-16, top 128-64-1), where the exchange weighs more.

All three processes live through the whole benchmark: one alone on the first core, two that work together on the first
and the second. While one side works the others wait in a pipe. Two ranks wait for each other, so whatever delays either
delays both, and a machine that others use makes less of two ranks than of one: turns count where one rank was as fast
as it gets, to 5%, right before and right after; all turns where there are fewer than three of those. What a rank adds
besides: its own deduplication and sums are the same, but it sends half of its unique keys, looks up those that both ask
for, and waits for the other; so the bound is 2, and the dense all-reduce and the exchange take from it.

`ranks/core_time` is what a step costs a core (of rank 0, its network threads included).
`ranks/volume` is what one rank sends on the channels of keys, rows and gradients, beside remote unique keys times
(8 + 2 rows); `ratio` is the share of what must travel in what does.
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
STEPS = {"scaling": 12, "scaling_small": 120}  # of a turn: what a call of `fit` begins and ends with is not asked for
TURNS, LEAST, MOST, NOISE = (
    7,
    3,
    16,
    0.05,
)  # undisturbed turns wanted, and enough; turns at most; how fast is undisturbed
TOWERS = {"scaling": ((512, 256), (1024, 1024, 512, 256)), "scaling_small": ((64,), (128, 64))}
DIM, BATCH = 16, 2048


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, with a word on what is running before each."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise OptionError(f"hotrow bench ranks needs two cores, and this process may use {len(cores)}")
    for name, tower in TOWERS.items():
        yield f"{name}: setting up one rank and two"
        with _Side(1, cores, tower, STEPS[name]) as one, _Side(2, cores, tower, STEPS[name]) as two:
            for _ in range(WARMUP):
                one.work(), two.work()
            alone, both = [one.work()], list[dict[str, float]]()
            while len(both) < MOST and len(_quiet(alone)) < TURNS:
                yield f"{name}: turn {len(both) + 1}, {len(_quiet(alone))} of {TURNS} undisturbed"
                both.append(two.work())
                alone.append(one.work())
        turns = _quiet(alone) if len(_quiet(alone)) >= LEAST else list(range(len(both)))
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


def _quiet(alone: list[dict[str, float]]) -> list[int]:
    """Turns of two ranks before and after which one rank was as fast as it gets.

    >>> _quiet([{"examples": 100, "seconds": s} for s in (1.0, 1.02, 1.5, 1.01, 1.0)])
    [0, 3]
    """
    best = max(_speed(turn) for turn in alone)
    undisturbed = [_speed(turn) > (1 - NOISE) * best for turn in alone]
    return [turn for turn in range(len(alone) - 1) if undisturbed[turn] and undisturbed[turn + 1]]


class _Side:
    """Some ranks, a core each, that work when they are told to."""

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
            pipe.recv()  # it is ready

    def work(self) -> dict[str, float]:
        """Some steps; what rank 0 says of them."""
        for pipe in self.pipes:
            pipe.send(True)
        said = [pipe.recv() for pipe in self.pipes]
        return dict(said[0])

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
    """Batches drawn beforehand, other ones for each rank; a pass goes on where the last one stopped."""

    examples = None

    def __init__(self, rank: int, world: int) -> None:
        from hotrow.bench.storage.tiers import draw

        self.drawn = [draw(number * world + rank) for number in range(BATCHES)]
        self.at = 0

    def batches(self, cursor: Any = None) -> Iterator[tuple[Any, Any]]:
        """Without an end."""
        while True:
            self.at += 1
            yield self.drawn[self.at % BATCHES], {"next": self.at}

    def every(self, number: int, of: int, cursor: Any = None) -> Iterator[tuple[Any, Any]]:
        """Each rank has drawn its own."""
        return self.batches(cursor)

    def describe(self) -> str:
        """One line for a log."""
        return "drawn beforehand"
