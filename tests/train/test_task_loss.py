"""The loss of several tasks against a loop over examples; missing labels reach neither the loss nor a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import hotrow as hr
from hotrow.errors import BatchError, OptionError
from hotrow.train.task_loss import label_counts, task_labels, task_logits, task_loss

NAN = float("nan")
TASKS = [
    hr.Task("click", weight=2.0),
    hr.Task("dwell", "regression"),
    hr.Task("price", "regression", weight=0.5, loss="huber"),
    hr.Task("orders", "count", weight=0.25),
    hr.Task("rank", "regression", loss=lambda logits, labels: (logits - labels).abs()),
]


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """One example and task at a time."""
    total = torch.zeros((), dtype=logits.dtype)
    for place, task in enumerate(TASKS):
        losses = []
        for x, y in zip(logits[:, place], labels[:, place], strict=True):
            if math.isnan(y):
                continue
            if place == 0:
                losses.append(-(y * torch.log(torch.sigmoid(x)) + (1 - y) * torch.log(1 - torch.sigmoid(x))))
            elif place == 1:
                losses.append((x - y) ** 2)
            elif place == 2:
                losses.append(0.5 * (x - y) ** 2 if abs(x - y) < 1 else abs(x - y) - 0.5)
            elif place == 3:
                losses.append(torch.exp(x) - y * x)
            else:
                losses.append(abs(x - y))
        if losses:
            total = total + task.weight * torch.stack(losses).mean()
    return total


def random_labels(rows: int, missing: float, draw: torch.Generator) -> Tensor:
    whole = torch.randint(0, 4, (rows,), generator=draw).double()
    columns = [(whole > 1).double(), torch.randn(rows, generator=draw).double(), whole * 2.5, whole, whole]
    labels = torch.stack(columns, 1)
    labels[torch.rand(labels.shape, generator=draw) < missing] = NAN
    return labels


@pytest.mark.parametrize("missing", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_the_loss_and_gradients_are_those_of_a_loop_over_examples(rows: int, missing: float) -> None:
    draw = torch.Generator().manual_seed(rows)
    labels = random_labels(rows, missing, draw)
    logits = torch.randn(rows, len(TASKS), generator=draw).double().requires_grad_()
    ours = task_loss(TASKS, logits, labels, label_counts(labels))
    (gradient,) = torch.autograd.grad(ours, logits)
    expected = plain_loss(logits, labels)
    torch.testing.assert_close(ours, expected)
    if missing < 1.0:
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    assert not gradient[labels.isnan()].any()


def test_the_parts_of_several_processes_add_up_to_the_loss_of_the_whole() -> None:
    draw = torch.Generator().manual_seed(5)
    labels, logits = random_labels(30, 0.3, draw), torch.randn(30, len(TASKS), generator=draw).double()
    labels[:9, 1] = NAN  # the first part has no label of this task
    counts = label_counts(labels)
    parts = [task_loss(TASKS, logits[a:b], labels[a:b], counts) for a, b in ((0, 9), (9, 10), (10, 30))]
    torch.testing.assert_close(sum(parts), task_loss(TASKS, logits, labels, counts))


@pytest.mark.parametrize("bad", [1e4, float("inf"), NAN])
def test_a_logit_without_a_label_may_be_anything(bad: float) -> None:
    logits = torch.tensor([[0.5, bad], [0.1, 1.0]], requires_grad=True)
    labels = torch.tensor([[1.0, NAN], [NAN, 2.0]])
    loss = task_loss([hr.Task("click"), hr.Task("orders", "count")], logits, labels, label_counts(labels))
    loss.backward()
    assert math.isfinite(loss.item())
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert logits.grad[labels.isnan()].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "value", "wants"),
    [
        ("binary", 0.5, "0 or 1"),
        ("binary", 2.0, "0 or 1"),
        ("count", -1.0, "a whole number from 0"),
        ("count", 1.5, "a whole number from 0"),
        ("count", float("inf"), "a whole number from 0"),
        ("regression", float("-inf"), "a finite number"),
    ],
)
def test_a_label_that_its_kind_cannot_have_is_named(kind: str, value: float, wants: str) -> None:
    with pytest.raises(BatchError, match=rf"task 'x' of kind '{kind}' has the label {value} at example 2; .*{wants}"):
        task_labels([hr.Task("x", kind)], torch.tensor([0.0, NAN, value]))


def test_labels_and_logits_of_another_width_are_refused_with_the_cure() -> None:
    tasks = [hr.Task("click"), hr.Task("like")]
    with pytest.raises(BatchError, match=r"labels have shape \[3\] but the trainer has 2 tasks \(click, like\)"):
        task_labels(tasks, torch.zeros(3))
    with pytest.raises(OptionError, match=r"logits of shape \[3, 4\] .* 2 tasks .*tasks=\['click', 'like'\]"):
        task_logits(tasks, torch.zeros(3, 4))
    assert task_logits(tasks[:1], torch.zeros(3)).shape == (3, 1)
    with pytest.raises(OptionError, match=r"loss of task 'x' gives \[\] for 2 examples; .*reduction='none'"):
        task = hr.Task("x", loss=torch.nn.functional.mse_loss)
        task_loss([task], torch.zeros(2, 1), torch.zeros(2, 1), torch.tensor([2.0]))


def test_wrong_tasks_are_refused_with_the_cure() -> None:
    with pytest.raises(OptionError, match=r"task 'x' has kind 'binry'; did you mean 'binary'"):
        hr.Task("x", "binry")
    with pytest.raises(OptionError, match=r"task 'x' of kind 'binary' has no loss 'huber'"):
        hr.Task("x", loss="huber")
    with pytest.raises(OptionError, match=r"task 'x' has weight -1; give a finite number"):
        hr.Task("x", weight=-1)
    with pytest.raises(OptionError, match=r"task name 'a/b'"):
        hr.Task("a/b")
