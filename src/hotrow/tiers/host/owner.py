"""HostOwner: rows in DRAM and on SSD that processes ask for.

Each Asked has a plan of the core, with one feature for each table and asker, in the order of askers. So counts,
admission and the order of every sum are those of one process that is given the askers' batches one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hotrow.tiers.batch_values import Arrived, BatchUpdate, Moved
from hotrow.tiers.host.plan import Block, HostPlan
from hotrow.tiers.plan import ANY_PUBLICATION, Asked


class HostOwner:
    """The rows' half of a plan, in DRAM and on SSD (hotrow.tiers.plan.RowOwner)."""

    publications = ANY_PUBLICATION

    def __init__(self) -> None:
        self.late_keys: dict[int, Tensor] = {}
        self._plans: list[HostPlan] = []
        self._asked: Sequence[Asked] = []

    def route(self, asked: Sequence[Asked]) -> None:
        """Look up what is asked for."""
        self._asked = asked
        while len(self._plans) < len(asked):
            self._plans.append(HostPlan())
        for plan, one in zip(self._plans, asked, strict=True):
            plan.route_seen(one.stores, _addresses(one))

    def prefetch(self) -> Moved:
        """Bring rows up from SSD."""
        return Moved.total([plan.prefetch() for plan in self._plans])

    def stage(self) -> Moved:
        """Nothing: these rows are in DRAM."""
        return Moved()

    @property
    def late(self) -> int:
        """Rows that `prefetch` was to have brought and `fetch` had to read after all."""
        return sum(plan.late for plan in self._plans)

    def fetch(self, step: int = 0) -> None:
        """Find the rows; unseen keys get theirs."""
        for plan in self._plans:
            plan.fetch(step)

    def read(self, late: str = "wait") -> None:
        """Copy the rows, without creating or counting anything."""
        for plan in self._plans:
            plan.read(late)

    def give(self) -> Iterator[Tensor]:
        """The rows for each Asked."""
        for plan, asked in zip(self._plans, self._asked, strict=True):
            counts = [c if asked.only in (None, asker) else None for asker, c in enumerate(asked.counts)]
            dims = [store.dim for store in asked.stores]
            floats = sum(n * dim for c in counts if c is not None for n, dim in zip(c, dims, strict=True))
            rows = torch.empty(floats, dtype=torch.float32)
            plan.gather_blocks(_blocks(rows, counts, dims))
            yield rows

    def apply(self, arrived: Iterable[Arrived], update: BatchUpdate) -> None:
        """Apply sums of gradients, each Arrived as soon as it is there."""
        for plan, asked, (sums, present) in zip(self._plans, self._asked, arrived, strict=True):
            blocks = _blocks(sums, asked.counts, [store.dim for store in asked.stores])
            marks: list[int] = []
            if present is not None:
                ones = [1] * len(asked.stores)
                marks = [address for address, *_ in _blocks(present, asked.counts, ones)]
            plan.update_blocks(blocks, marks, [update.rules[n] for n in asked.numbers], update.step, update.scale)

    def release(self) -> None:
        """Let go of the rows."""
        for plan in self._plans:
            plan.release()


def _addresses(asked: Asked) -> list[list[tuple[int, int, int]]]:
    """By table, there by asker: the addresses of keys and of how often they were seen, and how many there are."""
    wanted: list[list[tuple[int, int, int]]] = [[] for _ in asked.stores]
    for keys, seen, counts in zip(asked.keys, asked.seen, asked.counts, strict=True):
        at = 0
        for table, count in enumerate(counts):
            wanted[table].append((keys.data_ptr() + 8 * at, seen.data_ptr() + 4 * at, count))
            at += count
    return wanted


def _blocks(buffer: Tensor, counts: Sequence[Sequence[int] | None], dims: Sequence[int]) -> list[Block]:
    """Blocks of a buffer that has asker after asker, there table after table; listed by table, there by asker.

    An asker without counts has no place in the buffer.
    """
    address, width = buffer.data_ptr(), buffer.element_size()
    by_asker: list[list[Block]] = []
    for of_asker in counts:
        blocks = []
        for n, dim in zip(of_asker if of_asker is not None else itertools.repeat(0), dims, strict=False):
            blocks.append((address if n else 0, n, dim, dim))
            address += n * dim * width
        by_asker.append(blocks)
    return [block for of_table in zip(*by_asker, strict=True) for block in of_table]
