"""Every optimizer: the core against the plain rule bit for bit, torch's own optimizers to rounding, and its options."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Initial
from hotrow.errors import OptionError
from hotrow.nn import EmbeddingCollection
from hotrow.optim import (
    FTRL,
    KINDS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Optimizer,
    RowWiseAdagrad,
    Schedule,
    clip,
    from_dict,
    sum_of_squares,
)
from hotrow.table import Table

lrs = st.floats(1e-5, 1.0) | st.builds(
    Schedule,
    lr=st.floats(1e-5, 1.0),
    warmup=st.integers(0, 5),
    decay=st.sampled_from(["constant", "cosine", "exponential"]),
    steps=st.integers(1, 20),
    floor=st.floats(1e-6, 1e-4),
)
clips = {"clip_value": st.none() | st.floats(1e-3, 2.0), "clip_norm": st.none() | st.floats(1e-3, 2.0)}
epsilons = st.floats(1e-10, 1e-2)
sums = st.floats(0, 1)
betas = st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999))
optimizers = st.one_of(
    st.builds(SGD, lr=lrs, **clips),
    st.builds(Adagrad, lr=lrs, eps=epsilons, initial_accumulator=sums, **clips),
    st.builds(RowWiseAdagrad, lr=lrs, eps=epsilons, initial_accumulator=sums, **clips),
    st.builds(Adam, lr=lrs, betas=betas, eps=epsilons, **clips),
    st.builds(AdamW, lr=lrs, betas=betas, eps=epsilons, weight_decay=st.floats(0, 0.5), **clips),
    st.builds(FTRL, lr=lrs, beta=st.floats(0.1, 2), l1=st.floats(0, 1), l2=st.floats(0, 1), **clips),
)


def trained(optimizer: Optimizer, gradients: list[Tensor], initial: Initial | None = None) -> tuple[Tensor, Tensor]:
    """First and last rows (values and state) of keys 0, 1, ... after a step with each of the gradients [keys, dim]."""
    keys = torch.arange(gradients[0].shape[0])
    table = Table("t", dim=gradients[0].shape[1], initial=initial or Initial())
    collection = EmbeddingCollection([table], optimizer, seed=3)
    collection.table("t").create(keys)
    before = next(collection.table("t").scan()).values
    for gradient in gradients:
        (collection(KeyedBatch({"t": Jagged(keys)}))["t"] * gradient).sum().backward()
        collection.step()
    return before, next(collection.table("t").scan()).values


def by_rule(optimizer: Optimizer, rows: Tensor, gradients: list[Tensor]) -> Tensor:
    dim = gradients[0].shape[1]
    parts = optimizer.state(dim)
    w, *states = (part.clone() for part in rows.split([dim, *(part.width for part in parts)], dim=1))
    state = {part.name: tensor for part, tensor in zip(parts, states, strict=True)}
    for step, gradient in enumerate(gradients, start=1):
        clipped = clip(gradient, optimizer.clip_value, optimizer.clip_norm)
        optimizer.rule(w, clipped, state, optimizer.coefficients(step))
    return torch.cat([w, *states], dim=1)


def some_gradients(seed: int, steps: int, dim: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(4, dim, generator=generator) for _ in range(steps)]


@settings(max_examples=120, deadline=None)
@given(
    optimizer=optimizers,
    dim=st.integers(1, 20) | st.sampled_from([32, 33, 64, 128, 130]),
    steps=st.integers(1, 4),
    size=st.sampled_from([1.0, 1e-6, 1e4]),
    seed=st.integers(0, 1 << 30),
)
def test_the_core_and_the_rule_agree_bit_for_bit(
    optimizer: Optimizer, dim: int, steps: int, size: float, seed: int
) -> None:
    gradients = some_gradients(seed, steps, dim, size)
    before, after = trained(optimizer, gradients)
    assert torch.equal(after.view(torch.int32), by_rule(optimizer, before, gradients).view(torch.int32))


def test_the_rule_takes_correctly_rounded_roots() -> None:
    """torch's own float32 sqrt is up to one bit off on CPU (MKL); a rule that used it would be no oracle."""
    sums = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0))
    w = torch.zeros(1000, 1)
    Adagrad().rule(w, torch.ones(1000, 1), {"sum": sums.clone()}, (1.0, 0.0))
    assert np.array_equal(w.numpy(), -1 / np.sqrt((sums + 1).numpy()))


def test_a_row_of_another_order_of_magnitude_is_clipped_alone() -> None:
    gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    assert torch.equal(clip(gradient, None, 1.0)[1], gradient[1])
    torch.testing.assert_close(clip(gradient, None, 1.0)[0], torch.tensor([0.6, 0.8]))
    assert clip(gradient, 0.35, None).tolist() == torch.tensor([[0.35, 0.35], [0.3, 0.35]]).tolist()


@settings(max_examples=50, deadline=None)
@given(dim=st.integers(1, 40), seed=st.integers(0, 1 << 30))
def test_sum_of_squares_is_the_sum_of_squares(dim: int, seed: int) -> None:
    g = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(sum_of_squares(g), (g.double() ** 2).sum(1).float())


def by_torch(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        keys = torch.arange(gradient.shape[0]).unsqueeze(0)
        weight.grad = torch.sparse_coo_tensor(keys, gradient, weight.shape, is_coalesced=True, check_invariants=False)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(lr=0.1), lambda w: torch.optim.SGD(w, lr=0.1)),
        (Adam(lr=0.01, eps=1e-10), lambda w: torch.optim.SparseAdam(w, lr=0.01, eps=1e-10)),
        (
            Adam(lr=0.01, betas=(0.5, 0.9), eps=1e-10),
            lambda w: torch.optim.SparseAdam(w, lr=0.01, betas=(0.5, 0.9), eps=1e-10),
        ),
        (
            Adagrad(lr=0.1, eps=1e-6, initial_accumulator=0.2),
            lambda w: torch.optim.Adagrad(w, lr=0.1, eps=1e-6, initial_accumulator_value=0.2),
        ),
    ],
)
def test_rows_train_as_with_torchs_sparse_optimizers(
    ours: Optimizer, theirs: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> None:
    gradients = some_gradients(1, steps=6, dim=9)
    before, after = trained(ours, gradients)
    weight = torch.nn.Parameter(before[:, :9].clone())
    torch.testing.assert_close(after[:, :9], by_torch(theirs([weight]), weight, gradients), rtol=1e-5, atol=1e-6)


def test_adamw_trains_as_torchs_adamw_on_rows_that_every_batch_sees() -> None:
    gradients = some_gradients(2, steps=5, dim=6)
    before, after = trained(AdamW(lr=0.01, weight_decay=0.1), gradients)
    weight = torch.nn.Parameter(before[:, :6].clone())
    theirs = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    for gradient in gradients:
        weight.grad = gradient.clone()
        theirs.step()
    torch.testing.assert_close(after[:, :6], weight.detach(), rtol=1e-5, atol=1e-6)


def test_rowwise_adagrad_is_adagrad_on_rows_of_one_element() -> None:
    gradients = some_gradients(3, steps=4, dim=1)
    for a, b in zip(trained(RowWiseAdagrad(lr=0.1), gradients), trained(Adagrad(lr=0.1), gradients), strict=True):
        torch.testing.assert_close(a, b)


def test_ftrl_without_penalties_is_adagrad_with_beta_for_epsilon() -> None:
    gradients = some_gradients(4, steps=4, dim=5)
    _, ftrl = trained(FTRL(lr=0.1, beta=1.0), gradients, Initial.zeros())
    _, adagrad = trained(Adagrad(lr=0.1, eps=1.0), gradients, Initial.zeros())
    torch.testing.assert_close(ftrl[:, :5], adagrad[:, :5])


def test_ftrl_under_l1_gives_exact_zeros() -> None:
    _, after = trained(FTRL(lr=0.1, l1=100.0), some_gradients(5, steps=3, dim=8))
    assert torch.equal(after[:, :8], torch.zeros(4, 8))


@settings(max_examples=60, deadline=None)
@given(optimizer=optimizers)
def test_an_optimizer_survives_the_way_through_json(optimizer: Optimizer) -> None:
    again = from_dict(json.loads(json.dumps(optimizer.to_dict())))
    assert again == optimizer and type(again) is type(optimizer)
    assert again.coefficients(7) == optimizer.coefficients(7)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_kind_is_found_in_any_case(kind: str) -> None:
    assert type(from_dict({"kind": kind.upper()})) is KINDS[kind]
    assert type(from_dict({"kind": kind.lower(), "lr": 0.5})) is KINDS[kind]


@pytest.mark.parametrize("kind", [SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, FTRL])
@pytest.mark.parametrize("option", ["lr", "clip_value", "clip_norm"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "0.1"])
def test_rates_and_clips_must_be_above_zero(kind: type[Optimizer], option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"{option}=.*: give a number above 0"):
        kind(**{option: value})


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (Adagrad, "eps", -1e-8),
        (Adagrad, "eps", 0.0),  # the first zero gradient of a row would divide 0 by 0
        (RowWiseAdagrad, "eps", -1e-8),
        (Adam, "eps", -1e-8),
        (Adam, "eps", 0.0),
        (Adagrad, "initial_accumulator", -1.0),
        (RowWiseAdagrad, "initial_accumulator", -1.0),
        (AdamW, "weight_decay", -0.1),
        (FTRL, "beta", -1.0),
        (FTRL, "l1", -1.0),
        (FTRL, "l2", -1.0),
        (FTRL, "l1", math.nan),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(kind: type[Optimizer], option: str, value: float) -> None:
    with pytest.raises(OptionError, match=option):
        kind(**{option: value})


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, 0.99, 0.999)])
def test_betas_must_be_two_numbers_below_one(betas: tuple[float, ...]) -> None:
    with pytest.raises(OptionError, match=r"betas=.*: give two numbers"):
        Adam(betas=betas)  # type: ignore[arg-type]


def test_betas_that_are_no_pair_at_all_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="betas"):
        from_dict({"kind": "adam", "betas": 0.9})


def test_an_unknown_kind_or_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"kind='Adm': did you mean 'Adam'"):
        from_dict({"kind": "Adm"})
    with pytest.raises(OptionError, match=r"kind=''"):
        from_dict({})
    with pytest.raises(OptionError, match=r"Adam has no option 'beta'; did you mean 'betas'"):
        from_dict({"kind": "adam", "beta": 0.9})


def test_an_unknown_option_of_a_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"'warmp'.*did you mean 'warmup'"):
        from_dict({"kind": "adam", "lr": {"lr": 0.1, "warmp": 3}})


def test_schedules_follow_their_curves() -> None:
    warm = Schedule(0.8, warmup=4, decay="cosine", steps=10, floor=0.2)
    assert [warm.at(step) for step in (1, 2, 3, 4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert warm.at(9) == pytest.approx(0.5)
    assert warm.at(14) == warm.at(1000) == pytest.approx(0.2)
    fall = Schedule(0.8, decay="exponential", steps=10, rate=0.25, floor=0.1)
    assert [fall.at(step) for step in (0, 5, 10, 1000)] == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert Schedule(0.3).at(10**9) == 0.3


def test_a_schedule_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(OptionError, match=r"decay='cosin': did you mean 'cosine'"):
        Schedule(0.1, decay="cosin")
    with pytest.raises(OptionError, match=r"decay='cosine' needs steps="):
        Schedule(0.1, decay="cosine")
    for option, value in (("warmup", -1), ("rate", -2.0), ("rate", 0.0), ("floor", -0.1)):
        with pytest.raises(OptionError, match=option):
            Schedule(0.1, decay="exponential", steps=3, **{option: value})  # type: ignore[arg-type]


def test_ftrl_refuses_a_schedule_that_ends_at_zero() -> None:
    with pytest.raises(OptionError, match="floor"):
        FTRL(lr=Schedule(0.1, decay="cosine", steps=10))


def test_coefficients_of_adam_remove_the_bias_of_its_moments() -> None:
    step_size, unbias, *_ = Adam(lr=0.5, betas=(0.9, 0.99)).coefficients(1)
    assert step_size == pytest.approx(0.5 / 0.1) and unbias == pytest.approx(1 / math.sqrt(0.01))


def test_state_follows_the_values_in_the_order_it_is_listed() -> None:
    optimizer = RowWiseAdagrad(initial_accumulator=0.25)
    collection = EmbeddingCollection([Table("t", dim=3)], optimizer)
    rows = collection.table("t")
    rows.create(torch.tensor([1]))
    scanned = next(rows.scan())
    assert rows.state(scanned)["sum"].tolist() == [[0.25]]
    assert scanned.values.shape == (1, optimizer.width(3)) == (1, 4)
