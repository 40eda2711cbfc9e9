"""What `make test-oldest` and `make test-newest` install is what pyproject.toml allows, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "tools/dependency_pins.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = spec_from_file_location("dependency_pins", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project(*dependencies: str, **extras: list[str]) -> dict[str, Any]:
    return {
        "build-system": {"requires": ["nanobind>=2.4"]},
        "project": {"dependencies": list(dependencies), "optional-dependencies": extras},
    }


def test_a_package_that_is_named_twice_is_in_both_ranges(tool: Any) -> None:
    given = project("redis>=5,<9", test=["redis>=5.2", "ray[serve,data]>=2.9,!=2.10"], bench=["never>=1"])
    assert tool.pins(given, "oldest", ["test"]) == ["nanobind==2.4", "ray[data,serve]==2.9", "redis==5.2"]
    newest = tool.pins(given, "newest", ["test"])
    assert newest == ["nanobind>=2.4", "ray[data,serve]!=2.10,>=2.9", "redis<9,>=5,>=5.2"]


def test_a_dependency_of_other_pythons_is_left_out(tool: Any) -> None:
    given = project("rich>=13; python_version < '3'", "typer>=0.16; python_version > '3'")
    assert tool.pins(given, "oldest", []) == ["nanobind==2.4", "typer==0.16"]


@pytest.mark.parametrize(
    ("edge", "extras", "error"),
    [
        ("oldest", ["gpu"], r"no extra 'gpu'; it has free, test"),
        ("oldest", ["free"], r"flask<9 has no lowest version; write flask>=VERSION"),
        ("older", [], r"no edge 'older'; it is one of oldest, newest"),
    ],
)
def test_what_cannot_be_pinned_is_an_error(tool: Any, edge: str, extras: list[str], error: str) -> None:
    with pytest.raises(SystemExit, match=error):
        tool.pins(project(test=["pytest>=8"], free=["flask<9"]), edge, extras)


def test_every_dependency_of_ours_has_a_lowest_version() -> None:
    command = [sys.executable, str(PROGRAM), "oldest", "test", "hbm", "rocksdb", "tensorboard", "ray", "redis", "kafka"]
    lines = subprocess.run([*command, "serve"], check=True, capture_output=True, text=True).stdout.splitlines()
    assert any(line.startswith("torch==") for line in lines) and all("==" in line for line in lines)
