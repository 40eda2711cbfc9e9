"""Progressive validation: metrics of predictions on examples that the model has not trained on yet.

The prediction is the trainer's own forward pass, before the batch's update, so the only cost is counting. A total over
the whole run says little about the present, so examples are counted in windows. Each window gives one point of a curve:
its AUC and log loss.

A window is a number of examples or a span of event time. Windows are cut inside batches, so the curve depends on the
stream of examples alone: not on the batch size (except the last bits of a log loss, a sum of floats), the clock or
interruptions (a checkpoint holds the open window). With event time, a window is a fixed span (every full hour, say). An
example that arrives late counts in the open window, and a span without examples has no point.

One thread. With ranks, each rank has only a part of the examples, so the trainer raises an error for `window=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from hotrow.errors import BatchError, OptionError
from hotrow.task import Task
from hotrow.train.task_metrics import metrics_of
from hotrow.units import parse_milliseconds

MAX_POINTS = 100_000  # points of the curve that a trainer keeps


@dataclass(frozen=True)
class Window:
    """A point of the curve. `examples` and `step` are the run's when the window ended, `time` its last event time.

    With tasks, `tasks` has the metrics of all, such as `dwell/rmse`, and the other figures are those of the first
    binary task (`nan` without one).
    """

    number: int
    examples: int
    step: int
    time: int | None
    auc: float
    logloss: float
    ctr: float
    tasks: dict[str, float] = field(default_factory=dict)


class Windows:
    """Counts predictions in windows of `every` examples, or of event time ("1h").

    >>> import torch
    >>> windows = Windows(2)
    >>> windows.update(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 1.0]), None, step=1)
    >>> [(window.examples, window.auc) for window in windows.points]
    [(2, 1.0)]
    """

    def __init__(self, every: int | str, tasks: Sequence[Task] = ()) -> None:
        self.every = every
        self._tasks = tuple(tasks)
        self._count, self._span = _check(every)
        self.points: list[Window] = []
        self.begin()

    def begin(self) -> None:
        """Reset: a new run starts."""
        self.points = []
        self._metrics, self._open = metrics_of(self._tasks), 0
        self._number = self._examples = 0
        self._stretch: int | None = None
        self._time: int | None = None

    def update(self, logits: Tensor, labels: Tensor, time: Tensor | None, step: int) -> None:
        """Count a batch that step `step` trains on."""
        if time is None and self._span:
            raise BatchError(f"window={self.every!r} needs event times: give the feature spec time=, or a count")
        begin, size = 0, logits.shape[0]
        times = None if time is None else np.maximum.accumulate(time.numpy())
        while begin < size:
            end = self._end(begin, size, times)
            if end > begin:
                self._metrics.update(logits[begin:end], labels[begin:end])
                self._open, self._examples = self._open + end - begin, self._examples + end - begin
                if times is not None:
                    self._time = max(int(times[end - 1]), self._time or 0)
            if (self._count and self._open == self._count) or (self._span and end < size):
                self._close(step)
            begin = end

    def _end(self, begin: int, size: int, times: Any) -> int:
        """The index in this batch at which the open window ends, at most `size`."""
        if self._count:
            return min(size, begin + self._count - self._open)
        stretch = int(times[begin]) // self._span
        if self._stretch is None or (stretch > self._stretch and not self._open):
            self._stretch = stretch
        return max(begin, int(np.searchsorted(times, (self._stretch + 1) * self._span)))

    def _close(self, step: int) -> None:
        if self._open:
            figures = self._metrics.compute()
            lead = next((f"{task.name}/" for task in self._tasks if task.kind == "binary"), "")
            auc, logloss, ctr = (figures.get(lead + name, float("nan")) for name in ("auc", "logloss", "ctr"))
            of_tasks = figures if self._tasks else {}
            self.points.append(Window(self._number, self._examples, step, self._time, auc, logloss, ctr, of_tasks))
            del self.points[:-MAX_POINTS]
            self._number += 1
        self._metrics.reset()
        self._open, self._stretch = 0, None

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the open window and its position. Points are not kept there."""
        place = {
            "every": self.every,
            "open": self._open,
            "number": self._number,
            "examples": self._examples,
            "stretch": self._stretch,
            "time": self._time,
        }
        return {"place": place, **self._metrics.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. If the window size has changed, a new window starts."""
        place = state["place"]
        self.begin()
        self._examples, self._number, self._time = place["examples"], place["number"], place["time"]
        if place["every"] == self.every:
            self._metrics.load_state({name: part for name, part in state.items() if name != "place"})
            self._open, self._stretch = place["open"], place["stretch"]


def curve(points: list[Window]) -> list[dict[str, Any]]:
    """The points as JSON values."""
    return [{name: value for name, value in asdict(point).items() if value != {}} for point in points]


def _check(every: object) -> tuple[int, int]:
    """Examples and milliseconds of a window; one of them is 0."""
    if isinstance(every, str):
        span = int(parse_milliseconds(every, "window"))
        if span < 1:
            raise OptionError(f"window={every!r}: give a stretch of event time above 0, such as '1h'")
        return 0, span
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(f"window={every!r}: give a number of examples, 1 or more, or event time such as '1h'")
    return every, 0
