"""Link: a TCP connection's way to a server, which a test holds up, cuts or limits. It needs no root."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Any


class Link:
    """Listens on a port of its own and passes bytes to `port`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.accepted = 0
        self.most: int | None = None  # connections that are let through
        self.flows = threading.Event()
        self.flows.set()
        self.answers = threading.Event()  # cleared: requests pass and answers do not
        self.answers.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def open(self) -> int:
        """How many of its clients have not closed their connection."""
        return sum(not _is_closed(one) for one in self._sockets[::2])

    def cut(self) -> None:
        """Break all connections."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.flows.set()
        self.answers.set()
        self.cut()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                if self.most is not None and self.accepted > self.most:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self.port), 10)
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                for pair in ((client, server, [self.flows]), (server, client, [self.flows, self.answers])):
                    threading.Thread(target=_carry, args=pair, daemon=True).start()


def _carry(source: Any, target: Any, gates: list[threading.Event]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(1 << 16):
            for gate in gates:
                gate.wait()
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _is_closed(one: socket.socket) -> bool:
    try:
        poll = select.poll()
        poll.register(one, select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True
