"""HTTP as bytes through a socket: requests are sent exactly as they are given, replies are read strictly."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from fuzz import binary, http_request
from in_process import Running


class Reply(NamedTuple):
    """One reply. `headers` have names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes
    head: bytes

    def json(self) -> Any:
        """The body's JSON; of an answer with binary tensors its JSON part."""
        return json.loads(self.body[: int(self.headers.get("inference-header-content-length", len(self.body)))])

    def error(self) -> str:
        """The reply's error text, empty if there is none."""
        document = self.json() if self.body[:1] == b"{" else {}
        return str(document.get("error", ""))


class Client:
    """A connection and the bytes of it that no reply has taken yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._data = b""

    def send(self, *parts: bytes) -> None:
        """Send the parts, in a segment each."""
        for part in parts:
            self.socket.sendall(part)

    def reply(self, method: str = "POST") -> Reply | None:
        """The next reply, interim ones (1xx) too; None when the server has closed the connection before it."""
        while b"\r\n\r\n" not in self._data:
            if not self._receive():
                assert not self._data, f"the connection was closed in the middle of {self._data[:200]!r}"
                return None
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1" and len(status) == 3, first
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs), f"a header comes twice: {head!r}"
        body = b""
        if method != "HEAD" and status[0] != "1" and status not in ("204", "304"):
            body = self._exactly(int(headers["content-length"]))
        return Reply(int(status), headers, body, head)

    def roundtrip(self, data: bytes, method: str = "POST") -> Reply:
        """Send a request and read its reply."""
        self.socket.sendall(data)
        reply = self.reply(method)
        assert reply is not None, "the connection was closed without a reply"
        return reply

    def replies(self) -> list[Reply]:
        """All replies until the server closes the connection."""
        found = []
        while (reply := self.reply()) is not None:
            found.append(reply)
        return found

    def has_more(self) -> bool:
        """Whether something of a next reply has come; waits for it, or for the end."""
        return bool(self._data) or self._receive()

    def ended(self) -> bool:
        """Whether the server closes the connection without another byte."""
        return not self.has_more()

    def _receive(self) -> bool:
        try:
            part = self.socket.recv(1 << 18)
        except ConnectionResetError:
            return False
        self._data += part
        return bool(part)

    def _exactly(self, size: int) -> bytes:
        parts, missing = [self._data[:size]], size - len(self._data)
        self._data = self._data[size:]
        while missing > 0:
            part = self.socket.recv(min(missing, 1 << 18))
            assert part, f"the connection was closed {missing} bytes before the end of a reply of {size}"
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def connect(running: Running, protocol: str = "http") -> socket.socket:
    """A connection to one of the front end's ports."""
    host, _, port = running.address(protocol).rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def client(running: Running, protocol: str = "http") -> Client:
    """The same, to read replies from one after another."""
    return Client(connect(running, protocol))


def read_reply(connection: socket.socket) -> tuple[int, Any]:
    """One reply of a connection on which no other follows: its status, and its JSON with its head as `head`."""
    reply = Client(connection).reply()
    assert reply is not None, "the connection was closed without a reply"
    is_json = reply.body[:1] == b"{" and "inference-header-content-length" not in reply.headers
    return reply.status, {"head": reply.head, **(json.loads(reply.body) if is_json else {"list": reply.body})}


def exchange(running: Running, data: bytes, protocol: str = "http") -> tuple[int, Any]:
    """Send bytes on a connection of their own and read the reply."""
    with connect(running, protocol) as connection:
        connection.sendall(data)
        return read_reply(connection)


def until_released(running: Running) -> None:
    """Wait until no request is in flight and none of its bytes are held, a moment after the client got its
    answer."""
    service, http = running.frontend.service, running.frontend._http
    until = time.monotonic() + 10
    while (service.load_shedder.in_flight or http.held) and time.monotonic() < until:
        time.sleep(0.005)
    assert service.load_shedder.in_flight == 0 and http.held == 0


def good(**changes: Any) -> dict[str, Any]:
    """Tensors that the small model answers, with changes; None leaves a tensor out."""
    tensors = {
        "user": np.array([3]),
        "item": np.arange(4),
        "history": np.arange(6),
        "history.offsets": np.array([0, 2, 2, 5, 6]),
        "dense": np.zeros((4, 2), np.float32),
    }
    return {name: array for name, array in {**tensors, **changes}.items() if array is not None}


def infer_status(running: Running, **changes: Any) -> tuple[int, str]:
    """The status and the error of a request with such tensors."""
    status, reply = exchange(running, http_request(*binary(good(**changes))))
    return status, reply.get("error", "")


def chunked(body: bytes, sizes: Iterable[int], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """The body in chunks of these sizes, the rest in one, and the end."""
    parts, at = [], 0
    for size in (*sizes, len(body)):
        piece = body[at : at + size]
        at += len(piece)
        if piece:
            parts += [b"%x" % len(piece), extension, b"\r\n", piece, b"\r\n"]
    return b"".join([*parts, b"0", extension, b"\r\n", trailers, b"\r\n"])


def pieces(data: bytes, draw: random.Random, most: int = 12) -> list[bytes]:
    """The data cut at random places; half of the cuts lie in its first 600 bytes, where the headers are."""
    last = max(1, len(data) - 1)
    cuts = {draw.randint(1, min(last, 600) if draw.random() < 0.5 else last) for _ in range(draw.randrange(most))}
    edges = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def send_slowly(connection: socket.socket, data: bytes, draw: random.Random, most: int = 12) -> None:
    """Send the data in random pieces, with a pause behind some of them."""
    for piece in pieces(data, draw, most):
        connection.sendall(piece)
        if draw.random() < 0.5:
            time.sleep(draw.random() * 0.002)
