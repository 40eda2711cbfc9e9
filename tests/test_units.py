"""Sizes, durations and counts as people write and read them, and the errors that show the cure."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import OptionError
from hotrow.units import format_size, parse_milliseconds, parse_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("1", 1),
        ("100B", 100),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        ("1.5 MiB", 3 << 19),
        (" 500 MB ", 500_000_000),
        ("2TB", 2 * 10**12),
        ("1PiB", 1 << 50),
        ("0.5KiB", 512),
        (4096, 4096),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "8 potatoes", "-1GiB", "1e3", "0", "0GiB", "8GiB8", "1.GiB", "8Gib/s", 0, -5, True, 1.5, None, "٣GiB"],
)
def test_what_is_no_size_is_refused_by_name_and_with_the_cure(text: Any) -> None:
    with pytest.raises(OptionError, match=r"dram=.* is not a size; write a number and a unit, such as '8GiB'"):
        parse_size(text, "dram")


@given(st.integers(0, 1 << 60))
def test_sizes_for_people_are_short_and_nearly_right(count: int) -> None:
    number, unit = format_size(count).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert math.isclose(float(number) * scale, count, rel_tol=0.051)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("250ms", 250), ("30s", 30_000), ("1.5h", 5_400_000), ("2m", 120_000), (" 7 d ", 7 * 86_400_000)],
)
def test_a_span_of_time_is_read_as_people_write_it(text: str, milliseconds: int) -> None:
    assert parse_milliseconds(text) == milliseconds


@pytest.mark.parametrize("text", ["30", "d", "3 weeks", "-1h", "1h30m", "", "0d", "0.5ms", None, 30])
def test_what_is_no_span_of_time_is_refused(text: Any) -> None:
    with pytest.raises(OptionError, match=r"is not a span of time; write a number and a unit, such as '30d'"):
        parse_milliseconds(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("250us", 250e-6), (" 2 s ", 2.0), ("1.5m", 90.0), ("0s", 0.0)]
)
def test_a_timeout_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--deadline") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "soon", "-1s", "1h", "2MS"])
def test_what_is_no_timeout_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"--deadline .*: give a number and a unit, us, ms, s or m, such as 50ms"):
        parse_seconds(text, "--deadline")
