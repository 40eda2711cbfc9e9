"""GeneratedStream: what synthetic sources share. A batch is computed from the number of its first example.

Every example depends on the source's options and its own number alone. So any range is a source, a cursor is the number
of the next example, and a unit of work is a range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hotrow.batch import KeyedBatch
from hotrow.data.source import Cursor, cursor_number, match_cursor
from hotrow.data.split import DecodedUnit, DecodedUnits, Unit, finished_batches
from hotrow.data.strided import Steps, finished_steps
from hotrow.errors import DataError

UNIT_EXAMPLES = 16_384


class GeneratedStream:
    """Streams examples `offset` to `offset + examples`. A subclass computes them in `batch`."""

    kind: str  # in cursors
    same: str  # the cure for a cursor of other options
    examples: int
    batch_size: int
    offset: int

    @property
    def unit_examples(self) -> int:
        """How many examples a worker makes at once."""
        return UNIT_EXAMPLES

    @property
    def _stamp(self) -> str:
        """A digest of all options that decide an example."""
        raise NotImplementedError

    def batch(self, start: int, count: int) -> KeyedBatch:
        """Examples start to start + count."""
        raise NotImplementedError

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """Batches from example `offset` on, or after the batch that came with `cursor`."""
        return self._stream(self._find_start(cursor), self.offset + self.examples)

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit]:
        """Units of some batches each."""
        step = self.batch_size * max(1, self.unit_examples // self.batch_size)
        end = self.offset + self.examples
        return ({"start": at, "end": min(at + step, end)} for at in range(self._find_start(cursor), end, step))

    def decoder(self) -> GeneratedStream:
        """This source itself."""
        return self

    def decode(self, unit: Unit) -> DecodedUnit:
        """The batches of one unit."""
        made = list(self._stream(unit["start"], unit["end"]))
        return DecodedUnit([batch for batch, _ in made], notes={"cursors": [cursor for _, cursor in made]})

    def assemble(
        self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """The batches of all units."""
        return finished_batches(parts)

    def every(self, number: int, of: int, cursor: Cursor | None = None) -> Steps:
        """Batch `number` of every `of` batches, None where the stream has ended before it, with the cursor after all.

        >>> import hotrow as hr
        >>> [b and b.size for b, _ in hr.data.synthetic(examples=10, batch_size=4).every(1, 2)]
        [4, None]
        """
        return self._steps(number, of, self._find_start(cursor), self.offset + self.examples)

    def strided(self, number: int, of: int) -> StridedSynthetic:
        """Batch `number` of every `of` batches, as units that any worker can generate."""
        return StridedSynthetic(self, number, of)

    def _stream(self, start: int, end: int) -> Iterator[tuple[KeyedBatch, Cursor]]:
        for at in range(start, end, self.batch_size):
            count = min(self.batch_size, end - at)
            yield self.batch(at, count), self._cursor(at + count)

    def _steps(self, number: int, of: int, start: int, end: int) -> Steps:
        for first in range(start, end, self.batch_size * of):
            at = first + number * self.batch_size
            batch = self.batch(at, min(self.batch_size, end - at)) if at < end else None
            yield batch, self._cursor(min(end, first + self.batch_size * of))

    def _cursor(self, following: int) -> Cursor:
        return {
            "source": self.kind,
            "batch_size": self.batch_size,
            "offset": self.offset,
            "world": self._stamp,
            "next": following,
        }

    def _find_start(self, cursor: Cursor | None) -> int:
        if cursor is None:
            return self.offset
        cures = {
            "source": "resume with the kind of source that made the cursor",
            "batch_size": f"pass batch_size={cursor.get('batch_size')}",
            "offset": f"pass offset={cursor.get('offset')}",
            "world": self.same,
        }
        mine = self._cursor(0)
        match_cursor(cursor, {name: mine[name] for name in cures}, cures)
        start, end = cursor_number(cursor, "next"), self.offset + self.examples
        if start > end or (start < end and (start - self.offset) % self.batch_size):
            raise DataError(
                f"the cursor does not fit this source: it stands before example {start}, where no batch of this source "
                f"begins (examples {self.offset} to {end}); pass the same examples= as before"
            )
        return start


@dataclass(frozen=True)
class StridedSynthetic:
    """Batch `number` of every `of` batches of a synthetic source. A unit is a range of steps."""

    source: GeneratedStream
    number: int
    of: int

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit]:
        """Units of some steps each."""
        source = self.source
        step = source.batch_size * self.of * max(1, source.unit_examples // source.batch_size)
        start, end = source._find_start(cursor), source.offset + source.examples
        return ({"start": at, "end": min(at + step, end)} for at in range(start, end, step))

    def decoder(self) -> StridedSynthetic:
        """This object itself."""
        return self

    def decode(self, unit: Unit) -> DecodedUnit:
        """The own batches of one unit."""
        made = list(self.source._steps(self.number, self.of, unit["start"], unit["end"]))
        own = [batch for batch, _ in made if batch is not None]
        return DecodedUnit(own, notes={"cursors": [cursor for _, cursor in made]})

    def assemble(self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]) -> Steps:
        """The own batches of all units."""
        return finished_steps(parts)
