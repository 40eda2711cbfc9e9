"""Load client: one process that sends requests over keep-alive connections and times the answers.

It runs as a script, `python load_client.py SPEC.json`, and imports the standard library only. It shares the cores with
the server under test, so it must be cheap: a request costs one `send`, one `recv` and a part of an `epoll_wait` (about
25 us), and requests are encoded in advance and read from a file. It works with every HTTP server, because it reads only
an answer's status and length.

A spec is `{"port": ..., "requests": FILE, "phases": [...]}`. The file holds whole HTTP requests, each after its length
(uint32). Phases run one after another, each on new connections:

    closed   {"connections": n, "seconds": s, "warm": s}                  a connection sends after its last answer
    open     {"connections": n, "seconds": s, "rate": requests a second}  requests are sent at fixed times

In an open loop, a request for which no connection is free waits in this process. Its latency counts from its sending,
so this queue is not measured. `sent` is the load that the server received; `unsent` counts the requests that still
waited at the end of the phase. Answers later than DRAIN_SECONDS after the end are `lost`. Every phase prints one line
of JSON.
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

DRAIN_SECONDS = 5.0  # how long to wait for the last answers
MAX_SENDS = 32  # requests sent before answers are read again: an unread answer would count as the server's latency


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
    """Write whole HTTP requests, each after its length."""
    with open(path, "wb") as file:
        for request in requests:
            file.write(struct.pack("<I", len(request)) + request)


class Connection:
    """A socket, and the request in flight on it."""

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
        """Read what has arrived. Returns the answer's status if it is complete, else 0."""
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
    """The Content-Length in a reply's head. Heads repeat, so results are cached."""
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
        lost = self._drain()
        return {
            "rate": len(self.good) / seconds,
            "p50": percentile(self.good, 0.50),
            "p99": percentile(self.good, 0.99),
            "worst": max(self.good, default=0.0),
            "good": len(self.good),
            "refused": len(self.refused),
            "refused_p50": percentile(self.refused, 0.50),
            "refused_p99": percentile(self.refused, 0.99),
            "failed": self.failed,
            "sent": self.sent,
            "unsent": unsent,
            "lost": lost,
            "client_seconds": time.process_time() - used,
            "seconds": time.perf_counter() - began,
        }

    def _closed(self) -> tuple[int, float]:
        """Closed loop: every connection sends again as soon as its answer has come."""
        begin = time.perf_counter()
        counted, end = begin + self.phase.get("warm", 0.0), begin + self.phase["seconds"]
        for connection in self.by_file.values():
            self._send(connection, time.perf_counter())
        clock = time.perf_counter
        while (now := clock()) < end:
            for file, _ in self.epoll.poll(end - now + 0.001):
                connection = self.by_file[file]
                status = self._advance(connection)
                if status:
                    now = clock()
                    if connection.due >= counted:
                        self._record(status, now - connection.due)
                    self._send(connection, now)
        return 0, end - counted

    def _open(self) -> tuple[int, float]:
        """Open loop: requests are due at fixed times."""
        begin, rate = time.perf_counter(), self.phase["rate"]
        end = begin + self.phase["seconds"]
        free = deque(self.by_file.values())
        due = 0  # requests sent so far
        clock = time.perf_counter
        while (now := clock()) < end:
            wanted = min(int((now - begin) * rate) + 1, due + MAX_SENDS)
            while due < wanted and free:
                self._send(free.popleft(), clock())
                due += 1
            pause = begin + due / rate - now if free else 0.01
            for file, _ in self.epoll.poll(min(max(pause, 0.0), end - now)):
                connection = self.by_file[file]
                status = self._advance(connection)
                if status:
                    self._record(status, clock() - connection.due)
                    free.append(connection)
        for connection in free:
            connection.due = 0.0
        return int(self.phase["seconds"] * rate) - due, self.phase["seconds"]

    def _drain(self) -> int:
        """Wait for the answers in flight, and count them. Returns how many did not arrive."""
        left = {c.socket.fileno() for c in self.by_file.values() if c.due}
        until = time.perf_counter() + DRAIN_SECONDS
        while left and (now := time.perf_counter()) < until:
            for file, _ in self.epoll.poll(until - now):
                connection = self.by_file[file]
                status = self._advance(connection)
                if status:
                    left.discard(file)
                    if "rate" in self.phase:
                        self._record(status, time.perf_counter() - connection.due)
        for connection in self.by_file.values():
            connection.socket.close()
        self.epoll.close()
        return len(left)

    def _send(self, connection: Connection, due: float) -> None:
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

    def _advance(self, connection: Connection) -> int:
        """Continue on a connection that is ready. Returns the status of a complete answer, else 0."""
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

    def _record(self, status: int, seconds: float) -> None:
        if status == 200:
            self.good.append(seconds)
        elif status in (429, 503):
            self.refused.append(seconds)
        else:
            self.failed[status] = self.failed.get(status, 0) + 1


def percentile(seconds: list[float], part: float) -> float:
    """A percentile; 0 if there are no values."""
    if not seconds:
        return 0.0
    rank = max(1, round(len(seconds) * (1 - part)))
    return heapq.nlargest(rank, seconds)[-1] if part > 0.5 else sorted(seconds)[len(seconds) - rank]


def main(path: str) -> None:
    """Run all phases of a spec."""
    with open(path) as file:
        spec = json.load(file)
    requests = read_requests(spec["requests"])
    for phase in spec["phases"]:
        print(json.dumps(Load(spec["port"], requests, phase).run()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
