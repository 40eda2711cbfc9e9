"""Rows in DRAM that a GPU loads and writes back.

RowLocations says where rows are in DRAM. HostRowFetch finds the rows that HBM lacks for one batch (reads them from SSD,
or creates them) and pins them in DRAM while the GPU has them. tiers/hbm calls both, from its staging, training and
write-back threads; one object belongs to one thread at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow import _core
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import HostStore


@dataclass
class RowLocations:
    """Where rows of several tables are in DRAM: slot, last step and count of each row, int32 on the CPU.

    Rows bounds[t] to before bounds[t + 1] are of table t. A row without a slot has slot -1.
    """

    stores: Sequence[HostStore]
    bounds: Sequence[int]
    slots: Tensor
    steps: Tensor
    counts: Tensor
    block: Tensor | None = None  # the matrix of which the three are rows, if there is one

    def slice(self, begin: int, end: int) -> RowLocations:
        """Rows `begin` to before `end`, in the same memory."""
        if (begin, end) == (0, self.slots.numel()):
            return self
        bounds = [min(max(bound, begin), end) - begin for bound in self.bounds]
        return RowLocations(
            self.stores, bounds, *(of_all[begin:end] for of_all in (self.slots, self.steps, self.counts))
        )

    def separate(self, begin: int, end: int) -> RowLocations:
        """New, unfilled locations for rows `begin` to before `end`, in memory of their own. `copy_slice_from` copies
        them back."""
        pinned = self.block is not None and self.block.is_pinned()
        return HostRowFetch(pinned).allocate(self.stores, self.slice(begin, end).bounds, end - begin)

    def copy_slice_from(self, begin: int, part: RowLocations) -> None:
        """Copy the locations in `part` to those from `begin` on."""
        for ours, theirs in zip(
            (self.slots, self.steps, self.counts), (part.slots, part.steps, part.counts), strict=True
        ):
            ours.numpy()[begin : begin + theirs.numel()] = theirs.numpy()

    def by_table(self) -> list[tuple[HostStore, int, int]]:
        """Each table that has rows here, with where they begin and end."""
        pairs = zip(self.stores, self.bounds, self.bounds[1:], strict=False)
        return [(store, begin, end) for store, begin, end in pairs if begin < end]

    @functools.cached_property
    def core_ranges(self) -> list[tuple[Any, int, int]]:
        """`by_table`, with the core's tables."""
        return [(store.core, begin, end) for store, begin, end in self.by_table()]

    def lookup(self, keys: Tensor, begin: int, end: int, out: Tensor | None = None) -> int:
        """Locate keys `begin` to before `end` in DRAM, and copy their rows into `out` if given. Returns how many are
        not in DRAM."""
        addresses = [tensor.data_ptr() for tensor in (self.slots, self.steps, self.counts)]
        rows = (0, 0) if out is None else (out.data_ptr(), out.stride(0))
        return int(_core.lookup_rows(self.core_ranges, keys.data_ptr(), begin, end, *addresses, *rows))

    def gather_rows(self, begin: int, end: int, out: Tensor) -> None:
        """Copy whole rows `begin` to before `end` into `out`, a float32 matrix."""
        _core.gather_rows(self.core_ranges, self.slots.data_ptr(), begin, end, out.data_ptr(), out.stride(0))

    def write_back(self, rows: Tensor, begin: int, end: int, clean: int) -> None:
        """Store rows that a GPU wrote back, with their steps and counts. Skips rows without a slot, and rows that
        no update after step `clean` has changed."""
        with core_errors():
            _core.write_back_rows(
                self.core_ranges,
                self.slots.data_ptr(),
                self.steps.data_ptr(),
                self.counts.data_ptr(),
                clean,
                begin,
                end,
                rows.data_ptr(),
                rows.stride(0),
            )

    def unpin(self) -> None:
        """DRAM may evict the rows again."""
        for store, begin, end in self.by_table():
            if store.evicts:
                store.core.unpin_from_device(self.slots[begin:end])


class HostRowFetch:
    """The rows of one batch's keys that HBM lacks: found in DRAM, read from SSD or created, and pinned in DRAM."""

    def __init__(self, pinned: bool = False) -> None:
        self.core: Any = None
        self.pinned = pinned

    def allocate(self, stores: Sequence[HostStore], bounds: Sequence[int], count: int) -> RowLocations:
        """Locations for `count` rows, not filled in."""
        block = torch.empty(3, count, dtype=torch.int32, pin_memory=self.pinned)
        slots, steps, counts = block.unbind()
        return RowLocations(stores, bounds, slots, steps, counts, block)

    def fetch(self, locations: RowLocations, keys: Tensor, occurrences: Tensor, step: int) -> None:
        """Find, pin and locate the rows of unique keys, table by table, for update `step`. `occurrences` says how often
        the batch has each key.

        A key that admission refuses has step -1; its slot has its initial row until `commit` or `release`.
        """
        with core_errors():
            self.core = _core.Plan()
            self.core.route_unique(
                [
                    (table, [(keys.data_ptr() + 8 * begin, occurrences.data_ptr() + 4 * begin, end - begin)])
                    for table, begin, end in locations.core_ranges
                ]
            )
            self.core.fetch(step)
            self.core.slot_metadata(locations.slots.data_ptr(), locations.steps.data_ptr(), locations.counts.data_ptr())
            self.core.pin_for_device()

    def commit(self) -> None:
        """The batch's update is done: count the occurrences of refused keys."""
        if self.core is not None:
            self.core.commit_device_update()

    def release(self) -> None:
        """The batch is dropped."""
        if self.core is not None:
            self.core.release()
