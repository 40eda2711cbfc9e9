"""One front end over one small real model for the tests that only ask; those that change something start their own."""

from collections.abc import Iterator

import pytest
from in_process import Running, small_backend


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with Running(small_backend()) as server:
        yield server
