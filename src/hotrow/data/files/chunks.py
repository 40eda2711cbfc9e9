"""Chunk, Span, RowOffsets and Reader: what a file format has to provide.

A Chunk is some thousand raw rows of one file. Features are applied to a whole chunk at once, because an Arrow call
costs the same for 100 rows as for 10,000; rebatch.py then cuts the result into batches. A chunk keeps two numbers for
each row: its number in the file, for messages, and the offset right after it, for the cursor.

A Span is a part of a file that can be read by itself, perhaps on another machine (file_units.py). The spans of a file
cover it without overlap; a row belongs to the span in which it begins.

A RowOffsets has the offsets of rows that have not been decoded. Strided reading selects rows by it (strided_files.py).
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
        """The same rows, copied if they are a small part of a larger buffer, so that the buffer can be freed."""
        if self.table.get_total_buffer_size() <= 2 * self.table.nbytes:
            return self
        return Chunk(self.path, self.table.take(np.arange(len(self.numbers))), self.numbers, self.ends)

    def without(self, rows: IntArray) -> Chunk:
        """The chunk with these rows left out."""
        keep = np.ones(len(self.numbers), np.bool_)
        keep[rows] = False
        return Chunk(self.path, self.table.filter(pa.array(keep)), self.numbers[keep], self.ends[keep])


def join_chunks(chunks: list[Chunk]) -> Chunk:
    """The rows of chunks of one file. Requires: at least one chunk."""
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

    number: how many rows came before, or None if that is not known without reading. read_from: the offset at which
    reading has to start to reach `begin`, such as the row group's first row.
    """

    begin: int
    end: int
    number: int | None
    read_from: int


@dataclass(frozen=True)
class RowOffsets:
    """Row i is at offsets begins[i] to ends[i] and has the number numbers[i], from 1.

    read_from: the offset at which reading has to start to reach them, or None if each row can be read by itself.
    """

    begins: Many[int] | IntArray
    ends: Many[int] | IntArray
    numbers: Many[int] | IntArray
    read_from: int | None = None

    def span(self, first: int, last: int) -> Span:
        """Rows first to last. Requires: first < last."""
        begin, end = int(self.begins[first]), int(self.ends[last - 1])
        return Span(begin, end, int(self.numbers[first]) - 1, begin if self.read_from is None else self.read_from)


SpanReader: TypeAlias = Callable[[str, Span, int, Rejects], Iterator[Chunk]]
"""(path, span, rows before the span, rejects) to the chunks of the span. It may keep a position in the file, so only
one thread at a time may call it."""


class Reader(Protocol):
    """Reads one file format."""

    @property
    def kind(self) -> str:
        """The format's name in the cursor; a source refuses a cursor of another kind."""

    @property
    def unit(self) -> str:
        """What a message calls a row: "row" or "line"."""

    def chunks(self, path: str, offset: int, number: int, rejects: Rejects) -> Iterator[Chunk]:
        """The chunks of a file from `offset` on, which is right after row `number`; 0 and 0 at the start."""

    def count(self, paths: tuple[str, ...]) -> int | None:
        """How many rows all files have, or None if that is not known without reading them."""

    def spans(self, path: str, offset: int, number: int) -> Iterator[Span] | None:
        """The spans of a file from `offset` on, found without reading its rows; None if the format cannot do that."""

    def row_offsets(self, path: str, offset: int, number: int) -> Iterator[RowOffsets]:
        """All rows of a file from `offset` on, in order, found without decoding them. Requires: the file has spans."""

    @property
    def span_size(self) -> int:
        """The size of a unit of work, in offsets."""

    def span_reader(self) -> SpanReader:
        """A reader of spans; it is fastest when spans come in ascending order."""
