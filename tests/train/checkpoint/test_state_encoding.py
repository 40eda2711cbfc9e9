"""Optimizer state goes through JSON and tensors and comes back as it was; what would need pickle is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotrow as hr
from hotrow.train.checkpoint import state_encoding

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
def test_plain_values_come_back_with_their_types(tree: Any) -> None:
    packed = json.loads(json.dumps(state_encoding.pack(tree, {}, "x"), allow_nan=False))
    back = state_encoding.unpack(packed, {})
    assert back == tree
    assert repr(back) == repr(tree)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "LBFGS", "Adamax"])
def test_every_kind_of_dense_optimizer_goes_on_with_the_same_bits(kind: str) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        return module, getattr(torch.optim, kind)(module.parameters(), lr=0.1)

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = module(x).square().sum()
            value.backward()
            return value

        optimizer.step(loss)

    module, optimizer = make()
    for seed in range(3):
        step(module, optimizer, seed)
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(state_encoding.pack(optimizer.state_dict(), tensors, "o"), allow_nan=False))
    loaded = state_encoding.from_bytes(state_encoding.to_bytes(tensors), "file")

    other, second = make()
    other.load_state_dict(module.state_dict())
    second.load_state_dict(state_encoding.unpack(packed, loaded))
    step(module, optimizer, 9)
    step(other, second, 9)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_floats_that_json_lacks_and_keys_that_look_alike() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = {"inf": math.inf, 0: torch.tensor(1.0), "0": torch.tensor(2.0), "$x": -math.inf}
    back = state_encoding.unpack(json.loads(json.dumps(state_encoding.pack(tree, tensors, "x"))), tensors)
    assert back == tree
    assert math.isnan(state_encoding.unpack(state_encoding.pack(math.nan, {}, "x"), {}))


def test_what_would_need_pickle_is_refused_by_name() -> None:
    with pytest.raises(hr.CheckpointError, match=r"adam\.groups\.0\.hook is function, which cannot be saved without"):
        state_encoding.pack({"groups": [{"hook": lambda: 0}]}, {}, "adam")
    with pytest.raises(hr.CheckpointError, match="rubbish is corrupt"):
        state_encoding.from_bytes(b"not a safetensors file", "rubbish")
