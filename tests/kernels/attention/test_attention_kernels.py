"""Forward and backward beside the reference (nn/jagged/reference.py), in float64, over random inputs."""

from __future__ import annotations

import pytest
import torch
from kernel_attention_inputs import Case, compare, computed, converted, draw

from hotrow.errors import BatchError, OptionError
from hotrow.kernels.attention import problem as problem_module
from hotrow.kernels.attention.forward import forward
from hotrow.nn.jagged.reference import time_bucket

SOME = [3, 0, 35, 1]  # more than a tile, a user without rows, one row
OTHER = [5, 4, 40, 0]


def _lengths(layer: str) -> tuple[list[int], list[int]]:
    return (SOME, SOME) if layer in ("causal", "bidirectional") else (SOME, OTHER)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ("causal", "softmax"),
        ("causal", "silu"),
        ("bidirectional", "silu"),
        ("visible", "softmax"),
        ("own", "softmax"),
        ("visible and own", "silu"),
    ],
)
def test_outputs_and_all_gradients_equal_the_reference(layer: str, kind: str, device: torch.device) -> None:
    inputs = draw(Case(layer, kind), *_lengths(layer))
    compare(converted(inputs, torch.float32, device), 1e-4)


@pytest.mark.parametrize("layer", ["causal", "visible and own"])
def test_large_tiles_of_queries(layer: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "ENOUGH", 0)
    monkeypatch.setattr(problem_module, "FEW", 0)
    inputs = draw(Case(layer, heads=1), [34, 2], [34, 2])
    compare(converted(inputs, torch.float32, device), 1e-4)


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [([0, 0], [0, 0]), ([1], [1]), ([2, 1], [0, 0]), ([0, 0], [2, 1]), ([1], [33])],
    ids=["all empty", "one row", "no keys", "no queries", "one candidate"],
)
def test_small_and_empty_lengths(q_lengths: list[int], k_lengths: list[int], device: torch.device) -> None:
    for layer in ("visible", "own"):
        compare(converted(draw(Case(layer), q_lengths, k_lengths), torch.float32, device), 1e-4)


def test_a_batch_without_users_is_padding(device: torch.device) -> None:
    inputs = converted(draw(Case("own"), [], []), torch.float32, device)
    found = computed(inputs, torch.ones(3, 2, 3, device=device))
    assert all(value.abs().sum() == 0 for value in found.values())


def test_no_rows_at_all(device: torch.device) -> None:
    compare(converted(draw(Case("own", padding=0), [0], [0]), torch.float32, device), 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case("causal", positions=None, buckets=None, padding=0),
        Case("causal", "silu", positions=1, buckets=1),
        Case("bidirectional", positions=100, buckets=40, sorted_times=False),
        Case("visible", positions=100, buckets=None),
        Case("own", "silu", heads=1, dim=16, value_dim=20, positions=None, sorted_times=False),
    ],
    ids=str,
)
def test_tables_of_any_size_and_none(case: Case, device: torch.device) -> None:
    compare(converted(draw(case, *_lengths(case.layer)), torch.float32, device), 1e-4)


def test_half_precision(device: torch.device) -> None:
    compare(converted(draw(Case("causal"), SOME, SOME), torch.float16, device), 1e-2)


def test_scores_that_overflow_an_exponential_give_finite_outputs(device: torch.device) -> None:
    inputs = draw(Case("causal", scale=500.0, positions=None, buckets=None), SOME, SOME)
    compare(converted(inputs, torch.float32, device), 1e-3)


def test_an_expanded_gradient_is_read_as_its_values(device: torch.device) -> None:
    inputs = converted(draw(Case("own"), [2], [3]), torch.float32, device)
    shape = (inputs[0].shape[0], inputs[0].shape[1], inputs[2].shape[2])
    ones = torch.ones(shape, device=device)
    plain, expanded = computed(inputs, ones), computed(inputs, torch.ones((), device=device).expand(shape))
    assert all(torch.equal(plain[name], expanded[name]) for name in plain)


def test_time_buckets_are_exact_at_their_bounds(device: torch.device) -> None:
    bounds = [(1 << bit) * 1000 - 1000 for bit in range(45)]
    elapsed = torch.tensor([-5, 0, 1, *(bound + near for bound in bounds for near in (-1, 0, 1)), 2**62, -(2**63)])
    n, buckets = elapsed.numel(), 60
    table = torch.arange(buckets, dtype=torch.float32, device=device)[None]
    rows, times = torch.zeros(n, 1, 4, device=device), elapsed.to(device)
    n_of_one, one_of_one = torch.tensor([n], device=device), torch.tensor([1], device=device)
    _, log_sums = forward(
        rows, rows[:1], rows[:1], n_of_one, one_of_one, None, None, torch.ones_like(times), times, times[:1] * 0, None,
        table, "softmax", False, 1.0, 1.0,
    )  # fmt: skip
    wanted = time_bucket(elapsed.clamp(0, 2**62)).clamp(max=buckets - 1)
    assert log_sums[:, 0].round().long().tolist() == wanted.tolist()


def test_lengths_beyond_the_rows_touch_no_other_memory(device: torch.device) -> None:
    inputs = list(converted(draw(Case("visible", padding=0), [3, 4], [3, 4]), torch.float32, device))
    inputs[3], inputs[4] = inputs[3] * 1000, inputs[4] * 1000 - 1
    gradient = torch.ones(7, 2, 3, device=device)
    assert all(value.isfinite().all() for name, value in computed(inputs, gradient).items() if name != "log_sums")


def test_a_dtype_or_a_head_that_kernels_do_not_have_is_an_error(device: torch.device) -> None:
    inputs = draw(Case("causal"), [1], [1])
    with pytest.raises(OptionError, match=r"takes torch.float32.*q is torch.float64; convert"):
        forward(*converted(inputs, torch.float64, device))
    with pytest.raises(OptionError, match="at most 256 floats, q and v have 300 and 3; use more heads"):
        forward(*converted(draw(Case("causal", dim=300), [1], [1]), torch.float32, device))
    mixed = list(converted(inputs, torch.float32, device))
    mixed[3] = mixed[3].to("meta")
    with pytest.raises(BatchError, match="move all to one device"):
        forward(*mixed)
