"""Plain values that a batch's plan takes and returns. They are the same for every tier and over ranks.

`route` returns Routed, the early stages return Moved, and `update` takes a BatchUpdate. Between a process that asks for
rows and one that owns them travel a Request and, after backward, Summed gradients. tiers/plan.py has the verbs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.optim import Optimizer


@dataclass(frozen=True)
class Routed:
    """What is known of a batch once it is routed.

    `share` is the part of the step's `examples` that this batch has; where `examples` is None, it has all of them.
    `over` says that no process has a batch left. `sizes` has the number of examples of every process that asks.
    """

    share: float = 1.0
    examples: int | None = None
    over: bool = False
    sizes: tuple[int, ...] = (1,)


ALL_EXAMPLES = Routed()  # one process has the whole step


@dataclass(frozen=True)
class Moved:
    """What an early stage of a batch moved up a tier, and whether it was short of room for more."""

    rows: int = 0
    bytes: int = 0
    short: bool = False

    @staticmethod
    def total(parts: Iterable[Moved]) -> Moved:
        """The sum of several."""
        parts = list(parts)
        return Moved(sum(p.rows for p in parts), sum(p.bytes for p in parts), any(p.short for p in parts))


@dataclass(frozen=True)
class TableRule:
    """What one table's optimizer does in one update: its coefficients and its clipping."""

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

    `gradients` has a matrix or None for each feature, and they are multiplied by `scale`. If a matrix in `checked` is
    not finite, no row changes. `rules` has one rule for each table. `step` counts from 1.
    """

    gradients: Sequence[Tensor | None]
    checked: Sequence[Tensor]
    rules: Sequence[TableRule]
    step: int
    scale: float


@dataclass(frozen=True)
class Summed:
    """Gradients summed by unique key: the sums, which keys had one, whether all were finite, and whether all had one.

    `overflowed` says that the sums were finite before they were rounded for the wire, and are not now.
    """

    sums: Tensor
    present: Tensor
    finite: bool
    whole: bool
    overflowed: bool = False

    def rounded(self, wire: torch.dtype) -> Summed:
        """The sums in the type in which they travel."""
        if wire == torch.float32 or not self.finite:
            return self
        sums = self.sums.to(wire)
        finite = bool(torch.isfinite(sums).all())
        overflowed = not finite and bool(torch.isfinite(self.sums).all())
        return replace(self, sums=sums, finite=finite, overflowed=overflowed)


class Request(NamedTuple):
    """A batch's unique keys, owner by owner and there table by table, and how often the batch has each. On the CPU."""

    counts: list[list[int]]  # of keys, by owner and table
    keys: Tensor  # int64
    seen: Tensor  # int32


class Arrived(NamedTuple):
    """Sums of gradients that came to an owner: asker by asker, there table by table."""

    sums: Tensor
    present: Tensor | None  # a byte for each key, 0 where it has no gradient; None: all have one
