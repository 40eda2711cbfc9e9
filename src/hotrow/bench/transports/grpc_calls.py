"""gRPC: raw bytes without protobuf, as unary calls or on one bidirectional stream; a threaded or an asyncio server.

gRPC's Python takes a message as a bytes object and copies it into a slice of its own; a received message is copied into
a bytes object. So an answer is copied twice before the kernel copies it, and once after. Rows are read straight into
the bytes object that is sent, which saves a third copy.
"""

from __future__ import annotations

import asyncio
import queue
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import torch

from hotrow.bench.transports.transport import Keys, StoredRows, Values

CALL, STREAM = "/hotrow.Rows/Read", "/hotrow.Rows/ReadStream"
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    ("grpc.http2.lookahead_bytes", 8 << 20),  # the window: an answer does not wait for the client's updates of it
    ("grpc.http2.bdp_probe", 0),
)


@dataclass(frozen=True)
class Grpc:
    """`streaming`: one stream for each connection, else a call for each batch. `threads`: 0 is the asyncio server."""

    name: str
    streaming: bool
    threads: int
    connections: int = 1
    depth: int = 4

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """Both methods, on one port."""
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        address = f"127.0.0.1:{port}"
        if not self.threads:
            asyncio.run(_serve_asyncio(rows, address, ready))
            return
        server = grpc.server(futures.ThreadPoolExecutor(self.threads), options=OPTIONS)
        server.add_generic_rpc_handlers((_handlers(_Calls(rows)),))
        server.add_insecure_port(address)
        server.start()
        ready()
        server.wait_for_termination()

    def connect(self, port: int, dim: int, batch: int) -> UnaryConnection | StreamConnection:
        """A channel of its own."""
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", (*OPTIONS, ("grpc.use_local_subchannel_pool", 1)))
        return StreamConnection(channel, dim) if self.streaming else UnaryConnection(channel, dim)


def _answer(rows: StoredRows, request: bytes) -> bytes:
    """The rows of the keys, read into a new bytes object before anybody else sees it."""
    keys = np.frombuffer(request, np.int64)
    answer = bytes(4 * len(keys) * rows.dim)
    rows.read_into(keys, torch.frombuffer(answer, dtype=torch.float32).view(len(keys), rows.dim))
    return answer


class _Calls:
    """The methods of the threaded server."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows

    def read(self, request: bytes, context: Any) -> bytes:
        return _answer(self._rows, request)

    def read_stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for request in requests:
            yield _answer(self._rows, request)


class _AsyncCalls:
    """The methods of the asyncio server."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows

    async def read(self, request: bytes, context: Any) -> bytes:
        return _answer(self._rows, request)

    async def read_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield _answer(self._rows, request)


def _handlers(calls: _Calls | _AsyncCalls) -> Any:
    return grpc.method_handlers_generic_handler(
        "hotrow.Rows",
        {
            "Read": grpc.unary_unary_rpc_method_handler(calls.read),
            "ReadStream": grpc.stream_stream_rpc_method_handler(calls.read_stream),
        },
    )


async def _serve_asyncio(rows: StoredRows, address: str, ready: Callable[[], None]) -> None:
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_handlers(_AsyncCalls(rows)),))
    server.add_insecure_port(address)
    await server.start()
    ready()
    await server.wait_for_termination()


class UnaryConnection:
    """A call for each batch."""

    def __init__(self, channel: grpc.Channel, dim: int) -> None:
        self._call = channel.unary_unary(CALL)
        self._dim = dim
        self._in_flight: deque[Any] = deque()

    def send(self, keys: Keys) -> None:
        """Start a call."""
        self._in_flight.append(self._call.future(keys.tobytes(), wait_for_ready=True))

    def receive(self) -> Values:
        """The result of the oldest call."""
        return np.frombuffer(self._in_flight.popleft().result(), np.float32).reshape(-1, self._dim)


class StreamConnection:
    """One stream for all batches."""

    def __init__(self, channel: grpc.Channel, dim: int) -> None:
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers = channel.stream_stream(STREAM)(iter(self._requests.get, None), wait_for_ready=True)
        self._dim = dim

    def send(self, keys: Keys) -> None:
        """Append to the stream; a thread of gRPC sends it."""
        self._requests.put(keys.tobytes())

    def receive(self) -> Values:
        """The next message of the stream."""
        return np.frombuffer(next(self._answers), np.float32).reshape(-1, self._dim)


TRANSPORTS = (
    Grpc("grpc unary", streaming=False, threads=4),
    Grpc("grpc stream", streaming=True, threads=4),
    Grpc("grpc aio unary", streaming=False, threads=0),
    Grpc("grpc aio stream", streaming=True, threads=0),
)
