"""Puts the helper modules of tests/serve and of its rows/ on the path; row servers for each test."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SERVE = Path(__file__).parent.parent.parent / "serve"
for folder in (SERVE, SERVE / "rows"):
    sys.path.insert(0, str(folder))


@pytest.fixture
def rows() -> Iterator[Any]:
    running = import_module("row_servers").Rows()
    yield running
    running.close()
