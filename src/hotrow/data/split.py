"""Split: a source as units of work that other processes can decode.

The result is the same as reading in one process: the same batches and the same cursors. Three steps; only the second is
expensive, and only the second runs on a worker:

    units(cursor)            the units after the cursor, in order, found without decoding anything
    decoder().decode(unit)   one unit's examples; any worker, in any order, always the same DecodedUnit
    assemble(cursor, parts)  the decoded units, in order again, cut into batches, each with its cursor

A unit is a few numbers, so a worker holds no state: when it dies, another one decodes the unit again. A unit is not a
batch. A unit of a file is a range of it, because the byte at which batch 1,000 begins is not known in advance.
`assemble` cuts the examples into batches at almost no cost, and `FileSource.batches` uses the same code.

`strided(number, of)` (strided.py) gives the same three steps for every N-th batch, for one rank.

`SerialDecoder` decodes a source without these methods (your own, or gzip files): a unit is the next few batches after a
cursor, and the following unit is known only after it. One worker at a time reads ahead of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.data.source import Cursor
from hotrow.features.hashing import IntArray

SERIAL_BYTES = 8 << 20
SERIAL_BATCHES = 64

Unit: TypeAlias = dict[str, Any]
"""Plain JSON-able values."""


@dataclass
class DecodedUnit:
    """The result of one unit: batches, arrays for each batch (row positions), JSON notes, and the error that ended it.

    A unit that ends in an error still has the batches before the error.
    """

    batches: list[KeyedBatch] = field(default_factory=list)
    positions: list[tuple[IntArray, ...]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def check(self) -> None:
        """Raise the error, if there is one. Call it after the batches have been consumed."""
        if self.error is not None:
            raise self.error


DecodedUnits: TypeAlias = Iterator[tuple[Unit, DecodedUnit]]


class Decoder(Protocol):
    """Decodes units of one source. It may keep a position in a file, so only one thread at a time may call it."""

    def decode(self, unit: Unit) -> DecodedUnit:
        """The unit's examples. An error in the data is returned in the result, not raised."""


@runtime_checkable
class Splittable(Protocol):
    """A source that can be decoded in units."""

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit] | None:
        """The units after the cursor, or None if this source cannot be split."""

    def decoder(self) -> Decoder:
        """A decoder; it is fastest when it gets units in order."""

    def assemble(
        self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """The batches after the cursor, from the decoded units. `decode_now` decodes one more unit and blocks."""


def finished_batches(parts: DecodedUnits) -> Iterator[tuple[KeyedBatch, Cursor]]:
    """The batches of units that were decoded into whole batches, each with its cursor."""
    for _, part in parts:
        yield from zip(part.batches, part.notes["cursors"], strict=True)
        part.check()


class Stream(Protocol):
    """Anything that streams batches after a cursor."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch | None, Cursor]]:
        """Batches after the cursor."""


class SerialDecoder:
    """Decodes the next batches of any source after a cursor. It keeps its stream open and reuses it when the next unit
    begins at the cursor where the previous one ended.

    In a strided stream (strided.py) the last batch may be None; then only its cursor is returned.
    """

    def __init__(self, source: Stream) -> None:
        self._source = source
        self._stream: Iterator[tuple[KeyedBatch | None, Cursor]] | None = None
        self._after: Cursor | None = None

    def decode(self, unit: Unit) -> DecodedUnit:
        """Some batches after unit["cursor"]; notes["ended"] is true at the end of the source."""
        part = DecodedUnit(notes={"cursors": [], "ended": False})
        try:
            if self._stream is None or self._after != unit["cursor"]:
                self._stream = self._source.batches(unit["cursor"])
            self._fill(part, self._stream)
        except Exception as error:
            part.error, self._stream = error, None
        return part

    def _fill(self, part: DecodedUnit, stream: Iterator[tuple[KeyedBatch | None, Cursor]]) -> None:
        size = 0
        while size < SERIAL_BYTES and len(part.batches) < SERIAL_BATCHES:
            found = next(stream, None)
            if found is None:
                part.notes["ended"], self._stream = True, None
                return
            batch, self._after = found
            part.notes["cursors"].append(self._after)
            if batch is not None:
                part.batches.append(batch)
                size += sum(tensor.nbytes for tensor in tensors_of(batch))


def tensors_of(batch: KeyedBatch) -> Iterator[Tensor]:
    """All tensors of a batch."""
    for jagged in (*batch.ids.values(), *batch.numbers.values()):
        yield from (part for part in (jagged.values, jagged.offsets, jagged.weights) if part is not None)
    yield from (part for part in (batch.dense, batch.labels, batch.time) if part is not None)
