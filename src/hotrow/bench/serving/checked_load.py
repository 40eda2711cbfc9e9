"""A load whose answers are kept: one process that sends requests at fixed times and writes every answer to a file.

It runs as a script, `python checked_load.py SPEC.json`, and imports the standard library only. A spec is

    {"port": ..., "path": ..., "requests": FILE, "answers": FILE, "rate": requests a second, "connections": n}

Request i is due at i / rate. The connections' threads take the requests in turns; one that is late sends at once. The
process ends when its stdin ends and the last answers have come. `requests` and `answers` are files of records
(`write_records`, `read_records`): of a request (length of its JSON, body), of an answer (number of its request, status,
time when it had arrived, seconds that it took, length of its JSON, body). A request without an answer has status 0 and
the reason as its body.
"""

from __future__ import annotations

import http.client
import json
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

HEAD = struct.Struct("<IIddII")
TIMEOUT = 60.0


class Record(NamedTuple):
    """A request or an answer."""

    number: int
    status: int
    arrived: float  # time.time()
    seconds: float
    json_bytes: int
    body: bytes


def write_records(path: str, records: Iterable[Record]) -> None:
    """Write a file of records."""
    with open(path, "wb") as file:
        for record in records:
            file.write(HEAD.pack(*record[:5], len(record.body)) + record.body)


def read_records(path: str) -> Iterator[Record]:
    """What `write_records` wrote."""
    with open(path, "rb") as file:
        while head := file.read(HEAD.size):
            *fields, size = HEAD.unpack(head)
            yield Record._make([*fields, file.read(size)])


class Sender(threading.Thread):
    """One connection and its requests."""

    def __init__(self, spec: dict[str, Any], requests: list[Record], first: int, began: float, stop: threading.Event):
        super().__init__(daemon=True)
        self.spec, self.requests, self.next, self.began, self.stopped = spec, requests, first, began, stop
        self.answers: list[Record] = []
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.spec["port"], timeout=TIMEOUT)

    def run(self) -> None:
        """Send requests until the end."""
        while not self.stopped.wait(max(0.0, self.began + self.next / self.spec["rate"] - time.perf_counter())):
            number = self.next % len(self.requests)
            sent = time.perf_counter()
            try:
                status, json_bytes, body = self._ask(self.requests[number])
            except Exception as error:  # whatever went wrong, the request has no answer
                status, json_bytes, body = 0, 0, f"{type(error).__name__}: {error}".encode()
                self._connection.close()
                self._connection = self._connect()
            self.answers.append(Record(number, status, time.time(), time.perf_counter() - sent, json_bytes, body))
            self.next += self.spec["connections"]
        self._connection.close()

    def _ask(self, request: Record) -> tuple[int, int, bytes]:
        headers = {"Inference-Header-Content-Length": str(request.json_bytes)}
        self._connection.request("POST", self.spec["path"], request.body, headers)
        answer = self._connection.getresponse()
        body = answer.read()
        return answer.status, int(answer.getheader("Inference-Header-Content-Length") or 0), body


def main(path: str) -> None:
    """Run a spec."""
    with open(path) as file:
        spec = json.load(file)
    requests, stop = list(read_records(spec["requests"])), threading.Event()
    began = time.perf_counter()
    senders = [Sender(spec, requests, first, began, stop) for first in range(spec["connections"])]
    for sender in senders:
        sender.start()
    sys.stdin.read()
    stop.set()
    for sender in senders:
        sender.join(TIMEOUT + 5)
    write_records(spec["answers"], [answer for sender in senders for answer in sender.answers])


if __name__ == "__main__":
    main(sys.argv[1])
