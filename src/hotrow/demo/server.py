"""The demo's server and load generator as child processes, and how updates reach the server.

If `hotrow serve` has the option --bus, it follows publications. Otherwise new versions are exported every few seconds
and found by --poll. Only `update_options` and `Versions` depend on which it is.

Both processes end with this process, however it ends (child_process.py).
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrow import child_process
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.errors import HotRowError
from hotrow.nn import Recommender

CANDIDATES = 20  # per request


def follows_a_bus() -> bool:
    """Whether `hotrow serve` of this release has --bus."""
    from hotrow.serve.processes.serve_options import ServeOptions

    return "bus" in ServeOptions.__dataclass_fields__


def update_options(bus: str) -> list[str]:
    """The server's options for updates."""
    return ["--bus", bus] if follows_a_bus() else ["--poll", "1s"]


@dataclass
class DemoServer:
    """`hotrow serve` on ports of its own."""

    repository: Path
    bus: str
    log: Path
    process: subprocess.Popen[Any] | None = None
    port: int = 0
    metrics: int = 0

    @property
    def address(self) -> str:
        """Host and port of HTTP."""
        return f"127.0.0.1:{self.port}"

    def start(self, timeout: float = 300.0) -> None:
        """Start it and wait until it answers."""
        self.port, self.metrics = free_port(), free_port()
        command = [sys.executable, "-m", "hotrow", "serve", str(self.repository), "--http", str(self.port)]
        command += ["--grpc", "-1", "--metrics", str(self.metrics), "--no-compile", "--max-wait", "1ms"]
        with open(self.log, "wb") as log:
            whole = [*command, *update_options(self.bus)]
            self.process = child_process.start(whole, signal.SIGTERM, stdout=log, stderr=log)
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            if self.ready():
                return
            time.sleep(0.1)
        raise HotRowError(f"hotrow serve did not start; {self.log} has its output")

    def ready(self) -> bool:
        """Whether it is ready for requests."""
        try:
            line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            line.request("GET", "/v2/health/ready")
            return line.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass
class Versions:
    """Exports a new version every few seconds if the server follows no bus. Called between steps by the training
    thread; keeps the watermark of every version, for freshness."""

    model: Recommender
    path: Path
    every: float = 8.0
    watermarks: dict[str, int] = field(default_factory=dict)
    _next: float = field(default_factory=time.monotonic)

    def tick(self, watermark: int | None) -> None:
        """Export if it is time."""
        if watermark is None or time.monotonic() < self._next + self.every:
            return
        from hotrow.serve.repository.export import export

        version = export(self.model, self.path, values="fp16")
        self.watermarks[str(version.number)] = watermark
        self._next = time.monotonic()


@dataclass
class Load:
    """The load generator's process and the replies so far."""

    address: str
    folder: Path
    bodies: list[str]
    rate: float = 40.0
    answers: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[Any] | None = None
    _read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, seconds: float, timeout: float = 60.0) -> None:
        """Start it, and wait for the first reply."""
        requests = self.folder / "requests.json"
        requests.write_text(json.dumps(self.bodies))
        self.out.write_text("")
        program = str(Path(__file__).with_name("load.py"))
        command = [sys.executable, program, self.address, str(requests), str(self.out)]
        self.process = child_process.start([*command, str(seconds), str(self.rate)])
        end = time.monotonic() + timeout
        while not self.poll() and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)

    @property
    def out(self) -> Path:
        """The file of its replies."""
        return self.folder / "answers.jsonl"

    def poll(self) -> list[dict[str, Any]]:
        """All replies so far."""
        with self._lock, open(self.out) as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self.answers.append(json.loads(line))
                self._read = file.tell()
            return self.answers

    def stop(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def requests(log: SyntheticClicks, start: int, count: int = 200) -> list[str]:
    """Bodies of requests: a user in a context, and candidates."""
    bodies = []
    for number in range(count):
        batch = log.batch(start + number * CANDIDATES, CANDIDATES)
        inputs: list[dict[str, Any]] = []
        for name, jagged in batch.ids.items():
            length = CANDIDATES if name == "item" else 1
            values = jagged.values[:length].tolist()
            shape = [length]
            if jagged.offsets is not None:
                values = jagged.values[: int(jagged.offsets[1])].tolist() or jagged.values[:1].tolist()
                shape = [1, len(values)]
            inputs.append({"name": name, "datatype": "INT64", "shape": shape, "data": values})
        if batch.dense is not None:
            dense = batch.dense[:1]
            inputs.append({"name": "dense", "datatype": "FP32", "shape": list(dense.shape), "data": dense[0].tolist()})
        bodies.append(json.dumps({"inputs": inputs, "outputs": [{"name": "probabilities"}]}))
    return bodies


def free_port() -> int:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
