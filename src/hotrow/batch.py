"""KeyedBatch: one step's examples, which the stages of training and serving pass to each other.

A batch holds, for `size` examples: jagged ids by feature (any number of 64-bit keys per example), dense features,
labels and event times. It is frozen, and checked once when it is made. Later stages trust it, so a wrong shape is an
error at the place that made the batch, never inside a kernel.

Examples of one user may share the user's features, so that a long history is in the batch once. `user_of` then says
which user an example belongs to, and a feature in `user_features` has one entry per user. `numbers` are jagged integers
that are no keys, such as the times of a history's events; they have no rows.

A `Jagged` with `offsets=None` has exactly one id per example. That is the common case in click logs, and it saves the
offsets of 26 features in every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hotrow.errors import BatchError


@dataclass(frozen=True)
class Jagged:
    """Ids of one feature: example `i` owns `values[offsets[i]:offsets[i + 1]]`, or `values[i]` when offsets is None.

    >>> Jagged(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3])).lengths()
    tensor([2, 0, 1])
    """

    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        _check("values", self.values, torch.int64, 1, "ids.to(torch.int64)")
        if self.offsets is not None:
            _check("offsets", self.offsets, torch.int64, 1, "offsets.to(torch.int64)")
            _check_offsets(self.offsets, self.values.numel())
        if self.weights is not None:
            _check("weights", self.weights, torch.float32, 1, "weights.float()")
            if self.weights.numel() != self.values.numel():
                raise BatchError(
                    f"{self.weights.numel()} weights for {self.values.numel()} ids; give one weight for each id"
                )
            if not bool(torch.isfinite(self.weights).all()):
                raise BatchError("weights have NaN or infinite elements; clean them with nan_to_num()")

    @property
    def size(self) -> int:
        """How many examples."""
        return int(self.values.numel() if self.offsets is None else self.offsets.numel() - 1)

    def lengths(self) -> Tensor:
        """How many ids each example has, int64."""
        return torch.ones_like(self.values) if self.offsets is None else self.offsets.diff()

    @staticmethod
    def from_lists(rows: list[list[int]]) -> Jagged:
        """From plain Python lists, one per example.

        >>> Jagged.from_lists([[1, 2], []]).offsets
        tensor([0, 2, 2])
        """
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor([len(row) for row in rows], dtype=torch.int64), 0, out=offsets[1:])
        return Jagged(torch.tensor([key for row in rows for key in row], dtype=torch.int64), offsets)


@dataclass(frozen=True)
class KeyedBatch:
    """One step's examples: ids by feature, dense features, labels, event times.

    `numbers` are int64 by name, jagged as ids are. `user_of` has the user of each example, from 0; features and numbers
    in `user_features` then have one entry per user.

    >>> batch = KeyedBatch({"user": Jagged(torch.tensor([3, 3]))}, labels=torch.tensor([1.0, 0.0]))
    >>> batch.size
    2
    """

    ids: Mapping[str, Jagged]
    dense: Tensor | None = None
    labels: Tensor | None = None
    time: Tensor | None = None
    numbers: Mapping[str, Jagged] = field(default_factory=dict)
    user_of: Tensor | None = None
    user_features: frozenset[str] = frozenset()
    size: int = field(init=False)

    def __post_init__(self) -> None:
        columns = {**self.ids, **self.numbers}
        for name, jagged in columns.items():
            if not isinstance(jagged, Jagged):
                raise BatchError(f"feature {name!r} is {type(jagged).__name__}; pass hr.Jagged(ids)")
        if len(columns) != len(self.ids) + len(self.numbers):
            raise BatchError(f"{min(self.ids.keys() & self.numbers)!r} is among ids and numbers; rename one")
        users = {name: jagged.size for name, jagged in columns.items() if name in self.user_features}
        sizes = {f"feature {name!r}": jagged.size for name, jagged in columns.items() if name not in users}
        if self.user_of is not None:
            _check("user_of", self.user_of, torch.int64, 1, "the number of each example's user, int64")
            _check_users(self.user_of, users)
            sizes["user_of"] = self.user_of.shape[0]
        elif users:
            raise BatchError(f"user_features={sorted(users)} without user_of; give the user of each example, int64")
        if self.dense is not None:
            _check("dense", self.dense, torch.float32, 2, "dense.float() of shape [batch, features]")
            sizes["dense"] = self.dense.shape[0]
        if self.labels is not None:
            if not isinstance(self.labels, Tensor):
                raise BatchError(f"labels is {type(self.labels).__name__}, not a torch tensor; pass labels.float()")
            if not self.labels.is_floating_point() or self.labels.dim() not in (1, 2):
                raise BatchError(
                    f"labels are {self.labels.dtype} of shape {list(self.labels.shape)}; "
                    "pass labels.float() of shape [batch] or [batch, tasks]"
                )
            sizes["labels"] = self.labels.shape[0]
        if self.time is not None:
            _check("time", self.time, torch.int64, 1, "event times in milliseconds, int64, one per example")
            sizes["time"] = self.time.shape[0]
        if not sizes:
            raise BatchError("an empty batch: give ids, dense features or labels")
        if len(set(sizes.values())) > 1:
            raise BatchError(
                "parts of one batch have different sizes: "
                + ", ".join(f"{name} {size}" for name, size in sizes.items())
                + "; every feature needs one entry per example (an empty list is one)"
            )
        object.__setattr__(self, "size", next(iter(sizes.values())))

    @property
    def users(self) -> int:
        """How many users; without `user_of`, every example is a user of its own."""
        if self.user_of is None:
            return self.size
        found = [self.column(name).size for name in self.user_features if name in self.ids or name in self.numbers]
        return found[0] if found else (int(self.user_of.max()) + 1 if self.size else 0)

    def column(self, name: str) -> Jagged:
        """The ids or the numbers with this name."""
        return self.ids[name] if name in self.ids else self.numbers[name]

    def share_users(self, features: Iterable[str]) -> KeyedBatch:
        """The same examples, where those whose `features` are all equal are one user, which has these features once.

        Users are numbered in the order of their first examples. A batch that has users already is returned as it is.

        >>> batch = KeyedBatch({"seen": Jagged.from_lists([[1, 2], [3], [1, 2]]), "item": Jagged(torch.arange(3))})
        >>> shared = batch.share_users(["seen"])
        >>> shared.user_of, shared.ids["seen"].values
        (tensor([0, 1, 0]), tensor([1, 2, 3]))
        """
        names = frozenset(features) & (self.ids.keys() | self.numbers.keys())
        if self.user_of is not None or not names:
            return self
        user_of, first = group_equal([self.column(name) for name in sorted(names)], self.size)
        return replace(
            self,
            ids={name: take(ids, first) if name in names else ids for name, ids in self.ids.items()},
            numbers={name: take(ids, first) if name in names else ids for name, ids in self.numbers.items()},
            user_of=user_of,
            user_features=names,
        )

    def id_count(self) -> int:
        """How many ids, over all features."""
        return sum(jagged.values.numel() for jagged in self.ids.values())


def take(jagged: Jagged, entries: Tensor) -> Jagged:
    """The entries with these numbers, in that order.

    >>> take(Jagged.from_lists([[1, 2], [], [3]]), torch.tensor([2, 0])).values
    tensor([3, 1, 2])
    """
    weights = jagged.weights
    if jagged.offsets is None:
        return Jagged(jagged.values[entries], None, None if weights is None else weights[entries])
    lengths = jagged.lengths()[entries]
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    at = torch.repeat_interleave(jagged.offsets[entries] - offsets[:-1], lengths) + torch.arange(int(offsets[-1]))
    return Jagged(jagged.values[at], offsets, None if weights is None else weights[at])


def group_equal(columns: list[Jagged], size: int) -> tuple[Tensor, Tensor]:
    """The group of each example, and the first example of each group. Examples of a group are equal in all columns.

    Groups are found by two 64-bit hashes and then compared value by value; an example that differs from the first of
    its group, which is all but impossible, gets a group of its own.

    >>> group_equal([Jagged(torch.tensor([7, 8, 7]))], 3)
    (tensor([0, 1, 0]), tensor([0, 1]))
    """
    hashes = torch.zeros(2, size, dtype=torch.int64)
    for number, column in enumerate(columns):
        hashes = _mixed(hashes ^ _hash_entries(column), number)
    _, group = torch.unique(hashes, dim=1, return_inverse=True)
    first = _first_of(group)
    for column in columns:
        differs = ~_equal_entries(column, first[group])
        if bool(differs.any()):
            group[differs] = first.numel() + torch.arange(int(differs.sum()))
            first = _first_of(group)
    order = torch.argsort(first)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel())
    return rank[group], first[order]


_FACTORS = torch.tensor([[-7046029254386353131], [-4417276706812531889]])  # odd, of SplitMix64 and xxHash


def _mixed(hashes: Tensor, salt: int) -> Tensor:
    """A bijection of 64 bits for each salt (two rounds of multiply and shift)."""
    mixed = (hashes + (2 * salt + 1)) * _FACTORS
    mixed = (mixed ^ (mixed >> 32)) * _FACTORS.flip(0)
    return mixed ^ (mixed >> 29)


def _hash_entries(column: Jagged) -> Tensor:
    """Two hashes of each entry: of its values, their places and its length."""
    values = column.values
    if column.weights is not None:
        values = values ^ (column.weights.view(torch.int32).to(torch.int64) << 17)
    if column.offsets is None:
        return _mixed(values.expand(2, -1), 1)
    lengths = column.lengths()
    places = torch.arange(values.numel()) - torch.repeat_interleave(column.offsets[:-1], lengths)
    each = _mixed(_mixed(values.expand(2, -1), 1) + places, 2)
    sums = torch.zeros(2, values.numel() + 1, dtype=torch.int64)
    torch.cumsum(each, 1, out=sums[:, 1:])
    return _mixed(sums[:, column.offsets[1:]] - sums[:, column.offsets[:-1]] + lengths, 3)


def _first_of(group: Tensor) -> Tensor:
    """The first example of each group."""
    groups = int(group.max()) + 1 if group.numel() else 0
    first = torch.full((groups,), group.numel(), dtype=torch.int64)
    return first.scatter_reduce(0, group, torch.arange(group.numel()), "amin")


def _equal_entries(column: Jagged, others: Tensor) -> Tensor:
    """Whether each entry equals the entry with the number in `others`."""
    taken = take(column, others)
    if column.offsets is None:
        same = taken.values == column.values
        return same if column.weights is None else same & (taken.weights == column.weights)
    assert taken.offsets is not None
    equal = taken.lengths() == column.lengths()
    if not bool(equal.all()):
        return equal
    wrong = taken.values != column.values
    if column.weights is not None:
        wrong |= taken.weights != column.weights
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(wrong, 0)])
    return sums[column.offsets[1:]] == sums[column.offsets[:-1]]


def _check(name: str, tensor: Tensor, dtype: torch.dtype, dims: int, cure: str) -> None:
    if not isinstance(tensor, Tensor):
        raise BatchError(f"{name} is {type(tensor).__name__}, not a torch tensor; pass {cure}")
    if tensor.dtype != dtype or tensor.dim() != dims:
        raise BatchError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, not {dims}-d {dtype}; pass {cure}")


def _check_users(user_of: Tensor, users: Mapping[str, int]) -> None:
    if len(set(users.values())) > 1:
        listed = ", ".join(f"{name!r} {size}" for name, size in users.items())
        raise BatchError(f"user features have different numbers of users: {listed}; give one entry per user in each")
    if user_of.numel() and users:
        low, high, count = int(user_of.min()), int(user_of.max()), next(iter(users.values()))
        if low < 0 or high >= count:
            raise BatchError(f"user_of has users from {low} to {high}, but the user features have {count} entries")


def _check_offsets(offsets: Tensor, count: int) -> None:
    if offsets.numel() == 0 or int(offsets[0]) != 0 or int(offsets[-1]) != count or bool((offsets.diff() < 0).any()):
        shown = offsets.tolist() if offsets.numel() <= 8 else [*offsets[:4].tolist(), "...", *offsets[-3:].tolist()]
        raise BatchError(
            f"offsets are wrong: they must start at 0, never fall, and end at the number of ids ({count}); got {shown}"
        )
