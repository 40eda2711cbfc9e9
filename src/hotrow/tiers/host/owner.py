"""HostOwner: rows in DRAM and on SSD that other processes request.

Each RequestedRows has a plan of the core, with one feature for each table and requester, in the order of requesters.
So counts, admission and the order of every addition are those of one process that gets the requesters' batches one
after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow.tiers.batch_values import BatchUpdate, PackedRows, ReceivedGradients, TransferStats, bytes_of_mask
from hotrow.tiers.host.plan import Block, HostPlan, KeyArrays
from hotrow.tiers.plan import ANY_PUBLICATION, RequestedRows


class HostOwner:
    """Rows of unique keys in DRAM and on SSD (hotrow.tiers.plan.RowOwner)."""

    publications = ANY_PUBLICATION

    def __init__(self) -> None:
        self.late_keys: dict[int, Tensor] = {}
        self._plans: list[HostPlan] = []
        self._requests: Sequence[RequestedRows] = []

    def route(self, requests: Sequence[RequestedRows]) -> None:
        """Look up the requested keys."""
        self._requests = requests
        while len(self._plans) < len(requests):
            self._plans.append(HostPlan())
        for plan, request in zip(self._plans, requests, strict=True):
            plan.route_unique(request.stores, _addresses(request))

    def prefetch(self) -> TransferStats:
        """Load rows from SSD."""
        return TransferStats.total([plan.prefetch() for plan in self._plans])

    def stage(self) -> TransferStats:
        """Do nothing: these rows are used in DRAM."""
        return TransferStats()

    @property
    def prefetch_misses(self) -> int:
        """How many rows `fetch` had to read from SSD because `prefetch` had not."""
        return sum(plan.prefetch_misses for plan in self._plans)

    def fetch(self, step: int = 0) -> None:
        """Find and pin the rows; create those of unseen keys."""
        for plan in self._plans:
            plan.fetch(step)

    def read(self, late: str = "wait") -> None:
        """Copy the rows; create and count nothing."""
        for plan in self._plans:
            plan.read(late)

    def gather_rows(self) -> Iterator[Tensor]:
        """The rows of each request."""
        for plan, request in zip(self._plans, self._requests, strict=True):
            counts = [
                of_requester if request.reply_only_to in (None, requester) else None
                for requester, of_requester in enumerate(request.counts)
            ]
            dims = [store.dim for store in request.stores]
            floats = sum(n * dim for c in counts if c is not None for n, dim in zip(c, dims, strict=True))
            rows = torch.empty(floats, dtype=torch.float32)
            plan.gather_blocks(_blocks(rows, counts, dims))
            yield rows

    def note_in_flight(self, keys: Sequence[Any], number: int, done: int) -> None:
        """Note the requested keys under the batch's number."""
        for plan, of_part in zip(self._plans, keys, strict=True):
            plan.note_in_flight(of_part, number, done)

    def copy_ahead(self, done: int, step: int) -> Iterator[PackedRows]:
        """For each request the rows in DRAM that no batch after `done` has. Beside the training thread."""
        for plan, request in zip(self._plans, self._requests, strict=True):
            yield _packed(request, partial(plan.copy_ahead, done, step))

    def copy_changed(self) -> Iterator[PackedRows]:
        """For each request the rows that were not copied ahead, or have changed since."""
        for plan, request in zip(self._plans, self._requests, strict=True):
            yield _packed(request, plan.copy_changed)

    def apply_gradients(self, received: Iterable[ReceivedGradients], update: BatchUpdate) -> None:
        """Apply sums of gradients, those of one request as soon as they have arrived."""
        for plan, request, (sums, present) in zip(self._plans, self._requests, received, strict=True):
            blocks = _blocks(sums, request.counts, [store.dim for store in request.stores])
            presence: list[int] = []
            if present is not None:
                ones = [1] * len(request.stores)
                presence = [address for address, *_ in _blocks(present, request.counts, ones)]
            rules = [update.rules[number] for number in request.table_numbers]
            plan.update_blocks(blocks, presence, rules, update.step, update.scale)

    def release(self) -> None:
        """Unpin the rows."""
        for plan in self._plans:
            plan.release()


def _packed(request: RequestedRows, copy: Callable[[Tensor, Tensor], list[int]]) -> PackedRows:
    """The rows of a request that `copy` writes into a buffer for all, and their masks."""
    dims = [store.dim for store in request.stores]
    mask_bytes = [bytes_of_mask(sum(counts)) for counts in request.counts]
    rows = torch.empty(
        sum(n * dim for counts in request.counts for n, dim in zip(counts, dims, strict=True)), dtype=torch.float32
    )
    masks = torch.empty(sum(mask_bytes), dtype=torch.uint8)
    floats = copy(rows, masks)
    return PackedRows(masks, rows[: sum(floats)], mask_bytes, floats)


def _addresses(request: RequestedRows) -> list[list[KeyArrays]]:
    """The arrays of a request, by table, and for each table by requester."""
    arrays: list[list[KeyArrays]] = [[] for _ in request.stores]
    for keys, occurrences, counts in zip(request.keys, request.occurrences, request.counts, strict=True):
        at = 0
        for table, count in enumerate(counts):
            arrays[table].append((keys.data_ptr() + 8 * at, occurrences.data_ptr() + 4 * at, count))
            at += count
    return arrays


def _blocks(buffer: Tensor, counts: Sequence[Sequence[int] | None], dims: Sequence[int]) -> list[Block]:
    """Blocks of a buffer that is laid out by requester and then by table; listed by table and then by requester.

    A requester without counts has no part of the buffer.
    """
    address, width = buffer.data_ptr(), buffer.element_size()
    by_requester: list[list[Block]] = []
    for of_requester in counts:
        blocks = []
        for n, dim in zip(of_requester if of_requester is not None else itertools.repeat(0), dims, strict=False):
            blocks.append((address if n else 0, n, dim, dim))
            address += n * dim * width
        by_requester.append(blocks)
    return [block for of_table in zip(*by_requester, strict=True) for block in of_table]
