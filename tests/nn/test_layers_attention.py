"""Local activation against the four parts put side by side, item by item; padding and empty histories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.nn.attention import LocalActivation


def attention_by_loops(layer: LocalActivation, target: Tensor, items: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(target)
    for example in range(target.shape[0]):
        kept = [item for item, keep in zip(items[example], mask[example], strict=True) if keep]
        scores = []
        for item in kept:
            parts = torch.cat([target[example], item, target[example] - item, target[example] * item])
            scores.append(layer.rest(layer.first(parts))[0])
        if layer.normalize and scores:
            scores = list(torch.softmax(torch.stack(scores), dim=0))
        for item, score in zip(kept, scores, strict=True):
            out[example] += score * item
    return out


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(0, 3),
    length=st.integers(0, 4),
    dim=st.integers(1, 5),
    hidden=st.sampled_from([(), (3,), (4, 2)]),
    normalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_equals_the_loops(
    batch: int, length: int, dim: int, hidden: tuple[int, ...], normalize: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = LocalActivation(dim, hidden, normalize=normalize).double()
    target = torch.randn(batch, dim, dtype=torch.float64)
    items = torch.randn(batch, length, dim, dtype=torch.float64)
    mask = torch.rand(batch, length) < 0.6
    with torch.no_grad():
        torch.testing.assert_close(layer(target, items, mask), attention_by_loops(layer, target, items, mask))


@pytest.mark.parametrize("normalize", [False, True])
def test_empty_histories_give_zeros_and_finite_gradients(normalize: bool) -> None:
    torch.manual_seed(0)
    layer = LocalActivation(4, (8,), normalize=normalize)
    target = torch.randn(3, 4, requires_grad=True)
    items = torch.randn(3, 5, 4, requires_grad=True)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1, :2] = True
    out = layer(target, items, mask)
    assert out[0].eq(0).all() and out[2].eq(0).all() and out[1].ne(0).any()
    out.square().sum().backward()
    for tensor in (target, items, *layer.parameters()):
        assert tensor.grad is not None and tensor.grad.isfinite().all()
    assert items.grad is not None and items.grad[~mask].eq(0).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_padding_changes_nothing(normalize: bool) -> None:
    torch.manual_seed(0)
    layer = LocalActivation(4, normalize=normalize).double()
    target, items = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    longer = torch.cat([items, torch.zeros(2, 6, 4, dtype=torch.float64)], dim=1)
    longer_mask = torch.cat([mask, torch.zeros(2, 6, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(layer(target, longer, longer_mask), layer(target, items, mask))


def test_normalised_weights_sum_to_one_and_plain_ones_grow_with_the_history() -> None:
    torch.manual_seed(0)
    target, items = torch.randn(1, 4), torch.randn(1, 1, 4).expand(1, 6, 4)
    mask = torch.ones(1, 6, dtype=torch.bool)
    soft = LocalActivation(4, normalize=True)
    torch.testing.assert_close(soft.weights(target, items, mask).sum(), torch.tensor(1.0))
    plain = LocalActivation(4)
    torch.testing.assert_close(plain(target, items, mask), 6 * plain(target, items[:, :1], mask[:, :1]))


def test_wrong_options_are_named() -> None:
    with pytest.raises(OptionError, match="dim is 0"):
        LocalActivation(0)
    with pytest.raises(OptionError, match="activation 'dice' does not exist"):
        LocalActivation(4, activation="dice")
