"""Row servers in the test's process, engines that read from them, and a client that follows no rule."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow as hr
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
