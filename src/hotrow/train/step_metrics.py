"""What a step's batches were becomes part of the run: metrics, windows of progressive validation, losses.

A batch counts when its step is whole. On a GPU its logits and its loss come down behind the step and are counted while
the next step is in work: whoever waits for them at once leaves the GPU without work until the host has launched the
next batch, and where stages run ahead on threads, each wait also asks for Python's lock again. So after a step its
batches may still be on their way here; `finish` has them all, and who looks at metrics calls it first. Without a GPU
they count at once.

Called by the training thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hotrow.device.device_to_host import Down
from hotrow.train.metrics import Metrics
from hotrow.train.progressive_validation import Windows
from hotrow.train.report import Report
from hotrow.train.tensorboard import log


@dataclass
class Computed:
    """One batch of a step that is whole: its logits, labels and loss, wherever they are."""

    logits: Tensor
    labels: Tensor | None  # None where there are no logits, either
    loss: Tensor  # what this rank adds to it
    scale: float  # the step's examples for one of this rank's
    time: Tensor | None
    step: int


class Counting:
    """What has been seen so far."""

    def __init__(self, windows: Windows | None, writer: Any = None) -> None:
        self.metrics = Metrics()
        self.windows = windows
        self.loss = 0.0  # of the last batch
        self._writer = writer  # of TensorBoard
        self._coming: deque[tuple[Report, Computed, Down]] = deque()

    def add(self, report: Report, batch: Computed) -> None:
        """Count a batch, when what is known of it is on the host."""
        labels = [] if batch.labels is None else [batch.labels]
        down = Down(batch.loss, batch.logits, *labels)
        self._coming.append((report, batch, down))
        if not down.in_flight:
            self.finish()

    def finish(self) -> None:
        """Wait for what is on its way, and count it."""
        while self._coming:
            report, batch, down = self._coming.popleft()
            loss, logits, *labels = down.wait()
            report.losses.append(float(loss))
            self.loss = report.losses[-1] * batch.scale
            if logits.numel():
                self.metrics.update(logits, labels[0])
                if self.windows is not None:
                    self._window(self.windows, logits, labels[0], batch)

    def forget(self) -> None:
        """Drop what is on its way: another run begins."""
        self._coming.clear()

    def _window(self, windows: Windows, logits: Tensor, labels: Tensor, batch: Computed) -> None:
        before = windows.points[-1] if windows.points else None
        windows.update(logits, labels, batch.time, batch.step)
        if windows.points and (newest := windows.points[-1]) is not before:
            log(self._writer, "window", {"auc": newest.auc, "logloss": newest.logloss}, batch.step)
