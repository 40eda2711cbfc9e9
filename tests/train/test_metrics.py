"""Streaming metrics against plain definitions: pairs compared one by one, sums taken exactly, batches cut anywhere."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.errors import BatchError, CheckpointError
from hotrow.train.metrics import Calibration, LogLoss, Metrics, StreamingAUC


def clicks(examples: int, seed: int = 0, spread: float = 1.5, middle: float = -3.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(examples, generator=random) * spread + middle
    return logits, (torch.rand(examples, generator=random) < torch.sigmoid(logits)).float()


def exact_auc(logits: Tensor, labels: Tensor) -> float:
    """Every positive against every negative, by sorted search; ties count half."""
    positives, negatives = logits[labels == 1], logits[labels == 0].sort().values
    below = torch.searchsorted(negatives, positives, right=False).double()
    not_above = torch.searchsorted(negatives, positives, right=True).double()
    return float(((below + not_above) / 2).sum() / (len(positives) * len(negatives)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-40, 40), st.booleans()), min_size=1, max_size=40))
def test_auc_of_separate_scores_is_exact_and_ties_count_half(rows: list[tuple[int, bool]]) -> None:
    positives = [score for score, clicked in rows if clicked]
    negatives = [score for score, clicked in rows if not clicked]
    auc = StreamingAUC()
    auc.update(torch.tensor([float(score) for score, _ in rows]), torch.tensor([float(clicked) for _, clicked in rows]))
    if not positives or not negatives:
        assert math.isnan(auc.compute()) and math.isnan(auc.error_bound())
        return
    credit = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    assert auc.compute() == pytest.approx(credit / (len(positives) * len(negatives)), abs=1e-12)


@pytest.mark.parametrize(
    ("spread", "middle"), [(1.5, -3.0), (0.2, -4.0), (1.0, 0.0), (6.0, 0.0), (0.5, -7.0), (20.0, 5.0), (0.02, 0.0)]
)
def test_auc_is_within_a_ten_thousandth_of_the_exact_one(spread: float, middle: float) -> None:
    logits, labels = clicks(50_000, spread=spread, middle=middle)
    auc = StreamingAUC()
    auc.update(logits, labels)
    error = abs(auc.compute() - exact_auc(logits, labels))
    assert error < 1e-4
    assert error <= auc.error_bound() + 1e-12


def test_auc_takes_the_largest_finite_logits() -> None:
    auc = StreamingAUC()
    auc.update(torch.tensor([3e38, -3e38, 1e-38]), torch.tensor([1.0, 0.0, 1.0]))
    assert auc.compute() == 1.0


def test_one_class_alone_has_no_auc_and_no_examples_have_no_loss() -> None:
    metrics = Metrics()
    assert {name for name, value in metrics.compute().items() if math.isnan(value)} == {
        "auc",
        "logloss",
        "calibration",
        "ctr",
    }
    metrics.update(torch.tensor([0.5, -0.5]), torch.tensor([0.0, 0.0]))
    values = metrics.compute()
    assert math.isnan(values["auc"]) and math.isnan(values["calibration"])
    assert values["ctr"] == 0.0 and values["examples"] == 2.0


def test_logloss_equals_the_definition_and_survives_huge_logits() -> None:
    logits, labels = clicks(1000)
    loss = LogLoss()
    loss.update(logits, labels)
    p = torch.sigmoid(logits.double())
    plain = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean().item()
    assert loss.compute() == pytest.approx(plain, rel=1e-12)
    loss.reset()
    loss.update(torch.tensor([1000.0, -1000.0, 1000.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert loss.compute() == pytest.approx(1000.0 / 3)


def test_calibration_is_one_for_true_probabilities_and_above_one_for_too_high_ones() -> None:
    logits, labels = clicks(200_000)
    right, wrong = Calibration(), Calibration()
    right.update(logits, labels)
    wrong.update(logits + 0.5, labels)
    assert right.compute() == pytest.approx(1.0, abs=0.02)
    assert wrong.compute() == pytest.approx(float(torch.sigmoid(logits + 0.5).sum() / labels.sum()), rel=1e-5)
    assert right.ctr() == pytest.approx(float(labels.double().mean()))


def test_deciles_hold_every_example_once_and_follow_the_predictions() -> None:
    logits, labels = clicks(100_000)
    calibration = Calibration()
    calibration.update(logits, labels)
    table = calibration.deciles()
    assert len(table) == 10
    assert sum(decile.examples for decile in table) == 100_000
    assert all(8_000 < decile.examples < 12_000 for decile in table)
    assert [decile.predicted for decile in table] == sorted(decile.predicted for decile in table)
    assert all(abs(decile.predicted - decile.observed) < 0.02 for decile in table)
    assert Calibration().deciles() == []


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 3000), max_size=4), seed=st.integers(0, 9))
def test_batches_cut_anywhere_and_merged_in_any_order_give_one_result(cuts: list[int], seed: int) -> None:
    logits, labels = clicks(3000, seed)
    whole = Metrics()
    whole.update(logits, labels)
    edges = [0, *sorted(cuts), 3000]
    merged = Metrics()
    for start, stop in reversed(list(pairwise(edges))):
        part = Metrics()
        part.update(logits[start:stop], labels[start:stop])
        merged.merge(part)
    assert merged.compute()["auc"] == whole.compute()["auc"]
    assert merged.compute() == pytest.approx(whole.compute(), rel=1e-12)


def test_a_metric_that_was_saved_as_json_goes_on_to_the_same_bits() -> None:
    straight, before = Metrics(), Metrics()
    for seed in range(4):
        straight.update(*clicks(500, seed))
    for seed in range(2):
        before.update(*clicks(500, seed))
    after = Metrics()
    after.update(*clicks(10, 99))  # what it held before is gone after loading
    after.load_state(json.loads(json.dumps(before.state(), allow_nan=False)))
    for seed in range(2, 4):
        after.update(*clicks(500, seed))
    assert after.compute() == straight.compute()
    assert after.state() == straight.state()


def test_state_does_not_follow_later_updates() -> None:
    metrics = Metrics()
    metrics.update(*clicks(100))
    saved = metrics.state()
    text = json.dumps(saved)
    metrics.update(*clicks(100, 1))
    assert json.dumps(saved) == text


def test_reset_starts_a_fresh_window() -> None:
    metrics, fresh = Metrics(), Metrics()
    metrics.update(*clicks(500, 1))
    metrics.reset()
    metrics.update(*clicks(500, 2))
    fresh.update(*clicks(500, 2))
    assert metrics.state() == fresh.state()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_float_type_and_with_gradients_are_taken(dtype: torch.dtype) -> None:
    logits, labels = clicks(200)
    metrics = Metrics()
    metrics.update(logits.to(dtype).requires_grad_(), labels.bool())
    assert metrics.compute()["logloss"] > 0


def test_an_empty_batch_changes_nothing() -> None:
    metrics = Metrics()
    metrics.update(torch.zeros(0), torch.zeros(0))
    assert metrics.state() == Metrics().state()


def test_bad_batches_are_refused_and_change_nothing() -> None:
    metrics = Metrics()
    metrics.update(*clicks(100))
    before = metrics.state()
    ones = torch.ones(3)
    with pytest.raises(BatchError, match=r"NaN or infinity \(2 of 3, first nan at example 1\); no metric was changed"):
        metrics.update(torch.tensor([0.0, math.nan, math.inf]), ones)
    with pytest.raises(BatchError, match=r"labels hold 0.5 at example 2; these metrics need labels that are 0 or 1"):
        metrics.update(ones, torch.tensor([0.0, 1.0, 0.5]))
    with pytest.raises(BatchError, match=r"labels hold nan at example 0"):
        metrics.update(ones, torch.tensor([math.nan, 1.0, 0.0]))
    with pytest.raises(BatchError, match=r"logits of shape \[3, 1\] for labels of \[3\]; pass one logit"):
        metrics.update(ones.unsqueeze(1), ones)
    assert metrics.state() == before


@pytest.mark.parametrize(
    ("part", "change", "fact"),
    [
        ("auc", {"bins": 1024}, "it has 1024 bins and this version has 65536"),
        ("auc", {"used": [5, 4], "negatives": [1, 1], "positives": [1, 1]}, "its bins do not rise"),
        ("auc", {"used": [65536], "negatives": [1], "positives": [1]}, "its bins do not rise"),
        ("auc", {"used": [5], "negatives": [1, 1], "positives": [1]}, "its negatives has 2 entries, not 1"),
        ("auc", {"positives": [-1]}, "its positives is not a list of whole numbers"),
        ("logloss", {"total": math.nan}, "its total is nan"),
        ("logloss", {"examples": 1.5}, "its examples are 1.5"),
        ("calibration", {"predicted": [0.5]}, "its predicted is not a list of 1024 numbers"),
        ("calibration", {"examples": [1]}, "its examples has 1 entries, not 1024"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    part: str, change: dict[str, object], fact: str
) -> None:
    metrics, other = Metrics(), Metrics()
    metrics.update(*clicks(100))
    other.update(*clicks(50, 3))
    before, wrong = metrics.state(), other.state()
    wrong[part] |= change
    with pytest.raises(CheckpointError, match=rf"the saved state of {part} does not fit: .*{fact}"):
        metrics.load_state(wrong)
    del wrong[part]
    with pytest.raises(CheckpointError, match=rf"the saved state of {part} does not fit: it is missing"):
        metrics.load_state(wrong)
    assert metrics.state() == before


def test_one_update_of_4096_examples_takes_less_than_a_millisecond() -> None:
    logits, labels = clicks(4096)
    metrics = Metrics()
    times = []
    for _ in range(60):
        start = time.perf_counter()
        metrics.update(logits, labels)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3
