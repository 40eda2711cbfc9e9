"""File units: the units of work of a list of files, and their decoding on any worker.

A unit is a span of one file (chunks.py). Its result has the features of the span's rows, with each row's end offset and
number. In a text file the number of lines before a span is not known without reading, so a worker numbers lines from
the start of its span. `number_rows` runs on the trainer, sees the results in order, and adds the lines before. An error
message names its line, so a unit that failed is decoded again with the right first number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hotrow.batch import KeyedBatch
from hotrow.data.event_log.builder import Piece
from hotrow.data.files.chunks import Chunk, Reader, Span
from hotrow.data.rejects import Rejects
from hotrow.data.split import DecodedUnit, DecodedUnits, Unit
from hotrow.errors import DataError
from hotrow.features import FeatureSpec, RowError
from hotrow.features.hashing import IntArray


@dataclass(frozen=True)
class Rows:
    """The features of some rows of file number `file`, and each row's end offset and number; with histories, the piece
    of the log that they came from."""

    file: int
    batch: KeyedBatch
    ends: IntArray
    numbers: IntArray
    piece: Piece | None = None


def file_units(reader: Reader, paths: tuple[str, ...], first: int, offset: int, number: int) -> Iterator[Unit] | None:
    """The spans of all files from file `first`, `offset` on, or None if some file has no spans."""
    spans = [
        reader.spans(path, *((offset, number) if index == first else (0, 0)))
        for index, path in enumerate(paths[first:], first)
    ]
    if any(found is None for found in spans):
        return None
    return (
        {"file": index, "begin": span.begin, "end": span.end, "number": span.number, "read_from": span.read_from}
        for index, found in enumerate(spans, first)
        for span in found or ()
    )


class FileDecoder:
    """Decodes spans of files."""

    def __init__(self, paths: tuple[str, ...], reader: Reader, features: FeatureSpec, on_error: str) -> None:
        self._paths, self._features = paths, features
        self._on_error, self._unit = on_error, reader.unit
        self._read = reader.span_reader()

    def decode(self, unit: Unit) -> DecodedUnit:
        """The features of the rows of a span."""
        part, rejects = DecodedUnit(), Rejects(self._on_error, self._unit)
        span = Span(unit["begin"], unit["end"], unit["number"], unit["read_from"])
        try:
            for chunk in self._read(self._paths[unit["file"]], span, span.number or 0, rejects):
                for batch, used in apply_features(self._features, chunk, rejects):
                    if batch.size:
                        part.batches.append(batch)
                        part.positions.append((used.ends, used.numbers))
        except Exception as error:
            part.error = error
        part.notes = {"lines": rejects.lines, "skipped": rejects.count, "first": rejects.first}
        return part


def number_rows(
    parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit], first: int, number: int, rejects: Rejects
) -> Iterator[Rows]:
    """The rows of all units, numbered from each file's start; `number` rows of file `first` came before."""
    file, before = first, number
    for unit, given in parts:
        if unit["file"] != file:
            file, before = unit["file"], 0
        part, known = given, unit["number"] is not None
        if part.error is not None and not known:
            part, known = decode_now({**unit, "number": before}), True
        shift = 0 if known else before
        for batch, (ends, numbers) in zip(part.batches, part.positions, strict=True):
            yield Rows(file, batch, ends, numbers + shift)
        rejects.merge(part.notes["skipped"], part.notes["first"], shift)
        before += part.notes["lines"]
        part.check()


def apply_features(features: FeatureSpec, chunk: Chunk, rejects: Rejects) -> Iterator[tuple[KeyedBatch, Chunk]]:
    """The chunk's batch, and the rows that are in it. Rows that the spec refuses go to `rejects`.

    The rows before a bad one are yielded before its error is raised, so what precedes an error does not depend on how
    the file was cut into chunks.
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
