"""Puts the helper modules of this folder on the path, and those of execution/ and online/; row servers for each test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("rows", "execution", "online"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

from row_servers import Rows


@pytest.fixture
def rows() -> Iterator[Rows]:
    running = Rows()
    yield running
    running.close()
