"""RowServerTables: the tables of a collection whose rows are on row servers, without a cache.

A plan over them is a ShardedPlan (tiers/sharded/plan.py) with two parts of this file:

    RowServerTransport   says which range of row servers owns each shard, so that keys are sorted by range
    RowServerOwner       prefetch: reads all rows from the row servers, by a deadline; read: waits for nothing

The rows arrive in the order of the keys, so nothing is sorted or copied between the network and the pooling.

`ReadTerms` say what a batch reads: the publication, and until when it waits. The engine sets them on the batch's plan
(`set_terms`); without them a batch reads the publication in service and waits READ seconds.

Threads: any number of plans at once, each on one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.errors import LateError, OptionError
from hotrow.tiers.batch_values import (
    ALL_EXAMPLES,
    BatchUpdate,
    KeyRequest,
    ReceivedGradients,
    RoutedBatch,
    TransferStats,
)
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import ANY_PUBLICATION, RequestedRows
from hotrow.tiers.rows.client import PooledFeature, RowServerClient
from hotrow.tiers.rows.row_servers import RowServers
from hotrow.tiers.rows.topology import Topology
from hotrow.tiers.sharded.transport import ExchangeRequests, ReceivedRequests

READ = 1.0  # seconds that a batch without terms waits
ONLY_READ = "rows of row servers are only read: train with dram= and ssd=, and publish to a bus that they follow"
NO_ROWS = torch.empty(0)


class ReadTerms(NamedTuple):
    """What a batch reads: the publication, and the deadline (time.monotonic())."""

    publication: int
    until: float


class RemoteRows:
    """One table's entry in a collection (TableRows.remote): nothing is kept here, so nothing changes."""

    def cold(self, keys: Tensor) -> Tensor:
        """No key is loaded before its batch: the batch's lane reads them all at once."""
        return torch.zeros(keys.numel(), dtype=torch.bool)

    def apply(self, number: int, keys: Any, values: Any, deleted: Any = None) -> int:
        """Do nothing: the row servers follow the bus themselves."""
        return 0


class RowServerTables:
    """The tables of a collection over row servers."""

    def __init__(self, servers: RowServers, tables: Sequence[Any]) -> None:
        self.servers = servers
        self.rows = [RemoteRows() for _ in tables]
        self.publication = 0
        self._lock = threading.Lock()

    def begin(self, number: int) -> None:
        """This collection serves publication `number`."""
        self.publication = number

    def set_terms(self, plan: Any, terms: ReadTerms) -> None:
        """Set what a batch reads, between its `route` and its `prefetch`. The plan is one of these tables."""
        plan.owner.terms = terms

    def cold(self, parts: Sequence[tuple[HostStore, Tensor]]) -> int:
        """0: no request waits for its rows before its batch."""
        return 0

    def prefetch(self, parts: Sequence[tuple[HostStore, Tensor]], until_complete: bool = False) -> int:
        """Do nothing: there is no memory to load rows into."""
        return 0

    def write_if_local(self, number: int, previous: int, changes: Mapping[str, Any]) -> None:
        """Do nothing: the row servers follow the bus themselves."""

    def figures(self) -> dict[str, Any]:
        """For metrics."""
        return self.servers.figures()

    def close(self) -> None:
        """Close the connections."""
        self.servers.close()


class RowServerTransport:
    """Sorts a batch's keys by the ranges of row servers (tiers.sharded.transport.Transport). It sends nothing itself.

    One belongs to each plan: its topology is that of the batch.
    """

    rank, wire = 0, torch.float32

    def __init__(self, servers: RowServers) -> None:
        self.servers = servers
        self.topology: Topology = servers.topology

    @property
    def world(self) -> int:
        """The number of ranges."""
        return len(self.topology.servers)

    @property
    def owner_of(self) -> Tensor:
        """The range of each shard."""
        return self.topology.owner_of

    def routing(self, ahead: bool) -> AbstractContextManager[ExchangeRequests]:
        """Take the topology of now for this batch."""
        self.topology = self.servers.topology
        return nullcontext(_to_row_servers)

    def routed(self, size: int, sizes: Sequence[int]) -> RoutedBatch:
        """The batch is the whole step."""
        return ALL_EXAMPLES

    def check_policy(self, late: str) -> None:
        """Do nothing: every policy is supported."""

    def rows(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """The tensor itself: the owner has read it from the servers."""
        return send

    def gradients(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Raise: rows of row servers are only read."""
        raise OptionError(ONLY_READ)

    presence = gradients

    def agree(self, sums: Sequence[Any], scale: float) -> tuple[list[bool], float]:
        """Raise: rows of row servers are only read."""
        raise OptionError(ONLY_READ)


def _to_row_servers(request: KeyRequest, size: int, replicated: bool) -> ReceivedRequests:
    return ReceivedRequests([size], request.counts, [request.keys], [request.occurrences])


class RowServerOwner:
    """Rows of unique keys on row servers (hotrow.tiers.plan.RowOwner)."""

    prefetch_misses = 0

    def __init__(self, tables: RowServerTables, transport: RowServerTransport, client: RowServerClient) -> None:
        self.tables, self.transport, self.client = tables, transport, client
        self.publications = ANY_PUBLICATION
        self.release()

    def release(self) -> None:
        """Forget the batch."""
        self.terms: ReadTerms | None = None
        self.late_keys: dict[int, Any] = {}
        self._request: RequestedRows | None = None
        self._rows, self._read = NO_ROWS, False
        self._late: list[int] = []
        self._why = ""

    def route(self, requests: Sequence[RequestedRows]) -> None:
        """Take the keys: range by range, and table by table."""
        terms = self.terms
        self.release()
        self.terms = terms
        (self._request,) = requests

    def prefetch(self) -> TransferStats:
        """Read all rows, by the deadline."""
        request = self._request
        assert request is not None
        publication, until = self.terms or ReadTerms(self.tables.publication, time.monotonic() + READ)
        (keys,) = request.keys
        dims = [store.dim for store in request.stores]
        floats = sum([n * dim for counts in request.counts for n, dim in zip(counts, dims, strict=True)])
        self._rows = torch.empty(floats)
        result = self.tables.servers.lookup(
            self.transport.topology,
            request.table_numbers,
            request.counts,
            keys,
            publication,
            max(0.0, until - time.monotonic()),
            self._rows,
            pooled=self.client.pooled,
        )
        self._read = True
        self._late = result.late
        self._why = ", ".join(sorted({_WHY.get(error, error) for error in result.errors}))
        self.publications = publication, publication
        return TransferStats(keys.numel(), result.bytes)

    def stage(self) -> TransferStats:
        """Do nothing: there is no tier above."""
        return TransferStats()

    def fetch(self, step: int = 0) -> None:
        """Raise: rows of row servers are only read."""
        raise OptionError(ONLY_READ)

    def read(self, late: str = "wait") -> None:
        """Answer the rows of late ranges by the policy. With "wait" they raise LateError."""
        request = self._request
        assert request is not None
        if not self._read:
            self.prefetch()
        if self._late and late == "wait":
            missing = sum([sum(request.counts[number]) for number in self._late])
            raise LateError(
                f"{missing} rows did not come from the row servers in time ({self._why}); send the request again, or "
                "use the policy initial or default"
            )
        for number, keys, out, store in self._parts() if self._late else ():
            if late == "initial":
                out.copy_(store.read(keys)[0])  # the store here is empty
            else:
                out.copy_(store.default_row.expand_as(out))
            self._note_late(number, keys)
        for feature in self.client.pooled if self._late else ():
            self._pool_by_policy(feature, late)

    def _note_late(self, table: int, keys: Tensor) -> None:
        before = self.late_keys.get(table)
        self.late_keys[table] = keys.numpy() if before is None else np.concatenate([before, keys.numpy()])

    def _pool_by_policy(self, feature: PooledFeature, late: str) -> None:
        """The vectors of a feature whose server did not answer."""
        ids, store = feature.ids, feature.store
        assert ids.offsets is not None
        keys = ids.values
        rows = store.read(keys)[0] if late == "initial" else store.default_row.expand(keys.numel(), store.dim)
        vectors = torch.zeros(ids.size, store.dim)
        lengths = ids.lengths()
        vectors.index_add_(0, torch.repeat_interleave(torch.arange(ids.size), lengths), rows)
        if feature.pooling == "mean":
            vectors /= lengths.clamp(min=1).unsqueeze(1)
        feature.vectors.copy_(vectors)
        self._note_late(feature.table, keys)

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor, HostStore]]:
        """The tables' parts of late ranges: table number, keys, rows, store."""
        request = self._request
        assert request is not None
        (keys,) = request.keys
        at = begin = 0
        for number, counts in enumerate(request.counts):
            for store, table, count in zip(request.stores, request.table_numbers, counts, strict=True):
                floats = count * store.dim
                if number in self._late and count:
                    rows = self._rows[begin : begin + floats].view(count, store.dim)
                    yield table, keys[at : at + count], rows, store
                at, begin = at + count, begin + floats

    def gather_rows(self) -> Iterator[Tensor]:
        """The rows."""
        yield self._rows

    def apply_gradients(self, received: Iterable[ReceivedGradients], update: BatchUpdate) -> None:
        """Raise: rows of row servers are only read."""
        raise OptionError(ONLY_READ)


_WHY = {
    "": "no server answered",
    "behind": "the servers have not applied the publication yet",
    "too new": "this server is too far behind the row servers",
    "closing": "the servers shut down",
    "failed": "the servers cannot read their rows",
}
