"""Rows of DRAM on their way to a GPU and back: where they are, and a batch's missing keys while they come."""

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
class Places:
    """Rows of several tables by their slots in DRAM, bounds[t] to bounds[t + 1] table t's. All int32, on the CPU."""

    stores: Sequence[HostStore]
    bounds: Sequence[int]
    slots: Tensor
    steps: Tensor
    counts: Tensor
    block: Tensor | None = None  # the three as one matrix, where they are

    def part(self, begin: int, end: int) -> Places:
        """Numbers `begin` to `end` of them: the same memory."""
        if (begin, end) == (0, self.slots.numel()):
            return self
        bounds = [min(max(bound, begin), end) - begin for bound in self.bounds]
        return Places(self.stores, bounds, *(of_all[begin:end] for of_all in (self.slots, self.steps, self.counts)))

    def apart(self, begin: int, end: int) -> Places:
        """Room for as many as `begin` to `end`, one matrix of its own; `take_part` brings back what was found."""
        pinned = self.block is not None and self.block.is_pinned()
        return HostLift(pinned).nowhere(self.stores, self.part(begin, end).bounds, end - begin)

    def take_part(self, begin: int, part: Places) -> None:
        """What was found of those from `begin` on."""
        for ours, theirs in zip(
            (self.slots, self.steps, self.counts), (part.slots, part.steps, part.counts), strict=True
        ):
            ours.numpy()[begin : begin + theirs.numel()] = theirs.numpy()

    def of_tables(self) -> list[tuple[HostStore, int, int]]:
        """Each table with where its rows begin and end, where it has any."""
        pairs = zip(self.stores, self.bounds, self.bounds[1:], strict=False)
        return [(store, begin, end) for store, begin, end in pairs if begin < end]

    @functools.cached_property
    def parts(self) -> list[tuple[Any, int, int]]:
        """As the core takes them."""
        return [(store.core, begin, end) for store, begin, end in self.of_tables()]

    def seek(self, keys: Tensor, begin: int, end: int, out: Tensor | None = None) -> int:
        """Find keys number `begin` to `end` in DRAM, with `out` their rows too; returns how many are not there."""
        there = [tensor.data_ptr() for tensor in (self.slots, self.steps, self.counts)]
        rows = (0, 0) if out is None else (out.data_ptr(), out.stride(0))
        return int(_core.seek_rows(self.parts, keys.data_ptr(), begin, end, *there, *rows))

    def copy_rows(self, begin: int, end: int, out: Tensor) -> None:
        """Whole rows of numbers `begin` to `end` into `out`, a float32 matrix."""
        _core.copy_rows(self.parts, self.slots.data_ptr(), begin, end, out.data_ptr(), out.stride(0))

    def lower(self, rows: Tensor, begin: int, end: int, clean: int) -> None:
        """Rows come back from a GPU, with their steps and counts: those with a slot, updated after step `clean`."""
        with core_errors():
            _core.lower_rows(
                self.parts,
                self.slots.data_ptr(),
                self.steps.data_ptr(),
                self.counts.data_ptr(),
                clean,
                begin,
                end,
                rows.data_ptr(),
                rows.stride(0),
            )

    def unhold(self) -> None:
        """The rows may leave DRAM again."""
        for store, begin, end in self.of_tables():
            if store.evicts:
                store.core.unhold(self.slots[begin:end])


class HostLift:
    """A batch's missing keys on their way up to a GPU: found, read from SSD or created, and held in DRAM meanwhile."""

    def __init__(self, pinned: bool = False) -> None:
        self.core: Any = None
        self.pinned = pinned

    def nowhere(self, stores: Sequence[HostStore], bounds: Sequence[int], count: int) -> Places:
        """Room for where so many rows are."""
        block = torch.empty(3, count, dtype=torch.int32, pin_memory=self.pinned)
        slots, steps, counts = block.unbind()
        return Places(stores, bounds, slots, steps, counts, block)

    def fetch(self, found: Places, keys: Tensor, seen: Tensor, step: int) -> None:
        """Where the rows of unique keys are (table by table), seen so often in the batch that update `step` is for.

        A key that admission refuses has step -1; its slot has its initial row until `commit` or `release`.
        """
        with core_errors():
            self.core = _core.Plan()
            self.core.route_unique(
                [
                    (table, keys.data_ptr() + 8 * begin, seen.data_ptr() + 4 * begin, end - begin)
                    for table, begin, end in found.parts
                ]
            )
            self.core.fetch(step)
            self.core.places(found.slots.data_ptr(), found.steps.data_ptr(), found.counts.data_ptr())
            self.core.hold()

    def commit(self) -> None:
        """The batch's update has landed: sightings of refused keys count."""
        if self.core is not None:
            self.core.commit()

    def release(self) -> None:
        """The batch came to nothing."""
        if self.core is not None:
            self.core.release()
