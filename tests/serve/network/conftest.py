"""So that the tests here find sums.py and its neighbours."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import Running

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "online"):  # served.py is there
    sys.path.insert(0, str(folder))

from sums import Sums  # noqa: E402


@pytest.fixture(scope="session")
def sums() -> Iterator[Running]:
    """One front end with the default limits over the model that adds its ids up."""
    with Running(Sums()) as server:
        yield server
