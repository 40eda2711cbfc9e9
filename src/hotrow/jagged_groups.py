"""Groups of examples with equal entries in jagged columns, or whose histories are beginnings of one history.

A column is (values int64, offsets or None, weights or None), as in batch.Jagged. Groups are found by two 64-bit hashes
of each entry and then compared value by value, so a collision costs a group and never a result. No loop over examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Column(NamedTuple):
    """Entries: `values[offsets[i]:offsets[i + 1]]`, or `values[i]` without offsets."""

    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None

    def lengths(self) -> Tensor:
        """How many values each entry has."""
        return torch.ones_like(self.values) if self.offsets is None else self.offsets.diff()


def take(column: Column, entries: Tensor, lengths: Tensor | None = None) -> Column:
    """The entries with these numbers, in that order; of each the first `lengths` values if that is given.

    >>> take(Column(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3])), torch.tensor([2, 0])).values
    tensor([3, 1, 2])
    """
    if column.offsets is None:
        return Column(column.values[entries], None, None if column.weights is None else column.weights[entries])
    if lengths is None:
        lengths = column.lengths()[entries]
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    at = torch.repeat_interleave(column.offsets[entries] - offsets[:-1], lengths) + torch.arange(int(offsets[-1]))
    return Column(column.values[at], offsets, None if column.weights is None else column.weights[at])


def group_equal(columns: Sequence[Column], size: int) -> tuple[Tensor, Tensor]:
    """The group of each example, and the first example of each group. Examples of a group are equal in all columns.

    Groups are numbered in the order of their first examples.

    >>> group_equal([Column(torch.tensor([7, 8, 7]))], 3)
    (tensor([0, 1, 0]), tensor([0, 1]))
    """
    return _numbered(_equal_owner(columns, size))


def group_prefixes(
    columns: Sequence[Column], histories: Sequence[Sequence[Column]], size: int
) -> tuple[Tensor, Tensor]:
    """The group of each example, and the example of each group that has its whole histories.

    Examples of a group are equal in `columns`. Of each history (some columns of equal lengths) every example has the
    beginning of what the group's example has. Groups are numbered in the order of their first examples.

    >>> seen = Column(torch.tensor([5, 5, 6, 5, 7]), torch.tensor([0, 1, 3, 5]))  # [5], [5, 6], [5, 7]
    >>> group_prefixes([], [[seen]], 3)
    (tensor([0, 0, 1]), tensor([1, 2]))
    """
    all_columns = [*columns, *(column for history in histories for column in history)]
    equal_owner = _equal_owner(all_columns, size)
    if not histories or not size:
        return _numbered(equal_owner)
    hashes = torch.zeros(2, size, dtype=torch.int64)
    for number, column in enumerate(columns):
        hashes = _mixed(hashes ^ _hash_entries(column), number)
    total = torch.stack([history[0].lengths() for history in histories]).sum(0)
    owner = _longest_with_prefix(histories[0], hashes, total)
    fits = torch.ones(size, dtype=torch.bool)
    for number, column in enumerate(all_columns):
        fits &= _equal_entries(column, owner, prefix=number >= len(columns))
    owner = torch.where(fits, owner, equal_owner)  # examples that differ from their owner are as a rule not equal to it
    return _numbered(torch.where(owner[owner] == owner, owner, torch.arange(size)))


_FACTORS = torch.tensor([[-7046029254386353131], [-4417276706812531889]])  # odd, of SplitMix64 and xxHash


def _mixed(hashes: Tensor, salt: int) -> Tensor:
    """A bijection of 64 bits for each salt (two rounds of multiply and shift)."""
    mixed = (hashes + (2 * salt + 1)) * _FACTORS
    mixed = (mixed ^ (mixed >> 32)) * _FACTORS.flip(0)
    return mixed ^ (mixed >> 29)


def _hash_values(column: Column) -> Tensor:
    """Two hashes of each value with its place in its entry."""
    values = column.values
    if column.weights is not None:
        values = values ^ (column.weights.view(torch.int32).to(torch.int64) << 17)
    assert column.offsets is not None
    places = torch.arange(values.numel()) - torch.repeat_interleave(column.offsets[:-1], column.lengths())
    return _mixed(_mixed(values.expand(2, -1), 1) + places, 2)


def _hash_entries(column: Column) -> Tensor:
    """Two hashes of each entry: of its values, their places and its length."""
    if column.offsets is None:
        values = column.values
        if column.weights is not None:
            values = values ^ (column.weights.view(torch.int32).to(torch.int64) << 17)
        return _mixed(values.expand(2, -1), 1)
    sums = _sums(_hash_values(column))
    return _mixed(sums[:, column.offsets[1:]] - sums[:, column.offsets[:-1]] + column.lengths(), 3)


def _sums(values: Tensor) -> Tensor:
    sums = torch.zeros(2, values.shape[1] + 1, dtype=torch.int64)
    torch.cumsum(values, 1, out=sums[:, 1:])
    return sums


def _equal_owner(columns: Sequence[Column], size: int) -> Tensor:
    """For each example the first one that equals it in all columns."""
    hashes = torch.zeros(2, size, dtype=torch.int64)
    for number, column in enumerate(columns):
        hashes = _mixed(hashes ^ _hash_entries(column), number)
    _, group = torch.unique(hashes, dim=1, return_inverse=True)
    owner = _first_of(group)[group]
    equal = torch.ones(size, dtype=torch.bool)
    for column in columns:
        equal &= _equal_entries(column, owner, prefix=False)
    return torch.where(equal, owner, torch.arange(size))


def _longest_with_prefix(history: Sequence[Column], hashes: Tensor, total: Tensor) -> Tensor:
    """For each example, the one with the largest `total` that begins with its history and has equal `hashes`."""
    offsets = history[0].offsets
    assert offsets is not None
    lengths, size = history[0].lengths(), total.numel()
    each = torch.zeros(2, history[0].values.numel(), dtype=torch.int64)
    for number, column in enumerate(history):
        each = _mixed(each ^ _hash_values(column), 4 + number)
    sums = _sums(each)
    of_event = torch.repeat_interleave(torch.arange(size), lengths)
    begins = sums[:, offsets[:-1]]
    # The hash of every beginning of every history: of the empty one, and of one event and more.
    holder = torch.cat([torch.arange(size), of_event])
    prefixes = torch.cat([torch.zeros_like(begins), sums[:, 1:] - begins[:, of_event]], dim=1)
    wholes = sums[:, offsets[1:]] - begins
    keys = torch.cat([_mixed(prefixes ^ hashes[:, holder], 5), _mixed(wholes ^ hashes, 5)], dim=1)
    _, group = torch.unique(keys, dim=1, return_inverse=True)
    rank = total[holder] * size + (size - 1 - holder)  # most events, then the first example
    best = torch.full((int(group.max()) + 1,), -1, dtype=torch.int64)
    best.scatter_reduce_(0, group[: holder.numel()], rank, "amax")
    return size - 1 - best[group[holder.numel() :]] % size


def _numbered(owner: Tensor) -> tuple[Tensor, Tensor]:
    """Groups in the order of their first examples, and each group's owner."""
    _, group = torch.unique(owner, return_inverse=True)
    first = _first_of(group)
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel())
    return rank[group], owner[first[order]]


def _first_of(group: Tensor) -> Tensor:
    """The first example of each group."""
    groups = int(group.max()) + 1 if group.numel() else 0
    first = torch.full((groups,), group.numel(), dtype=torch.int64)
    return first.scatter_reduce(0, group, torch.arange(group.numel()), "amin")


def _equal_entries(column: Column, others: Tensor, prefix: bool) -> Tensor:
    """Whether each entry equals the entry with the number in `others`, or with `prefix` is the beginning of it."""
    if column.offsets is None:
        same = column.values[others] == column.values
        return same if column.weights is None else same & (column.weights[others] == column.weights)
    mine = column.lengths()
    common = torch.minimum(mine, mine[others])
    taken, own = take(column, others, common), take(column, torch.arange(mine.numel()), common)
    wrong = taken.values != own.values
    if taken.weights is not None and own.weights is not None:
        wrong |= taken.weights != own.weights
    assert taken.offsets is not None
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(wrong, 0)])
    return (mine[others] >= mine if prefix else mine[others] == mine) & (
        sums[taken.offsets[1:]] == sums[taken.offsets[:-1]]
    )
