"""Cross layers against the paper's formulas, one entry at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.nn.cross import CrossLayer


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.stack([sum((row[k] * vector[k] for k in range(len(vector))), torch.zeros(())) for row in matrix])


def cross_by_loops(layer: CrossLayer, start: Tensor, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    weight, bias = layer.outward.weight, layer.outward.bias
    for example in range(x.shape[0]):
        if layer.inward is None:
            mapped = times(weight, x[example]) + bias
        elif layer.experts == 1:
            mapped = times(weight, times(layer.inward.weight, x[example])) + bias
        else:
            mapped = mixture_by_loops(layer, x[example])
        out[example] = start[example] * mapped + x[example]
    return out


def mixture_by_loops(layer: CrossLayer, x: Tensor) -> Tensor:
    assert layer.inward is not None
    rank = layer.core.shape[1]
    gates = torch.softmax(times(layer.gate.weight, x) + layer.gate.bias, dim=0)
    total = torch.zeros_like(x)
    for expert in range(layer.experts):
        part = slice(expert * rank, (expert + 1) * rank)
        thin = torch.tanh(times(layer.inward.weight[part], x))
        thin = torch.tanh(times(layer.core[expert], thin))
        total += gates[expert] * (times(layer.outward.weight[:, part], thin) + layer.outward.bias)
    return total


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(0, 3),
    features=st.integers(1, 5),
    shape=st.sampled_from([(None, 1), (1, 1), (3, 1), (2, 2), (1, 3)]),
    seed=st.integers(0, 99),
)
def test_cross_layer_equals_the_loops(batch: int, features: int, shape: tuple[int | None, int], seed: int) -> None:
    torch.manual_seed(seed)
    layer = CrossLayer(features, rank=shape[0], experts=shape[1]).double()
    torch.nn.init.normal_(layer.outward.bias)
    start, x = torch.randn(2, batch, features, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(start, x), cross_by_loops(layer, start, x))


def test_low_rank_has_fewer_weights_than_full() -> None:
    full = sum(weight.numel() for weight in CrossLayer(64).parameters())
    thin = sum(weight.numel() for weight in CrossLayer(64, rank=4).parameters())
    assert (full, thin) == (64 * 64 + 64, 2 * 4 * 64 + 64)


def test_a_mixture_needs_a_rank() -> None:
    with pytest.raises(OptionError, match=r"experts=4 without a rank; .* pass rank= too"):
        CrossLayer(8, experts=4)
    with pytest.raises(OptionError, match=r"rank is 0"):
        CrossLayer(8, rank=0)
