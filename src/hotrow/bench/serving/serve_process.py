"""Servers under test (HotRow's and its peers') and the load client, each in its own process.

A server is a context manager. It starts on a free port, is ready when it answers the probe, and is ended with its
children on exit. If this process dies, the server gets SIGTERM and ends its children (child_process.py). `cpu` sums the
processor time of the server's process tree, which is steadier than wall time on a shared machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from hotrow import child_process
from hotrow.bench.serving import load_client
from hotrow.errors import HotRowError

START_SECONDS = 300.0


class ServerError(HotRowError):
    """A server did not start, or gave a wrong answer."""


class ServerProcess:
    """A command that serves HTTP on `port`."""

    def __init__(self, name: str, command: list[str], probe: bytes, port: int = 0) -> None:
        self.name, self.port = name, port
        self._command, self._probe = command, probe
        self._log = tempfile.NamedTemporaryFile("w+", prefix="hotrow-bench-", suffix=".log")  # noqa: SIM115
        self.process: subprocess.Popen[Any] | None = None

    def __enter__(self) -> ServerProcess:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}
        self.process = child_process.start(
            self._command, signal.SIGTERM, stdout=self._log, stderr=self._log, start_new_session=True, env=environment
        )
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def text(self) -> str:
        """The server's output so far."""
        return Path(self._log.name).read_text(errors="replace")

    def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send one request on a new connection. Returns status and body."""
        connection = load_client.Connection(self.port)
        connection.socket.setblocking(True)
        connection.socket.settimeout(60)
        try:
            connection.socket.sendall(request)
            whole = b""
            while b"\r\n\r\n" not in whole or len(whole) < _total(whole):
                part = connection.socket.recv(1 << 20)
                if not part:
                    raise ConnectionError(f"{self.name} closed the connection")
                whole += part
        finally:
            connection.socket.close()
        return int(whole[9:12]), whole.partition(b"\r\n\r\n")[2]

    def cpu(self) -> dict[str, float]:
        """Processor seconds by kind of process: engine, front end, other."""
        assert self.process is not None
        found: dict[str, float] = {}
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            try:
                times, command = process.cpu_times(), " ".join(process.cmdline())
            except psutil.Error:
                continue
            kind = (
                "engine" if "engine_process" in command else "front end" if "frontend_process" in command else "other"
            )
            found[kind] = found.get(kind, 0.0) + times.user + times.system
        return found

    def end(self) -> None:
        """Stop the server and its children."""
        if self.process is None:
            return
        children = _tree(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in children:
            if child.is_running():
                child.kill()
        self._log.close()

    def _wait(self) -> None:
        assert self.process is not None
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            self.port = self.port or self._printed_port()
            try:
                if self.port and self.ask(self._probe)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise ServerError(f"{self.name} did not start: {self.text()[-2000:]}")

    def _printed_port(self) -> int:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.text())
        return int(found[1]) if found else 0


def _total(whole: bytes) -> int:
    head = whole.partition(b"\r\n\r\n")[0]
    return len(head) + 4 + load_client.length_of(head)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def hotrow_serve(repository: Path, probe: bytes, *options: str) -> ServerProcess:
    """`hotrow serve`, as a user starts it, on the CPU as the peers."""
    ports = ("--http", "0", "--grpc", "-1", "--metrics", "-1")
    command = [sys.executable, "-m", "hotrow", "serve", str(repository), "--devices", "cpu", *ports, *options]
    return ServerProcess("hotrow", command, probe)


def peer_serve(kind: str, weights: Path, probe: bytes) -> ServerProcess:
    """A peer of serve_peers.py."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hotrow.bench.serving.serve_peers", kind, str(port), str(weights)]
    return ServerProcess(kind, command, probe, port)


def load(server: ServerProcess, requests: Path, *phases: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the load client. Returns its figures phase by phase; `cpu` is the server's processor seconds over all."""
    before = server.cpu()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spec:
        json.dump({"port": server.port, "requests": str(requests), "phases": phases}, spec)
        spec.flush()
        run = child_process.run([sys.executable, load_client.__file__, spec.name], timeout=600)
    if run.returncode:
        raise ServerError(f"the load on {server.name} failed: {run.stderr[-2000:]}\n{server.text()[-2000:]}")
    found: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    used = {kind: seconds - before.get(kind, 0.0) for kind, seconds in server.cpu().items()}
    for figures in found:
        figures["cpu"] = used
        if figures["failed"] or figures["lost"]:
            raise ServerError(f"{server.name} failed or lost requests: {figures}\n{server.text()[-2000:]}")
    return found
