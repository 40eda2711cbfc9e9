"""Numbers, EventTimes and TimeGap: integers of a history's events that are not hashed.

`Numbers` (a dwell time, a price in cents) and `EventTimes` (milliseconds since 1970) become `batch.numbers[name]`,
int64 values that reach the tower as they are. `TimeGap` becomes a key, for a table of its own: the bucket of the
time between an event and the one before it, or between an event and its example. Bucket k > 0 holds the gaps from
2 ** k - 1 seconds to below 2 ** (k + 1) - 1: floor(log2(1 + milliseconds / 1000)), computed by comparing integers, so
that no math library decides a key.

Gaps are computed after the history was cut. So they depend on the events that the model reads and on no others, and a
server that is sent the last `max_length` events makes the same keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from hotrow.errors import OptionError
from hotrow.features.columns import Column
from hotrow.features.hashing import BoolArray, IntArray
from hotrow.features.keys import offsets_of
from hotrow.features.options import check_choice, check_history, check_separator
from hotrow.features.sequences import list_items, parse_integers, present_items
from hotrow.features.times import milliseconds

SINCE = ("previous", "example")
GAP_STARTS = 1000 * ((np.int64(1) << np.arange(1, 53, dtype=np.int64)) - 1)
"""The milliseconds at which bucket 1, 2, ... of TimeGap begins."""
FIRST_EVENT = 53
"""The key of TimeGap for the first event of a history, which has no event before it."""


@dataclass(frozen=True)
class Numbers:
    """Integers of a list column as they are: `batch.numbers[name]`, int64.

    A column of plain integers gives one number per example. missing: the number of a null; without it, an event whose
    number is null is dropped from all columns of its history. Text, with separator=, is read as decimal integers.
    """

    name: str
    column: str | None = None
    max_length: int | None = None
    keep: str | None = None
    separator: str | None = None
    missing: int | None = None
    aligned: str | None = None

    def __post_init__(self) -> None:
        check_history(self)
        check_separator(self.name, self.separator)
        missing = self.missing
        whole = isinstance(missing, int) and not isinstance(missing, bool) and -(1 << 63) <= missing < 1 << 63
        if missing is not None and not whole:
            raise OptionError(f"feature {self.name!r}: missing={missing!r}; give an integer of 64 bits, or None")

    single = False

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def items(self, column: Column) -> tuple[pa.Array, IntArray]:
        """All items of all examples, and how many each example has."""
        return list_items(_as_lists(column, self.aligned), self.name, self.separator)

    def present(self, items: pa.Array) -> BoolArray | None:
        """Which events are kept; None if all are."""
        return None if self.missing is not None else present_items(items)

    def values(self, column: str, items: pa.Array, lengths: IntArray) -> IntArray:
        """The number of every item."""
        kind, t = items.type, pa.types
        if t.is_null(kind):
            return np.full(len(items), self.missing or 0, np.int64)
        if self.separator is not None:
            items = parse_integers(column, items, lengths)
        elif t.is_duration(kind):
            items = items.cast(pa.duration("ms"), safe=False).cast(pa.int64())
        elif not (t.is_integer(kind) or t.is_boolean(kind)) or t.is_uint64(kind):
            raise Column(column, items).wrong_type(
                f"feature {self.name!r} needs integers of 64 bits",
                "round and cast it, for example dwell seconds to milliseconds, or use EventTimes for timestamps",
            )
        plain = items.cast(pa.int64()).fill_null(self.missing or 0)
        return np.array(plain.to_numpy(zero_copy_only=False), np.int64)


@dataclass(frozen=True)
class EventTimes:
    """The times of a history's events in milliseconds: `batch.numbers[name]`, int64.

    The column is lists of integer milliseconds, timestamps or dates; a plain column gives one time per example. Times
    of a history must not run backwards. sort=True sorts the events of all its columns by this time, equal times in the
    order of the list.
    """

    name: str
    column: str | None = None
    max_length: int | None = None
    keep: str | None = None
    sort: bool = False
    aligned: str | None = None

    def __post_init__(self) -> None:
        check_history(self)
        _check_sort(self.name, self.sort)

    single = False

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def items(self, column: Column) -> tuple[pa.Array, IntArray]:
        """All items of all examples, and how many each example has."""
        return list_items(_as_lists(column, self.aligned), self.name, None)

    def present(self, items: pa.Array) -> BoolArray | None:
        """Which events have a time; None if all do."""
        return present_items(items)

    def values(self, column: str, items: pa.Array, lengths: IntArray) -> IntArray:
        """The milliseconds of every item."""
        return milliseconds(Column(column, items))[0]


@dataclass(frozen=True)
class TimeGap:
    """The bucket of a time gap as a key, one for each event of a history.

    since: "previous" (the time since the event before it; the first event has the key 53) or "example" (the time from
    the event to its example, whose time is the spec's `time` column). Bucket 0 is below 1 s, then 1 s, 3 s, 7 s, 15 s,
    ...: floor(log2(1 + seconds)). A negative gap has the bucket 0. sort: as for EventTimes.
    """

    name: str
    column: str | None = None
    max_length: int | None = None
    keep: str | None = None
    since: str = "previous"
    sort: bool = False
    aligned: str | None = None

    def __post_init__(self) -> None:
        check_history(self)
        check_choice(self.name, "since", self.since, SINCE)
        _check_sort(self.name, self.sort)

    single = False

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def items(self, column: Column) -> tuple[pa.Array, IntArray]:
        """All items of all examples, and how many each example has."""
        return list_items(column, self.name, None)

    def present(self, items: pa.Array) -> BoolArray | None:
        """Which events have a time; None if all do."""
        return present_items(items)

    def values(self, column: str, items: pa.Array, lengths: IntArray) -> IntArray:
        """The milliseconds of every item; `gaps` makes keys of them."""
        return milliseconds(Column(column, items))[0]

    def gaps(self, times: IntArray, lengths: IntArray, example: IntArray | None) -> IntArray:
        """The key of every event. Requires: with since="example", the time of each example."""
        if self.since == "example":
            assert example is not None
            return gap_buckets(np.repeat(example, lengths) - times)
        keys = np.zeros(len(times), np.int64)
        keys[1:] = gap_buckets(times[1:] - times[:-1])
        keys[offsets_of(lengths)[:-1][lengths > 0]] = FIRST_EVENT
        return keys


def gap_buckets(gaps: IntArray) -> IntArray:
    """floor(log2(1 + milliseconds / 1000)) of every gap; a negative one counts as 0.

    >>> gap_buckets(np.array([-5, 999, 1000, 2999, 3000, 86_400_000]))
    array([ 0,  0,  1,  1,  2, 16])
    """
    return np.searchsorted(GAP_STARTS, gaps, side="right").astype(np.int64)


def _check_sort(name: str, sort: object) -> None:
    if not isinstance(sort, bool):
        raise OptionError(f"feature {name!r}: sort={sort!r}; give True or False")


def _as_lists(column: Column, aligned: str | None) -> Column:
    """A plain column as lists of one item, so that Numbers and EventTimes take one value per example, too."""
    kind, t = column.array.type, pa.types
    nested = t.is_nested(kind) or t.is_null(kind) or t.is_string(kind) or t.is_large_string(kind)
    if nested or aligned is not None:
        return column
    offsets = pa.array(np.arange(len(column) + 1))
    return Column(column.name, pa.LargeListArray.from_arrays(offsets, column.array))
