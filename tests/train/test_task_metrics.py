"""Metrics of several tasks against plain formulas; merged, saved and refused as those of one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import hotrow as hr
from hotrow.errors import BatchError, CheckpointError
from hotrow.train.metrics import Metrics
from hotrow.train.task_metrics import TaskMetrics, describe_figures

NAN = float("nan")
TASKS = [hr.Task("click"), hr.Task("dwell", "regression"), hr.Task("orders", "count")]


def random_batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 3, generator=draw)
    whole = torch.randint(0, 4, (rows,), generator=draw).float()
    labels = torch.stack([(whole > 1).float(), torch.randn(rows, generator=draw), whole], 1)
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = NAN
    return logits, labels


def test_the_figures_are_those_of_their_formulas() -> None:
    logits, labels = random_batch(500, 1)
    metrics = TaskMetrics(TASKS)
    metrics.update(logits, labels)
    figures = metrics.compute()
    x, y = logits.double().numpy(), labels.double().numpy()
    known = ~np.isnan(y)
    alone = Metrics()
    alone.update(logits[known[:, 0], 0], labels[known[:, 0], 0])
    expected = {f"click/{name}": value for name, value in alone.compute().items()}
    share = expected["click/ctr"]
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    expected["click/ne"] = expected["click/logloss"] / entropy
    error = (x - y)[known[:, 1], 1]
    expected |= {"dwell/rmse": math.sqrt((error**2).mean()), "dwell/mae": abs(error).mean()}
    rate, count = np.exp(x[known[:, 2], 2]), y[known[:, 2], 2]
    terms = [2 * ((c * math.log(c / r) if c else 0.0) - (c - r)) for c, r in zip(count, rate, strict=True)]
    expected |= {"orders/deviance": float(np.mean(terms)), "orders/rmse": math.sqrt(((rate - count) ** 2).mean())}
    expected |= {"dwell/mean_label": y[known[:, 1], 1].mean(), "orders/mean_rate": rate.mean()}
    for place, task in enumerate(TASKS):
        expected[f"{task.name}/examples"] = known[:, place].sum()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=1e-9), name


def test_parts_merge_and_a_saved_state_goes_on_to_the_same_bits() -> None:
    batches = [random_batch(rows, rows) for rows in (7, 1, 64)]
    whole, left, right = TaskMetrics(TASKS), TaskMetrics(TASKS), TaskMetrics(TASKS)
    for number, (logits, labels) in enumerate(batches):
        whole.update(logits, labels)
        (left if number < 2 else right).update(logits, labels)
    loaded = TaskMetrics(TASKS)
    loaded.load_state(json.loads(json.dumps(left.state())))
    assert loaded.state() == left.state()
    loaded.update(*batches[2])
    assert loaded.state() == whole.state()
    left.merge(right)
    assert left.compute() == pytest.approx(whole.compute(), nan_ok=True)


@pytest.mark.parametrize(("task", "value"), [(0, NAN), (1, float("inf")), (2, 800.0)])
def test_a_refused_batch_changes_no_task(task: int, value: float) -> None:
    metrics = TaskMetrics(TASKS)
    logits, labels = random_batch(20, 3)
    metrics.update(logits, labels)
    before = metrics.state()
    spoiled, known = logits.clone(), labels.clone()
    spoiled[4, task], known[4, task] = value, 1.0
    with pytest.raises(BatchError):
        metrics.update(spoiled, known)
    assert metrics.state() == before
    known[4, task] = NAN  # a logit without a label may be anything
    metrics.update(spoiled, known)
    assert metrics.state() != before


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    metrics = TaskMetrics(TASKS)
    metrics.update(*random_batch(20, 3))
    before = metrics.state()
    for damage in ({"dwell/error": {"squared": "x"}}, {"orders/error": None}, {"click/auc": {}}):
        with pytest.raises(CheckpointError):
            metrics.load_state({**before, **damage})
        assert metrics.state() == before


def test_a_task_without_labels_is_described_so() -> None:
    metrics = TaskMetrics(TASKS)
    metrics.update(torch.zeros(2, 3), torch.tensor([[1.0, NAN, NAN], [0.0, NAN, 2.0]]))
    text = describe_figures(metrics.compute())
    assert "click/logloss 0.6931" in text and text.endswith("dwell: no labels")
    assert "examples" not in text
