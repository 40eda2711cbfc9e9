"""Connections to Redis nodes, and pipelined requests on several of them at once.

`exchange` sends on all connections and receives from all as replies come, until every reply is there or a deadline has
passed. No socket blocks. A connection that lacks a reply must be closed: the late reply would be read as the reply to
the next request.

The core decodes replies with rows (core/remote/redis_replies.h), this file all others. The protocol is RESP2, TLS is
Python's. Why not redis-py with hiredis: its client takes 1.8 µs of processor time a row where this takes 0.2 (batches
of 8,192 at dim 64; 4.8 and 0.5 in batches of 1,024), all under the interpreter lock, and its pipelines have no
deadline.

Threads: a connection belongs to one thread at a time.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hotrow.credentials import Login

BUFFER_BYTES = 1 << 18  # of a connection's receive buffer; a row is smaller
Reply = Any  # bytes, int, None, list of replies, or ReplyError


class ReplyError(Exception):
    """An error that the server sent."""


@dataclass(frozen=True)
class NodeAccess:
    """How to log in to a node: TLS, user and password, database."""

    tls: ssl.SSLContext | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0


class Replies(Protocol):
    """Parses replies from bytes as they arrive; `done` of `expected` replies are complete."""

    @property
    def done(self) -> int: ...
    @property
    def expected(self) -> int: ...
    def feed(self, buffer: Any, size: int) -> int: ...


class ValueReplies:
    """Replies as Python values, errors among them as ReplyError."""

    def __init__(self, expected: int) -> None:
        self.values: list[Reply] = []
        self.expected = expected
        self._bytes = bytearray()

    @property
    def done(self) -> int:
        return len(self.values)

    def feed(self, buffer: Any, size: int) -> int:
        """Parse `size` bytes of the buffer. Returns how many it leaves there for the next call: 0."""
        self._bytes += memoryview(buffer)[:size]
        at = 0
        while len(self.values) < self.expected and (parsed := parse(self._bytes, at)) is not None:
            value, at = parsed
            self.values.append(value)
        del self._bytes[:at]
        return 0


def parse(data: bytearray, at: int) -> tuple[Reply, int] | None:
    """The reply that begins at `at` and where it ends; None if it is not complete."""
    end = data.find(b"\r\n", at)
    if end < 0:
        return None
    kind, line, after = bytes(data[at : at + 1]), bytes(data[at + 1 : end]), end + 2
    if kind == b"+":
        return line, after
    if kind == b"-":
        return ReplyError(line.decode(errors="replace")), after
    if kind not in (b":", b"$", b"*"):
        raise ConnectionError(f"not a reply of a Redis server: {bytes(data[at : at + 40])!r}")
    number = int(line)
    if kind == b":":
        return number, after
    if number < 0:
        return None, after
    if kind == b"$":
        stop = after + number
        return None if len(data) < stop + 2 else (bytes(data[after:stop]), stop + 2)
    items = []
    for _ in range(number):
        parsed = parse(data, after)
        if parsed is None:
            return None
        item, after = parsed
        items.append(item)
    return items, after


def command(*parts: bytes | str | int) -> bytes:
    """A command in RESP2.

    >>> command("GET", "a")
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n'
    """
    out = [b"*%d\r\n" % len(parts)]
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(out)


class Connection:
    """One socket to a node, logged in. Raises OSError if it is not ready in `timeout` seconds."""

    def __init__(self, host: str, port: int, access: NodeAccess, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        raw = socket.create_connection((host, port), timeout=max(timeout, 1e-3))
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket: socket.socket = raw
            if access.tls is not None:
                self.socket = access.tls.wrap_socket(raw, server_hostname=host)
            self.socket.setblocking(False)
            self.buffer = np.empty(BUFFER_BYTES, np.uint8)
            self.view = self.buffer.data
            self._log_in(access, deadline)
        except BaseException:
            raw.close()
            raise

    def _log_in(self, access: NodeAccess, deadline: float) -> None:
        commands = []
        if access.password:
            user = (access.username,) if access.username else ()
            commands.append(command("AUTH", *user, access.password))
        if access.db:
            commands.append(command("SELECT", access.db))
        for reply in self.call(commands, deadline) if commands else ():
            if isinstance(reply, ReplyError):
                why = Login(password=access.password).redact(reply)
                raise ConnectionRefusedError(f"the server refuses the login: {why}; check user, password and db")

    def call(self, commands: Sequence[bytes], deadline: float) -> list[Reply]:
        """Send commands and return their replies; TimeoutError if they are not complete by the deadline."""
        replies = ValueReplies(len(commands))
        request = PipelinedRequest(self, list(commands), replies)
        exchange([request], deadline)
        if request.error is not None:
            raise request.error
        if not request.complete:
            raise TimeoutError("the server did not answer in time")
        return replies.values

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


@dataclass
class PipelinedRequest:
    """Commands for one connection, sent in one piece, and the parser of their replies."""

    connection: Connection
    pieces: list[Any]
    replies: Replies
    error: OSError | None = None
    received_any: bool = False  # whether at least one byte has arrived
    _out: memoryview = field(default_factory=lambda: memoryview(b""))
    _incomplete: int = 0  # bytes of an incomplete reply at the start of the buffer

    @property
    def complete(self) -> bool:
        """Whether every reply has arrived."""
        return self.replies.done == self.replies.expected

    def start(self) -> None:
        """Join the commands."""
        self._out = memoryview(b"".join(self.pieces))

    @property
    def events(self) -> int:
        """The events to poll for."""
        return select.POLLIN | (select.POLLOUT if len(self._out) else 0)

    def send(self) -> None:
        """Send as much as the socket accepts."""
        try:
            while len(self._out):
                self._out = self._out[self.connection.socket.send(self._out[: 1 << 20]) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass

    def receive(self) -> None:
        """Receive as much as has arrived."""
        connection = self.connection
        try:
            while not self.complete:
                got = connection.socket.recv_into(connection.view[self._incomplete :])
                if not got:
                    raise ConnectionResetError("the server closed the connection")
                self.received_any = True
                try:
                    self._incomplete = self.replies.feed(connection.buffer, self._incomplete + got)
                except RuntimeError as error:
                    raise ConnectionError(str(error)) from None
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass


def exchange(requests: Sequence[PipelinedRequest], deadline: float) -> None:
    """Send and receive on all connections until all replies have arrived, or the deadline has passed.

    Afterwards each request is complete, has an error, or has run out of time.
    """
    poll = select.poll()
    waiting: dict[int, PipelinedRequest] = {}
    for request in requests:
        request.start()
        try:
            request.send()
            poll.register(request.connection.socket, request.events)
            waiting[request.connection.socket.fileno()] = request
        except OSError as error:
            request.error = error
    while waiting:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0, math.ceil(left * 1000)))
        if not ready and left <= 0:
            return
        for number, _ in ready:
            request = waiting[number]
            try:
                sending = len(request._out)
                if sending:
                    request.send()
                request.receive()
            except OSError as error:
                request.error = error
            if request.complete or request.error is not None:
                poll.unregister(number)
                del waiting[number]
            elif sending and not len(request._out):
                poll.modify(number, request.events)
        if left <= 0:
            return
