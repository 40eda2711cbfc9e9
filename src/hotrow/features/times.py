"""Event times: milliseconds since 1970-01-01 UTC, and their hour and weekday.

A time column is integers, which are milliseconds, or Arrow timestamps and dates of any unit, rounded down to the
millisecond. Arrow stores a timestamp with a time zone in UTC, so the zone changes nothing; one without is taken as UTC.
Floats are refused, because seconds and milliseconds could not be distinguished.

`TimePart` makes a key of the hour or the weekday (UTC) with integer arithmetic, so it is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from hotrow.batch import Jagged
from hotrow.features.columns import Column
from hotrow.features.hashing import BoolArray, IntArray
from hotrow.features.keys import fill_missing
from hotrow.features.options import check_choice, set_default_column
from hotrow.features.row_error import refuse_rows

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS

PARTS = {"hour": 24, "weekday": 7}
"""Each part and how many values it has; a missing time gets the number after the last value."""

_PER_MS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


@dataclass(frozen=True)
class TimePart:
    """The hour of the day (0 to 23) or the weekday (Monday 0 to Sunday 6) of a time, in UTC, as a key.

    A missing time has the key 24 or 7.

    >>> TimePart("hour", "time", part="hour").ids(Column("time", pa.array([7_200_000, None]))).values
    tensor([ 2, 24])
    """

    name: str
    column: str | None = None
    part: str = "hour"

    def __post_init__(self) -> None:
        set_default_column(self)
        check_choice(self.name, "part", self.part, tuple(PARTS))

    single = True

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def ids(self, column: Column) -> Jagged:
        """The part of every time."""
        time, missing = milliseconds(column)
        # 1970-01-01 was a Thursday, the third day after Monday.
        part = time // HOUR_MS % 24 if self.part == "hour" else (time // DAY_MS + 3) % 7
        return Jagged(torch.from_numpy(fill_missing(part, missing, PARTS[self.part])))


def milliseconds(column: Column) -> tuple[IntArray, BoolArray | None]:
    """Milliseconds since 1970 of every row, 0 where missing, and the mask of missing rows (None if there are none).

    >>> import datetime
    >>> milliseconds(Column("t", pa.array([datetime.datetime(1970, 1, 2)])))
    (array([86400000]), None)
    """
    array, kind, t = column.array, column.array.type, pa.types
    missing = column.missing()
    if t.is_null(kind):
        return np.zeros(len(array), np.int64), missing
    if t.is_timestamp(kind):
        times, per = array.cast(pa.int64()), _PER_MS[kind.unit]
    elif t.is_date32(kind):
        times, per = array.cast(pa.int32()).cast(pa.int64()), (DAY_MS, 1)
    elif t.is_date64(kind) or (t.is_integer(kind) and not t.is_uint64(kind)):
        times, per = array.cast(pa.int64()), (1, 1)
    else:
        raise column.wrong_type(
            "a time is integer milliseconds or a timestamp", "cast it, for example column.cast(pyarrow.timestamp('ms'))"
        )
    raw = np.array(times.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    return raw * per[0] // per[1], missing


def event_time(column: Column) -> IntArray:
    """The event time of every example; a missing one is an error, since time decides what has expired.

    >>> event_time(Column("t", pa.array([5, 6])))
    array([5, 6])
    """
    time, missing = milliseconds(column)
    if missing is not None:
        refuse_rows(column.name, missing, column.array, "the event time is missing; drop the row")
    return time
