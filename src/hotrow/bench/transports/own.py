"""Our own protocol: the row server of the core (core/rowserver/), as `hotrow rows` runs it.

The client speaks the protocol over one plain socket, so that several batches are in flight on one connection as they
are for the other transports. Tower servers use the core's client.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hotrow import _core
from hotrow.bench.transports.plain_sockets import REQUEST_BUFFER, receive_into, send
from hotrow.bench.transports.transport import Keys, StoredRows, Values, retry
from hotrow.tiers.rows.handshake import HEADER, MAGIC, Model, Welcome, greet, make_welcome, read_hello

LOOKUP, ROWS = 4, 5  # kinds of frames
MODEL = Model("rows", 1, "")


@dataclass(frozen=True)
class Own:
    """One connection, several batches in flight."""

    name: ClassVar[str] = "own"
    connections: ClassVar[int] = 1
    depth: int = 2

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """One thread of the core."""
        service = _core.RowService([rows.core], 0, 64, 1 << 20)

        def prove(challenge: bytes, hello: bytes) -> tuple[object, bytes]:
            _, nonce = read_hello(challenge, hello, None)
            return service, make_welcome(Welcome(0, 1024, ""), nonce, challenge, None)

        server = _core.RowServer(prove)
        listener = socket.create_server(("127.0.0.1", port))
        listener.setblocking(False)
        server.listen(listener.detach())
        ready()
        threading.Event().wait()

    def connect(self, port: int, dim: int, batch: int) -> OwnConnection:
        """A TCP connection."""
        return OwnConnection(port, dim, batch)


class OwnConnection:
    """The client's side."""

    def __init__(self, port: int, dim: int, batch: int) -> None:
        self._socket = retry(lambda: socket.create_connection(("127.0.0.1", port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BUFFER)
        greet(self._socket, MODEL, None)
        self._head = np.array([1, 0, 0, batch], np.uint32).tobytes()  # one table, fp32; table 0 has all keys
        self._answer = np.empty(HEADER.size // 4 + batch * dim, np.float32)
        self._bytes = self._answer.data.cast("B")
        self._rows = self._answer[HEADER.size // 4 :].reshape(batch, dim)
        self._sent = self._received = 0

    def send(self, keys: Keys) -> None:
        """Header and keys in one call."""
        header = HEADER.pack(MAGIC, LOOKUP, 0, self._sent, len(self._head) + keys.nbytes, 0, 0)
        send(self._socket, header + self._head, keys.data.cast("B"))
        self._sent += 1

    def receive(self) -> Values:
        """Header and rows in one call."""
        receive_into(self._socket, self._bytes)
        _, kind, _, number, _, _, _ = HEADER.unpack_from(self._bytes)
        if kind != ROWS or number != self._received:
            raise ConnectionError("an answer does not belong to the oldest request")
        self._received += 1
        return self._rows


TRANSPORTS = (Own(),)
