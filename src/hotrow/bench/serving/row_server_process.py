"""A row server under test: `hotrow rows` as a user starts it, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

from hotrow import child_process
from hotrow.bench.serving.serve_process import ServerError

START_SECONDS = 300.0


class RowServer:
    """`hotrow rows` on a free port, or on `port`. With `core`, its process may use that one alone."""

    def __init__(self, repository: Path, *options: str, port: int = 0, core: int | None = None) -> None:
        self.repository, self.options, self.port, self.core = repository, options, port, core
        self.process: subprocess.Popen[Any] | None = None
        self._log = tempfile.NamedTemporaryFile("w+", prefix="hotrow-rows-", suffix=".log")  # noqa: SIM115

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def start(self, wait: bool = True, nice: int = 0) -> None:
        """Start the process, at the priority `nice`; with `wait`, return when it serves."""
        listen = ("--listen", f"127.0.0.1:{self.port}", "--metrics", "-1")
        command = [sys.executable, "-m", "hotrow", "rows", str(self.repository), *listen, *self.options]
        if nice:
            command = ["nice", "-n", str(nice), *command]
        if self.core is not None:
            command = ["taskset", "-c", str(self.core), *command]
        self._log.truncate(0)
        environment = {**os.environ, "COLUMNS": "200"}
        self.process = child_process.start(
            command, signal.SIGTERM, stdout=self._log, stderr=self._log, start_new_session=True, env=environment
        )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it serves."""
        assert self.process is not None
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            if (found := re.search(r"127\.0\.0\.1:(\d+)", self.text())) is not None:
                self.port = int(found[1])
                return
            time.sleep(0.05)
        raise ServerError(f"hotrow rows did not start: {self.text()[-2000:]}")

    def text(self) -> str:
        """Its output so far."""
        return Path(self._log.name).read_text(errors="replace")

    def cpu(self) -> float:
        """Processor seconds of the process."""
        assert self.process is not None
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> RowServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def addresses(servers: Sequence[RowServer]) -> str:
    """For `--rows`."""
    return ",".join(server.address for server in servers)
