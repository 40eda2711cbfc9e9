"""A token and passwords given by files are in no process list, page or log of the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server_process import ShowsRows, until

import hotrow as hr
from hotrow.bench.servers.redis_cluster import HOST, RedisServers

TOKEN, PASSWORD = "tea-for-two-and-two-for-tea", "correct-horse-battery-staple"


@pytest.fixture
def repeating(redis_installed: None) -> Iterator[RedisServers]:
    """A Redis that answers a login with an error that has all of it."""
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    with RedisServers(options=["--rename-command", "AUTH", "", "--rename-command", "HELLO", ""]) as servers:
        yield servers


class RealServer:
    """`hotrow serve` as a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / "serve.log"
        command_line = [
            "serve",
            str(folder / "repository"),
            "--no-compile",
            "--http",
            "0",
            "--grpc",
            "-1",
            "--metrics",
            "0",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500", "XDG_CACHE_HOME": str(folder)}
        environment.pop("HOTROW_TOKEN", None)
        with open(self.log, "wb") as log:
            command = [sys.executable, "-m", "hotrow", *command_line, *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        until(lambda: "metrics " in self.text() or self.process.poll() is not None, "the server")
        assert self.process.poll() is None, self.text()
        lines = [line.split() for line in self.text().splitlines() if "http://" in line]
        self.ports = {
            name: int(where.split(":")[2].split("/")[0]) for name, where in lines if name in ("http", "metrics")
        }

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, port: str, path: str, body: bytes | None = None, **headers: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[port]}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def check(self) -> str:
        """Checks that no output and no environment has the token or the password; returns the output."""
        shown = self.shown()
        assert TOKEN not in shown and PASSWORD not in shown, shown
        environments = [repr(process.environ()) for process in self.family()]
        assert not any(
            secret in environment for environment in environments for secret in (TOKEN, PASSWORD)
        )  # not for logs
        return shown

    def shown(self) -> str:
        """All of it that other users can see."""
        processes = [repr(process.cmdline()) for process in self.family()]
        pages = [self.ask("metrics", "/metrics"), self.ask("http", "/v2/repository/index", b"{}")]
        return "\n".join([*processes, *pages, self.text()])


def test_no_process_and_no_page_shows_a_token_or_a_password(tmp_path: Path, repeating: RedisServers) -> None:
    for name, secret in (("token", TOKEN), ("password", PASSWORD)):
        (tmp_path / name).write_text(f"{secret}\n")
        (tmp_path / name).chmod(0o600)
    for name in ("ctr", "feed"):
        model = hr.Recommender(hr.EmbeddingCollection([hr.Table("user", dim=1)], seed=3), ShowsRows())
        hr.export(model, tmp_path / "repository" / name, dense_features=0)
    place = f"redis://me@{HOST}:{repeating.servers[0].port}/0?password_file={tmp_path / 'password'}"
    server = RealServer(
        tmp_path,
        *("--bus", f"ctr={place}&stream=ctr", "--remote", f"feed={place}&write_timeout=0.2", "--dram", "64MiB"),
        *("--token-file", str(tmp_path / "token")),
    )
    try:
        until(lambda: "away" in server.text() and "model 'feed' does not load" in server.text(), "both to be refused")
        assert len(server.family()) == 3 and server.check().count("'***'") >= 2  # the log and the index have the errors
        for child in server.family()[1:]:
            child.kill()

        def loaded() -> bool:
            server.ask("http", "/v2/repository/models/ctr/load", b"{}", Authorization=f"Bearer {TOKEN}")
            return len(server.family()) == 3

        until(loaded, "the next lives of both processes")
        server.check()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.text()
    finally:
        for process in server.family() if server.process.poll() is None else ():
            process.kill()
        server.process.wait()
