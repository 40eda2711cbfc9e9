"""Tests that are marked gpu, over the pretended one, with the sizes of the interpreter:

    TRITON_INTERPRET=1 PYTHONPATH=tests python -m pytest -p simulated_gpu.plugin tests/nn/test_hbm.py -m gpu

Each fails if it touched memory unordered. Those that measure memory, or want the real device's sizes, say nothing here.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotrow.kernels import graph_capture
from hotrow.kernels.rows import layout, move, update
from hotrow.tiers.hbm import batch_layout, row_transfer
from simulated_gpu import Device, pretend


class _Os:
    """Where tests look whether kernels are interpreted."""

    def __init__(self) -> None:
        self.environ = {**os.environ, "TRITON_INTERPRET": "0"}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.fixture(autouse=True)
def pretended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    monkeypatch.setattr(request.module, "os", _Os(), raising=False)
    for module, name, value in (
        (move, "PULLERS", 4),
        (move, "NOTERS", 2),
        (move, "ORDERERS", 2),
        (row_transfer, "ROOM", 256),
    ):
        monkeypatch.setattr(module, name, value)
    kept: list[Any] = [value for value in vars(request.module).values() if hasattr(value, "cache_clear")]
    with pretend(_folder(tmp_path_factory)) as device:
        yield device
        for known in (graph_capture._streams, layout._tables, batch_layout._PLAIN):
            known.clear()
        for function in (update._on_device, *kept):
            function.cache_clear()
        gc.collect()
        device.order.settle()
    assert not device.order.races, "\n".join(device.order.races.values())
    assert not device.errors, device.errors


def _folder(factory: pytest.TempPathFactory) -> Path:
    """Of the driver, which is loaded once."""
    folder = factory.getbasetemp() / "driver"
    folder.mkdir(exist_ok=True)
    return folder
