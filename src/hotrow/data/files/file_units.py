"""File parts: the units of a list of files, and one unit decoded, wherever that is.

A unit is a span of one file (chunks.py). Its part has the features of the span's rows, with each row's end and number.
In a text file only reading tells how many lines came before a span, so a part may number its lines from its own start;
`number_rows` on the trainer, which sees the parts in order, adds what came before. An error names its line, so a part
that failed is decoded once more, knowing its first line's number this time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from hotrow.batch import KeyedBatch
from hotrow.data.files.chunks import Chunk, Reader, Span
from hotrow.data.rejects import Rejects
from hotrow.data.split import Part, Parts, Unit
from hotrow.errors import DataError
from hotrow.features import FeatureSpec, RowError
from hotrow.features.hashing import IntArray

Rows: TypeAlias = tuple[int, KeyedBatch, IntArray, IntArray]
"""Number of the file, the features of some rows of it, and each row's end and number."""


def file_units(reader: Reader, paths: tuple[str, ...], first: int, offset: int, number: int) -> Iterator[Unit] | None:
    """The spans of all files from file `first`, `offset` on, or None if there is a file without."""
    spans = [
        reader.spans(path, *((offset, number) if index == first else (0, 0)))
        for index, path in enumerate(paths[first:], first)
    ]
    if any(found is None for found in spans):
        return None
    return (
        {"file": index, "begin": span.begin, "end": span.end, "number": span.number, "root": span.root}
        for index, found in enumerate(spans, first)
        for span in found or ()
    )


class FileDecoder:
    """Decodes spans of files."""

    def __init__(self, paths: tuple[str, ...], reader: Reader, features: FeatureSpec, on_error: str) -> None:
        self._paths, self._features = paths, features
        self._on_error, self._unit = on_error, reader.unit
        self._read = reader.span_reader()

    def decode(self, unit: Unit) -> Part:
        """The features of the rows of a span."""
        part, rejects = Part(), Rejects(self._on_error, self._unit)
        span = Span(unit["begin"], unit["end"], unit["number"], unit["root"])
        try:
            for chunk in self._read(self._paths[unit["file"]], span, span.number or 0, rejects):
                for batch, used in apply_features(self._features, chunk, rejects):
                    if batch.size:
                        part.batches.append(batch)
                        part.marks.append((used.ends, used.numbers))
        except Exception as error:
            part.error = error
        part.notes = {"lines": rejects.lines, "skipped": rejects.count, "first": rejects.first}
        return part


def number_rows(parts: Parts, ask: Callable[[Unit], Part], first: int, number: int, rejects: Rejects) -> Iterator[Rows]:
    """The rows of all parts, numbered from each file's start; `number` rows of file `first` came before."""
    file, before = first, number
    for unit, given in parts:
        if unit["file"] != file:
            file, before = unit["file"], 0
        part, known = given, unit["number"] is not None
        if part.error is not None and not known:
            part, known = ask({**unit, "number": before}), True
        shift = 0 if known else before
        for batch, (ends, numbers) in zip(part.batches, part.marks, strict=True):
            yield file, batch, ends, numbers + shift
        rejects.merge(part.notes["skipped"], part.notes["first"], shift)
        before += part.notes["lines"]
        part.check()


def apply_features(features: FeatureSpec, chunk: Chunk, rejects: Rejects) -> Iterator[tuple[KeyedBatch, Chunk]]:
    """The chunk's batch, and the rows that are in it: those that the spec refuses go to `rejects`.

    The rows before one whose error is raised come out first, so what comes before an error does not depend on how a
    file was cut into chunks.
    """
    while True:
        try:
            batch = features.apply(chunk.table)
        except RowError as error:
            first = int(error.rows[0])
            if rejects.on_error == "raise" and first:
                yield from apply_features(features, chunk.slice(0, first), rejects)
            rejects.add(chunk.path, int(chunk.numbers[first]), error.column, error.fact, len(error.rows))
            chunk = chunk.without(error.rows)
        except DataError as error:
            raise DataError(f"{chunk.path}: {error}") from error
        else:
            yield batch, chunk
            return
