"""Chunk: some thousand raw rows of one file, and where each of them stood.

Readers give chunks, features are applied to a whole chunk at once (one Arrow call per column costs the same for 100
rows as for 10,000), and rebatch.py cuts the result into batches. To give every batch a cursor, a chunk remembers for
each row its number in the file, for messages, and the offset right after it, to resume from.

A Span is a part of a file that can be read by itself, perhaps on another machine (file_parts.py). The spans of a file,
one after another, have the rows of the whole file; a row belongs to the span that it begins in.

A Stretch is some rows of which it is known where each begins and ends, before any of them is decoded: what every N-th
batch is found by (file_share.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from hotrow.data.rejects import Rejects
from hotrow.features.hashing import IntArray


@dataclass(frozen=True)
class Chunk:
    """Rows of one file. `numbers[i]` is row i's line or row number, from 1; `ends[i]` is where the next row begins."""

    path: str
    table: pa.Table
    numbers: IntArray
    ends: IntArray

    def slice(self, start: int, stop: int) -> Chunk:
        """Rows start to stop."""
        rows = slice(start, stop)
        return Chunk(self.path, self.table.slice(start, stop - start), self.numbers[rows], self.ends[rows])

    def compact(self) -> Chunk:
        """The same rows, without keeping alive what they are a small part of."""
        if self.table.get_total_buffer_size() <= 2 * self.table.nbytes:
            return self
        return Chunk(self.path, self.table.take(np.arange(len(self.numbers))), self.numbers, self.ends)

    def without(self, rows: IntArray) -> Chunk:
        """The chunk with these rows left out."""
        keep = np.ones(len(self.numbers), np.bool_)
        keep[rows] = False
        return Chunk(self.path, self.table.filter(pa.array(keep)), self.numbers[keep], self.ends[keep])


def join_chunks(chunks: list[Chunk]) -> Chunk:
    """The rows of chunks of one file. Requires: there is one."""
    if len(chunks) == 1:
        return chunks[0]
    return Chunk(
        chunks[0].path,
        pa.concat_tables([chunk.table for chunk in chunks]),
        np.concatenate([chunk.numbers for chunk in chunks]),
        np.concatenate([chunk.ends for chunk in chunks]),
    )


@dataclass(frozen=True)
class Span:
    """The rows of a file that begin at offsets begin to end.

    number: how many rows came before, or None if only reading would tell. root: where reading has to start to get to
    `begin`, such as the row group's first row.
    """

    begin: int
    end: int
    number: int | None
    root: int


@dataclass(frozen=True)
class Stretch:
    """Row i stands at offsets begins[i] to ends[i] and has number numbers[i], from 1.

    root: where reading has to start to get to any of them, or None if each can be read by itself.
    """

    begins: Many[int] | IntArray
    ends: Many[int] | IntArray
    numbers: Many[int] | IntArray
    root: int | None = None

    def span(self, first: int, last: int) -> Span:
        """Rows first to last. Requires: first < last."""
        begin, end = int(self.begins[first]), int(self.ends[last - 1])
        return Span(begin, end, int(self.numbers[first]) - 1, begin if self.root is None else self.root)


SpanReader: TypeAlias = Callable[[str, Span, int, Rejects], Iterator[Chunk]]
"""The chunks of a span of a file, before which so many rows stood. May remember where it has got to, so one thread at
a time."""


class Reader(Protocol):
    """How to read one kind of file."""

    @property
    def kind(self) -> str:
        """A word for the cursor: a cursor of one kind does not fit another."""

    @property
    def unit(self) -> str:
        """What a row is called in a message."""

    def chunks(self, path: str, offset: int, number: int, rejects: Rejects) -> Iterator[Chunk]:
        """The chunks of a file from `offset` on, where row `number` had just been read; 0 and 0 at the start."""

    def count(self, paths: tuple[str, ...]) -> int | None:
        """How many rows all files have, or None if one would have to read them to know."""

    def spans(self, path: str, offset: int, number: int) -> Iterator[Span] | None:
        """The spans of a file from `offset` on, found without reading its rows, or None if that cannot be done."""

    def stretches(self, path: str, offset: int, number: int) -> Iterator[Stretch]:
        """All rows of a file from `offset` on, in order, found without decoding them. Requires: it has spans."""

    @property
    def span_size(self) -> int:
        """How much of a file, in offsets, is worth a worker's while."""

    def span_reader(self) -> SpanReader:
        """A reader of spans; it is fastest when it gets them in rising order."""
