"""`hotrow train --ranks N`: starts the ranks of one machine as processes, watches them and ends them together.

It does what torchrun does, as far as one machine needs it: the environment that torch.distributed reads, a store at
which the ranks meet (in this process, so that it outlives every rank), and the end of all when one fails. The other
ranks get time to end by themselves, because their errors name the failed rank; then they are killed. Each rank has a
session of its own, so that Ctrl-C reaches it once, through this process. If this process is killed, the system kills
the ranks.

The first SIGINT or SIGTERM goes to all ranks, which stop together and save (train/distributed.py). A second one kills
them.

torchrun does restarts: `torchrun --nproc-per-node=N --max-restarts=R -m hotrow train job.toml --resume`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hotrow import child_process
from hotrow.signals import StopSignals, exit_code

POLL_SECONDS = 0.05
LOOPBACK = "127.0.0.1"
Process = subprocess.Popen[Any]


def launch(ranks: int, command: Sequence[str], patience: float = 20.0) -> int:
    """Run `command` as `ranks` processes. Returns 0, or the exit code of the first that failed (128 + the signal's
    number if a signal killed it).

    When one has failed, the others have `patience` seconds to end by themselves.
    """
    store = _loopback_store()
    processes: list[Process] = []
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number)

    try:
        for rank in range(ranks):
            environment = _environment(rank, ranks, store.port)
            processes.append(child_process.start(command, env=environment, start_new_session=True))
        with StopSignals(forward):
            return _watch(processes, patience, lambda: bool(received))
    finally:
        _kill(processes)


def _loopback_store() -> TCPStore:
    """The store at which ranks meet. It gets a bound socket, because by itself it would listen on every interface."""
    listener = socket.create_server((LOOPBACK, 0))
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {
        "GLOO_SOCKET_IFNAME": "lo",  # else the interface of the machine's name
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: rank 0 need not hold it
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _watch(processes: Sequence[Process], patience: float, signalled: Callable[[], bool]) -> int:
    failed, deadline = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if not failed and (bad := [(rank, code) for rank, code in enumerate(codes) if code]):
            rank, code = bad[0]
            failed, deadline = code if code > 0 else exit_code(-code), time.monotonic() + patience
            if code < 0 and not signalled():
                print(f"rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        if all(code is not None for code in codes) or time.monotonic() > deadline:
            return failed
        time.sleep(POLL_SECONDS)


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
