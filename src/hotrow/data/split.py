"""Split: how a source lets others decode its parts, with the very batches and cursors of reading it in one go.

Three steps, of which only the second is work and only the second leaves the trainer:

    units(cursor)            what there is to decode after the cursor, in order, found without decoding anything
    decoder().decode(unit)   one unit's examples; any worker, any order, as often as need be: always the same Part
    assemble(cursor, parts)  the parts, in order again, cut into batches, each with its cursor

A unit is a few plain numbers, so a worker that dies takes nothing with it: somebody else decodes the unit again. Units
need not be batches. Those of a file are stretches of it, because nobody knows in which byte batch 1,000 begins; cutting
their examples into batches takes no time, and `batches` of the file source itself goes through the same lines.

`share(number, of)` (share.py) gives the same three for every N-th batch alone, for ranks that each want their own.

A source without these methods (yours, or one of gzip files) is `Serial`: one unit is the next few batches after a
cursor, and is known only when the one before it has been decoded. One worker at a time reads it, ahead of the trainer.
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
class Part:
    """What became of one unit: batches, arrays that go with each of them, plain notes, and the error that ended it.

    The batches of a part that ends in an error are those before it.
    """

    batches: list[KeyedBatch] = field(default_factory=list)
    marks: list[tuple[IntArray, ...]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def check(self) -> None:
        """Raise the error, if there is one; call it after the batches have been used."""
        if self.error is not None:
            raise self.error


Parts: TypeAlias = Iterator[tuple[Unit, Part]]


class Decoder(Protocol):
    """Decodes units of one source. May remember where it stands in a file, so one thread at a time."""

    def decode(self, unit: Unit) -> Part:
        """The unit's part; errors in the data are in it, not raised."""


@runtime_checkable
class Splittable(Protocol):
    """A source whose parts can be decoded by others."""

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit] | None:
        """What there is to decode after the cursor, or None if this source cannot be split."""

    def decoder(self) -> Decoder:
        """A decoder; it is fastest when it gets units in order."""

    def assemble(
        self, cursor: Cursor | None, parts: Parts, ask: Callable[[Unit], Part]
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """The batches after the cursor out of the parts of all units; `ask` decodes one more unit, and waits for it."""


def whole_batches(parts: Parts) -> Iterator[tuple[KeyedBatch, Cursor]]:
    """Batches of parts that hold finished ones, each with its cursor."""
    for _, part in parts:
        yield from zip(part.batches, part.notes["cursors"], strict=True)
        part.check()


class Stream(Protocol):
    """What can be read after a cursor."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch | None, Cursor]]:
        """Batches after the cursor."""


class Serial:
    """Decodes the next batches of any source after a cursor; goes on where it stands if that is the same cursor.

    Of every N-th batch (share.py) the last may be None, and is then the cursor without a batch.
    """

    def __init__(self, source: Stream) -> None:
        self._source = source
        self._stream: Iterator[tuple[KeyedBatch | None, Cursor]] | None = None
        self._after: Cursor | None = None

    def decode(self, unit: Unit) -> Part:
        """Some batches after unit["cursor"]; notes["ended"] if there are no more."""
        part = Part(notes={"cursors": [], "ended": False})
        try:
            if self._stream is None or self._after != unit["cursor"]:
                self._stream = self._source.batches(unit["cursor"])
            self._fill(part, self._stream)
        except Exception as error:
            part.error, self._stream = error, None
        return part

    def _fill(self, part: Part, stream: Iterator[tuple[KeyedBatch | None, Cursor]]) -> None:
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
    for jagged in batch.ids.values():
        yield from (part for part in (jagged.values, jagged.offsets, jagged.weights) if part is not None)
    yield from (part for part in (batch.dense, batch.labels, batch.time) if part is not None)
