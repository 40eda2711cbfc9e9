"""Connections to Redis nodes, and many requests in flight on several of them at once.

`exchange` sends on all connections and takes replies from all as they come, until everything is there or a deadline has
passed; no socket blocks. A connection whose replies did not all come is closed, never used again: what arrives later
would be taken for another request's reply.

Replies of rows are decoded by the core (core/remote/redis_replies.h), others here. The protocol is RESP2. TLS is
Python's. redis-py with hiredis was tried for this: its client takes 1.8 µs of processor time a row where this takes 0.2
(batches of 8,192 at dim 64; 4.8 and 0.5 in batches of 1,024), all under the interpreter lock; its pipelines have no
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

ROOM = 1 << 18  # bytes that a connection takes at a time; a row is smaller
Reply = Any  # bytes, int, None, list of replies, or ReplyError


class ReplyError(Exception):
    """An error that the server sent."""


@dataclass(frozen=True)
class Access:
    """How to be let in: TLS, name and password, database."""

    tls: ssl.SSLContext | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0


class Replies(Protocol):
    """Takes bytes as they come; `done` of `expected` replies are whole."""

    @property
    def done(self) -> int: ...
    @property
    def expected(self) -> int: ...
    def feed(self, buffer: Any, size: int) -> int: ...


class PlainReplies:
    """Replies as Python values, errors among them as ReplyError."""

    def __init__(self, expected: int) -> None:
        self.values: list[Reply] = []
        self.expected = expected
        self._bytes = bytearray()

    @property
    def done(self) -> int:
        return len(self.values)

    def feed(self, buffer: Any, size: int) -> int:
        """Takes all of it."""
        self._bytes += memoryview(buffer)[:size]
        at = 0
        while len(self.values) < self.expected and (parsed := parse(self._bytes, at)) is not None:
            value, at = parsed
            self.values.append(value)
        del self._bytes[:at]
        return 0


def parse(data: bytearray, at: int) -> tuple[Reply, int] | None:
    """The reply that begins there and where it ends; None: it is not all there yet."""
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
    """A command as it goes over the wire.

    >>> command("GET", "a")
    b'*2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\na\\r\\n'
    """
    out = [b"*%d\r\n" % len(parts)]
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        out.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(out)


class Connection:
    """One socket to a node, ready for commands. Raises OSError when it cannot be had in `timeout` seconds."""

    def __init__(self, host: str, port: int, access: Access, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        raw = socket.create_connection((host, port), timeout=max(timeout, 1e-3))
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket: socket.socket = raw
            if access.tls is not None:
                self.socket = access.tls.wrap_socket(raw, server_hostname=host)
            self.socket.setblocking(False)
            self.buffer = np.empty(ROOM, np.uint8)
            self.room = self.buffer.data
            self._enter(access, deadline)
        except BaseException:
            raw.close()
            raise

    def _enter(self, access: Access, deadline: float) -> None:
        greetings = []
        if access.password:
            who = (access.username,) if access.username else ()
            greetings.append(command("AUTH", *who, access.password))
        if access.db:
            greetings.append(command("SELECT", access.db))
        for reply in self.call(greetings, deadline) if greetings else ():
            if isinstance(reply, ReplyError):
                why = Login(password=access.password).redact(reply)
                raise ConnectionRefusedError(f"the server does not let us in: {why}; check user, password and db")

    def call(self, commands: Sequence[bytes], deadline: float) -> list[Reply]:
        """The replies of some commands; TimeoutError if they are not all there by the deadline."""
        replies = PlainReplies(len(commands))
        job = Job(self, list(commands), replies)
        exchange([job], deadline)
        if job.error is not None:
            raise job.error
        if not job.complete:
            raise TimeoutError("the server did not answer in time")
        return replies.values

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


@dataclass
class Job:
    """What is to be sent on one connection, and who takes the replies."""

    connection: Connection
    pieces: list[Any]
    replies: Replies
    error: OSError | None = None
    heard: bool = False  # whether a single byte came
    _out: memoryview = field(default_factory=lambda: memoryview(b""))
    _held: int = 0  # bytes of a reply that is not whole

    @property
    def complete(self) -> bool:
        """Whether every reply is there."""
        return self.replies.done == self.replies.expected

    def start(self) -> None:
        """Make one piece of the pieces."""
        self._out = memoryview(b"".join(self.pieces))

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLIN | (select.POLLOUT if len(self._out) else 0)

    def send(self) -> None:
        """As much as the socket takes."""
        try:
            while len(self._out):
                self._out = self._out[self.connection.socket.send(self._out[: 1 << 20]) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass

    def receive(self) -> None:
        """As much as there is."""
        connection = self.connection
        try:
            while not self.complete:
                got = connection.socket.recv_into(connection.room[self._held :])
                if not got:
                    raise ConnectionResetError("the server hung up")
                self.heard = True
                try:
                    self._held = self.replies.feed(connection.buffer, self._held + got)
                except RuntimeError as error:
                    raise ConnectionError(str(error)) from None
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass


def exchange(jobs: Sequence[Job], deadline: float) -> None:
    """Send and receive on all connections until all replies are there, or the deadline has passed.

    Afterwards each job is complete, has an error, or neither: then its time ran out.
    """
    poll = select.poll()
    waiting: dict[int, Job] = {}
    for job in jobs:
        job.start()
        try:
            job.send()
            poll.register(job.connection.socket, job.events)
            waiting[job.connection.socket.fileno()] = job
        except OSError as error:
            job.error = error
    while waiting:
        left = deadline - time.monotonic()
        ready = poll.poll(max(0, math.ceil(left * 1000)))
        if not ready and left <= 0:
            return
        for number, _ in ready:
            job = waiting[number]
            try:
                sending = len(job._out)
                if sending:
                    job.send()
                job.receive()
            except OSError as error:
                job.error = error
            if job.complete or job.error is not None:
                poll.unregister(number)
                del waiting[number]
            elif sending and not len(job._out):
                poll.modify(number, job.events)
        if left <= 0:
            return
