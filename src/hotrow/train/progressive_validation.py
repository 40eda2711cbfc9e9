"""Windows: how good the model was lately, on examples that it had not learned from yet.

Progressive validation: predict, then learn. The trainer's own forward pass, before the step that learns from the batch,
is the prediction, so it costs nothing but counting. A total over the whole run says little about today; so examples are
counted in windows, and each window's AUC and log loss are a point of a curve.

A window is so many examples, or so much event time. Both are cut inside of batches, so the curve is a function of the
stream of examples alone: not of the batch size (but for the last bits of a log loss, which is a sum of floats), the
clock, or interruptions (a checkpoint holds the window under way).
With event time a window is a fixed stretch of it (every full hour, say), an example that comes late counts in the
window that is open, and a stretch without examples has no point.

One thread. With ranks each would see a part of the examples only, and the trainer refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hotrow.errors import BatchError, OptionError
from hotrow.train.metrics import Metrics
from hotrow.units import parse_milliseconds

KEPT = 100_000  # points of the curve that a trainer remembers


@dataclass(frozen=True)
class Window:
    """A point of the curve. `examples` and `step` are those of the run when it ended; `time` is its last event time."""

    number: int
    examples: int
    step: int
    time: int | None
    auc: float
    logloss: float
    ctr: float


class Windows:
    """Counts predictions in windows of `every` examples, or of event time ("1h").

    >>> import torch
    >>> windows = Windows(2)
    >>> windows.update(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 1.0]), None, step=1)
    >>> [(window.examples, window.auc) for window in windows.points]
    [(2, 1.0)]
    """

    def __init__(self, every: int | str) -> None:
        self.every = every
        self._count, self._span = _check(every)
        self.points: list[Window] = []
        self.begin()

    def begin(self) -> None:
        """Forget everything: a run starts."""
        self.points = []
        self._metrics, self._open = Metrics(), 0
        self._number = self._examples = 0
        self._stretch: int | None = None
        self._time: int | None = None

    def update(self, logits: Tensor, labels: Tensor, time: Tensor | None, step: int) -> None:
        """Count a batch that step `step` learned from."""
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
        """Where the open window ends in this batch, at most at its end."""
        if self._count:
            return min(size, begin + self._count - self._open)
        stretch = int(times[begin]) // self._span
        if self._stretch is None or (stretch > self._stretch and not self._open):
            self._stretch = stretch
        return max(begin, int(np.searchsorted(times, (self._stretch + 1) * self._span)))

    def _close(self, step: int) -> None:
        if self._open:
            figures = self._metrics.compute()
            self.points.append(
                Window(
                    self._number,
                    self._examples,
                    step,
                    self._time,
                    figures["auc"],
                    figures["logloss"],
                    figures["ctr"],
                )
            )
            del self.points[:-KEPT]
            self._number += 1
        self._metrics.reset()
        self._open, self._stretch = 0, None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the window under way, and where it stands. Points are the report's."""
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
        """Go on where `state` was taken. Another size of window starts a new one."""
        place = state["place"]
        self.begin()
        self._examples, self._number, self._time = place["examples"], place["number"], place["time"]
        if place["every"] == self.every:
            self._metrics.load_state({name: part for name, part in state.items() if name != "place"})
            self._open, self._stretch = place["open"], place["stretch"]


def curve(points: list[Window]) -> list[dict[str, Any]]:
    """Points as plain values, for a file."""
    return [asdict(point) for point in points]


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
