"""The loss of several tasks, and the checks of their labels and logits.

    loss = sum over tasks of weight * (sum of the losses of the examples that have the task's label) / (their number)

A missing label is NaN. It and its logit are replaced by zeros before any arithmetic, and the result is masked, so
neither the value nor a gradient depends on them, not even if the logit overflows. The number of examples is that of the
whole batch over all ranks (`RankTeam.label_counts`). A task that has no label there contributes zero.

Called by the training thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotrow.errors import BatchError, OptionError
from hotrow.features import FeatureSpec
from hotrow.task import Task


def label_counts(labels: Tensor) -> Tensor:
    """How many examples have the label of each task, float64 `[tasks]`.

    >>> label_counts(torch.tensor([[1.0, float("nan")], [0.0, 2.0]])).tolist()
    [2.0, 1.0]
    """
    return (~torch.isnan(labels)).sum(dim=0).double()


def task_loss(tasks: Sequence[Task], logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """This process's part of the loss; the parts of all ranks add up to the loss of the batch.

    Requires: logits and labels are `[rows, tasks]` on one device, `counts` are on the CPU.
    """
    present = ~torch.isnan(labels)
    known_labels = torch.where(present, labels, 0.0)
    known_logits = torch.where(present, logits, 0.0)
    total = logits.new_zeros(())
    for place, (task, count) in enumerate(zip(tasks, counts.tolist(), strict=True)):
        if count == 0:
            continue
        each = task.losses(known_logits[:, place], known_labels[:, place])
        if each.shape != labels[:, place].shape:
            raise OptionError(
                f"the loss of task {task.name!r} gives {list(each.shape)} for {labels.shape[0]} examples; return the "
                "loss of each example (reduction='none')"
            )
        total = total + torch.where(present[:, place], each, 0.0).sum() * (task.weight / count)
    if not total.requires_grad:  # no label at all: backward still passes zeros through the graph
        total = total + (torch.where(present, logits, 0.0) * 0.0).sum()
    return total


def task_logits(tasks: Sequence[Task], logits: Tensor) -> Tensor:
    """Logits as `[rows, tasks]`, checked. A tower of one task may give `[rows]`."""
    if logits.dim() == 1 and len(tasks) == 1:
        logits = logits.unsqueeze(1)
    if logits.dim() != 2 or logits.shape[1] != len(tasks):
        names = [task.name for task in tasks]
        raise OptionError(
            f"the tower gives logits of shape {list(logits.shape)} but the trainer has {len(tasks)} tasks "
            f"({', '.join(names)}); end the tower in a head of these tasks, such as "
            f"head=functools.partial(hr.nn.MMoE, tasks={names})"
        )
    return logits


def task_labels(tasks: Sequence[Task], labels: Tensor) -> Tensor:
    """Labels as `[rows, tasks]`, checked by the kinds of the tasks. With one task they may be `[rows]`."""
    if labels.dim() == 1 and len(tasks) == 1:
        labels = labels.unsqueeze(1)
    names = ", ".join(task.name for task in tasks)
    if labels.dim() != 2 or labels.shape[1] != len(tasks):
        raise BatchError(
            f"labels have shape {list(labels.shape)} but the trainer has {len(tasks)} tasks ({names}); give one "
            "column per task, such as FeatureSpec(label=[hr.features.Label('click'), ...])"
        )
    for place, task in enumerate(tasks):
        column = labels[:, place]
        missing = torch.isnan(column)
        if task.kind == "binary":
            bad, wants = (column != 0) & (column != 1), "0 or 1"
        elif task.kind == "count":
            bad, wants = (column < 0) | torch.isinf(column) | (column != column.floor()), "a whole number from 0"
        else:
            bad, wants = torch.isinf(column), "a finite number"
        bad &= ~missing
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise BatchError(
                f"task {task.name!r} of kind {task.kind!r} has the label {column[first].item()} at example {first}; "
                f"its labels are {wants}, or NaN where missing. Repair the data or change the task's kind"
            )
    return labels


def check_heads(tasks: Sequence[Task], tower: nn.Module) -> None:
    """Raise if a head of the tower was built for other tasks, or for these in another order."""
    names = tuple(task.name for task in tasks)
    for module in tower.modules():
        built_for = getattr(module, "task_names", None)
        if isinstance(built_for, tuple) and built_for != names:
            raise OptionError(
                f"the tower's {type(module).__name__} gives logits of the tasks {', '.join(built_for)}, but the "
                f"trainer has {', '.join(names)}; give both the same tasks in the same order"
            )


def check_labels_of_spec(tasks: Sequence[Task], spec: FeatureSpec) -> None:
    """Raise if a feature spec reads labels of other tasks, or in another order. A spec with one plain label column has
    no task names to compare."""
    if spec.label is None or isinstance(spec.label, str):
        return
    theirs, ours = [[(one.name, one.kind) for one in group] for group in (spec.labels, tasks)]
    if theirs != ours:
        written = ", ".join(f"Label({task.name!r}, {task.kind!r})" for task in tasks)
        raise OptionError(
            f"the feature spec reads labels of {_listed(theirs)}, but the trainer's tasks are {_listed(ours)}; "
            f"give the spec label=[{written}]"
        )


def _listed(pairs: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in pairs)
