"""Checks of options that several kinds of feature share.

A kind checks its options when it is made, in code or from JSON, so every spec that exists can run. Each message names
the feature, the option, its value and what to write instead.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from hotrow.errors import OptionError, choices

HASHES = ("auto", "none", "string", "hex", "int")


def check_name(feature: Any) -> None:
    """Check that a feature's name is a text that is not empty."""
    name = feature.name
    if not isinstance(name, str) or not name:
        raise OptionError(f"{type(feature).__name__}: name={name!r}; give the feature a name that is not empty")


def set_default_column(feature: Any) -> None:
    """Set a feature's column to its name unless a column is given."""
    check_name(feature)
    name, column = feature.name, feature.column
    if column is not None and (not isinstance(column, str) or not column):
        raise OptionError(f"feature {name!r}: column={column!r}; give the name of a raw column, or leave it out")
    object.__setattr__(feature, "column", column or name)


def check_choice(name: str, option: str, value: object, options: Many[str]) -> None:
    """Check an option that takes one of a few values."""
    if value not in options:
        raise OptionError(f"feature {name!r}: {option}={value!r}; {choices(value, options)}")


def check_hash(name: str, method: object, seed: object) -> None:
    """Check the hashing options, which Key and Sequence share."""
    check_choice(name, "hash", method, HASHES)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 64:
        raise OptionError(f"feature {name!r}: seed={seed!r}; give an integer from 0 to 2**64 - 1")


KEEP = ("last", "first")


def check_history(feature: Any) -> None:
    """Check the options of a feature of a history, and set the defaults of one that is not aligned to another.

    A feature with `aligned` gets max_length and keep from the feature that it names, when a FeatureSpec is made.
    """
    set_default_column(feature)
    name, aligned = feature.name, feature.aligned
    if aligned is not None and (not isinstance(aligned, str) or not aligned or aligned == name):
        raise OptionError(f"feature {name!r}: aligned={aligned!r}; give the name of another feature of the history")
    if aligned is None:
        object.__setattr__(feature, "max_length", 50 if feature.max_length is None else feature.max_length)
        object.__setattr__(feature, "keep", feature.keep or KEEP[0])
    if feature.keep is not None:
        check_choice(name, "keep", feature.keep, KEEP)
    limit = feature.max_length
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise OptionError(f"feature {name!r}: max_length={limit!r}; give an integer of 1 or more")


def check_separator(name: str, separator: object) -> None:
    """Check the option separator."""
    if separator is not None and (not isinstance(separator, str) or not separator):
        raise OptionError(f"feature {name!r}: separator={separator!r}; give a text such as '|', or leave it out")
