"""One front end over a small real model, for tests that change nothing; the others start their own."""

from collections.abc import Iterator

import pytest
import torch
from in_process import Running, small_backend


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with Running(small_backend()) as server:
        yield server


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny tensors on a busy machine, where threads of one operation only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
