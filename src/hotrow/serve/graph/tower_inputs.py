"""The tensors that a tower reads: names, types and sizes, for a whole tower or for one of its two parts.

A size is a number, or the name of a free size:

    rows                 examples; in serving, candidates
    users                users of the batch, where the tower has a user part
    length of <feature>  padded histories: the longest of the batch
    events of <feature>  jagged histories: all events of the batch, and padding at the end

Features that are columns of one history ("aligned") have one free size between them, named after the first. A jagged
tensor `seen [events, dim]` goes with `seen_lengths` (int64, one per row or user), a padded one with `seen_mask`.

The candidate part reads `user_of` and the encoding, whose tensors are named "encoding.<name>" among its vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from hotrow.nn import EmbeddingCollection

WHOLE, USER, CANDIDATES = "whole", "user", "candidates"  # parts of a tower
USER_OF, ENCODING = "user_of", "encoding."
MASK, LENGTHS = "_mask", "_lengths"
ROWS, USERS, LENGTH, EVENTS = "rows", "users", "length of ", "events of "
TIMES = 1_700_000_000_000  # milliseconds; the first time that an example may have
DIM_MOST = 1 << 31  # of a size that nothing limits


@dataclass(frozen=True)
class TowerTensor:
    """One tensor that a tower reads; `sizes` are numbers, or names of free sizes."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int | str, ...]


@dataclass(frozen=True)
class TowerInputs:
    """A tower's inputs, in the collection's order: width by feature, which features are sequences, dense columns.

    `numbers` are int64 histories without rows. With `jagged` the tower reads histories without padding. `user` are the
    features that its user part reads; empty: it has one part. `aligned` are groups of features with equal lengths in
    each example, `max_lengths` the most events of a history.
    """

    widths: dict[str, int]
    sequences: frozenset[str]
    dense: int
    numbers: tuple[str, ...] = ()
    jagged: bool = False
    user: tuple[str, ...] = ()
    aligned: tuple[tuple[str, ...], ...] = ()
    max_lengths: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(embeddings: EmbeddingCollection, dense: int, **layout: Any) -> TowerInputs:
        """The inputs that this collection produces. `layout`: fields of TowerInputs from `numbers` on."""
        widths = {f: rows.table.dim for rows in embeddings.tables for f in rows.table.poolings}
        return TowerInputs(widths, frozenset(embeddings.sequences), dense, **layout)

    @property
    def names(self) -> list[str]:
        """The names of the whole tower's vectors in order. The mask or the lengths of a sequence follow it.

        >>> TowerInputs({"seen": 4, "user": 4}, frozenset({"seen"}), 0).names
        ['seen', 'seen_mask', 'user']
        >>> TowerInputs({"seen": 4, "item": 4}, frozenset({"seen"}), 0, jagged=True, user=("seen",)).names
        ['seen', 'seen_lengths', 'item', 'user_of']
        """
        return [tensor.name for tensor in self.tensors()]

    def tensors(self, part: str = WHOLE) -> list[TowerTensor]:
        """The vectors that a part reads, in order; of the candidate part without the encoding."""
        chosen = {WHOLE: lambda f: True, USER: self.user.__contains__, CANDIDATES: lambda f: f not in self.user}[part]
        found = [t for f in (*self.widths, *self.numbers) if chosen(f) for t in self._of_feature(f)]
        if self.user and part != USER:
            found.append(TowerTensor(USER_OF, torch.int64, (ROWS,)))
        return found

    def group(self, feature: str) -> str:
        """The first of the features that are aligned with this one."""
        return next((group[0] for group in self.aligned if feature in group), feature)

    def max_length(self, feature: str) -> int | None:
        """The most events of a history, the smallest of its aligned group; None if nothing limits it."""
        group = next((group for group in self.aligned if feature in group), (feature,))
        return min((self.max_lengths[name] for name in group if name in self.max_lengths), default=None)

    @property
    def limited(self) -> bool:
        """Whether every padded history has a largest length."""
        return self.jagged or all(self.max_length(name) is not None for name in (*self.sequences, *self.numbers))

    def entity(self, feature: str) -> str:
        """What a feature has one entry for: rows or users."""
        return USERS if feature in self.user else ROWS

    def example(
        self, rows: int, length: int = 1, seed: int = 0, users: int = 2, least: int = 0, padding: int = 0
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Random vectors and dense features, drawn without changing torch's random state.

        Histories have `least` to `length` events, at most their max_length. A number feature of a two-part tower's rows
        that is aligned with no history has one, such as the time of the request. `user_of` is sorted, as a server's is.
        Jagged histories have `padding` more events, which are not zero, at the end.
        """
        draw = torch.Generator().manual_seed(seed)
        vectors: dict[str, Tensor] = {}
        lengths: dict[str, Tensor] = {}
        for feature in (*self.widths, *self.numbers):
            count = users if feature in self.user else rows
            width = (self.widths[feature],) if feature in self.widths else ()
            if feature not in self.sequences and feature in self.widths:
                vectors[feature] = torch.randn(count, *width, generator=draw) * 0.1
                continue
            group = self.group(feature)
            longest = min(length, self.max_length(feature) or length)
            if group not in lengths:
                low, high = (1, 1) if self._is_single(feature) else (min(least, longest), longest)
                lengths[group] = torch.randint(low, high + 1, (count,), generator=draw)
            if self.jagged:
                events = int(lengths[group].sum()) + padding
                vectors[feature] = _drawn((events, *width), feature in self.widths, draw)
                vectors[f"{feature}{LENGTHS}"] = lengths[group].clone()  # a graph must see two tensors
            else:
                mask = torch.arange(longest) < lengths[group].unsqueeze(1)
                drawn = _drawn((count, longest, *width), feature in self.widths, draw)
                vectors[feature] = drawn * (mask.unsqueeze(2) if width else mask)
                vectors[f"{feature}{MASK}"] = mask
        if self.user:
            vectors[USER_OF] = torch.randint(0, max(1, users), (rows,), generator=draw).sort().values
        return vectors, torch.randn(rows, self.dense, generator=draw) if self.dense else None

    def free_sizes(self, tensors: Iterable[TowerTensor] | None = None) -> dict[str, dict[int, Any]]:
        """The dimensions of the vectors that may change, for torch.export."""
        dims: dict[str, Any] = {}
        return {
            tensor.name: {
                axis: self._dim(size, dims)
                for axis, size in enumerate(tensor.sizes)
                if isinstance(size, str) and self._dim(size, dims) is not None
            }
            for tensor in (self.tensors() if tensors is None else tensors)
        }

    def _is_single(self, feature: str) -> bool:
        alone = not any(feature in group for group in self.aligned)
        return bool(self.user) and alone and feature in self.numbers and feature not in self.user

    def _dim(self, size: str, dims: dict[str, Any]) -> Any:
        """The Dim of a free size; None if it can only be 1."""
        if size not in dims:
            dims[size] = self._new_dim(size, len(dims))
        return dims[size]

    def _new_dim(self, size: str, number: int) -> Any:
        if size in (ROWS, USERS):
            return Dim(size, min=1)
        if size.startswith(EVENTS):
            return Dim(f"events_{number}", min=0, max=DIM_MOST)
        most = self.max_length(size.removeprefix(LENGTH))
        return None if most == 1 else Dim(f"length_{number}", min=1, max=most)

    def _of_feature(self, feature: str) -> Iterator[TowerTensor]:
        entity, number = self.entity(feature), feature not in self.widths
        dtype = torch.int64 if number else torch.float32
        width = () if number else (self.widths[feature],)
        if not number and feature not in self.sequences:
            yield TowerTensor(feature, dtype, (entity, *width))
        elif self.jagged:
            yield TowerTensor(feature, dtype, (f"{EVENTS}{self.group(feature)}", *width))
            yield TowerTensor(f"{feature}{LENGTHS}", torch.int64, (entity,))
        else:
            length = f"{LENGTH}{self.group(feature)}"
            yield TowerTensor(feature, dtype, (entity, length, *width))
            yield TowerTensor(f"{feature}{MASK}", torch.bool, (entity, length))


def pad_empty(tensors: Sequence[Tensor], places: Iterable[int]) -> list[Tensor] | None:
    """The tensors, where a jagged one (at `places`) without any event gets one that belongs to no one; None if all
    have events. Many operators refuse tensors without elements, and a graph cannot branch on it as a tower may."""
    empty = [at for at in places if not tensors[at].shape[0]]
    if not empty:
        return None
    padded = list(tensors)
    for at in empty:
        padded[at] = padded[at].new_zeros(1, *padded[at].shape[1:])
    return padded


def drop_padding(names: Sequence[str], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of an encoding without events that belong to no one."""
    found = dict(zip(names, outputs, strict=True))
    return [
        value[: int(found[f"{name}{LENGTHS}"].sum())] if f"{name}{LENGTHS}" in found else value
        for name, value in found.items()
    ]


def encoding_tensors(examples: list[dict[str, Tensor]]) -> list[TowerTensor]:
    """The candidate part's inputs for an encoding, from encodings of several batches.

    Two jagged tensors whose lengths were equal in all batches are aligned: they have one free size.
    """
    first = examples[0]
    groups: dict[str, str] = {}
    for name in first:
        if f"{name}{LENGTHS}" in first:
            mine = [example[f"{name}{LENGTHS}"] for example in examples]
            groups[name] = next(
                (
                    group
                    for group in groups.values()
                    if all(map(torch.equal, mine, [example[f"{group}{LENGTHS}"] for example in examples]))
                ),
                name,
            )
    return [
        TowerTensor(
            f"{ENCODING}{name}",
            value.dtype,
            (f"{EVENTS}{ENCODING}{groups[name]}" if name in groups else USERS, *value.shape[1:]),
        )
        for name, value in first.items()
    ]


def _drawn(sizes: tuple[int, ...], real: bool, draw: torch.Generator) -> Tensor:
    """Vectors, or times in milliseconds that differ by seconds to weeks."""
    if real:
        return torch.randn(*sizes, generator=draw) * 0.1
    return TIMES + torch.randint(0, 1 << 31, sizes, generator=draw)
