"""Puts the helper modules of tests/serve and of its rows/ on the path; row servers for each test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVE = Path(__file__).parent.parent.parent / "serve"
for folder in (SERVE, SERVE / "rows"):
    sys.path.insert(0, str(folder))

from row_servers import Rows


@pytest.fixture
def rows() -> Iterator[Rows]:
    running = Rows()
    yield running
    running.close()
