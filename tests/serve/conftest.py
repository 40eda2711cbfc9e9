"""One front end over a small real model, for tests that change nothing; the others start their own."""

from collections.abc import Iterator

import pytest
from in_process import Running, small_backend


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with Running(small_backend()) as server:
        yield server
