"""Kernel tests run twice: under Triton's interpreter on CPU tensors, and, marked `gpu`, compiled on a CUDA device.

Triton reads TRITON_INTERPRET when it is imported, so one process does one or the other: without CUDA the interpreter
is chosen here, before anything imports Triton.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("something imported triton before tests/kernels; set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the tensors of a test live."""
    if request.param == "cuda":
        if not torch.cuda.is_available() or INTERPRETED:
            pytest.skip("needs a CUDA device and TRITON_INTERPRET unset")
        return torch.device("cuda", torch.cuda.current_device())
    if not INTERPRETED:
        pytest.skip("kernels are compiled in this process; set TRITON_INTERPRET=1 to interpret them")
    return torch.device("cpu")


@pytest.fixture
def draw() -> Callable[..., torch.Tensor]:
    """draw(n, seed=0): distinct keys in random order over all of int64, the extremes and both markers among them."""
    from hotrow.kernels.index.key_hash import HIGHEST, LOWEST

    extremes = [LOWEST, HIGHEST, 0, -1, 1, 2**63 - 1, -(2**63), -(2**62), 2**32, -(2**32)]

    def keys(n: int, seed: int = 0) -> torch.Tensor:
        rng = np.random.default_rng(seed)
        drawn = np.unique(np.concatenate([extremes, rng.integers(-(2**63), 2**63 - 1, n)]))
        inner = np.setdiff1d(drawn, extremes)
        return torch.from_numpy(rng.permutation(np.concatenate([extremes, inner])[:n]))

    return keys


@pytest.fixture
def filled(device: torch.device) -> Callable[..., Any]:
    """filled(sets_per_table, keys, tables): an index that holds the keys, except those whose sets are full."""
    from kernels import reference

    from hotrow.kernels.index.sets import SetIndex

    def index(sets_per_table: list[int], keys: torch.Tensor, tables: torch.Tensor | None = None) -> SetIndex:
        made = SetIndex(sets_per_table, device)
        tables = torch.zeros_like(keys) if tables is None else tables
        slots = torch.tensor(reference.choose(made, keys.to(device), tables.to(device), 0), dtype=torch.int64)
        made.keys.view(-1)[slots[slots >= 0].to(device)] = keys[slots >= 0].to(device)
        return made

    return index


@pytest.fixture
def crowd() -> Callable[..., torch.Tensor]:
    """crowd(n, high=0): n distinct keys with nearly `high` in both halves of their hash: both choices are one set."""
    from hotrow.kernels.index.key_hash import key_of

    return lambda n, high=0: torch.tensor([key_of((high << 32) | (high ^ i)) for i in range(n)], dtype=torch.int64)
