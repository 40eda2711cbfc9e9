"""Parses and formats sizes, durations and counts: "8GiB", "50ms", "1.2M".

Every option, job file, address and command line is parsed here, so that a unit means the same everywhere. A text that
does not parse raises OptionError with the option's name, the text and an example. Two functions read durations, because
two kinds of option have them: event time (whole milliseconds up to days) and timeouts (seconds down to microseconds).

Any thread may call any of this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hotrow.errors import OptionError

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_BYTES = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgtp", start=1):
    _BYTES[f"{_prefix}ib"] = 1024**_power
    _BYTES[f"{_prefix}b"] = 1000**_power
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def parse_size(text: str | int, option: str = "size") -> int:
    """A size in bytes. An integer is a number of bytes already.

    >>> parse_size("1.5GiB")
    1610612736
    >>> parse_size("12 potatoes", option="dram")
    Traceback (most recent call last):
    hotrow.errors.OptionError: dram='12 potatoes' is not a size; write a number and a unit, such as '8GiB' or '500MB'
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _BYTES or float(match[1]) * _BYTES[match[2].lower()] < 1:
        raise OptionError(f"{option}={text!r} is not a size; write a number and a unit, such as '8GiB' or '500MB'")
    return int(float(match[1]) * _BYTES[match[2].lower()])


def parse_milliseconds(text: str, option: str = "time") -> int:
    """A span of event time in milliseconds, at least 1.

    >>> parse_milliseconds("1.5h")
    5400000
    """
    match = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in _MILLISECONDS or float(match[1]) * _MILLISECONDS[match[2]] < 1:
        raise OptionError(f"{option}={text!r} is not a span of time; write a number and a unit, such as '30d' or '12h'")
    return int(float(match[1]) * _MILLISECONDS[match[2]])


def parse_seconds(text: str, option: str) -> float:
    """A timeout or an interval in seconds; 0 is allowed.

    >>> parse_seconds("50ms", "--deadline")
    0.05
    >>> parse_seconds("soon", "--deadline")
    Traceback (most recent call last):
    hotrow.errors.OptionError: --deadline soon: ...
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2] not in _SECONDS:
        raise OptionError(f"{option} {text}: give a number and a unit, us, ms, s or m, such as 50ms")
    return float(match[1]) * _SECONDS[match[2]]


def format_size(count: float) -> str:
    """A number of bytes for people.

    >>> format_size(1610612736)
    '1.5 GiB'
    """
    return _in_units(count, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def format_count(count: float) -> str:
    """A count for people.

    >>> format_count(1234567)
    '1.2M'
    """
    return _in_units(count, 1000, ("", "k", "M", "G", "T"))


def round_up_size(count: int) -> str:
    """The smallest budget in whole MiB that holds `count` bytes, for the cure in an error text.

    >>> round_up_size(3_000_000)
    '3MiB'
    """
    return f"{-(-count // (1 << 20))}MiB"


def _in_units(count: float, base: int, units: Sequence[str]) -> str:
    """A number in the largest unit that keeps it at least 1; each unit is `base` times the one before."""
    power = 0
    while abs(count) >= base and power + 1 < len(units):
        count /= base
        power += 1
    return f"{count:.0f}{units[0]}" if power == 0 else f"{count:.1f}{units[power]}"
