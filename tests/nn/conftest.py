"""The device that a test of rows in HBM runs on: interpreted kernels, or a GPU."""

from __future__ import annotations

import os

import pytest
from torch import Tensor

from hotrow.tiers.hbm.miss_list import MissFinder, MissList


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (request.param == "cuda") == interpreted:
        pytest.skip("this process interprets kernels" if interpreted else "this process compiles kernels")
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.fixture
def miss_list_requests(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each batch that used a miss list: whether it was ahead of its turn."""
    batches: list[bool] = []
    plain = MissFinder.find_misses

    def ask(
        miss_finder: MissFinder, keys: Tensor, begins: Tensor, batch: int, settled: int, score: float, ahead: bool
    ) -> MissList:
        batches.append(ahead)
        return plain(miss_finder, keys, begins, batch, settled, score, ahead)

    monkeypatch.setattr(MissFinder, "find_misses", ask)
    return batches
