"""RankProcesses: the processes of one side of a benchmark, each on its own cores, that run a turn on command.

Both sides of a comparison run during the whole benchmark, and their turns alternate. While one side works, the other
blocks on a pipe. Each process calls `prepare(rank, *arguments)`, which returns the function that runs one turn and
returns its figures. `prepare` is a function of a module, because the processes are spawned.

Ranks wait for each other, so a delay of any delays all: a shared machine slows several ranks more than one process. So
a turn of several ranks counts only if the single process beside it was near its best speed right before and right after
(`undisturbed`).

On an emulated network each process has a machine of its own, and ranks exchange over authenticated connections.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotrow import child_process
from hotrow.bench.servers.network import Network, enter
from hotrow.errors import HotRowError
from hotrow.parallel.job_token import TOKEN_VARIABLE, new_job_token
from hotrow.parallel.shared_memory import SWITCH

Figures = dict[str, float]
Turn = Callable[[], Figures]
MEET = 29500  # the port at which ranks meet on a network, where no other program is
NOISE = 0.05  # the relative speed below the best that still counts as undisturbed


class RankProcesses:
    """One process for each entry of `cores`, which lists the cores that it may use; on the machines of `network`, one
    after another, if there is one."""

    def __init__(
        self,
        cores: Sequence[Sequence[int]],
        prepare: Callable[..., Turn],
        *arguments: Any,
        network: Network | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        meet = _place() if network is None else (next(iter(network.addresses.values())), MEET)
        machines = [None] * len(cores) if network is None else [network.namespace(name) for name in network.addresses]
        environment = {**_at(meet), **({} if network is None else _as_on_machines())}
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        try:
            for rank, (of_rank, machine) in enumerate(zip(cores, machines, strict=True)):
                here, there = context.Pipe()
                where = Where(rank, len(cores), tuple(of_rank), machine, environment)
                process = context.Process(
                    target=_work, args=(where, prepare, arguments, there, os.getpid()), daemon=True
                )
                process.start()
                there.close()  # else the end of the process does not end a recv() here
                self.pipes.append(here)
                self.processes.append(process)
            self._receive()  # "ready"
        except BaseException:
            self._end(0)
            raise

    def work(self) -> list[Figures]:
        """Run one turn on all ranks. Returns each rank's figures."""
        for pipe in self.pipes:
            pipe.send(True)
        return self._receive()

    def _receive(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self.pipes]
        except EOFError:
            raise HotRowError("a process of the benchmark has ended; its error is above") from None

    def _end(self, seconds: float) -> None:
        for process in self.processes:
            process.join(seconds)
            process.kill()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for pipe in self.pipes:
                pipe.send(False)
        self._end(30 if kind is None else 0)


def undisturbed(alone: Sequence[float]) -> list[int]:
    """The turns before and after which the single process was near its best speed. `alone` has its speeds: before the
    first turn, between two turns, and after the last.

    >>> undisturbed([100, 98, 67, 99, 100])
    [0, 3]
    """
    best = max(alone)
    fast = [speed > (1 - NOISE) * best for speed in alone]
    return [turn for turn in range(len(alone) - 1) if fast[turn] and fast[turn + 1]]


@dataclass(frozen=True)
class Where:
    """Where a process runs: its rank, its cores, its machine's namespace, and what its environment says."""

    rank: int
    world: int
    cores: tuple[int, ...]
    namespace: str | None
    environment: dict[str, str]


def _place() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


def _at(meet: tuple[str, int]) -> dict[str, str]:
    local = {"GLOO_SOCKET_IFNAME": "lo"} if meet[0] == "127.0.0.1" else {}
    return {"MASTER_ADDR": meet[0], "MASTER_PORT": str(meet[1]), **local}


def _as_on_machines() -> dict[str, str]:
    """The machines are one, but their ranks must not share its memory."""
    return {SWITCH: "0", TOKEN_VARIABLE: new_job_token()}


def _work(where: Where, prepare: Callable[..., Turn], arguments: Any, pipe: Any, parent: int) -> None:
    child_process.end_with_parent(parent)
    if where.namespace is not None:
        enter(where.namespace)  # before any other thread starts
    os.sched_setaffinity(0, where.cores)
    numbers = {"RANK": where.rank, "WORLD_SIZE": where.world, "LOCAL_RANK": where.rank, "LOCAL_WORLD_SIZE": where.world}
    numbers |= {"OMP_NUM_THREADS": len(where.cores)}
    os.environ.update({name: str(value) for name, value in numbers.items()} | where.environment)
    turn = prepare(where.rank, *arguments)
    pipe.send("ready")
    while pipe.recv():
        pipe.send(turn())
