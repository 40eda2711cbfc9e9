"""Rejects: the policy for a row that cannot be used.

A row is bad when its line has the wrong number of columns or the feature spec refuses a value. `on_error="raise"`
stops with the file, the line and the column. `on_error="skip"` counts the row and continues. A corrupt file or a
missing column is an error under both policies. So is a pass that skipped every row: then the layout is wrong.

A worker that decodes part of a text file does not know how many lines come before it (files/file_units.py). It keeps
its own `Rejects`, numbered from the start of its part, and `merge` adds them to those of the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hotrow.errors import DataError, OptionError, choices

POLICIES = ("raise", "skip")

Reject: TypeAlias = tuple[str, int, str | None, str]
"""Path, number of the row, column if it is one column's fault, and what is wrong."""


@dataclass
class Rejects:
    """The rows that one pass refused. `unit` is "line" or "row", for messages.

    `lines` counts every line that a text reader has read: good, bad, blank and header.
    """

    on_error: str
    unit: str
    count: int = 0
    first: Reject | None = None
    lines: int = 0

    def add(self, path: str, number: int, column: str | None, fact: str, rows: int = 1) -> None:
        """Refuse `rows` rows, the first of which is number `number` of the file."""
        reject = (path, number, column, fact)
        if self.on_error == "raise":
            more = f" (and {rows - 1} more {self.unit}s)" if rows > 1 else ""
            message = self._format(reject)
            raise DataError(f'{message}{more}; repair the file, or pass on_error="skip" to leave such rows out')
        self.first = self.first or reject
        self.count += rows

    def merge(self, count: int, first: Reject | None, before: int) -> None:
        """Add the rejects of a part of a file; `before` rows come before that part."""
        if first is not None:
            path, number, column, fact = first
            self.first = self.first or (path, number + before, column, fact)
        self.count += count

    def check_some_passed(self) -> None:
        """Raise if every row was skipped. Call it after a pass without a single example."""
        if self.first is not None:
            raise DataError(
                f"all {self.count} {self.unit}s were skipped, so the layout or the features are wrong; the first: "
                f"{self._format(self.first)}"
            )

    def _format(self, reject: Reject) -> str:
        path, number, column, fact = reject
        return f"{path}, {self.unit} {number}" + (f", column {column!r}" if column else "") + f": {fact}"


def check_policy(on_error: str) -> str:
    """The option on_error."""
    if on_error not in POLICIES:
        raise OptionError(f"on_error={on_error!r}; {choices(on_error, POLICIES)}")
    return on_error
