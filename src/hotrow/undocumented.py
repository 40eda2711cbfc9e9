"""Parts of other projects that their authors do not document: looked up here, because any release may change them.

`find` gives such a part, or None with one warning; the caller then does the same by documented means. `look_up` raises
instead. `is_tested` says whether a package's version is in the range that pyproject.toml allows, whose ends the tests
ran with (`make test-oldest`, `make test-newest`): a C interface, where a change would be a crash and no AttributeError,
is used inside that range alone. docs/decisions/0006-private-interfaces.md lists every such part.

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
    """An undocumented part of another project is not as it was tested."""


def look_up(name: str) -> Any:
    """The part of that name, "package.module:attribute". Raises ChangedError where this release has none.

    >>> look_up("torch:Tensor").__name__
    'Tensor'
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        package = name.partition(":")[0].partition(".")[0]
        raise ChangedError(describe(package, f"has no {name.replace(':', '.')}")) from None


def find(name: str, instead: str) -> Any:
    """The same; None where there is none, after a warning that says what happens instead."""
    try:
        return look_up(name)
    except ChangedError as error:
        warn_once(f"{error}. {instead}")
        return None


def describe(package: str, what: str) -> str:
    """What is different about the package at hand, with its version and those that were tested.

    >>> describe("torch", "has no torch.example")
    'torch ... has no torch.example; HotRow was tested with torch<...'
    """
    return f"{package} {version(package)} {what}; HotRow was tested with {package}{allowed_range(package)}"


def warn_once(message: str) -> None:
    """Warn, unless this process has been told the same before."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)


def version(package: str) -> str:
    """The version of a package, as its module says it: a distribution may have another name."""
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
    """Whether the package's version is in that range."""
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
