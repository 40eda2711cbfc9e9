"""A fleet as processes of a test: row servers and a tower server over `fleet_history`'s model, and a load on it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import forked

from hotrow.bench.serving import checked_load, fleet_history
from hotrow.bench.serving.failover import open_client
from hotrow.bench.serving.fleet_servers import HOST, steady_ports

PATIENCE = 120.0  # seconds, on a busy machine


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait until the condition holds; a connection that fails counts as false."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


class RowServer:
    """`hotrow rows` on the same port at every start."""

    def __init__(self, repository: Path, folder: Path, *options: str) -> None:
        self.repository, self.folder, self.options = repository, folder, options
        (self.port,) = steady_ports(1)
        self.starts = 0
        self.start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        """Start the process. A tower server that starts waits for it."""
        self.starts += 1
        self.process = forked.hotrow(
            *("rows", str(self.repository), "--listen", self.address, "--metrics", "-1", *self.options),
            log=self.folder / f"rows-{self.port}-{self.starts}.log",
            env={"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )


class TowerServer:
    """`hotrow serve --rows`."""

    def __init__(self, repository: Path, folder: Path, rows: str, *options: str) -> None:
        self.port, self.metrics = steady_ports(2)
        ports = ("--http", str(self.port), "--grpc", "-1", "--metrics", str(self.metrics))
        self.process = forked.hotrow(
            *("serve", str(repository), "--rows", rows, "--no-compile", *ports, *options),
            log=folder / "tower.log",
            env={"OMP_NUM_THREADS": "1", "COLUMNS": "200", "XDG_CACHE_HOME": str(folder)},
        )

    def wait(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.process.text()
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/v2/health/ready", timeout=30) as answer:
                return bool(answer.status == 200)

        until(ready, "the tower server")

    def connected(self) -> int:
        """How many row servers it is connected to."""
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics}/metrics", timeout=30) as answer:
            found = re.findall(r"^hotrow_row_server_up{.*} (\S+)$", answer.read().decode(), re.M)
        return sum(float(up) > 0 for up in found)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


class Load:
    """Requests from a process of their own at a fixed rate; `answers` ends it."""

    def __init__(self, client: subprocess.Popen[Any], file: Path) -> None:
        self._client, self._file = client, file

    def answers(self) -> list[checked_load.Record]:
        """Everything that came, once the last answers have come."""
        _, error = self._client.communicate(timeout=PATIENCE)
        assert self._client.returncode == 0, error
        return list(checked_load.read_records(str(self._file)))


@contextmanager
def load_on(port: int, folder: Path, rate: float, connections: int = 8) -> Iterator[Load]:
    """A load of fleet_history's requests."""
    bodies = fleet_history.request_bodies(fleet_history.request_keys())
    requests, answers, spec = folder / "requests", folder / "answers", folder / "spec.json"
    records = [checked_load.Record(number, 0, 0, 0, *body) for number, body in enumerate(bodies)]
    checked_load.write_records(str(requests), records)
    given = {"port": port, "path": "/v2/models/ctr/infer", "rate": rate, "connections": connections}
    spec.write_text(json.dumps({**given, "requests": str(requests), "answers": str(answers)}))
    with open_client([checked_load.__file__, str(spec)]) as client:
        yield Load(client, answers)
