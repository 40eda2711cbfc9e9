"""ZeroMQ: a ROUTER socket at the server, a DEALER at the client, messages that are not copied in user space.

One I/O thread on each side. The server's loop answers in the order of arrival. Not a dependency of HotRow: measured if
pyzmq is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import zmq

from hotrow.bench.transports.transport import Keys, StoredRows, Values


@dataclass(frozen=True)
class ZeroMQ:
    """One connection, several batches in flight."""

    name: ClassVar[str] = "zeromq"
    connections: ClassVar[int] = 1
    depth: int = 2

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """One loop over all clients."""
        router = zmq.Context(1).socket(zmq.ROUTER)
        router.bind(f"tcp://127.0.0.1:{port}")
        ready()
        while True:
            client, keys = router.recv_multipart(copy=False)
            values = rows.read(np.frombuffer(keys, np.int64))
            router.send_multipart((client, values), copy=False)

    def connect(self, port: int, dim: int, batch: int) -> ZeroMQConnection:
        """A DEALER socket."""
        return ZeroMQConnection(port, dim)


class ZeroMQConnection:
    """The client's side."""

    def __init__(self, port: int, dim: int) -> None:
        self._socket = zmq.Context.instance(1).socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._dim = dim

    def send(self, keys: Keys) -> None:
        """One frame."""
        self._socket.send(keys, copy=False)

    def receive(self) -> Values:
        """One frame, used where ZeroMQ received it."""
        return np.frombuffer(self._socket.recv(copy=False), np.float32).reshape(-1, self._dim)


TRANSPORTS = (ZeroMQ(),)
