"""Shared by the tests of faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run import Options, finish

from hotrow import _core


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run without faults, with all rows in DRAM and without a checkpoint."""
    folder: Path = tmp_path_factory.mktemp("uninterrupted")
    return finish(folder, Options(ssd=False, checkpoints=False))


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """The same number of threads in every process: another one gives other bits in a tower of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def working_disk() -> Iterator[None]:
    """Compaction is off unless a test turns it on; injected faults are removed afterwards."""
    _core.set_compaction_rate(0)
    yield
    _core.remove_faults()
    _core.set_compaction_rate(64 << 20)
