"""Strided: every N-th batch of a source, without decoding the batches between.

Rank r of N takes batches r, r + N, r + 2N, ... of one stream. A step is N batches: it yields the rank's own batch (None
where the stream ends before it) and the cursor after all N. `source.every(r, N, cursor)` streams the steps.

A `Strided` is such a view of a source that workers can decode, with the methods of split.py: its units hold only rows
of the rank's own batches. Some inputs have to be decoded to know which row belongs to which batch (skipped rows, gzip
files). For those `stride_batches` reads every batch and drops the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from hotrow.batch import KeyedBatch
from hotrow.data.source import Cursor, Source
from hotrow.data.split import DecodedUnit, DecodedUnits, Decoder, Unit

Steps: TypeAlias = Iterator[tuple[KeyedBatch | None, Cursor]]
"""For each step: the rank's own batch, or None if the stream ends before it, and the cursor after the step."""


class Strided(Protocol):
    """Every N-th batch of a source, decodable in units."""

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit] | None:
        """The units after the cursor, or None if this source has to be read whole."""

    def decoder(self) -> Decoder:
        """A decoder; it is fastest when it gets units in order."""

    def assemble(self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]) -> Steps:
        """The steps after the cursor, from the decoded units."""


@runtime_checkable
class SupportsStride(Protocol):
    """A source with a strided view."""

    def strided(self, number: int, of: int) -> Strided:
        """Batch `number` of every `of` batches."""


def stride_batches(batches: Iterator[tuple[KeyedBatch, Cursor]], number: int, of: int) -> Steps:
    """The steps of a stream, by reading every batch and dropping those of other ranks.

    >>> import torch
    >>> stream = [(KeyedBatch({}, labels=torch.zeros(n)), {"at": n}) for n in (1, 2, 3)]
    >>> [(batch and batch.size, cursor) for batch, cursor in stride_batches(iter(stream), 1, 2)]
    [(2, {'at': 2}), (None, {'at': 3})]
    """
    while step := list(itertools.islice(batches, of)):
        yield step[number][0] if number < len(step) else None, step[-1][1]


def strided_steps(source: Source, number: int, of: int, cursor: Cursor | None) -> Steps:
    """The steps of any source: its own `every` if it has one, else `stride_batches`."""
    every = getattr(source, "every", None)
    found: Steps = (
        every(number, of, cursor) if every is not None else stride_batches(source.batches(cursor), number, of)
    )
    return found


@dataclass(frozen=True)
class StridedStream:
    """A source that streams its steps as batches, for one worker that reads all of it (split.py's `SerialDecoder`)."""

    source: Source
    number: int
    of: int

    def batches(self, cursor: Cursor | None = None) -> Steps:
        """The steps after the cursor."""
        return strided_steps(self.source, self.number, self.of, cursor)


def finished_steps(parts: DecodedUnits) -> Steps:
    """The steps of units that were decoded into whole batches. The very last step may have a cursor and no batch."""
    for _, part in parts:
        yield from itertools.zip_longest(part.batches, part.notes["cursors"])
        part.check()
