"""KeyedBatch: one step's examples, which the stages of training and serving pass to each other.

A batch holds, for `size` examples: jagged ids by feature (any number of 64-bit keys per example), jagged numbers
(integers that are no keys, such as the times of a history's events), dense features, labels and event times. It is
frozen, and checked once when it is made. Later stages trust it, so a wrong shape is an error at the place that made the
batch, never inside a kernel.

A `Jagged` with `offsets=None` has exactly one id per example. That is the common case in click logs, and it saves the
offsets of 26 features in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """One step's examples: ids by feature, dense features, labels, event times, and integers that are no keys.

    >>> batch = KeyedBatch({"user": Jagged(torch.tensor([3, 3]))}, labels=torch.tensor([1.0, 0.0]))
    >>> batch.size
    2
    """

    ids: Mapping[str, Jagged]
    dense: Tensor | None = None
    labels: Tensor | None = None
    time: Tensor | None = None
    numbers: Mapping[str, Jagged] = field(default_factory=dict)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        for name, jagged in self.ids.items():
            if not isinstance(jagged, Jagged):
                raise BatchError(f"feature {name!r} is {type(jagged).__name__}; pass hr.Jagged(ids)")
        sizes = {f"feature {name!r}": jagged.size for name, jagged in self.ids.items()}
        for name, jagged in self.numbers.items():
            if not isinstance(jagged, Jagged):
                raise BatchError(f"number {name!r} is {type(jagged).__name__}; pass hr.Jagged(integers)")
            if name in self.ids or jagged.weights is not None:
                raise BatchError(
                    f"number {name!r} has the name of a feature with ids; rename one"
                    if name in self.ids
                    else f"number {name!r} has weights, which only ids have; pass hr.Jagged(integers, offsets)"
                )
            sizes[f"number {name!r}"] = jagged.size
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

    def id_count(self) -> int:
        """How many ids, over all features."""
        return sum(jagged.values.numel() for jagged in self.ids.values())


def _check(name: str, tensor: Tensor, dtype: torch.dtype, dims: int, cure: str) -> None:
    if not isinstance(tensor, Tensor):
        raise BatchError(f"{name} is {type(tensor).__name__}, not a torch tensor; pass {cure}")
    if tensor.dtype != dtype or tensor.dim() != dims:
        raise BatchError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, not {dims}-d {dtype}; pass {cure}")


def _check_offsets(offsets: Tensor, count: int) -> None:
    if offsets.numel() == 0 or int(offsets[0]) != 0 or int(offsets[-1]) != count or bool((offsets.diff() < 0).any()):
        shown = offsets.tolist() if offsets.numel() <= 8 else [*offsets[:4].tolist(), "...", *offsets[-3:].tolist()]
        raise BatchError(
            f"offsets are wrong: they must start at 0, never fall, and end at the number of ids ({count}); got {shown}"
        )
