"""RepeatedBatches: a source of batches drawn in advance, so that a benchmark measures no reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class RepeatedBatches:
    """The same batches again and again. A pass continues where the last one stopped. Each rank has its own."""

    examples = None

    def __init__(self, drawn: list[Any]) -> None:
        self.drawn, self.at = drawn, 0

    def batches(self, cursor: Any = None) -> Iterator[tuple[Any, Any]]:
        """Batches for ever."""
        while True:
            self.at += 1
            yield self.drawn[self.at % len(self.drawn)], {"next": self.at}

    def every(self, number: int, of: int, cursor: Any = None) -> Iterator[tuple[Any, Any]]:
        """The same stream on each rank."""
        return self.batches(cursor)

    def describe(self) -> str:
        """One line for a log."""
        return "batches drawn in advance"
