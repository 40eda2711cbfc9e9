"""Row servers in the test's process, engines that read from them, and a client that follows no rule."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from small_models import trained

import hotrow as hr
from hotrow.errors import StorageError
from hotrow.serve.execution.engine import Engine
from hotrow.serve.repository.manifest import Version, open_version
from hotrow.serve.rows.row_server_options import RowServerOptions
from hotrow.serve.rows.row_server_process import RowServerProcess
from hotrow.tiers.rows.cluster_file import RowsAddress
from hotrow.tiers.rows.handshake import HEADER, MAGIC, Model, Welcome, fingerprint, greet, token_key
from hotrow.tiers.rows.row_servers import RowServers
from hotrow.tiers.rows.tables import RowServerTables

PATIENCE = 60.0  # seconds, on a busy machine
TOKEN = "tea-for-two-and-two-for-tea"


def until(what: Callable[[], object], why: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"waited {seconds:g} s for {why}"
        time.sleep(0.01)


class Rows:
    """Row servers that end with the test."""

    def __init__(self) -> None:
        self.running: list[RowServerProcess] = []

    def start(self, repository: Path, shards: str = "0:1024", port: int = 0, **options: Any) -> RowServerProcess:
        begin, end = (int(bound) for bound in shards.split(":"))
        given = {"listen": (f"127.0.0.1:{port}",), "metrics": None, "drain": 1.0, **options}
        server = RowServerProcess(RowServerOptions(str(repository), shards=(begin, end), **given))
        self.running.append(server)
        server.start()
        return server

    def end(self, server: RowServerProcess) -> None:
        self.running.remove(server)
        server.stop()

    def close(self) -> None:
        for server in self.running:
            server.stop()


@pytest.fixture
def rows() -> Iterator[Rows]:
    running = Rows()
    yield running
    running.close()


def port_of(server: RowServerProcess) -> int:
    return int(server.addresses[0].rpartition(":")[2])


def where(*servers: RowServerProcess, **options: str) -> str:
    """The `rows=` of these servers."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return ",".join(server.addresses[0] for server in servers) + (f"?{query}" if query else "")


def over(folder: Path, address: str) -> Engine:
    """An engine of a model's newest version whose rows are on row servers."""
    return hr.Engine(folder, memory=hr.Memory(rows=address))


def servers_of(engine: Engine) -> RowServers:
    remote = engine.embeddings.remote
    assert isinstance(remote, RowServerTables)
    return remote.servers


def model_of(version: Version) -> Model:
    tables = [on_disk.table for on_disk in version.tables]
    return Model(version.model, version.number, fingerprint(tables, int(version.manifest["seed"])))


@contextlib.contextmanager
def connected(folder: Path, address: str, links: int = 2) -> Iterator[RowServers]:
    """A client of row servers without an engine; `folder` is a version's."""
    version = open_version(folder)
    dims = [on_disk.table.dim for on_disk in version.tables]
    servers = RowServers(RowsAddress.parse(address), model_of(version), dims, links)
    try:
        yield servers
    finally:
        servers.close()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with version 1 of the model ctr."""
    folder = tmp_path_factory.mktemp("repository")
    hr.export(trained().model, folder / "ctr", policy="wait")
    return folder


def problem(folder: Path, address: str, said: str) -> str:
    """Why a client cannot use the row servers; waits until the problem has `said` in it."""
    with connected(folder, address) as servers:
        until(lambda: said in servers.describe_problems(), said)
        with pytest.raises(StorageError) as refused:
            servers.wait_until_complete(0.0)
    return str(refused.value)


# --- processes and load ---


class Load:
    """Threads that ask without a pause; `end` fails for any wrong answer or error."""

    def __init__(self, engine: Any, batch: hr.KeyedBatch, expected: torch.Tensor, threads: int = 2) -> None:
        self.wrong: list[Any] = []
        self.slowest = 0.0
        self.asked = 0
        self._stop = threading.Event()

        def ask() -> None:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    if not same_bits(engine.answer(batch, "wait", began + 5.0).logits, expected):
                        self.wrong.append("other bits")
                except Exception as error:
                    self.wrong.append(error)
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.asked += 1

        self._threads = [threading.Thread(target=ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert not self.wrong, self.wrong[:3]
        assert self.asked > 10


class RowsCommand:
    """`hotrow rows` as a process."""

    def __init__(self, log: Path, repository: Path, port: int = 0, *arguments: str) -> None:
        given = ["--listen", f"127.0.0.1:{port}", "--metrics", "-1", *arguments]
        self.process = forked.hotrow("rows", str(repository), *given, log=log, env={"COLUMNS": "300"})
        until(lambda: "  127.0.0.1:" in self.process.text() or self.process.poll() is not None, "the row server")
        assert self.process.poll() is None, self.process.text()
        self.address = next(line.strip() for line in self.process.text().splitlines() if "  127.0.0.1:" in line)
        self.port = int(self.address.rpartition(":")[2])

    def end(self) -> None:
        self.process.kill()


# --- a peer that does as it likes ---


class Stranger:
    """A connection that sends any bytes. With a model it proves itself first."""

    def __init__(self, address: str, model: Model | None = None, token: str | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self.socket.settimeout(10)
        self.welcome: Welcome | None = None
        if model is not None:
            self.welcome = greet(self.socket, model, token_key(token))

    def challenge(self) -> bytes:
        return self.frame()[2]

    def send(self, kind: int, payload: bytes = b"", size: int | None = None, publication: int = 0) -> None:
        length = len(payload) if size is None else size
        self.socket.sendall(HEADER.pack(MAGIC, kind, 0, 7, length, publication, 0) + payload)

    def frame(self) -> tuple[int, int, bytes]:
        """The next frame: its kind, its error and its payload."""
        _, kind, error, _, size, _, _ = HEADER.unpack(self._bytes(HEADER.size))
        return kind, error, self._bytes(size)

    def _bytes(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionError("closed")
            data += part
        return data

    def is_closed(self) -> bool:
        """Whether the server closes the connection, perhaps after an answer."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def close(self) -> None:
        self.socket.close()


def lookup_payload(tables: Sequence[tuple[int, Sequence[int]]], wire: int = 0, flags: int = 0) -> bytes:
    """A lookup's payload: (table, keys) of each table."""
    head = struct.pack("<IHH", len(tables), wire, flags)
    counts = b"".join(struct.pack("<II", table, len(keys)) for table, keys in tables)
    return head + counts + b"".join(struct.pack(f"<{len(keys)}q", *keys) for _, keys in tables)


def hello_of(body: object) -> bytes:
    return json.dumps(body).encode()
