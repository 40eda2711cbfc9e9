"""ShardedPlan: one batch whose rows another object owns: other processes, or a remote store.

    route    the client finds the batch's unique keys; the transport sends each key to its owner
    fetch    the owner finds the rows that all processes requested
    gather   the owner's rows go back to their requesters; the client pools them
    update   the client sums gradients by unique key in batch order; the owner adds the sums of several processes in
             rank order and applies the rule once

The parts are values: the clients (host or device), the owner (host, HBM or remote) and the transport (local or ranks).
Counts, admission and the order of every addition are those of one process that gets the requesters' batches one after
another and first sums each requester's gradients. So bits depend on the requesters alone, never on timing.

A process sends each unique key once a batch. Of a replicated table every process owns all rows: its keys and gradients
go to all processes, its rows are not sent.

If a gradient of any process is not finite, all processes raise and no row has changed: they compare before they touch
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow import _core
from hotrow.tiers.batch_values import (
    BatchUpdate,
    GradientSums,
    KeyRequest,
    ReceivedGradients,
    ReceivedRows,
    RoutedBatch,
    TransferStats,
)
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import Feature, RequestedRows, RowClient, RowOwner, TableInputs
from hotrow.tiers.sharded.rows_ahead import RowsAhead
from hotrow.tiers.sharded.transport import ExchangeRequests, Transport

NO_ROWS = RequestedRows([], [], [], [], [])


@dataclass
class ClientTables:
    """The tables of a batch that one client handles: tables that are sharded over the owners, or replicated tables."""

    client: RowClient
    replicated: bool = False
    inputs: list[tuple[HostStore, Sequence[Feature]]] = field(default_factory=list)
    table_numbers: list[int] = field(default_factory=list)  # of its tables, in the collection
    feature_numbers: list[int] = field(default_factory=list)  # of its features, in the batch
    sent_counts: list[list[int]] = field(default_factory=list)  # keys that this process requests, by owner and table
    received: RequestedRows = NO_ROWS  # what all processes request from this one

    def clear(self) -> None:
        """Forget the batch's tables."""
        self.inputs, self.table_numbers, self.feature_numbers = [], [], []

    def route(self, size: int, transport: Transport, exchange: ExchangeRequests, ahead: bool) -> list[int]:
        """Exchange requests with all processes. Returns every requester's number of examples."""
        if self.replicated:
            one = self.client.request_keys(self.inputs, torch.zeros_like(transport.owner_of), 1, ahead)
            world = transport.world  # every process gets all keys
            request = KeyRequest(one.counts * world, _repeated(one.keys, world), _repeated(one.occurrences, world))
        else:
            request = self.client.request_keys(self.inputs, transport.owner_of, transport.world, ahead)
        received = exchange(request, size, self.replicated)
        self.sent_counts = request.counts
        self.received = RequestedRows(
            [store for store, _ in self.inputs],
            self.table_numbers,
            received.counts,
            received.keys,
            received.occurrences,
            reply_only_to=transport.rank if self.replicated else None,
        )
        return received.batch_sizes

    def pool(self, rows: Tensor, outputs: Sequence[Tensor], transport: Transport) -> None:
        """Send the owner's rows to their requesters, and pool the rows that arrive."""
        if not self.replicated:
            rows = transport.rows(rows, self._floats(self.received.counts), self._floats(self.sent_counts))
        self.pool_requested(rows, outputs)

    def pool_requested(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool the rows that this process requested, owner by owner."""
        self.client.pool(rows, [outputs[number] for number in self.feature_numbers])

    def requested_floats(self) -> int:
        """How many floats the rows are that this process requests."""
        return sum(self._floats(self.sent_counts))

    def masked_floats(self, masks: Sequence[Tensor]) -> list[int]:
        """How many floats the rows are whose bit is set, by owner."""
        return [
            _core.masked_floats(mask.data_ptr(), blocks) for mask, blocks in zip(masks, self._blocks(), strict=True)
        ]

    def place_rows(self, received: ReceivedRows, out: Tensor) -> None:
        """Put rows into their places in `out`, which has all requested rows. An empty mask has no rows."""
        at = out.data_ptr()
        for mask, rows, blocks in zip(received.masks, received.rows, self._blocks(), strict=True):
            if mask.numel():
                _core.expand_rows(mask.data_ptr(), rows.data_ptr(), blocks, at)
            at += 4 * sum(n * dim for n, dim in blocks)

    def _blocks(self) -> list[list[tuple[int, int]]]:
        """Keys and dim by owner and table."""
        dims = [store.dim for store, _ in self.inputs]
        return [list(zip(counts, dims, strict=True)) for counts in self.sent_counts]

    def sum_gradients(self, update: BatchUpdate, checked: Sequence[Tensor], wire: torch.dtype) -> GradientSums:
        """This process's gradients by unique key, in the type in which they are sent."""
        floats = sum(self._floats(self.sent_counts[:1] if self.replicated else self.sent_counts))
        gradients = [update.gradients[number] for number in self.feature_numbers]
        return self.client.sum_gradients(gradients, checked, floats).rounded(wire)

    def send_gradients(self, sums: GradientSums, all_present: bool, transport: Transport) -> ReceivedGradients:
        """Send sums to the owners; returns the sums that this process received."""
        times = transport.world if self.replicated else 1
        destinations, sources = self._floats(self.sent_counts), self._floats(self.received.counts)
        arrived = transport.gradients(_repeated(sums.sums, times), destinations, sources)
        if all_present:
            return ReceivedGradients(arrived, None)
        destinations, sources = ([sum(counts) for counts in by] for by in (self.sent_counts, self.received.counts))
        return ReceivedGradients(arrived, transport.presence(_repeated(sums.present, times), destinations, sources))

    def _floats(self, counts: Sequence[Sequence[int]]) -> list[int]:
        """How many floats the rows are, by process. `counts` has the number of rows by process and table."""
        dims = [store.dim for store, _ in self.inputs]
        return [sum(n * dim for n, dim in zip(of_process, dims, strict=True)) for of_process in counts]


class ShardedPlan:
    """The plan protocol (hotrow.tiers.plan.Plan) over clients, a RowOwner and a Transport.

    Each of `parts` is a client with its tables. `part_of` has the number of the part of each table in the collection.
    With `ahead` owners send rows before the batch's turn (rows_ahead.py).
    """

    def __init__(
        self,
        parts: Sequence[ClientTables],
        part_of: Sequence[int],
        owner: RowOwner,
        transport: Transport,
        ahead: RowsAhead | None = None,
    ) -> None:
        self.parts, self.part_of, self.owner, self.transport = list(parts), list(part_of), owner, transport
        self.ahead = ahead
        self._inputs: TableInputs = []

    def route(self, inputs: TableInputs, ahead: bool = False, examples: int | None = None) -> RoutedBatch:
        """Send each key to its owner; receive the keys that this process owns."""
        with self.transport.routing(ahead) as exchange:
            return self.route_with(exchange, inputs, ahead, examples)

    def route_with(
        self, exchange: ExchangeRequests, inputs: TableInputs, ahead: bool, examples: int | None = None
    ) -> RoutedBatch:
        """As `route`, with an exchange that the transport has begun."""
        self._inputs = inputs
        size = inputs[0][1][0][0].size if examples is None else examples
        sizes: list[int] = []
        features = 0
        for part in self.parts:
            part.clear()
        for number, (store, table_features) in enumerate(inputs):
            part = self.parts[self.part_of[number]]
            part.inputs.append((store, table_features))
            part.table_numbers.append(number)
            part.feature_numbers += range(features, features + len(table_features))
            features += len(table_features)
        for part in self.parts:
            sizes = part.route(size, self.transport, exchange, ahead)
        self.owner.route([part.received for part in self.parts])
        if ahead and self.ahead is not None:
            self.ahead.route(len(self.parts))
        return self.transport.routed(size, sizes)

    def prefetch(self) -> TransferStats:
        """Load requested rows ahead of the batch's turn."""
        return self.owner.prefetch()

    def stage(self) -> TransferStats:
        """Load requested rows into HBM, if the owner has any; send rows ahead of the turn."""
        stats = self.owner.stage()
        return stats if self.ahead is None else self.ahead.stage(self.parts)

    @property
    def prefetch_misses(self) -> int:
        """How many rows the owner had to load on the batch's turn."""
        return self.owner.prefetch_misses

    def fetch(self, step: int = 0) -> None:
        """Find the requested rows; create those of unseen keys."""
        self._join_route_streams()
        self.owner.fetch(step)

    def read(self, late: str = "wait") -> None:
        """Copy the requested rows; create and count nothing."""
        self.transport.check_policy(late)
        self._join_route_streams()
        self.owner.read(late)

    def _join_route_streams(self) -> None:
        for part in self.parts:
            part.client.join_route_stream()

    @property
    def publications(self) -> tuple[int, int]:
        """The owner's."""
        return self.owner.publications

    @property
    def late_ids(self) -> int:
        """How many ids the late policy answered."""
        late = self.owner.late_keys.items()
        return sum(int(np.isin(ids.values.numpy(), keys).sum()) for n, keys in late for ids, _ in self._inputs[n][1])

    def late_by_example(self, examples: int) -> Tensor:
        """The same for each example, int32."""
        return _count_late(self._inputs, self.owner.late_keys, examples)

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Send rows to their requesters, and pool those that arrive."""
        if self.ahead is not None and self.ahead.staged:
            for part, rows in zip(self.parts, self.ahead.gather(self.parts), strict=True):
                part.pool_requested(rows, outputs)
            return
        for part, rows in zip(self.parts, self.owner.gather_rows(), strict=True):
            part.pool(rows, outputs, self.transport)

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """False: each part pools into its features' outputs."""
        return False

    def update(self, update: BatchUpdate) -> None:
        """Send sums of gradients to the owners, which apply them. A part's sums are sent when the owner's iteration
        reaches them."""
        sums, checked = [], update.checked
        for part in self.parts:
            sums.append(part.sum_gradients(update, checked, self.transport.wire))
            checked = []
        all_present, scale = self.transport.agree(sums, update.scale)
        sends = zip(self.parts, sums, all_present, strict=True)
        self.owner.apply_gradients(
            (part.send_gradients(one, every, self.transport) for part, one, every in sends),
            replace(update, scale=scale),
        )
        if self.ahead is not None:
            self.ahead.updated(update.step)

    def release(self) -> None:
        """Unpin the rows."""
        self.owner.release()
        if self.ahead is not None:
            self.ahead.release()
        self._inputs = []


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat(times)


def _count_late(inputs: TableInputs, late_keys: Mapping[int, Any], examples: int) -> Tensor:
    """How many ids of each example are among the late keys of their table, int32."""
    counts: Tensor | None = None
    for number, keys in late_keys.items():
        for ids, _ in inputs[number][1]:
            mask = torch.from_numpy(np.isin(ids.values.numpy(), keys)).to(torch.int64)
            if ids.offsets is not None:
                sums = torch.cat([mask.new_zeros(1), mask.cumsum(0)])
                mask = sums[ids.offsets[1:]] - sums[ids.offsets[:-1]]
            counts = mask if counts is None else counts + mask
    return torch.zeros(examples, dtype=torch.int32) if counts is None else counts.to(torch.int32)
