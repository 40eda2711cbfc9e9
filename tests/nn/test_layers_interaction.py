"""Dot interaction and factorization machine against pairs taken one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.nn.interaction import DotInteraction, FactorizationMachine


def pair_dots_by_loops(vectors: Tensor) -> Tensor:
    batch, count, dim = vectors.shape
    rows = []
    for example in range(batch):
        pairs = []
        for later in range(count):
            for earlier in range(later):
                pairs.append(sum(vectors[example, later, d] * vectors[example, earlier, d] for d in range(dim)))
        rows.append(torch.stack([torch.as_tensor(pair) for pair in pairs]))
    return torch.stack(rows) if rows else vectors.new_zeros(0, count * (count - 1) // 2)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(0, 3), count=st.integers(2, 6), dim=st.integers(1, 5), seed=st.integers(0, 99))
def test_dot_interaction_and_its_gradient_equal_the_loops(batch: int, count: int, dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    vectors = torch.randn(batch, count, dim, dtype=torch.float64, requires_grad=True)
    layer = DotInteraction(count)
    out, expected = layer(vectors), pair_dots_by_loops(vectors)
    assert out.shape == (batch, layer.out_features)
    torch.testing.assert_close(out, expected)
    if batch:
        weights = torch.randn_like(out)
        (ours,) = torch.autograd.grad(out, vectors, weights)
        (theirs,) = torch.autograd.grad(expected, vectors, weights)
        torch.testing.assert_close(ours, theirs)


def test_written_out_backward_passes_gradcheck_twice() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    for layer in (DotInteraction(4), DotInteraction(4, self_interaction=True)):
        assert torch.autograd.gradcheck(layer, (vectors,))
        assert torch.autograd.gradgradcheck(layer, (vectors,))


def test_self_interaction_appends_squared_lengths() -> None:
    vectors = torch.randn(3, 4, 5)
    out = DotInteraction(4, self_interaction=True)(vectors)
    torch.testing.assert_close(out[:, :6], DotInteraction(4)(vectors))
    torch.testing.assert_close(out[:, 6:], vectors.square().sum(2))


def test_dot_interaction_in_autocast_is_narrow_and_gives_full_gradients() -> None:
    vectors = torch.randn(3, 4, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = DotInteraction(4)(vectors)
    assert out.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(out.float().sum(), vectors)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, vectors.sum(1, keepdim=True) - vectors, atol=0.1, rtol=0.1)


def test_one_vector_makes_no_pair() -> None:
    with pytest.raises(OptionError, match="count of vectors to interact is 1; give a whole number of at least 2"):
        DotInteraction(1)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(0, 3), count=st.integers(1, 6), dim=st.integers(1, 5), seed=st.integers(0, 99))
def test_factorization_machine_sums_all_pairs(batch: int, count: int, dim: int, seed: int) -> None:
    torch.manual_seed(seed)
    vectors = torch.randn(batch, count, dim, dtype=torch.float64)
    expected = pair_dots_by_loops(vectors).sum(1) if count > 1 else vectors.new_zeros(batch)
    torch.testing.assert_close(FactorizationMachine()(vectors), expected)
