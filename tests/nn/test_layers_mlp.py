"""MLP against layers written out by hand, and the options it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotrow.errors import OptionError
from hotrow.nn.mlp import ACTIVATIONS, MLP
from hotrow.nn.sizes import at_least, fraction, positive, widths


def linear_by_loops(x: Tensor, layer: nn.Linear) -> Tensor:
    out = torch.zeros(x.shape[0], layer.out_features, dtype=x.dtype)
    for example in range(x.shape[0]):
        for unit in range(layer.out_features):
            out[example, unit] = layer.bias[unit]
            for place in range(layer.in_features):
                out[example, unit] += layer.weight[unit, place] * x[example, place]
    return out


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(0, 4),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    last_activation=st.booleans(),
)
def test_mlp_is_its_layers_one_after_another(batch: int, sizes: list[int], last_activation: bool) -> None:
    mlp = MLP(sizes[0], sizes[1:], activation="tanh", last_activation=last_activation).double()
    x = torch.randn(batch, sizes[0], dtype=torch.float64)
    linears = [layer for layer in mlp.layers if isinstance(layer, nn.Linear)]
    expected = x
    for place, layer in enumerate(linears):
        expected = linear_by_loops(expected, layer)
        if place < len(linears) - 1 or last_activation:
            expected = torch.tanh(expected)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected.detach())
    assert mlp.out_features == sizes[-1]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_works_on_any_leading_shape(activation: str) -> None:
    mlp = MLP(3, (4, 2), activation=activation, last_activation=True)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(mlp(x), mlp(x.reshape(10, 3)).reshape(2, 5, 2))


def test_signal_keeps_its_size_through_deep_layers() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 128)
    size = MLP(128, (128,) * 4, activation="tanh")(x).std().item()
    assert 0.2 < size < 2.0


def test_dropout_acts_in_training_only_and_never_on_the_output() -> None:
    torch.manual_seed(0)
    mlp = MLP(8, (64, 1), dropout=0.5)
    x = torch.randn(16, 8)
    assert not torch.equal(mlp(x), mlp(x))
    mlp.eval()
    assert torch.equal(mlp(x), mlp(x))
    assert not isinstance(mlp.layers[-1], nn.Dropout)


def test_wrong_sizes_name_the_option_the_value_and_the_cure() -> None:
    with pytest.raises(OptionError, match="activation 'rel' does not exist; did you mean 'relu'"):
        MLP(3, (2,), activation="rel")
    with pytest.raises(OptionError, match="widths is empty; an MLP needs at least one layer"):
        MLP(3, ())
    with pytest.raises(OptionError, match=r"widths\[1\] is 0; give a whole number of at least 1"):
        MLP(3, (2, 0))
    with pytest.raises(OptionError, match="in_features is 0"):
        MLP(0, (2,))
    with pytest.raises(OptionError, match="top is '512'; give the widths of its layers as a list"):
        widths("top", "512")
    with pytest.raises(OptionError, match="layers is True"):
        positive("layers", True)
    with pytest.raises(OptionError, match="dense_features is -1; give a whole number of at least 0"):
        at_least(0, "dense_features", -1)
    for wrong in (1.0, -0.1, math.nan, "0.1", True):
        with pytest.raises(OptionError, match="dropout is "):
            fraction("dropout", wrong)
