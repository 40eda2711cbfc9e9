"""The values that a plan takes and returns (tiers/plan.py). They are the same in every tier and with ranks.

    route      returns a RoutedBatch
    prefetch   returns TransferStats, as stage does
    update     takes a BatchUpdate

Where one process has the batch and another owns its rows, the two exchange a KeyRequest before the rows and
GradientSums after backward. PackedRows are some of the rows: the owner sends them ahead of the batch's turn, or on it.
All values are immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.optim import Optimizer


@dataclass(frozen=True)
class RoutedBatch:
    """This process's part of a step, known once its batch is routed.

    `example_fraction` is the batch's examples divided by the step's `examples`. `examples` is None where the batch is
    the whole step. `finished` says that no process has a batch left. `batch_sizes` has the number of examples of every
    process that requests rows.
    """

    example_fraction: float = 1.0
    examples: int | None = None
    finished: bool = False
    batch_sizes: tuple[int, ...] = (1,)


ALL_EXAMPLES = RoutedBatch()  # one process has the whole step


@dataclass(frozen=True)
class TransferStats:
    """What `prefetch` or `stage` loaded into its tier. `out_of_slots`: it had to leave rows out for want of space."""

    rows: int = 0
    bytes: int = 0
    out_of_slots: bool = False

    @staticmethod
    def total(parts: Iterable[TransferStats]) -> TransferStats:
        """The sum of several."""
        parts = list(parts)
        return TransferStats(
            sum(p.rows for p in parts), sum(p.bytes for p in parts), any(p.out_of_slots for p in parts)
        )


@dataclass(frozen=True)
class TableRule:
    """One table's optimizer in one update: its coefficients and its clipping (0 is none)."""

    coefficients: tuple[float, ...]
    clip_value: float
    clip_norm: float

    @staticmethod
    def of(optimizer: Optimizer, step: int) -> TableRule:
        """The rule of `optimizer` at update number `step`, counted from 1."""
        return TableRule(optimizer.coefficients(step), optimizer.clip_value or 0.0, optimizer.clip_norm or 0.0)


@dataclass(frozen=True)
class BatchUpdate:
    """One update of a batch's rows.

    `gradients` has a matrix or None for each feature; the update multiplies them by `scale`. If a matrix in `checked`
    is not finite, no row changes. `rules` has one rule for each table. `step` counts from 1.
    """

    gradients: Sequence[Tensor | None]
    checked: Sequence[Tensor]
    rules: Sequence[TableRule]
    step: int
    scale: float


@dataclass(frozen=True)
class GradientSums:
    """One process's gradients, summed by unique key.

    `sums` are laid out as the rows. `present` has a byte for each key, 0 where it has no gradient; `all_present` says
    that none is 0. `finite` says that every number is finite. `overflowed`: the sums were finite as float32 and are
    not in the type in which they are sent.
    """

    sums: Tensor
    present: Tensor
    finite: bool
    all_present: bool
    overflowed: bool = False

    def rounded(self, wire: torch.dtype) -> GradientSums:
        """The sums in the type in which they are sent."""
        if wire == torch.float32 or not self.finite:
            return self
        sums = self.sums.to(wire)
        finite = bool(torch.isfinite(sums).all())
        overflowed = not finite and bool(torch.isfinite(self.sums).all())
        return replace(self, sums=sums, finite=finite, overflowed=overflowed)


class KeyRequest(NamedTuple):
    """A batch's unique keys on the CPU: owner by owner, and for each owner table by table."""

    counts: list[list[int]]  # keys by owner and table
    keys: Tensor  # int64
    occurrences: Tensor  # int32: how often the batch has each key


class ReceivedGradients(NamedTuple):
    """The sums of gradients that an owner received: requester by requester, and for each table by table."""

    sums: Tensor
    present: Tensor | None  # a byte for each key, 0 where it has no gradient; None: every key has one


class PackedRows(NamedTuple):
    """Some rows of a request, and which: for each requester a bit for each of its keys, rounded up to a byte."""

    masks: Tensor  # uint8
    rows: Tensor  # float32
    mask_bytes: list[int]  # by requester
    floats: list[int]  # by requester


class ReceivedRows(NamedTuple):
    """Some rows of each owner, and which; one element for each owner."""

    masks: list[Tensor]
    rows: list[Tensor]


def bytes_of_mask(keys: int) -> int:
    """Bytes of a mask of so many keys."""
    return -(-keys // 8)
