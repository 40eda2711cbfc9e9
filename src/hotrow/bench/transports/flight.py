"""Arrow Flight: a long-lived DoExchange, a DoGet for each batch, or a DoPut whose answers are its metadata.

Keys travel as an int64 column, rows as a column of FixedSizeList<float>[dim]. Both are views of numpy memory: Flight
hands the columns' buffers to gRPC without a copy, and without compression. A received message is one buffer, whose
column numpy reads in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from hotrow.bench.transports.transport import Keys, StoredRows, Values

KEYS = pa.schema([("keys", pa.int64())])
PLACE = flight.FlightDescriptor.for_path("rows")
CHANNEL = (("grpc.http2.lookahead_bytes", 8 << 20), ("grpc.http2.max_frame_size", (1 << 24) - 1))


def rows_schema(dim: int) -> pa.Schema:
    """One column with a row in each element."""
    return pa.schema([("rows", pa.list_(pa.float32(), dim))])


def keys_batch(keys: Keys) -> pa.RecordBatch:
    """The keys as a column, not copied."""
    column = pa.Array.from_buffers(pa.int64(), len(keys), [None, pa.py_buffer(keys)])
    return pa.RecordBatch.from_arrays([column], schema=KEYS)


def rows_batch(values: Values, schema: pa.Schema) -> pa.RecordBatch:
    """The rows as a column, not copied."""
    floats = pa.Array.from_buffers(pa.float32(), values.size, [None, pa.py_buffer(values)])
    column = pa.FixedSizeListArray.from_arrays(floats, values.shape[1])
    return pa.RecordBatch.from_arrays([column], schema=schema)


def rows_of(batch: pa.RecordBatch, dim: int) -> Values:
    """A view of the column."""
    rows: Values = batch.column(0).values.to_numpy().reshape(-1, dim)
    return rows


class RowFlights(flight.FlightServerBase):  # type: ignore[misc]
    """The server: one thread of gRPC for each stream."""

    def __init__(self, rows: StoredRows, port: int) -> None:
        super().__init__(f"grpc://127.0.0.1:{port}")
        self._rows, self._schema = rows, rows_schema(rows.dim)

    def _read(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return rows_batch(self._rows.read(batch.column(0).to_numpy()), self._schema)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """A batch of rows for each batch of keys."""
        writer.begin(self._schema)
        for chunk in reader:
            writer.write_batch(self._read(chunk.data))

    def do_get(self, context: Any, ticket: Any) -> Any:
        """The rows of the keys in the ticket."""
        values = self._rows.read(np.frombuffer(ticket.ticket, np.int64))
        return flight.GeneratorStream(self._schema, iter([rows_batch(values, self._schema)]))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """The rows of each batch of keys, as metadata."""
        for chunk in reader:
            writer.write(pa.py_buffer(self._rows.read(chunk.data.column(0).to_numpy())))


@dataclass(frozen=True)
class Flight:
    """`connect_by` makes a connection of a client. Each connection has a client, so that a TCP connection, too."""

    name: str
    connect_by: Callable[[flight.FlightClient, int], Any]
    connections: int = 2
    depth: int = 1

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """All three methods, on one port."""
        server = RowFlights(rows, port)
        ready()
        server.serve()

    def connect(self, port: int, dim: int, batch: int) -> Any:
        """A client and its stream."""
        options = [*CHANNEL, ("grpc.use_local_subchannel_pool", 1)]
        return self.connect_by(flight.FlightClient(f"grpc://127.0.0.1:{port}", generic_options=options), dim)


class Exchange:
    """One DoExchange for all batches."""

    def __init__(self, client: flight.FlightClient, dim: int) -> None:
        self._client, self._dim = client, dim
        self._writer, self._reader = client.do_exchange(PLACE)
        self._writer.begin(KEYS)

    def send(self, keys: Keys) -> None:
        """One record batch."""
        self._writer.write_batch(keys_batch(keys))

    def receive(self) -> Values:
        """One record batch, used where Arrow received it."""
        return rows_of(self._reader.read_chunk().data, self._dim)


class Get:
    """One DoGet for each batch; its ticket is the keys."""

    def __init__(self, client: flight.FlightClient, dim: int) -> None:
        self._client, self._dim = client, dim
        self._in_flight: deque[Any] = deque()

    def send(self, keys: Keys) -> None:
        """Start a DoGet."""
        self._in_flight.append(self._client.do_get(flight.Ticket(keys.tobytes())))

    def receive(self) -> Values:
        """The only batch of the oldest DoGet."""
        reader = self._in_flight.popleft()
        rows = rows_of(reader.read_chunk().data, self._dim)
        _drain(reader)
        return rows


def _drain(reader: Iterator[Any]) -> None:
    for _ in reader:
        raise ConnectionError("a DoGet answered with a second batch")


class Put:
    """One DoPut for all batches; the rows are its metadata."""

    def __init__(self, client: flight.FlightClient, dim: int) -> None:
        self._client, self._dim = client, dim
        self._writer, self._reader = client.do_put(PLACE, KEYS)

    def send(self, keys: Keys) -> None:
        """One record batch."""
        self._writer.write_batch(keys_batch(keys))

    def receive(self) -> Values:
        """One message of metadata."""
        return np.frombuffer(self._reader.read(), np.float32).reshape(-1, self._dim)


TRANSPORTS = (Flight("flight exchange", Exchange), Flight("flight get", Get), Flight("flight put", Put, connections=4))
