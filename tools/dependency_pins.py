"""Print what pip installs to test one edge of the ranges in pyproject.toml, one requirement a line.

    python tools/dependency_pins.py oldest [EXTRA ...]     # name==lowest version allowed
    python tools/dependency_pins.py newest [EXTRA ...]     # name with its range: pip takes the newest

`make test-oldest` and `make test-newest` call this, so the ranges in pyproject.toml are the only list. It prints what
builds the package, what the package always needs, and the extras that are named. A package that is named twice has to
be in both ranges.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EDGES = ("oldest", "newest")


def pins(pyproject: dict[str, Any], edge: str, extras: Iterable[str]) -> list[str]:
    """The requirements, sorted. A dependency whose marker is false for this interpreter is left out.

    >>> some = {"build-system": {"requires": ["nanobind>=2.4"]}, "project": {"dependencies": ["torch>=2.11,<2.14"]}}
    >>> pins(some, "oldest", []), pins(some, "newest", [])
    (['nanobind==2.4', 'torch==2.11'], ['nanobind>=2.4', 'torch<2.14,>=2.11'])
    """
    if edge not in EDGES:
        raise SystemExit(f"there is no edge {edge!r}; it is one of {', '.join(EDGES)}")
    ranges = _ranges(pyproject, extras)
    if edge == "newest":
        return [f"{name}{within}" for name, within in sorted(ranges.items())]
    return [f"{name}=={_lowest(name, within)}" for name, within in sorted(ranges.items())]


def _ranges(pyproject: dict[str, Any], extras: Iterable[str]) -> dict[str, SpecifierSet]:
    optional = pyproject["project"].get("optional-dependencies", {})
    texts = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"pyproject.toml has no extra {extra!r}; it has {', '.join(sorted(optional))}")
        texts += optional[extra]
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate():
            name = requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else "")
            found[name] = requirement.specifier & found.get(name, SpecifierSet())
    return found


def _lowest(name: str, within: SpecifierSet) -> Version:
    bounds = [Version(bound.version) for bound in within if bound.operator in (">=", "==", "~=")]
    if not bounds:
        raise SystemExit(f"pyproject.toml: {name}{within} has no lowest version; write {name}>=VERSION")
    return max(bounds)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    print("\n".join(pins(tomllib.loads(PYPROJECT.read_text()), sys.argv[1], sys.argv[2:])))
