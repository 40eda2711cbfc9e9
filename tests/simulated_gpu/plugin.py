"""A pytest plugin: runs tests marked gpu over the simulated GPU, with sizes for Triton's interpreter:

    TRITON_INTERPRET=1 PYTHONPATH=tests python -m pytest -p simulated_gpu.plugin tests/nn/hbm/test_hbm_ahead.py -m gpu

A test fails if it accessed memory without an order. Tests that measure memory, or need a real device's sizes, prove
nothing here.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotrow.kernels import graph_capture
from hotrow.kernels.rows import layout, transfer, update
from hotrow.tiers.hbm import batch_layout, row_transfer
from simulated_gpu import Device, simulate_gpu


class _Os:
    """Replaces `os` in a test module: there, kernels do not look interpreted."""

    def __init__(self) -> None:
        self.environ = {**os.environ, "TRITON_INTERPRET": "0"}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.fixture(autouse=True)
def simulated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    monkeypatch.setattr(request.module, "os", _Os(), raising=False)
    for module, name, value in (
        (transfer, "ROW_PROGRAMS", 4),
        (transfer, "METADATA_PROGRAMS", 2),
        (transfer, "REQUEST_PROGRAMS", 2),
        (row_transfer, "LAUNCH_ROWS", 256),
    ):
        monkeypatch.setattr(module, name, value)
    kept: list[Any] = [value for value in vars(request.module).values() if hasattr(value, "cache_clear")]
    with simulate_gpu(_folder(tmp_path_factory)) as device:
        yield device
        for known in (graph_capture._streams, layout._tables, batch_layout._UNIFORM_LAYOUTS):
            known.clear()
        for function in (update._on_device, *kept):
            function.cache_clear()
        gc.collect()
        device.order.settle()
    assert not device.order.races, "\n".join(device.order.races.values())
    assert not device.errors, device.errors


def _folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of the driver, which is loaded once."""
    folder = factory.getbasetemp() / "driver"
    folder.mkdir(exist_ok=True)
    return folder
