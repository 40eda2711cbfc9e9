"""`hotrow train --ranks N`: starts the ranks of a machine as processes, watches them and ends them together.

It does what torchrun does, as far as HotRow needs it: the environment that ranks read, a store at which they meet (in
the process that starts rank 0, so that it outlives every rank), a job token, and the end of all when one fails. With
`--start` and `--meet` each of several machines starts a part of the ranks. The other ranks get time to end by
themselves, because their errors name the failed rank; then they are killed. Each rank has a session of its own, so that
Ctrl-C reaches it once, through this process. If this process is killed, the system kills the ranks.

The first SIGINT or SIGTERM goes to all ranks, which stop together and save (train/distributed.py). A second one kills
them.

torchrun does restarts: `torchrun --nproc-per-node=N --max-restarts=R -m hotrow train job.toml --resume`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotrow import child_process
from hotrow.errors import OptionError
from hotrow.parallel.job_token import MAKE_ONE, TOKEN_VARIABLE, new_job_token
from hotrow.parallel.meeting import AGENT_STORE, LOOPBACK, bind_store, is_loopback
from hotrow.signals import StopSignals, exit_code

POLL_SECONDS = 0.05
STORE_SECONDS = 60  # the store's own timeout
REPORT_SECONDS = (
    8.0  # after a failure, the store stays this long for the ranks of other machines, which read who failed
)
Process = subprocess.Popen[Any]


@dataclass(frozen=True)
class Part:
    """The ranks that one machine starts, from `first` to before `end` of `world`, and where all ranks meet.

    Without `meet` the part is the whole job, on loopback. `token` is the job token; without one a random one is made,
    which is possible only where one launcher starts all ranks.
    """

    world: int
    first: int = 0
    end: int | None = None
    meet: tuple[str, int] | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= self.world:
            raise OptionError(
                f"--start {self.first}:{self.last} of {self.world} ranks: give the first rank of this machine and the "
                f"one after its last, within 0:{self.world}"
            )
        if not self.is_whole and self.meet is None:
            raise OptionError(
                "--start without --meet: say where the ranks of all machines meet, such as --meet 10.0.0.1:29500 (an "
                "address of the machine that starts rank 0)"
            )
        if not self.is_whole and self.token is None:
            raise OptionError(
                f"--start needs a job token, because other machines start ranks too: pass --token-file; {MAKE_ONE}"
            )

    @property
    def last(self) -> int:
        """The rank after the last."""
        return self.world if self.end is None else self.end

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        return range(self.first, self.last)

    @property
    def is_whole(self) -> bool:
        """Whether this machine starts all ranks."""
        return len(self.ranks) == self.world


def part_of(world: int, towers: int, start: str | None, meet: str | None, token: str | None) -> Part:
    """The part that the options of `hotrow train` name. The first `towers` ranks have towers.

    >>> part_of(5, 2, "rows", "10.0.0.1:29500", "sixteen characters").ranks
    range(2, 5)
    """
    place = None if meet is None else _place(meet)
    if start is None:
        return Part(world, meet=place, token=token)
    if start in ("towers", "rows"):
        if towers == world:
            raise OptionError(f"--start {start} without row ranks: pass --towers and --rows, or --start FIRST:END")
        first, end = (0, towers) if start == "towers" else (towers, world)
    else:
        numbers = start.split(":")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise OptionError(f"--start {start!r}: give towers, rows, or FIRST:END, such as 0:2")
        first, end = int(numbers[0]), int(numbers[1])
    return Part(world, first, end, place, token)


def _place(meet: str) -> tuple[str, int]:
    host, _, port = meet.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise OptionError(f"--meet {meet!r}: give HOST:PORT, such as 10.0.0.1:29500")
    return host.removeprefix("[").removesuffix("]"), int(port)


def launch(part: Part | int, command: Sequence[str], patience: float = 20.0) -> int:
    """Run `command` as the ranks of a part; a number is that many ranks on this machine. Returns 0, or the exit code of
    the first that failed (128 + the signal's number if a signal killed it).

    When one has failed, the others have `patience` seconds to end by themselves.
    """
    part = Part(part) if isinstance(part, int) else part
    host, port = part.meet or (LOOPBACK, 0)
    store = bind_store(host, port, STORE_SECONDS) if part.first == 0 else None
    token = part.token or new_job_token()
    processes: list[Process] = []
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number)

    try:
        for rank in part.ranks:
            meet = (host, port if store is None else store.port)
            environment = rank_environment(rank, part.world, part.ranks, meet, token)
            processes.append(child_process.start(command, env=environment, start_new_session=True))
        with StopSignals(forward):
            code = _watch(part.first, processes, patience, lambda: bool(received))
            if code and store is not None and not part.is_whole:
                time.sleep(REPORT_SECONDS)
            return code
    finally:
        _kill(processes)


def rank_environment(rank: int, world: int, here: range, meet: tuple[str, int], token: str) -> dict[str, str]:
    """The environment of a rank on a machine that starts the ranks `here`, with a store that is open at `meet`."""
    cores = len(os.sched_getaffinity(0))
    return {
        **({"GLOO_SOCKET_IFNAME": "lo"} if is_loopback(meet[0]) else {}),  # else the interface of the machine's name
        "OMP_NUM_THREADS": str(max(1, cores // len(here))),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(here.index(rank)),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": meet[0],
        "MASTER_PORT": str(meet[1]),
        AGENT_STORE: "True",  # the store is there already: rank 0 need not hold it
        "TORCHELASTIC_RESTART_COUNT": "0",
        TOKEN_VARIABLE: token,
    }


def _watch(first: int, processes: Sequence[Process], patience: float, signalled: Callable[[], bool]) -> int:
    failed, deadline = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if not failed and (bad := [(rank, code) for rank, code in enumerate(codes) if code]):
            rank, code = bad[0]
            failed, deadline = code if code > 0 else exit_code(-code), time.monotonic() + patience
            if code < 0 and not signalled():
                print(f"rank {first + rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        if all(code is not None for code in codes) or time.monotonic() > deadline:
            return failed
        time.sleep(POLL_SECONDS)


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
