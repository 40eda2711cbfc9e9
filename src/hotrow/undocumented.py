"""Undocumented parts of other projects, which any release may change. They are looked up here and nowhere else.

`find` returns such a part, or None after one warning; the caller then uses documented calls. `look_up` raises instead.
`is_tested` tells whether a package's version is in the range that pyproject.toml allows; the tests run with both ends
of it (`make test-oldest`, `make test-newest`). A C interface, where a change would crash instead of raising, is used
inside that range only. docs/decisions/0006-private-interfaces.md lists every such part.

Any thread may call any of this.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import warnings
from typing import Any

from hotrow.errors import HotRowError

_warned: set[str] = set()


class ChangedError(HotRowError, RuntimeError):
    """An undocumented part of another project differs from the tested releases."""


def look_up(name: str) -> Any:
    """The part of that name, "package.module:attribute". Raises ChangedError if this release has none.

    >>> look_up("torch:Tensor").__name__
    'Tensor'
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        package = name.partition(":")[0].partition(".")[0]
        raise ChangedError(describe(package, f"has no {name.replace(':', '.')}")) from None


def find(name: str, instead: str) -> Any:
    """As `look_up`, but if there is none, warn with the text `instead` (what the caller does then) and return None."""
    try:
        return look_up(name)
    except ChangedError as error:
        warn_once(f"{error}. {instead}")
        return None


def describe(package: str, what: str) -> str:
    """An error text: how the installed package differs, with its version and the tested ones.

    >>> describe("torch", "has no torch.example")
    'torch ... has no torch.example; HotRow was tested with torch<...'
    """
    return f"{package} {version(package)} {what}; HotRow was tested with {package}{allowed_range(package)}"


def warn_once(message: str) -> None:
    """Warn once per process and message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)


def version(package: str) -> str:
    """The version of a package by its module: its distribution may have another name."""
    return str(getattr(importlib.import_module(package), "__version__", "of an unknown version"))


def allowed_range(package: str) -> str:
    """The versions that pyproject.toml allows, as pip writes them; empty where HotRow is not installed."""
    try:
        required = importlib.metadata.requires("hotrow") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    named = re.compile(rf"{re.escape(package)}(?:\[.*?\])?\s*([<>=!~][^;\s]*)")
    return next((found[1] for found in map(named.match, required) if found), "")


def is_tested(package: str) -> bool:
    """Whether the package's version is in the range of `allowed_range`."""
    return is_within(version(package), allowed_range(package))


def is_within(found: str, bounds: str) -> bool:
    """Whether a version is in a range of pip's; only its numbers count, so 2.14.0a0 is 2.14.

    >>> is_within("2.13.1+cpu", "<2.14,>=2.11"), is_within("2.14.0a0", "<2.14,>=2.11"), is_within("2.9", ">=2.11")
    (True, False, False)
    """
    mine = _numbers(found)
    for bound in filter(None, bounds.split(",")):
        operator, other = re.fullmatch(r"\s*([<>=!]+)\s*(\S+)", bound).groups()  # type: ignore[union-attr]
        limit = _numbers(other)
        holds = {"<": mine < limit, "<=": mine <= limit, ">": mine > limit, ">=": mine >= limit, "==": mine == limit}
        if not holds.get(operator, mine != limit):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    return tuple([*parts, 0, 0, 0, 0][:4])
