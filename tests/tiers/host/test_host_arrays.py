"""The core writes into the caller's arrays or refuses them; it never writes into a converted copy."""

from __future__ import annotations

import pytest
import torch

from hotrow.config import Initial
from hotrow.optim import SGD
from hotrow.tiers.host.store import Budget, HostStore


@pytest.fixture
def store() -> HostStore:
    store = HostStore("t", 2, SGD(), Initial.constant(3.0), 0, Budget())
    store.find_or_create(torch.tensor([1, 2]))
    return store


@pytest.mark.parametrize(
    "out",
    [torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float16), torch.zeros(2, 4)[:, ::2]],
    ids=["double", "half", "apart"],
)
def test_an_output_of_another_dtype_or_layout_is_refused(store: HostStore, out: torch.Tensor) -> None:
    with pytest.raises(TypeError):
        store.core.read(torch.tensor([1, 2]), out, torch.zeros(2, dtype=torch.bool))


def test_slots_of_another_dtype_are_refused(store: HostStore) -> None:
    with pytest.raises(TypeError):
        store.core.find(torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int32))


def test_outputs_of_the_wrong_size_are_refused(store: HostStore) -> None:
    with pytest.raises(ValueError, match=r"out must be \[keys, dim\]"):
        store.core.read(torch.tensor([1, 2]), torch.zeros(1, 2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="differ in length"):
        store.core.find(torch.tensor([1, 2]), torch.zeros(3, dtype=torch.int64))
