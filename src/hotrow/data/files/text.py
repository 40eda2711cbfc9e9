"""Text: delimited files in Criteo's, Avazu's or your own layout, with the exact line of every error.

A block of lines is split and typed at once; parse.py finds the bad lines when that fails. Rows before a bad line are
yielded before its error is raised, and with on_error="skip" the good lines keep their order. Blank lines are skipped,
but count in line numbers. Columns that no feature needs are split but not typed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hotrow.data.event_log.options import Histories
from hotrow.data.event_log.resume import needed_columns
from hotrow.data.files import lines as line_blocks
from hotrow.data.files.chunks import Chunk, RowOffsets, Span, SpanReader
from hotrow.data.files.file_source import FileSource
from hotrow.data.files.lines import Block, find_lines, is_zipped, read_blocks, read_span
from hotrow.data.files.listing import Paths, find_files
from hotrow.data.files.parse import Fault, misshapen_lines, split_lines, type_columns
from hotrow.data.files.text_layouts import TextLayout, find_layout
from hotrow.data.rejects import Rejects
from hotrow.data.source import check_features
from hotrow.errors import DataError, OptionError, choices
from hotrow.features import FeatureSpec
from hotrow.features.hashing import IntArray


def text(
    paths: Paths,
    layout: str | TextLayout,
    features: FeatureSpec | None = None,
    batch_size: int = 4096,
    on_error: str = "raise",
    histories: Histories | None = None,
) -> FileSource:
    """A source of delimited text files, plain or gzip: a path, a pattern such as "day_*.gz", or a list of them.

    layout: "criteo" (comma separated, with a header), "criteo-tsv" (the original files), "avazu", or a TextLayout.
    features: the layout's default_spec() unless given. on_error: "raise" stops at a malformed line, naming file, line
    and column; "skip" leaves such lines out and counts them in `source.skipped`.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/day_0.txt"
    >>> with open(path, "w") as file:
    ...     _ = file.write("1" + "\\t" * 39 + "\\n" + "0\\t5" + "\\t" * 37 + "\\t05db9164\\n")
    >>> batch, cursor = next(text(path, layout="criteo-tsv").batches())
    >>> batch.labels, len(batch.ids), cursor["number"]
    (tensor([1., 0.]), 26, 2)
    """
    found = find_layout(layout)
    spec = found.default_spec() if features is None else check_features(features)
    reader = TextReader(found, _check_columns(found, needed_columns(spec, histories)))
    return FileSource(find_files(paths), reader, spec, batch_size, on_error, histories)


@dataclass(frozen=True)
class TextReader:
    """Reads some columns of text files of one layout."""

    layout: TextLayout
    columns: tuple[str, ...]

    kind = "text"
    unit = "line"

    def chunks(self, path: str, offset: int, number: int, rejects: Rejects) -> Iterator[Chunk]:
        """The lines of a file from byte `offset` on."""
        yield from self._blocks(path, offset, read_blocks(path, offset, number), rejects)

    def count(self, paths: tuple[str, ...]) -> None:
        """Not known without reading."""
        return

    def spans(self, path: str, offset: int, number: int) -> Iterator[Span] | None:
        """Spans of some megabytes; None for a gzip file, which can be read only from its start."""
        return None if is_zipped(path) else _byte_spans(os.stat(path).st_size, offset, number)

    def row_offsets(self, path: str, offset: int, number: int) -> Iterator[RowOffsets]:
        """The non-blank lines, found by scanning for newlines."""
        if self.layout.header and offset == 0:
            with open(path, "rb") as file:
                first = file.readline(line_blocks.LONGEST_LINE)
            for rest in self._without_header(path, 0, iter([Block(first, 0, 0)] if first else [])):
                offset, number = rest.offset, rest.number
        for starts, ends, numbers in find_lines(path, offset, number):
            yield RowOffsets(starts, ends, numbers)

    @property
    def span_size(self) -> int:
        """In bytes."""
        return line_blocks.SPAN_BYTES

    def span_reader(self) -> SpanReader:
        """Reads any span by itself."""

        def read(path: str, span: Span, number: int, rejects: Rejects) -> Iterator[Chunk]:
            block = read_span(path, span.begin, span.end, number)
            return self._blocks(path, span.begin, iter([block] if block.data else []), rejects)

        return read

    def _blocks(self, path: str, offset: int, blocks: Iterator[Block], rejects: Rejects) -> Iterator[Chunk]:
        rejects.lines += self.layout.header and offset == 0
        for block in self._without_header(path, offset, blocks):
            rejects.lines += len(block.ends)
            yield from self._lines(path, block, rejects)

    def _without_header(self, path: str, offset: int, blocks: Iterator[Block]) -> Iterator[Block]:
        header = self.layout.header and offset == 0
        for block in blocks:
            yield self._skip_header(path, block) if header else block
            header = False
        if header:
            raise DataError(f"{path} is empty and should begin with a header; remove it from the list of files")

    def _lines(self, path: str, block: Block, rejects: Rejects) -> Iterator[Chunk]:
        lines, table, faults = self._split(path, block)
        typed, wrong = type_columns(self.layout, table)
        faults.update((int(lines[row]), fault) for row, fault in wrong.items())
        lines = np.delete(lines, list(wrong))
        chunk = Chunk(path, typed, lines + (block.number + 1), block.ends[lines] + block.offset)
        # Yield the rows before the first bad line before raising its error.
        before = int(np.searchsorted(lines, min(faults))) if faults else len(lines)
        yield chunk.slice(0, before)
        for line, (column, fact) in sorted(faults.items()):
            rejects.add(path, block.number + 1 + line, column, fact)
        if faults:
            yield chunk.slice(before, len(lines))

    def _split(self, path: str, block: Block) -> tuple[IntArray, pa.Table, dict[int, Fault]]:
        """The lines with the right number of cells, their cells, and the faults of the other lines."""
        lines, faults = np.flatnonzero(~block.blank), dict[int, Fault]()
        table = split_lines(self.layout, block.take(lines), self.columns)
        if table is None or table.num_rows != len(lines):
            faults = misshapen_lines(self.layout, block)
            lines = np.setdiff1d(lines, list(faults))
            table = split_lines(self.layout, block.take(lines), self.columns)
        if table is None or table.num_rows != len(lines):
            first, last = block.number + 1, block.number + len(block.ends)
            raise DataError(
                f"{path}, lines {first} to {last} cannot be split at {self.layout.delimiter!r}; is this text?"
            )
        return lines, table, faults

    def _skip_header(self, path: str, block: Block) -> Block:
        first = block.data[: int(block.ends[0])].decode(errors="replace").rstrip("\r\n")
        names = first.removeprefix("\ufeff").split(self.layout.delimiter)
        expected = list(self.layout.columns)
        if names != expected:
            pairs = zip([*names, "nothing"], [*expected, "nothing"], strict=False)
            at, (found, wanted) = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
            raise DataError(
                f"{path}, line 1: the header does not fit the layout: column {at} is {found[:60]!r}, not {wanted!r}; "
                "check the delimiter, or pass dataclasses.replace(layout, header=False) if the file has no header"
            )
        return block.after(1)


def _check_columns(layout: TextLayout, columns: tuple[str, ...]) -> tuple[str, ...]:
    for name in columns:
        if name not in layout.columns:
            raise OptionError(
                f"the features need a column {name!r} that the layout lacks; {choices(name, layout.columns)}"
            )
    return columns


def _byte_spans(size: int, offset: int, number: int) -> Iterator[Span]:
    """Spans of SPAN_BYTES. An empty file has one too, so that a missing header is noticed."""
    step = line_blocks.SPAN_BYTES
    for begin in [offset, *range((offset // step + 1) * step, size, step)] if offset < size or not size else []:
        end = min((begin // step + 1) * step, size)
        yield Span(begin, end, number if begin == offset else None, begin)
