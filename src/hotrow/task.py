"""Task: one thing that a model learns to predict, with the kind of its labels, its loss and its weight.

A trainer with tasks reads labels and logits `[batch, tasks]`, both in the order of its tasks. The kind decides the
loss, the metrics, and the link from a logit to a prediction:

    kind        labels                  loss                             prediction
    binary      0 or 1                  cross-entropy with logits        sigmoid(logit), a probability
    regression  any finite number       squared error, or Huber's        the logit itself
    count       whole numbers from 0    Poisson, with log rate = logit   exp(logit), a rate

NaN is a label that is missing. It takes no part in the loss, the gradient or the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import OptionError, choices

ExampleLoss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def _squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(logits, labels, reduction="none")


def _huber(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.huber_loss(logits, labels, reduction="none")


def _poisson(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.exp(logits) - labels * logits


LOSSES: dict[str, dict[str, ExampleLoss]] = {  # kind → name → loss of each example; the first is the kind's own
    "binary": {"cross_entropy": _cross_entropy},
    "regression": {"squared_error": _squared_error, "huber": _huber},
    "count": {"poisson": _poisson},
}
LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "binary": torch.sigmoid,
    "regression": lambda logits: logits,
    "count": torch.exp,
}


@dataclass(frozen=True)
class Task:
    """One task: `name`, the `kind` of its labels, its `weight` in the total loss, and its `loss`.

    `loss` is a name ("huber" for a regression) or your own function from logits and labels, both `[n]`, to the loss of
    each example, `[n]`. Without it the kind decides.

    >>> Task("dwell", "regression", weight=0.1, loss="huber").kind
    'regression'
    """

    name: str
    kind: str = "binary"
    weight: float = 1.0
    loss: str | ExampleLoss | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise OptionError(f"task name {self.name!r}: give a text that is not empty and has no '/'")
        if not isinstance(self.kind, str) or self.kind not in LOSSES:
            raise OptionError(f"task {self.name!r} has kind {self.kind!r}; {choices(str(self.kind), LOSSES)}")
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
            raise OptionError(f"task {self.name!r} has weight {weight!r}; give a finite number of at least 0")
        if self.loss is not None and not callable(self.loss) and self.loss not in LOSSES[self.kind]:
            raise OptionError(
                f"task {self.name!r} of kind {self.kind!r} has no loss {self.loss!r}; "
                f"{choices(str(self.loss), LOSSES[self.kind])}"
            )

    @property
    def loss_name(self) -> str:
        """The name of its loss; "custom" for a function of the user's."""
        if callable(self.loss):
            return "custom"
        return next(iter(LOSSES[self.kind])) if self.loss is None else self.loss

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example, `[n]`. Requires: no label is missing."""
        each = self.loss if callable(self.loss) else LOSSES[self.kind][self.loss_name]
        return each(logits, labels)

    def to_dict(self) -> dict[str, str]:
        """What a checkpoint and an export record: the name and the kind."""
        return {"name": self.name, "kind": self.kind}


def check_tasks(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The tasks of a trainer, checked: at least one, and each name once.

    >>> [task.name for task in check_tasks([Task("click"), Task("like")])]
    ['click', 'like']
    """
    if isinstance(tasks, (str, Task)) or not tasks or not all(isinstance(task, Task) for task in tasks):
        raise OptionError(f"tasks={tasks!r}: give a list of hr.Task, such as [hr.Task('click')]")
    task_names(tasks)
    return tuple(tasks)


def task_names(tasks: Sequence[Task | str]) -> tuple[str, ...]:
    """The names of tasks that are given by name or as a Task; each once.

    >>> task_names(["click", Task("like")])
    ('click', 'like')
    """
    if isinstance(tasks, (str, Mapping)) or not isinstance(tasks, Sequence) or not tasks:
        raise OptionError(f"tasks={tasks!r}: give a list of names or of hr.Task, such as ['click', 'like']")
    names = tuple(task.name if isinstance(task, Task) else Task(task).name for task in tasks)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"task {twice[0]!r} is there {names.count(twice[0])} times; name each task once")
    return names


def apply_links(kinds: Sequence[str], logits: Tensor) -> Tensor:
    """Predictions of logits `[rows, tasks]`: sigmoid, identity or exp by the kind of each task.

    >>> apply_links(["binary", "count"], torch.zeros(1, 2)).tolist()
    [[0.5, 1.0]]
    """
    return torch.stack([LINKS[kind](logits[:, place]) for place, kind in enumerate(kinds)], dim=1)


def tasks_from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Task, ...]:
    """The tasks of a job file or a record: mappings of Task's fields. None gives none.

    >>> tasks_from_json([{"name": "click"}])[0].kind
    'binary'
    """
    known = ["name", "kind", "weight", "loss"]
    for value in values:
        if not isinstance(value, Mapping) or "name" not in value:
            raise OptionError(f"task {value!r}: give a name, and optionally {', '.join(known[1:])}")
        for option in value:
            if option not in known:
                raise OptionError(f"task {value['name']!r} has no option {option!r}; {choices(option, known)}")
    return check_tasks([Task(**value) for value in values]) if values else ()
