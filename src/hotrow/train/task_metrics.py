"""Metrics of several tasks, by name: `click/auc`, `dwell/rmse`, `orders/deviance`.

    binary      auc, logloss, calibration, ctr, ne (log loss over the entropy of the click-through rate)
    regression  rmse, mae, mean_label, mean_prediction
    count       deviance (Poisson, a mean), rmse (of the rate), mean_label, mean_rate

Each covers the examples that have the task's label; `click/examples` is their number. A task that had none has only
that figure, 0. As the metrics of metrics.py, these are sums: they merge over ranks, and their state is lossless JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hotrow.errors import BatchError, CheckpointError
from hotrow.task import Task
from hotrow.train.metrics import Metrics, Scored

Floats = npt.NDArray[np.float64]
State = dict[str, Any]
LEADING = {"binary": ("logloss", "auc"), "regression": ("rmse",), "count": ("deviance",)}  # in a progress line


class StreamingMetrics(Protocol):
    """What a trainer asks of its metrics: `Metrics` of one unnamed task, or `TaskMetrics`."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch."""

    def compute(self) -> dict[str, float]:
        """All metrics by name."""

    def merge(self, other: Any) -> None:
        """Add the examples of `other`, of the same class and tasks."""

    def reset(self) -> None:
        """Forget all examples."""

    def state(self) -> State:
        """State for `load_state`, as JSON values: metric → name → number or list."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""


class BinaryMetrics:
    """The metrics of one binary task."""

    def __init__(self) -> None:
        self.metrics = Metrics()

    @staticmethod
    def check(logits: Tensor, labels: Tensor) -> Scored:
        """A checked batch, for `add`."""
        return Scored.check(logits, labels)

    def add(self, batch: Scored) -> None:
        """Add a checked batch."""
        self.metrics.add(batch)

    def compute(self) -> dict[str, float]:
        """All metrics by name."""
        figures = self.metrics.compute()
        return {**figures, "ne": figures["logloss"] / entropy if (entropy := _entropy(figures["ctr"])) else math.nan}

    def merge(self, other: BinaryMetrics) -> None:
        """Add the examples of `other`."""
        self.metrics.merge(other.metrics)

    def state(self) -> State:
        """Its parts by name."""
        return self.metrics.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.metrics.load_state(state)


class ErrorMetrics:
    """The metrics of one regression or count task: sums over the examples."""

    SUMS = ("squared", "absolute", "deviance", "labels", "predictions")

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.sums = dict.fromkeys(self.SUMS, 0.0)
        self.examples = 0

    def check(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, float], int]:
        """The sums of one batch, for `add`."""
        x, y = (one.detach().to("cpu").double().numpy() for one in (logits, labels))
        with np.errstate(over="ignore", invalid="ignore"):
            prediction: Floats = np.exp(x) if self.kind == "count" else x
            error = prediction - y
            deviance = _poisson_deviance(x, y, prediction) if self.kind == "count" else np.zeros(0)
            parts = (error * error, np.abs(error), deviance, y, prediction)
            sums = {name: float(part.sum()) for name, part in zip(self.SUMS, parts, strict=True)}
        if not all(math.isfinite(value) for value in sums.values()):
            worst = int(np.argmax(np.where(np.isfinite(x), np.abs(x), np.inf)))
            raise BatchError(
                f"task {self.name!r}: a logit is {x[worst]} for the label {y[worst]}, too large for its metrics; none "
                "was changed. Lower the learning rate, or look for NaN in the dense features"
            )
        return sums, int(x.size)

    def add(self, batch: tuple[dict[str, float], int]) -> None:
        """Add a checked batch."""
        sums, examples = batch
        for name, value in sums.items():
            self.sums[name] += value
        self.examples += examples

    def compute(self) -> dict[str, float]:
        """All metrics by name."""
        mean = {name: value / self.examples if self.examples else math.nan for name, value in self.sums.items()}
        rmse = math.sqrt(mean["squared"])
        if self.kind == "count":
            own = {"deviance": mean["deviance"], "rmse": rmse, "mean_label": mean["labels"]}
            return {**own, "mean_rate": mean["predictions"], "examples": float(self.examples)}
        own = {"rmse": rmse, "mae": mean["absolute"], "mean_label": mean["labels"]}
        return {**own, "mean_prediction": mean["predictions"], "examples": float(self.examples)}

    def merge(self, other: ErrorMetrics) -> None:
        """Add the examples of `other`."""
        self.add((other.sums, other.examples))

    def state(self) -> State:
        """One part."""
        return {"error": {**self.sums, "examples": self.examples}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        part = state.get("error")
        sums: dict[str, Any] = {name: part.get(name) for name in self.SUMS} if isinstance(part, Mapping) else {}
        examples = part.get("examples") if isinstance(part, Mapping) else None
        if type(examples) is not int or examples < 0 or not all(_is_number(value) for value in sums.values()):
            raise CheckpointError(
                f"the saved state of task {self.name!r} does not fit: {part!r}; load what state() gave, or reset() and "
                "count anew"
            )
        self.sums, self.examples = {name: float(value) for name, value in sums.items()}, examples


class TaskMetrics:
    """The metrics of several tasks, over logits and labels `[rows, tasks]`; NaN is a missing label.

    >>> import torch
    >>> metrics = TaskMetrics([Task("click"), Task("dwell", "regression")])
    >>> metrics.update(torch.tensor([[1.0, 3.0], [-1.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, float("nan")]]))
    >>> metrics.compute()["click/auc"], metrics.compute()["dwell/rmse"], metrics.compute()["dwell/examples"]
    (1.0, 2.0, 1.0)
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tuple(tasks)
        self.reset()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch. If a task refuses it, no task has changed."""
        if logits.dim() == 1 and labels.dim() <= 2 and len(self.tasks) == 1:
            logits, labels = logits.unsqueeze(1), labels.view(-1, 1)
        if logits.shape != labels.shape or logits.dim() != 2 or logits.shape[1] != len(self.tasks):
            raise BatchError(
                f"logits of shape {list(logits.shape)} for labels of {list(labels.shape)} and {len(self.tasks)} tasks; "
                "pass both as [batch, tasks]"
            )
        present = ~labels.isnan()
        checked: list[Any] = []
        for place, task in enumerate(self.tasks):
            mine = present[:, place]
            checked.append(self._of[task.name].check(logits[mine, place], labels[mine, place]))
        for task, batch in zip(self.tasks, checked, strict=True):
            self._of[task.name].add(batch)

    def compute(self) -> dict[str, float]:
        """All metrics by `task/name`; a task without labels has only `task/examples`, 0."""
        figures = {}
        for task in self.tasks:
            own = self._of[task.name].compute()
            known = own if own["examples"] else {"examples": 0.0}
            figures.update({f"{task.name}/{name}": value for name, value in known.items()})
        return figures

    def merge(self, other: TaskMetrics) -> None:
        """Add the examples of `other`, which has the same tasks."""
        for task in self.tasks:
            self._of[task.name].merge(other._of[task.name])

    def reset(self) -> None:
        """Forget all examples."""
        self._of: dict[str, Any] = {
            task.name: BinaryMetrics() if task.kind == "binary" else ErrorMetrics(task.name, task.kind)
            for task in self.tasks
        }

    def state(self) -> State:
        """State for `load_state`: the parts of all tasks, named `task/part`."""
        return {
            f"{task.name}/{part}": value for task in self.tasks for part, value in self._of[task.name].state().items()
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; a malformed state raises an error and changes nothing."""
        loaded = TaskMetrics(self.tasks)
        for task in self.tasks:
            begin = f"{task.name}/"
            own = {name.removeprefix(begin): part for name, part in state.items() if name.startswith(begin)}
            loaded._of[task.name].load_state(own)
        self._of = loaded._of


def metrics_of(tasks: Sequence[Task]) -> StreamingMetrics:
    """Empty metrics of a trainer with these tasks; without any, those of one unnamed binary task."""
    return TaskMetrics(tasks) if tasks else Metrics()


def without_labels(figures: Mapping[str, float]) -> list[str]:
    """The tasks that had no label, in figures that `TaskMetrics.compute` gave.

    >>> without_labels({"click/auc": 0.7, "click/examples": 9.0, "like/examples": 0.0})
    ['like']
    """
    return [
        name.removesuffix("/examples") for name, value in figures.items() if name.endswith("/examples") and not value
    ]


def describe_figures(figures: Mapping[str, float]) -> str:
    """Figures in a line, for a person: without the numbers of examples, but with the tasks that have none.

    >>> describe_figures({"click/auc": 0.7, "click/examples": 9.0, "like/examples": 0.0})
    'click/auc 0.7000  like: no labels'
    """
    shown = [f"{name} {value:.4f}" for name, value in figures.items() if name.rpartition("/")[2] != "examples"]
    return "  ".join(shown + [f"{name}: no labels" for name in without_labels(figures)])


def _poisson_deviance(x: Floats, y: Floats, rate: Floats) -> Floats:
    """2 (y log(y / rate) - (y - rate)), where y log y is 0 for y = 0."""
    own = y * np.log(np.where(y > 0, y, 1.0))
    deviance: Floats = 2.0 * (own - y * x - y + rate)
    return deviance


def _entropy(share: float) -> float:
    """In nats; 0 if one class was not seen."""
    if not 0 < share < 1:
        return 0.0
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


def _is_number(value: Any) -> bool:
    return type(value) in (float, int) and math.isfinite(value)
