"""Parquet: row groups streamed one after another, never a whole file.

Only the columns that the features need are decoded, 65,536 rows at a time. An offset is a row number, so resuming uses
the file's footer to skip whole row groups and decodes only the one that holds the cursor.

A span is a chunk's worth of rows of one row group. A row group can be decoded only from its start, so a span reader
keeps its position: rows before the next span are decoded, but no features are made of them.

All files of a source need the same columns, and each column one family of types. An integer column that is text in
another file would give other keys for the same user, so that is an error. Integer widths, dictionaries and large
strings may differ, because they do not change a key.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.event_log.options import Histories
from hotrow.data.event_log.resume import needed_columns
from hotrow.data.files.chunks import Chunk, RowOffsets, Span, SpanReader
from hotrow.data.files.file_source import FileSource
from hotrow.data.files.listing import Paths, find_files
from hotrow.data.rejects import Rejects
from hotrow.data.source import check_features
from hotrow.errors import DataError, choices
from hotrow.features import FeatureSpec
from hotrow.features.nested import field_type, split_path

CHUNK_ROWS = 65_536


def parquet(
    paths: Paths,
    features: FeatureSpec,
    batch_size: int = 4096,
    on_error: str = "raise",
    histories: Histories | None = None,
) -> FileSource:
    """A source of Parquet files: a path, a pattern such as "clicks/*.parquet", or a list of them.

    on_error: "raise" stops at a row that the features refuse, naming file, row and column; "skip" leaves such rows out
    and counts them in `source.skipped`. histories: build histories from the rows, which are a log in time order.

    >>> import tempfile
    >>> from hotrow.features import Key
    >>> path = tempfile.mkdtemp() + "/clicks.parquet"
    >>> pq.write_table(pa.table({"user": ["ann", "bob", "cem"], "click": [1, 0, 1]}), path)
    >>> source = parquet(path, features=FeatureSpec([Key("user")], label="click"), batch_size=2)
    >>> [batch.size for batch, cursor in source.batches()]
    [2, 1]
    """
    columns = needed_columns(check_features(features), histories)
    files = find_files(paths)
    return FileSource(files, ParquetReader(files[0], columns), features, batch_size, on_error, histories)


@dataclass(frozen=True)
class ParquetReader:
    """Reads some columns of Parquet files whose types agree with those of the file `first`."""

    first: str
    columns: tuple[str, ...]

    kind = "parquet"
    unit = "row"

    def chunks(self, path: str, offset: int, number: int, rejects: Rejects) -> Iterator[Chunk]:
        """The rows of a file from row `offset` on."""
        with _open(path) as file:
            self._check_schema(path, file.schema_arrow)
            yield from self._from(path, file, _group_ends(file), offset)

    def count(self, paths: tuple[str, ...]) -> int:
        """The rows of all files, from their footers."""
        total = 0
        for path in paths:
            with _open(path) as file:
                total += file.metadata.num_rows
        return total

    def spans(self, path: str, offset: int, number: int) -> Iterator[Span]:
        """From the footer. A file without rows has one empty span, so that its columns are checked."""
        with _open(path) as file:
            ends = _group_ends(file)
        yield from _spans(ends, offset)
        if not ends or not ends[-1]:
            yield Span(0, 0, 0, 0)

    def row_offsets(self, path: str, offset: int, number: int) -> Iterator[RowOffsets]:
        """From the footer; also checks the columns."""
        with _open(path) as file:
            self._check_schema(path, file.schema_arrow)
            ends = _group_ends(file)
        for span in _spans(ends, offset):
            after = range(span.begin + 1, span.end + 1)
            yield RowOffsets(range(span.begin, span.end), after, after, span.read_from)

    @property
    def span_size(self) -> int:
        """In rows."""
        return CHUNK_ROWS

    def span_reader(self) -> SpanReader:
        """A reader that keeps its position in the current row group."""
        return ParquetSpanReader(self)

    def _from(self, path: str, file: pq.ParquetFile, ends: list[int], offset: int) -> Iterator[Chunk]:
        """The rows of an open file whose row groups end at these rows, from row `offset` on."""
        for group in range(bisect_right(ends, offset), len(ends)):
            yield from self._group(path, file, group, ends[group - 1] if group else 0, offset)

    def _group(self, path: str, file: pq.ParquetFile, group: int, begin: int, offset: int) -> Iterator[Chunk]:
        decoded = file.iter_batches(CHUNK_ROWS, row_groups=[group], columns=_leaves(file, self.columns))
        while True:
            try:
                rows = next(decoded, None)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path}, row group {group}: {error}; the file is damaged, write it again") from error
            if rows is None:
                return
            skip = min(max(offset - begin, 0), rows.num_rows)
            begin += rows.num_rows
            if skip < rows.num_rows:
                ends = np.arange(begin - rows.num_rows + skip + 1, begin + 1)
                yield Chunk(path, pa.Table.from_batches([rows.slice(skip)]), ends, ends)

    def _check_schema(self, path: str, schema: pa.Schema) -> None:
        for name in self.columns:
            root, fields = split_path(name, schema.names)
            if root not in schema.names:
                raise DataError(
                    f"{path} has no column {name!r}, which the features need; {choices(name, schema.names)}"
                )
            try:
                found = _family(field_type(root, schema.field(root).type, fields))
            except DataError as error:
                raise DataError(f"{path}: {error}") from None
            expected = self._families.get(name, "null")
            if found != expected and "null" not in (found, expected):
                raise DataError(
                    f"{path}: column {name!r} holds {found} values but {expected} values in {self.first}; write both "
                    "files with one type, or the same value gets two keys"
                )

    @cached_property
    def _families(self) -> dict[str, str]:
        with _open(self.first) as file:
            schema = file.schema_arrow
        families = {}
        for name in self.columns:
            root, fields = split_path(name, schema.names)
            if root in schema.names:
                families[name] = _family(field_type(root, schema.field(root).type, fields))
        return families


class ParquetSpanReader:
    """Reads spans of rows, and keeps its position for the next span.

    The file stays open, so a span behind skipped row groups does not read the footer again.
    """

    def __init__(self, reader: ParquetReader) -> None:
        self._reader = reader
        self._path = ""
        self._file: pq.ParquetFile | None = None
        self._ends: list[int] = []
        self._at = 0
        self._rest: Chunk | None = None
        self._chunks: Iterator[Chunk] = iter(())

    def __call__(self, path: str, span: Span, number: int, rejects: Rejects) -> Iterator[Chunk]:
        """The rows of the span."""
        if path != self._path or not span.read_from <= self._at <= span.begin:
            if path != self._path:
                self._open(path)
            assert self._file is not None
            self._at, self._rest = span.begin, None
            self._chunks = self._reader._from(path, self._file, self._ends, span.begin)
        try:
            yield from self._rows(span)
        except BaseException:
            self._path = ""  # after an error the next span opens the file again
            raise

    def _open(self, path: str) -> None:
        if self._file is not None:
            self._file.close()
        self._path, self._file = "", _open(path)
        self._reader._check_schema(path, self._file.schema_arrow)
        self._path, self._ends = path, _group_ends(self._file)

    def _rows(self, span: Span) -> Iterator[Chunk]:
        while True:
            chunk = self._rest or next(self._chunks, None)
            if chunk is None:
                if self._at < span.end:
                    raise DataError(f"{self._path} has lost rows after {self._at} while it was read; put it back")
                return
            first, last = (int(row) for row in np.searchsorted(chunk.ends, [span.begin, span.end], side="right"))
            self._at = max(self._at, min(int(chunk.ends[-1]), span.end))
            self._rest = chunk.slice(last, len(chunk.ends)) if last < len(chunk.ends) else None
            if first < last:
                yield chunk.slice(first, last)
            if self._at >= span.end:
                return


def _group_ends(file: pq.ParquetFile) -> list[int]:
    """The row number after each row group."""
    sizes = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
    return list(itertools.accumulate(sizes))


def _spans(ends: list[int], offset: int) -> Iterator[Span]:
    """Spans of up to CHUNK_ROWS rows, from row `offset` on, of row groups that end at these rows."""
    for group in range(bisect_right(ends, offset), len(ends)):
        begin = ends[group - 1] if group else 0
        for at in range(begin, ends[group], CHUNK_ROWS):
            end = min(at + CHUNK_ROWS, ends[group])
            if end > offset:
                yield Span(max(at, offset), end, max(at, offset), begin)


def _leaves(file: pq.ParquetFile, columns: tuple[str, ...]) -> list[str]:
    """The columns to decode: of a nested column only the fields that are needed."""
    schema = file.schema_arrow
    paths = {file.schema.column(i).path for i in range(len(file.schema))}
    leaves = []
    for name in columns:
        root, fields = split_path(name, schema.names)
        leaf = _leaf(root, schema.field(root).type, fields) if fields else root
        leaves.append(leaf if leaf in paths else root)
    return list(dict.fromkeys(leaves))


def _leaf(root: str, kind: pa.DataType, fields: list[str]) -> str:
    """The path of a field in a file that Arrow wrote: a list adds two levels. Other writers' files are read whole."""
    t = pa.types
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return _leaf(f"{root}.list.element", kind.value_type, fields)
    if not fields or not t.is_struct(kind):
        return root
    return _leaf(f"{root}.{fields[0]}", kind.field(fields[0]).type, fields[1:])


def _open(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}); it is another kind of file or damaged") from error


def _family(kind: pa.DataType) -> str:
    """The family of types that give the same key for the same value."""
    t = pa.types
    if t.is_dictionary(kind):
        return _family(kind.value_type)
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return f"lists of {_family(kind.value_type)}"
    if t.is_integer(kind) or t.is_boolean(kind):
        return "integer"
    if t.is_floating(kind) or t.is_decimal(kind):
        return "float"
    text = ("string", "binary", "fixed_size_binary")
    return "string" if str(kind).removeprefix("large_").removesuffix("_view").startswith(text) else str(kind)
