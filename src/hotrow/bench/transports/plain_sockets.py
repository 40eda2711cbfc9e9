"""Plain sockets: one TCP connection, and a thread that blocks in recv_into and sendmsg.

What a protocol of our own could do. A request is a header of 16 bytes (the number of keys, and a number that the answer
repeats) and the keys. An answer is a header and the rows. The server receives into one buffer and sends from another,
so user space copies nothing.

A client sends all its batches in flight before it reads: their requests (64 KiB each) fit into the socket's
buffers, so that it never blocks in send while the server blocks in send, too.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from hotrow.bench.transports.transport import Keys, StoredRows, Values, retry

HEADER = struct.Struct("<qq")
MOST = 8192  # keys of a request
REQUEST_BUFFER = 1 << 20


@dataclass(frozen=True)
class PlainSockets:
    """One connection, several batches in flight."""

    name: ClassVar[str] = "sockets"
    connections: ClassVar[int] = 1
    depth: int = 2

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """One thread for each connection."""
        with socket.create_server(("127.0.0.1", port)) as listener:
            ready()
            while True:
                accepted, _ = listener.accept()
                threading.Thread(target=answer, args=(accepted, rows), daemon=True).start()

    def connect(self, port: int, dim: int, batch: int) -> SocketConnection:
        """A TCP connection without Nagle's delay."""
        return SocketConnection(port, dim, batch)


def answer(connection: socket.socket, rows: StoredRows) -> None:
    """Answer requests until the client closes the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = bytearray(HEADER.size + 8 * MOST)
    incoming, all_keys = memoryview(request), np.frombuffer(request, np.int64, offset=HEADER.size)
    values = torch.empty(MOST, rows.dim)
    outgoing = values.numpy().data.cast("B")
    while receive_into(connection, incoming[: HEADER.size]):
        count, number = HEADER.unpack_from(request)
        receive_into(connection, incoming[HEADER.size : HEADER.size + 8 * count])
        rows.read_into(all_keys[:count], values[:count])
        body = outgoing[: 4 * rows.dim * count]
        send(connection, HEADER.pack(count, number), body)


def send(connection: socket.socket, header: bytes, body: memoryview) -> None:
    """Header and body in one call, and what that call left."""
    sent = connection.sendmsg((header, body))
    if sent < len(header):
        connection.sendall(header[sent:])
    connection.sendall(body[max(0, sent - len(header)) :])


def receive_into(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; False if the connection was closed before its first byte."""
    got = 0
    while got < len(buffer):
        part = connection.recv_into(buffer[got:], 0, socket.MSG_WAITALL)
        if not part:
            if got:
                raise ConnectionError(f"the connection was closed after {got} of {len(buffer)} bytes")
            return False
        got += part
    return True


class SocketConnection:
    """The client's side."""

    def __init__(self, port: int, dim: int, batch: int) -> None:
        self._socket = retry(lambda: socket.create_connection(("127.0.0.1", port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BUFFER)
        self._answer = np.empty(HEADER.size // 4 + batch * dim, np.float32)
        self._bytes = self._answer.data.cast("B")
        self._rows = self._answer[HEADER.size // 4 :].reshape(batch, dim)
        self._sent = self._received = 0

    def send(self, keys: Keys) -> None:
        """Header and keys in one call."""
        send(self._socket, HEADER.pack(len(keys), self._sent), keys.data.cast("B"))
        self._sent += 1

    def receive(self) -> Values:
        """Header and rows in one call."""
        receive_into(self._socket, self._bytes)
        if HEADER.unpack_from(self._bytes)[1] != self._received:
            raise ConnectionError("an answer does not belong to the oldest request")
        self._received += 1
        return self._rows


TRANSPORTS = (PlainSockets(),)
