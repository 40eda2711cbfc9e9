"""Rejects: what happens to a row that cannot be used.

One policy for all that can be wrong with a row, whether a line has a column too few or the feature spec refuses a
value: `on_error="raise"` stops with the file, the line and the column; `on_error="skip"` counts the row and goes on.
Skipping is for rows. A file that is corrupt, or a column that is absent, stops the source either way, and so does a
pass in which every single row was skipped: that is a wrong layout, not a few bad rows.

Part of a file may be read where nobody knows how many lines came before it (file_parts.py): it has rejects of its own,
numbered from the part's start, which `merge` adds to those of the pass.
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
    """The rows that one pass refused. `unit` is what a row is called in a message: line or row.

    `lines` counts what a reader of lines has read: good, bad, blank and header.
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
            said = self._say(reject)
            raise DataError(f'{said}{more}; mend the file, or pass on_error="skip" to leave such rows out')
        self.first = self.first or reject
        self.count += rows

    def merge(self, count: int, first: Reject | None, before: int) -> None:
        """Add the rejects of a part of a file before which `before` rows stood."""
        if first is not None:
            path, number, column, fact = first
            self.first = self.first or (path, number + before, column, fact)
        self.count += count

    def check_some_passed(self) -> None:
        """Called after a pass that gave no example at all."""
        if self.first is not None:
            raise DataError(
                f"all {self.count} {self.unit}s were skipped, so the layout or the features are wrong; the first: "
                f"{self._say(self.first)}"
            )

    def _say(self, reject: Reject) -> str:
        path, number, column, fact = reject
        return f"{path}, {self.unit} {number}" + (f", column {column!r}" if column else "") + f": {fact}"


def check_policy(on_error: str) -> str:
    """The option on_error."""
    if on_error not in POLICIES:
        raise OptionError(f"on_error={on_error!r}; {choices(on_error, POLICIES)}")
    return on_error
