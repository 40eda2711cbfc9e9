"""Parse: whole lines of delimited text into Arrow columns, or a word on what is wrong with a line.

Arrow's CSV reader does the work, a block at a time, with quoting off so that a line is a line. It is fast but vague
about where it failed, so nobody asks it: `parse_lines` only says whether a run of lines is good, and text.py halves a
bad run until single lines are left. `explain_line` then finds the column, with the same parser on one column at a
time, so the two can never disagree about what is good.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
from pyarrow import csv  # type: ignore[import-untyped, unused-ignore]

from hotrow.data.layouts import TextLayout
from hotrow.features.hashing import IntArray

_TYPES = {"number": pa.float64(), "integer": pa.int64(), "string": pa.string(), "hour": pa.int64()}
_WORDS = {"number": "a number", "integer": "an integer", "string": "UTF-8 text", "hour": "an hour as YYMMDDHH"}


def parse_lines(layout: TextLayout, data: pa.Buffer, columns: Iterable[str]) -> pa.Table | None:
    """Some columns of these lines, or None if a line is bad. Blank lines give no row."""
    wanted = list(columns)
    try:
        table = csv.read_csv(
            pa.BufferReader(data),
            csv.ReadOptions(column_names=list(layout.columns), block_size=data.size + 1),
            csv.ParseOptions(delimiter=layout.delimiter, quote_char=False, newlines_in_values=False),
            csv.ConvertOptions(
                column_types={name: _TYPES[kind] for name, kind in layout.columns.items()},
                include_columns=wanted,
                null_values=list(layout.missing),
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid:
        return None
    for name in wanted:
        if layout.columns[name] == "hour":
            hours = _timestamps(table.column(name).combine_chunks())
            if hours is None:
                return None
            table = table.set_column(table.schema.get_field_index(name), name, hours)
    return table


def explain_line(layout: TextLayout, line: bytes, columns: Iterable[str]) -> tuple[str | None, str]:
    """What is wrong with a bad line: the column, if it is one column's fault, and the fact. Requires: it is bad."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return None, f"byte {line[error.start]:#04x} at position {error.start} is not UTF-8 text"
    text = text.removesuffix("\n").removesuffix("\r")
    if "\r" in text:
        return None, "there is a carriage return inside the line"
    cells = dict(zip(layout.columns, text.split(layout.delimiter), strict=False))
    count = text.count(layout.delimiter) + 1
    if count != len(layout.columns):
        return None, f"it has {count} columns and the layout has {len(layout.columns)}"
    for name in columns:
        if parse_lines(layout, pa.py_buffer(line), [name]) is None:
            return name, f"{_short(cells[name])} is not {_WORDS[layout.columns[name]]}"
    return None, f"Arrow cannot parse {_short(text)}"


def _timestamps(hours: pa.Array) -> pa.Array | None:
    """YYMMDDHH, of the years 2000 to 2099 and UTC, as timestamps; None if one is no such hour."""
    missing = hours.is_null().to_numpy(zero_copy_only=False)
    digits: IntArray = hours.fill_null(10100).to_numpy(zero_copy_only=False)
    year, month, day, hour = digits // 1_000_000, digits // 10_000 % 100, digits // 100 % 100, digits % 100
    good = (year >= 0) & (year < 100) & (month >= 1) & (month <= 12) & (day >= 1) & (hour < 24)
    months = np.where(good, (year + 30) * 12 + month - 1, 0).astype("M8[M]")
    days = months.astype("M8[D]") + (day - 1)
    if not (good & (days < (months + 1).astype("M8[D]"))).all():
        return None
    times = (days.astype("M8[h]") + hour).astype("M8[ms]")
    return pa.array(times, pa.timestamp("ms"), mask=missing)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
