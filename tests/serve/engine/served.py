"""`hotrow serve` as a command, over a repository of plain_servable.py."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import forked
import psutil

HERE = Path(__file__).parent


class Served:
    """`hotrow serve` with ports that the system chose. Without `loader`, the repository has exported models."""

    def __init__(self, repository: Path, *arguments: str, loader: str | None = "plain_servable:load") -> None:
        loads = () if loader is None else ("--loader", loader)
        ports = ["--http", "0", "--grpc", "-1", "--metrics", "0"]
        self.process = forked.hotrow(
            *("serve", str(repository), *loads, *ports, *arguments),
            log=repository.parent / "serve.log",
            env={"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        self.repository = repository
        self.ports = self._ports()

    def _ports(self) -> dict[str, int]:
        until = time.monotonic() + 150
        while time.monotonic() < until and self.process.poll() is None:
            text = self.text()
            if "metrics " in text:
                lines = [line.split() for line in text.splitlines() if "http://" in line]
                return {name: int(where.split(":")[2].split("/")[0]) for name, where in lines}
            time.sleep(0.05)
        raise AssertionError(f"it did not come up: {self.text()}")

    def text(self) -> str:
        return self.process.text()

    def get(self, path: str, port: str = "http", data: bytes | None = None) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{path}", data, timeout=30) as answer:
            return str(answer.read().decode())

    def infer(self, version: str = "") -> Any:
        names = ["f0", "f1", "f2"]
        inputs = [{"name": name, "shape": [2], "datatype": "INT64", "data": [1, 2]} for name in names]
        inputs.append({"name": "dense", "shape": [2, 4], "datatype": "FP32", "data": [0.5] * 8})
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['http']}/v2/models/ctr{version}/infer",
            json.dumps({"inputs": inputs}).encode(),
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def children(self, word: str) -> list[psutil.Process]:
        """Its processes `python -m module` with this word in the module's name."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or is a zombie
                words = process.cmdline()
                # One that was forked a moment ago has the command of the test's fork server, which lists modules too.
                found += [process] if words[1:2] == ["-m"] and word in words[2] else []
        return found

    def end(self) -> None:
        self.process.kill()
