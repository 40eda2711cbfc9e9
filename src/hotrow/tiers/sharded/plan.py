"""ShardedPlan: one batch over rows that other objects own: those of other processes, or of a remote store.

    route    a client finds the batch's unique keys; the transport takes each key to its owner
    fetch    the owner finds the rows that all processes ask it for
    gather   the owner gives each process its rows; the client pools what came
    update   the client sums gradients by unique key, in batch order; the owner adds the sums of several processes in
             their order and applies the rule once

What varies is a value: the clients (host or device), the owner (host, HBM or remote) and the transport (none, or
ranks). So counts, admission and the order of every sum are those of one process that is given the askers' batches one
after another, with each asker's share of a sum added up first. Bits depend on the askers alone, never on timing.

A key travels once for each process and batch, however often it is in it. A replicated table is owned by every process:
its keys and gradients go to all, its rows travel nowhere.

If any process has a gradient that is not finite, all raise and no row of any has changed: they compare before they
touch a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.tiers.batch_values import Arrived, BatchUpdate, Moved, Request, Routed, Summed
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import Asked, Feature, Jobs, RowClient, RowOwner
from hotrow.tiers.sharded.transport import Deliver, Transport


@dataclass
class Part:
    """Tables of a batch that one client handles: tables that are spread over owners, or tables that every process
    owns."""

    client: RowClient
    replicated: bool = False
    jobs: list[tuple[HostStore, Sequence[Feature]]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of its tables, in the collection
    features: list[int] = field(default_factory=list)  # of its features, in the batch
    asks: list[list[int]] = field(default_factory=list)  # by owner and table: how many keys this process asks for
    asked: Asked = field(default_factory=lambda: Asked([], [], [], [], []))  # what others ask this process for

    def clear(self) -> None:
        """Forget the batch's tables."""
        self.jobs, self.numbers, self.features = [], [], []

    def route(self, size: int, transport: Transport, deliver: Deliver, ahead: bool) -> list[int]:
        """Ask the owners for the batch's keys. Returns every asker's number of examples."""
        if self.replicated:
            one = self.client.ask(self.jobs, torch.zeros_like(transport.owner_of), 1, ahead)
            world = transport.world  # the keys go to all
            request = Request(one.counts * world, _repeated(one.keys, world), _repeated(one.seen, world))
        else:
            request = self.client.ask(self.jobs, transport.owner_of, transport.world, ahead)
        came = deliver(request, size, self.replicated)
        self.asks = request.counts
        only = transport.rank if self.replicated else None
        self.asked = Asked([s for s, _ in self.jobs], self.numbers, came.counts, came.keys, came.seen, only)
        return came.sizes

    def pool(self, rows: Tensor, outputs: Sequence[Tensor], transport: Transport) -> None:
        """Send the owner's rows to those that asked, and pool the rows that came."""
        if not self.replicated:
            rows = transport.rows(rows, self._floats(self.asked.counts), self._floats(self.asks))
        self.client.pool(rows, [outputs[number] for number in self.features])

    def sum(self, update: BatchUpdate, checked: Sequence[Tensor], wire: torch.dtype) -> Summed:
        """This process's gradients by unique key, as they travel."""
        floats = sum(self._floats(self.asks[:1] if self.replicated else self.asks))
        gradients = [update.gradients[number] for number in self.features]
        return self.client.sum(gradients, checked, floats).rounded(wire)

    def send(self, summed: Summed, whole: bool, transport: Transport) -> Arrived:
        """Sums to the owners; the sums that came."""
        times = transport.world if self.replicated else 1
        give, take = self._floats(self.asks), self._floats(self.asked.counts)
        sums = transport.gradients(_repeated(summed.sums, times), give, take)
        if whole:
            return Arrived(sums, None)
        give, take = ([sum(counts) for counts in of_all] for of_all in (self.asks, self.asked.counts))
        return Arrived(sums, transport.marks(_repeated(summed.present, times), give, take))

    def _floats(self, counts: Sequence[Sequence[int]]) -> list[int]:
        """Floats of so many rows of each table, by process."""
        dims = [store.dim for store, _ in self.jobs]
        return [sum(n * dim for n, dim in zip(of_one, dims, strict=True)) for of_one in counts]


class ShardedPlan:
    """One batch's way through rows that a RowOwner has (hotrow.tiers.plan.Plan).

    `part_of` has the number of the part of each table in the collection.
    """

    def __init__(self, parts: Sequence[Part], part_of: Sequence[int], owner: RowOwner, transport: Transport) -> None:
        self.parts, self.part_of, self.owner, self.transport = list(parts), list(part_of), owner, transport
        self._jobs: Jobs = []

    def route(self, jobs: Jobs, ahead: bool = False) -> Routed:
        """Send each key to its owner; receive the keys that this process owns."""
        with self.transport.routing(ahead) as deliver:
            return self.route_with(deliver, jobs, ahead)

    def route_with(self, deliver: Deliver, jobs: Jobs, ahead: bool) -> Routed:
        """As `route`, where the transport is already there to deliver."""
        self._jobs = jobs
        size = jobs[0][1][0][0].size
        sizes: list[int] = []
        features = 0
        for part in self.parts:
            part.clear()
        for number, (store, of_table) in enumerate(jobs):
            part = self.parts[self.part_of[number]]
            part.jobs.append((store, of_table))
            part.numbers.append(number)
            part.features += range(features, features + len(of_table))
            features += len(of_table)
        for part in self.parts:
            sizes = part.route(size, self.transport, deliver, ahead)
        self.owner.route([part.asked for part in self.parts])
        return self.transport.routed(size, sizes)

    def prefetch(self) -> Moved:
        """The rows that are asked for come nearer."""
        return self.owner.prefetch()

    def stage(self) -> Moved:
        """The rows that are asked for come up to HBM, if the owner has any."""
        return self.owner.stage()

    @property
    def late(self) -> int:
        """Rows that the owner was to have brought ahead and had to bring at the batch's turn."""
        return self.owner.late

    def fetch(self, step: int = 0) -> None:
        """Find the rows that are asked for; unseen keys get theirs."""
        self._take_over()
        self.owner.fetch(step)

    def read(self, late: str = "wait") -> None:
        """Read the rows that are asked for, without creating or counting anything."""
        self.transport.check_policy(late)
        self._take_over()
        self.owner.read(late)

    def _take_over(self) -> None:
        for part in self.parts:
            part.client.take_over()

    @property
    def publications(self) -> tuple[int, int]:
        """The owner's."""
        return self.owner.publications

    @property
    def late_ids(self) -> int:
        """How many ids a policy answered."""
        return int(self.late_by_example(0).sum()) if self.owner.late_keys else 0

    def late_by_example(self, examples: int) -> Tensor:
        """The same for each example, int32."""
        return _count_late(self._jobs, self.owner.late_keys, examples)

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Rows to those that asked; then pool the rows that came."""
        for part, rows in zip(self.parts, self.owner.give(), strict=True):
            part.pool(rows, outputs, self.transport)

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """Not done: each part pools into its features' outputs."""
        return False

    def update(self, update: BatchUpdate) -> None:
        """Sums of gradients to the owners, which apply them. Each part's sums travel when the owner takes them."""
        summed, checked = [], update.checked
        for part in self.parts:
            summed.append(part.sum(update, checked, self.transport.wire))
            checked = []
        whole = self.transport.agree(summed)
        sends = zip(self.parts, summed, whole, strict=True)
        self.owner.apply((part.send(one, all_have, self.transport) for part, one, all_have in sends), update)

    def release(self) -> None:
        """Let go of the rows."""
        self.owner.release()
        self._jobs = []


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat(times)


def _count_late(jobs: Jobs, late_keys: Mapping[int, Any], examples: int) -> Tensor:
    """How many ids of each example are among the late keys of their table, int32."""
    counts: Tensor | None = None
    for number, keys in late_keys.items():
        for ids, _ in jobs[number][1]:
            mask = torch.from_numpy(np.isin(ids.values.numpy(), keys)).to(torch.int64)
            if ids.offsets is not None:
                sums = torch.cat([mask.new_zeros(1), mask.cumsum(0)])
                mask = sums[ids.offsets[1:]] - sums[ids.offsets[:-1]]
            counts = mask if counts is None else counts + mask
    return torch.zeros(examples, dtype=torch.int32) if counts is None else counts.to(torch.int32)
