"""The oracle of a table: a dict of rows, and training written as loops over ids.

There are no slots, tiers or threads here. Gradients of one key are added in batch order, one float32 addition at a
time, and the optimizer's own `rule` changes the rows, so the store must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.optim import Optimizer, clip
from hotrow.table import Table, TableRows
from hotrow.tiers.host.store import Budget

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1


@dataclass
class PlainRow:
    values: Tensor  # with the optimizer's state behind them
    count: int = 0
    last_step: int = 0


class PlainTable:
    """Rows by key. `initial` values come from a real table that is never trained."""

    def __init__(self, table: Table, optimizer: Optimizer, seed: int) -> None:
        self.dim = table.dim
        self.optimizer = table.optimizer or optimizer
        self.rows: dict[int, PlainRow] = {}
        self._untouched = TableRows(table, optimizer, seed, Budget())

    def initial(self, key: int) -> Tensor:
        parts = self.optimizer.state(self.dim)
        values = self._untouched.read(torch.tensor([key]))[0]
        return torch.cat([values, *(torch.full((part.width,), part.initial) for part in parts)])

    def create(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in self.rows:
                self.rows[key] = PlainRow(self.initial(key))

    def read(self, keys: Sequence[int]) -> Tensor:
        rows = [self.rows[key].values if key in self.rows else self.initial(key) for key in keys]
        return torch.stack(rows)[:, : self.dim] if rows else torch.empty(0, self.dim)

    def assign(self, keys: Sequence[int], values: Tensor) -> None:
        self.create(keys)
        for key, row in zip(keys, values, strict=True):
            self.rows[key].values[: row.numel()] = row

    def erase(self, keys: Iterable[int]) -> int:
        return sum(self.rows.pop(key, None) is not None for key in keys)

    def train(self, keys: Sequence[int], gradients: Sequence[Tensor], step: int) -> None:
        """One update; `gradients[i]` is what position i of the batch adds to the row of `keys[i]`."""
        self.create(keys)
        sums: dict[int, Tensor] = {}
        for key, gradient in zip(keys, gradients, strict=True):
            sums[key] = sums[key] + gradient if key in sums else gradient
        if sums:
            self._apply(list(sums), torch.stack(list(sums.values())), step)
        for key in keys:
            self.rows[key].count += 1
            self.rows[key].last_step = step

    def _apply(self, keys: list[int], g: Tensor, step: int) -> None:
        optimizer = self.optimizer
        rows = torch.stack([self.rows[key].values for key in keys])
        widths = [part.width for part in optimizer.state(self.dim)]
        w, *parts = rows.split([self.dim, *widths], dim=1)
        state = {part.name: tensor for part, tensor in zip(optimizer.state(self.dim), parts, strict=True)}
        optimizer.rule(w, clip(g, optimizer.clip_value, optimizer.clip_norm), state, optimizer.coefficients(step))
        for key, row in zip(keys, rows, strict=True):
            self.rows[key].values = row.clone()


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)), (a, b)


def assert_same_rows(rows: TableRows, plain: PlainTable) -> None:
    """Everything that a scan sees: keys, values, optimizer state, counts, last steps."""
    assert len(rows) == len(plain.rows)
    seen: set[int] = set()
    for chunk in rows.scan(chunk=5):
        for key, values, count, step in zip(
            chunk.keys.tolist(), chunk.values, chunk.counts.tolist(), chunk.last_steps.tolist(), strict=True
        ):
            assert_same_bits(values, plain.rows[key].values)
            assert (count, step) == (plain.rows[key].count, plain.rows[key].last_step)
            seen.add(key)
    assert seen == set(plain.rows)
