"""The load of `hotrow bench serve`: one process that asks an HTTP server over kept connections and times the answers.

Run as a script, `python load_client.py SPEC.json`, so that it imports the standard library alone. It shares the cores
with the server under test, so a request costs it one `send`, one `recv` and its part of an `epoll_wait` (about 25 us);
requests are encoded before and read from a file. One client serves every kind of server: what it reads of an answer is
its status and its length.

A spec is `{"port": ..., "requests": FILE, "phases": [...]}`; the file holds whole HTTP requests, each behind its length
(uint32). Phases follow each other on connections of their own, without a pause:

    closed   {"connections": n, "seconds": s, "warm": s}                each connection asks again when it was answered
    open     {"connections": n, "seconds": s, "rate": requests a second}  asks at fixed times, answered or not

In an open loop a request that finds all connections busy waits for one here. Its latency counts from its sending, so
that what is measured is the server and not this queue: look at `sent` to see how much was really offered, and at
`unsent` for those that were still waiting at the phase's end. Answers that come more than a few
seconds after the end are `lost`. Every phase gives a line of JSON.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

PATIENCE = 5.0  # seconds for the last answers
TOGETHER = 32  # requests that are sent before a look at the answers: their waiting here would count as the server's


def read_requests(path: str) -> list[bytes]:
    """What `write_requests` wrote."""
    with open(path, "rb") as file:
        data = file.read()
    requests, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        requests.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return requests


def write_requests(path: str, requests: list[bytes]) -> None:
    """Whole HTTP requests, each behind its length."""
    with open(path, "wb") as file:
        for request in requests:
            file.write(struct.pack("<I", len(request)) + request)


class Connection:
    """A socket, and the request that is under way on it."""

    __slots__ = ("due", "reply", "socket", "total", "unsent")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.due = 0.0
        self.reply = b""
        self.total = 0  # bytes of the reply, once its head is known
        self.unsent: memoryview | None = None

    def receive(self) -> int:
        """Take what came: the answer's status if it is whole, else 0."""
        part = self.socket.recv(262_144)
        if not part:
            raise ConnectionError("the server closed a connection")
        self.reply = part if not self.reply else self.reply + part
        if not self.total:
            end = self.reply.find(b"\r\n\r\n")
            if end < 0:
                return 0
            self.total = end + 4 + length_of(self.reply[:end])
        if len(self.reply) < self.total:
            return 0
        status = int(self.reply[9:12])
        self.reply, self.total = b"", 0
        return status


_lengths: dict[bytes, int] = {}


def length_of(head: bytes) -> int:
    """The Content-Length in a reply's head. Heads repeat, so they are kept."""
    found = _lengths.get(head)
    if found is None:
        lines = head.lower().split(b"\r\n")
        sizes = [int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")]
        if not sizes:
            raise ConnectionError(f"an answer without Content-Length: {head[:200]!r}")
        if len(_lengths) > 1000:
            _lengths.clear()
        found = _lengths[head] = sizes[0]
    return found


class Load:
    """One phase."""

    def __init__(self, port: int, requests: list[bytes], phase: dict[str, Any]) -> None:
        self.requests, self.phase = requests, phase
        self.epoll = select.epoll()
        self.by_file: dict[int, Connection] = {}
        for _ in range(phase["connections"]):
            connection = Connection(port)
            self.by_file[connection.socket.fileno()] = connection
            self.epoll.register(connection.socket.fileno(), select.EPOLLIN)
        self.next = 0
        self.good: list[float] = []
        self.refused: list[float] = []
        self.failed: dict[int, int] = {}
        self.sent = 0

    def run(self) -> dict[str, Any]:
        """The phase's figures."""
        work = self._open if "rate" in self.phase else self._closed
        began = time.perf_counter()
        used = time.process_time()
        unsent, seconds = work()
        lost = self._end()
        return {
            "rate": len(self.good) / seconds,
            "p50": part_of(self.good, 0.50),
            "p99": part_of(self.good, 0.99),
            "worst": max(self.good, default=0.0),
            "good": len(self.good),
            "refused": len(self.refused),
            "refused_p50": part_of(self.refused, 0.50),
            "refused_p99": part_of(self.refused, 0.99),
            "failed": self.failed,
            "sent": self.sent,
            "unsent": unsent,
            "lost": lost,
            "client_seconds": time.process_time() - used,
            "seconds": time.perf_counter() - began,
        }

    def _closed(self) -> tuple[int, float]:
        """Every connection asks again at once."""
        begin = time.perf_counter()
        counted, end = begin + self.phase.get("warm", 0.0), begin + self.phase["seconds"]
        for connection in self.by_file.values():
            self._ask(connection, time.perf_counter())
        clock = time.perf_counter
        while (now := clock()) < end:
            for file, _ in self.epoll.poll(end - now + 0.001):
                connection = self.by_file[file]
                status = self._step(connection)
                if status:
                    now = clock()
                    if connection.due >= counted:
                        self._note(status, now - connection.due)
                    self._ask(connection, now)
        return 0, end - counted

    def _open(self) -> tuple[int, float]:
        """Requests are due at fixed times."""
        begin, rate = time.perf_counter(), self.phase["rate"]
        end = begin + self.phase["seconds"]
        free = deque(self.by_file.values())
        due = 0  # how many have been
        clock = time.perf_counter
        while (now := clock()) < end:
            wanted = min(int((now - begin) * rate) + 1, due + TOGETHER)
            while due < wanted and free:
                self._ask(free.popleft(), clock())
                due += 1
            pause = begin + due / rate - now if free else 0.01
            for file, _ in self.epoll.poll(min(max(pause, 0.0), end - now)):
                connection = self.by_file[file]
                status = self._step(connection)
                if status:
                    self._note(status, clock() - connection.due)
                    free.append(connection)
        for connection in free:
            connection.due = 0.0
        return int(self.phase["seconds"] * rate) - due, self.phase["seconds"]

    def _end(self) -> int:
        """Wait for the answers that are still under way, and count them; returns how many did not come."""
        left = {c.socket.fileno() for c in self.by_file.values() if c.due}
        until = time.perf_counter() + PATIENCE
        while left and (now := time.perf_counter()) < until:
            for file, _ in self.epoll.poll(until - now):
                connection = self.by_file[file]
                status = self._step(connection)
                if status:
                    left.discard(file)
                    if "rate" in self.phase:
                        self._note(status, time.perf_counter() - connection.due)
        for connection in self.by_file.values():
            connection.socket.close()
        self.epoll.close()
        return len(left)

    def _ask(self, connection: Connection, due: float) -> None:
        data = self.requests[self.next]
        self.next = self.next + 1 if self.next + 1 < len(self.requests) else 0
        connection.due = due
        self.sent += 1
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            connection.unsent = memoryview(data)[sent:]
            self.epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _step(self, connection: Connection) -> int:
        """Go on with a connection that is ready; the status of a whole answer, else 0."""
        if connection.unsent is not None:
            try:
                sent = connection.socket.send(connection.unsent)
            except BlockingIOError:
                sent = 0
            connection.unsent = connection.unsent[sent:] or None
            if connection.unsent is None:
                self.epoll.modify(connection.socket.fileno(), select.EPOLLIN)
        try:
            return connection.receive()
        except BlockingIOError:
            return 0

    def _note(self, status: int, seconds: float) -> None:
        if status == 200:
            self.good.append(seconds)
        elif status in (429, 503):
            self.refused.append(seconds)
        else:
            self.failed[status] = self.failed.get(status, 0) + 1


def part_of(seconds: list[float], part: float) -> float:
    """A percentile; 0 without any."""
    if not seconds:
        return 0.0
    rank = max(1, round(len(seconds) * (1 - part)))
    return heapq.nlargest(rank, seconds)[-1] if part > 0.5 else sorted(seconds)[len(seconds) - rank]


def main(path: str) -> None:
    """The process."""
    with open(path) as file:
        spec = json.load(file)
    requests = read_requests(spec["requests"])
    for phase in spec["phases"]:
        print(json.dumps(Load(spec["port"], requests, phase).run()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
