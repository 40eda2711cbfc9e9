"""A tower server's answers while one of its two row servers is killed every few seconds.

The load comes from a process of its own, at fixed times (load_client.py). A row server is killed with SIGKILL and
started again at once on its port. The next one is killed only when the tower server is connected to both.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrow import child_process
from hotrow.bench.serving import load_client
from hotrow.bench.serving.fleet_servers import Tower, steady_ports
from hotrow.bench.serving.row_server_process import RowServer, addresses
from hotrow.bench.serving.serve_process import ServerError, load

KILL_SECONDS = 5.0
LOAD = 0.3  # of the capacity
NICE = 10  # of a server that is started again: in a fleet its start takes no core of the others
CONNECTIONS = 64
MEASURE = {"connections": 16, "seconds": 8.0, "warm": 2.0}


@dataclass(frozen=True)
class Failover:
    """What a load saw while row servers were killed."""

    answers: int
    failed: int
    p99: float  # ms
    kills: int
    rate: float  # requests/s that were sent
    why: str = ""


def measure_failover(
    repository: Path,
    requests: Path,
    probe: bytes,
    seconds: float,
    deadline: float,
    rate: float | None = None,
) -> Failover:
    """Run the load for `seconds`. `deadline` is in ms. Without `rate`, it is LOAD of the capacity."""
    with ExitStack() as stack:
        rows = [stack.enter_context(RowServer(repository, port=port)) for port in steady_ports(2)]
        options = ("--deadline", f"{deadline:g}ms", "--policy", "wait")
        tower = stack.enter_context(Tower(repository, f"{addresses(rows)}?local=off", probe, *options))
        tower.wait_for_row_servers(2)
        if rate is None:
            rate = LOAD * load(tower.server, requests, MEASURE)[0]["rate"]
        spec = {"connections": CONNECTIONS, "seconds": seconds, "rate": rate}
        with open_load(tower.server.port, requests, spec) as client:
            kills = kill_in_turns(rows, tower, client, time.monotonic() + seconds)
            figures = finish(client)
    figures["unsent"] = max(0, figures["unsent"] - CONNECTIONS)  # those were about to be sent
    failed = sum(figures["failed"].values()) + figures["refused"] + figures["lost"] + figures["unsent"]
    why = {name: figures[name] for name in ("failed", "refused", "lost", "unsent") if figures[name]}
    return Failover(figures["good"], failed, figures["p99"] * 1e3, kills, rate, f"failed: {why}" if why else "")


def kill_in_turns(rows: list[RowServer], tower: Tower, client: subprocess.Popen[Any], end: float) -> int:
    """Kill and restart the servers in turns until the load ends; how often."""
    kills = 0
    while True:
        until = min(end, time.monotonic() + KILL_SECONDS)
        time.sleep(max(0.0, until - time.monotonic()))
        while time.monotonic() < end and sum(tower.row_servers().values()) < len(rows):
            time.sleep(0.1)
        if time.monotonic() >= end or client.poll() is not None:
            return kills
        victim = rows[kills % len(rows)]
        victim.kill()
        victim.start(wait=False, nice=NICE)
        kills += 1


@contextmanager
def open_load(port: int, requests: Path, phase: dict[str, Any]) -> Iterator[subprocess.Popen[Any]]:
    """The load client in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spec:
        json.dump({"port": port, "requests": str(requests), "phases": [phase]}, spec)
        spec.flush()
        with open_client([load_client.__file__, spec.name]) as client:
            yield client


def finish(client: subprocess.Popen[Any]) -> dict[str, Any]:
    """The figures of the load client, once it has ended."""
    output, error = client.communicate(timeout=600)
    if client.returncode:
        raise ServerError(f"the load failed: {error[-2000:]}")
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


@contextmanager
def open_client(command: list[str]) -> Iterator[subprocess.Popen[Any]]:
    """A script in a process of its own, which is killed at the end of the context."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    client = child_process.start([sys.executable, *command], signal.SIGKILL, text=True, **pipes)
    try:
        yield client
    finally:
        client.kill()
        client.wait()
