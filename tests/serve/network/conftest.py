"""Puts the helper modules of this folder and of online/ on the path, and starts the `sums` front end."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import Running

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "online"):  # for server_process.py
    sys.path.insert(0, str(folder))

from sums import Sums  # noqa: E402


@pytest.fixture(scope="session")
def sums() -> Iterator[Running]:
    """One front end with the default limits over the model of sums.py."""
    with Running(Sums()) as server:
        yield server
