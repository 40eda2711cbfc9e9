"""`hotrow train --ranks N`: the ranks of one machine as processes, started, watched and ended together.

What torchrun does, as far as one machine needs it: the environment that torch.distributed reads, a store at which the
ranks meet (held here, so that it outlives any of them), and an end for all when one fails. The others are given time to
find out by themselves, because they say which rank it was; then they are told to stop, then killed. Ranks are in
sessions of their own, so that Ctrl-C reaches them once, through us; and if we are killed, the system ends them.

Restarts are torchrun's: `torchrun --nproc-per-node=N --max-restarts=R -m hotrow train job.toml --resume`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

POLL_SECONDS = 0.05
STOP_SECONDS = 5.0  # between "stop" and the end


def launch(ranks: int, command: Sequence[str], patience: float = 20.0) -> int:
    """Run `command` as so many ranks; returns 0, or the exit code of the first that failed.

    When one has failed, the others have `patience` seconds to end by themselves.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    processes = [
        subprocess.Popen(
            list(command), env=_environment(rank, ranks, store.port), start_new_session=True, preexec_fn=_die_with_us
        )
        for rank in range(ranks)
    ]
    told = _forward_signals(processes)
    try:
        return _watch(processes, patience, told)
    finally:
        _end(processes)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: rank 0 need not hold it
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _die_with_us() -> None:
    """In a child before it begins: SIGTERM when the parent goes."""
    death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(death_signal, signal.SIGTERM)


def _forward_signals(processes: Sequence[subprocess.Popen[bytes]]) -> Callable[[], bool]:
    """SIGINT and SIGTERM go to all ranks; returns whether one came."""
    came: list[int] = []

    def forward(number: int, _: object) -> None:
        came.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    return lambda: bool(came)


def _watch(processes: Sequence[subprocess.Popen[bytes]], patience: float, told: Callable[[], bool]) -> int:
    failed: int | None = None
    deadline = float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return failed if failed is not None else next((code for code in codes if code), 0) or 0
        if failed is None and (bad := [(rank, code) for rank, code in enumerate(codes) if code]):
            rank, code = bad[0]
            failed, deadline = code, time.monotonic() + patience
            if code < 0 and not told():
                print(f"rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            return failed or 1
        time.sleep(POLL_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for process in alive:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
