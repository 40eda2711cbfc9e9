"""Checks of the options that several kinds of feature share.

A kind is a frozen dataclass that refuses wrong options when it is made, in code and out of JSON alike, so that a spec
which exists is a spec which can run. Each message names the feature, the option, its value and what to write instead.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from hotrow.errors import OptionError, choices

HASHES = ("auto", "none", "string", "hex", "int")


def check_name(feature: Any) -> None:
    """A feature's name is a text that is not empty."""
    name = feature.name
    if not isinstance(name, str) or not name:
        raise OptionError(f"{type(feature).__name__}: name={name!r}; give the feature a name that is not empty")


def name_column(feature: Any) -> None:
    """The column of a feature is the one of its own name unless it says otherwise."""
    check_name(feature)
    name, column = feature.name, feature.column
    if column is not None and (not isinstance(column, str) or not column):
        raise OptionError(f"feature {name!r}: column={column!r}; give the name of a raw column, or leave it out")
    object.__setattr__(feature, "column", column or name)


def check_choice(name: str, option: str, value: object, options: Many[str]) -> None:
    """An option that takes one of a few words."""
    if value not in options:
        raise OptionError(f"feature {name!r}: {option}={value!r}; {choices(value, options)}")


def check_hash(name: str, how: object, seed: object) -> None:
    """The options of hashing, which Key and Sequence share."""
    check_choice(name, "hash", how, HASHES)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 64:
        raise OptionError(f"feature {name!r}: seed={seed!r}; give an integer from 0 to 2**64 - 1")
