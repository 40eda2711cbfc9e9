"""RowError: values that a feature cannot use, and the rows that hold them.

A feature spec works on whole columns and does not know where a row came from; its caller does. So a spec that finds a
bad value reports *all* bad rows of that column, by number. A file source turns row 3,071 into ``day_3.txt, line
8,122``, or drops the bad rows if it was told to skip them.

A column that is absent or has a wrong type is a plain DataError instead, because skipping rows cannot cure it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow.errors import DataError


class RowError(DataError):
    """Some rows of one column cannot be used. `rows` are their numbers, from 0, ascending; `fact` describes the first
    one."""

    def __init__(self, column: str, rows: npt.NDArray[np.int64], fact: str) -> None:
        self.column = column
        self.rows = rows
        self.fact = fact
        more = f" (and {rows.size - 1} more rows)" if rows.size > 1 else ""
        super().__init__(f"row {int(rows[0])}, column {column!r}: {fact}{more}")


def refuse_rows(column: str, bad: npt.NDArray[np.bool_], values: Any, fact: str) -> None:
    """Raise a RowError if any of `bad` is set. `{}` in the fact is replaced by the first bad value.

    Requires: `values` can be indexed by row.
    """
    rows = np.flatnonzero(bad)
    if rows.size:
        raise RowError(column, rows, fact.replace("{}", repr(_to_python(values[int(rows[0])]))))


def _to_python(value: Any) -> object:
    """An Arrow or numpy scalar as a Python value, for a message."""
    for method in ("as_py", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value
