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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hotrow.errors import BatchError
from hotrow.jagged_groups import Column, group_equal, group_prefixes, take


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
    in `user_features` then have one entry per user. `visible` has how many events of its user's history an example
    sees, by feature; without it, all.

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
    visible: Mapping[str, Tensor] = field(default_factory=dict)
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
            for name, events in self.visible.items():
                _check(f"visible[{name!r}]", events, torch.int64, 1, "a number of events per example, int64")
                sizes[f"visible[{name!r}]"] = events.shape[0]
                self._check_visible(name, events)
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

    def _check_visible(self, name: str, events: Tensor) -> None:
        user_of = self.user_of
        if name not in self.user_features or not (name in self.ids or name in self.numbers):
            raise BatchError(f"visible has {name!r}, which is no user feature of the batch; leave it out")
        if user_of is None or events.shape != user_of.shape:
            return  # told by the sizes
        most = self.column(name).lengths()[user_of]
        wrong = (events < 0) | (events > most)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise BatchError(
                f"visible[{name!r}] is {int(events[at])} for example {at}, whose user has {int(most[at])} events; give "
                f"0 to {int(most[at])}"
            )

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

    def share_users(self, features: Iterable[str], prefixes: Sequence[Sequence[str]] | None = None) -> KeyedBatch:
        """The same examples, where those whose `features` are all equal are one user, which has these features once.

        With `prefixes` (groups of names among `features`: the columns of each history) examples share a user also if
        their histories are beginnings of its histories; `visible` then has how many events each example sees. Users are
        numbered in the order of their first examples. A batch that has users already is returned as it is.

        >>> batch = KeyedBatch({"seen": Jagged.from_lists([[1, 2], [3], [1]]), "item": Jagged(torch.arange(3))})
        >>> batch.share_users(["seen"]).user_of
        tensor([0, 1, 2])
        >>> shared = batch.share_users(["seen"], prefixes=[["seen"]])
        >>> shared.user_of, shared.ids["seen"].values, shared.visible["seen"]
        (tensor([0, 1, 0]), tensor([1, 2, 3]), tensor([2, 1, 1]))
        """
        names = frozenset(features) & (self.ids.keys() | self.numbers.keys())
        if self.user_of is not None or not names:
            return self
        columns = {name: _column(self.column(name)) for name in sorted(names)}
        visible: dict[str, Tensor] = {}
        if prefixes is None:
            user_of, owner = group_equal(list(columns.values()), self.size)
        else:
            histories = [[name for name in group if name in names] for group in prefixes]
            of_history = {name for history in histories for name in history}
            user_of, owner = group_prefixes(
                [column for name, column in columns.items() if name not in of_history],
                [[columns[name] for name in history] for history in histories if history],
                self.size,
            )
            visible = {name: columns[name].lengths() for name in of_history}
        shared = {name: Jagged(*take(column, owner)) for name, column in columns.items()}
        return replace(
            self,
            ids={name: shared.get(name, ids) for name, ids in self.ids.items()},
            numbers={name: shared.get(name, ids) for name, ids in self.numbers.items()},
            user_of=user_of,
            user_features=names,
            visible=visible,
        )

    def id_count(self) -> int:
        """How many ids, over all features."""
        return sum(jagged.values.numel() for jagged in self.ids.values())


def missing_number(name: str) -> str:
    """What to say of a batch without a number feature that a tower reads."""
    return (
        f"the batch has no number {name!r}, which the tower reads; give it as int64 without rows: "
        f"hr.KeyedBatch(..., numbers={{{name!r}: hr.Jagged(...)}})"
    )


def _column(jagged: Jagged) -> Column:
    return Column(jagged.values, jagged.offsets, jagged.weights)


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
