"""Batches for ranks: rank r of N takes batches r, r + N, r + 2N, ... of the one stream that all ranks read.

Where rows have ranks of their own (ownership.py), N counts the tower ranks, and row ranks read nothing.

So a step of N ranks is N consecutive batches, the cursor after it is the cursor after the last of them, and another
number of ranks can resume the run: the stream and the cursor know nothing of ranks. A source that can skip the other
ranks' batches has `every(rank, world, cursor)` (data/strided.py); from other sources they are read and dropped.

If the stream ends in the middle of a step, the remaining ranks get an empty batch. A rank never decides alone that all
are done: it continues with empty batches, and `Lookup.finished` (exchanged with the keys) ends all at once. So ranks
whose streams differ in length end together, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.data.strided import strided_steps
from hotrow.parallel.ranks import Ranks


class NoBatches:
    """What a row rank reads: an empty batch for each step, without an end."""

    examples: int | None = None

    def __init__(self, features: Sequence[str], ranks: Ranks) -> None:
        none = torch.zeros(0, dtype=torch.int64)
        self._batch = KeyedBatch({name: Jagged(none, torch.zeros(1, dtype=torch.int64)) for name in features})
        self._ranks = ranks

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """The same empty batch again and again. Tower ranks know the cursor."""
        return itertools.repeat((self._batch, {}))

    def describe(self) -> str:
        """One line for a log."""
        return f"no batches on {self._ranks.roles.name(self._ranks.rank)}"


class RankSource:
    """One rank's share of a source's batches, with cursors of the whole; without an end."""

    def __init__(self, source: Source, ranks: Ranks) -> None:
        self.source, self.ranks = source, ranks

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """This rank's batch of each step, empty when there is none left, with the cursor after the step."""
        number = self.ranks.roles.requester_number(self.ranks.rank)
        assert number is not None
        steps = strided_steps(self.source, number, len(self.ranks.roles.requesters), cursor)
        last: Cursor | None = cursor
        shape: KeyedBatch | None = None
        for batch, after in steps:
            shape = shape or (None if batch is None else empty_like(batch))
            last = after
            if batch is None and shape is None:
                shape = self._shape()
            yield batch if batch is not None else _some(shape), after
        shape = shape or self._shape()
        if shape is not None:
            yield from itertools.repeat((shape, last or {}))

    def describe(self) -> str:
        """One line for a log."""
        towers = len(self.ranks.roles.requesters)
        return f"{self.source.describe()}, every {towers}th of them on each of {towers} ranks"

    @property
    def examples(self) -> int | None:
        """How many examples a whole pass of all ranks has, if that is known."""
        return self.source.examples

    def _shape(self) -> KeyedBatch | None:
        """An empty batch, for a rank that never got one."""
        return next((empty_like(batch) for batch, _ in self.source.batches()), None)


def empty_like(batch: KeyedBatch) -> KeyedBatch:
    """A batch without examples, otherwise like this one.

    >>> empty_like(KeyedBatch({"user": Jagged(torch.tensor([1, 2]))}, dense=torch.ones(2, 3))).dense.shape
    torch.Size([0, 3])
    """
    dense, labels, time = (None if part is None else part[:0] for part in (batch.dense, batch.labels, batch.time))
    ids, numbers = (
        {name: _without_entries(jagged) for name, jagged in columns.items()} for columns in (batch.ids, batch.numbers)
    )
    return KeyedBatch(ids, dense, labels, time, numbers)


def _without_entries(jagged: Jagged) -> Jagged:
    return Jagged(
        torch.zeros(0, dtype=torch.int64),
        None if jagged.offsets is None else torch.zeros(1, dtype=torch.int64),
        None if jagged.weights is None else torch.zeros(0),
    )


def _some(shape: KeyedBatch | None) -> KeyedBatch:
    assert shape is not None
    return shape
