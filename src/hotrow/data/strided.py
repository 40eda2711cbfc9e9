"""Share: every N-th batch of a source, without the work for those between.

Rank r of N takes batches r, r + N, r + 2N, ... of one stream, in steps of N batches: one of its own (None where the
stream has ended before it) and the cursor after all N. `source.every(r, N, cursor)` streams them. A share is what can
be decoded elsewhere of that, with the methods of split.py: its units hold only rows of its own batches.

Where what a row is depends on what is in it (rows that are skipped, lines in a gzip file), nothing can be passed over:
`deal` reads all and drops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from hotrow.batch import KeyedBatch
from hotrow.data.source import Cursor, Source
from hotrow.data.split import Decoder, Part, Parts, Unit

Steps: TypeAlias = Iterator[tuple[KeyedBatch | None, Cursor]]
"""Of each step the own batch, or None in a last step that ends before it, and the cursor after the step."""


class Share(Protocol):
    """A part of a source's batches, whose parts can be decoded by others."""

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit] | None:
        """What there is to decode after the cursor, or None if this source has to be read whole."""

    def decoder(self) -> Decoder:
        """A decoder; it is fastest when it gets units in order."""

    def assemble(self, cursor: Cursor | None, parts: Parts, ask: Callable[[Unit], Part]) -> Steps:
        """The steps after the cursor out of the parts of all units."""


@runtime_checkable
class Sharable(Protocol):
    """A source with shares."""

    def share(self, number: int, of: int) -> Share:
        """Batch `number` of every `of` batches."""


def deal(batches: Iterator[tuple[KeyedBatch, Cursor]], number: int, of: int) -> Steps:
    """The steps of a stream that is read whole.

    >>> import torch
    >>> stream = [(KeyedBatch({}, labels=torch.zeros(n)), {"at": n}) for n in (1, 2, 3)]
    >>> [(batch and batch.size, cursor) for batch, cursor in deal(iter(stream), 1, 2)]
    [(2, {'at': 2}), (None, {'at': 3})]
    """
    while step := list(itertools.islice(batches, of)):
        yield step[number][0] if number < len(step) else None, step[-1][1]


def steps_of(source: Source, number: int, of: int, cursor: Cursor | None) -> Steps:
    """The steps of any source, by its own `every` if it has one."""
    every = getattr(source, "every", None)
    found: Steps = every(number, of, cursor) if every is not None else deal(source.batches(cursor), number, of)
    return found


@dataclass(frozen=True)
class Dealt:
    """A source's steps in place of its batches, for one worker that reads them all (split.py's `Serial`)."""

    source: Source
    number: int
    of: int

    def batches(self, cursor: Cursor | None = None) -> Steps:
        """The steps after the cursor."""
        return steps_of(self.source, self.number, self.of, cursor)


def whole_steps(parts: Parts) -> Steps:
    """Steps of parts that hold finished batches; the last of all may have a cursor alone."""
    for _, part in parts:
        yield from itertools.zip_longest(part.batches, part.notes["cursors"])
        part.check()
