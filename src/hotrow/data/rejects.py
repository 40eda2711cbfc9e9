"""Rejects: what happens to a row that cannot be used.

One policy for all that can be wrong with a row, whether a line has a column too few or the feature spec refuses a
value: `on_error="raise"` stops with the file, the line and the column; `on_error="skip"` counts the row and goes on.
Skipping is for rows. A file that is corrupt, or a column that is absent, stops the source either way, and so does a
pass in which every single row was skipped: that is a wrong layout, not a few bad rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotrow.errors import DataError, OptionError, choices

POLICIES = ("raise", "skip")


@dataclass
class Rejects:
    """The rows that one pass refused. `unit` is what a row is called in a message: line or row."""

    on_error: str
    unit: str
    count: int = 0
    first: str = ""

    def add(self, path: str, number: int, column: str | None, fact: str, rows: int = 1) -> None:
        """Refuse `rows` rows, the first of which is number `number` of the file."""
        place = f"{path}, {self.unit} {number}" + (f", column {column!r}" if column else "")
        if self.on_error == "raise":
            more = f" (and {rows - 1} more {self.unit}s)" if rows > 1 else ""
            raise DataError(f'{place}: {fact}{more}; mend the file, or pass on_error="skip" to leave such rows out')
        self.first = self.first or f"{place}: {fact}"
        self.count += rows

    def check_some_passed(self) -> None:
        """Called after a pass that gave no example at all."""
        if self.count:
            raise DataError(
                f"all {self.count} {self.unit}s were skipped, so the layout or the features are wrong; the first: "
                f"{self.first}"
            )


def check_policy(on_error: str) -> str:
    """The option on_error."""
    if on_error not in POLICIES:
        raise OptionError(f"on_error={on_error!r}; {choices(on_error, POLICIES)}")
    return on_error
