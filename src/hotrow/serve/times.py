"""Durations as a person writes them: 50ms, 2s, 1m."""

from __future__ import annotations

import re

from hotrow.errors import OptionError

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def parse_seconds(text: str, option: str) -> float:
    """Seconds of a duration.

    >>> parse_seconds("50ms", "--deadline")
    0.05
    >>> parse_seconds("soon", "--deadline")
    Traceback (most recent call last):
    hotrow.errors.OptionError: --deadline soon: ...
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m)", text.strip())
    if found is None:
        raise OptionError(f"{option} {text}: give a number and a unit, us, ms, s or m, such as 50ms")
    return float(found[1]) * _UNITS[found[2]]
