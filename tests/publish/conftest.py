"""Buses for the behaviour tests: a folder, a real redis-server, librdkafka's mock cluster in a process of its own
(tests/conftest.py)."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

_names = itertools.count()


@pytest.fixture(params=["dir", "redis", "kafka"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty bus, of each kind."""
    name = f"bus{next(_names)}"
    if request.param == "dir":
        return f"dir:{tmp_path / name}"
    if request.param == "redis":
        pytest.importorskip("redis", reason="pip install hotrow[redis]")
        return f"{request.getfixturevalue('redis').url}/0?stream={name}"
    brokers = request.getfixturevalue("kafka_brokers")
    return f"kafka://{brokers}/{name}?create=no"  # the mock makes topics when they are used, but not when asked to


@pytest.fixture
def folder_bus(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'bus'}"
