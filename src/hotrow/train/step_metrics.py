"""Counts the batches of complete steps: metrics, windows of progressive validation, losses.

On a GPU, the copies of a batch's logits and loss to the host are enqueued after its step, and counted while the next
step runs. Waiting for them at once would leave the GPU idle until the host has launched the next batch. So after a step
the copies of its batches may still be in flight; `finish` waits for all of them, and readers of metrics call it first.
Without a GPU, batches are counted at once.

Called by the training thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hotrow.device.device_to_host import HostCopy
from hotrow.train.progressive_validation import Windows
from hotrow.train.report import Report
from hotrow.train.task_metrics import StreamingMetrics
from hotrow.train.tensorboard import log


@dataclass
class ComputedBatch:
    """One batch of a complete step; its tensors may be on a device."""

    logits: Tensor
    labels: Tensor | None  # None if there are no logits
    loss: Tensor  # with ranks: this rank's part
    scale: float  # the step's examples over this rank's
    time: Tensor | None
    step: int


class RunCounts:
    """Metrics and windows of the run so far."""

    def __init__(self, metrics: StreamingMetrics, windows: Windows | None, writer: Any = None) -> None:
        self.metrics = metrics
        self.windows = windows
        self.loss = 0.0  # of the last batch
        self._writer = writer  # TensorBoard's
        self._in_flight: deque[tuple[Report, ComputedBatch, HostCopy]] = deque()

    def add(self, report: Report, batch: ComputedBatch) -> None:
        """Count a batch as soon as its tensors are on the host."""
        labels = [] if batch.labels is None else [batch.labels]
        down = HostCopy(batch.loss, batch.logits, *labels)
        self._in_flight.append((report, batch, down))
        if not down.in_flight:
            self.finish()

    def finish(self) -> None:
        """Wait for the batches in flight, and count them."""
        while self._in_flight:
            report, batch, down = self._in_flight.popleft()
            loss, logits, *labels = down.wait()
            report.losses.append(float(loss))
            self.loss = report.losses[-1] * batch.scale
            if logits.numel():
                self.metrics.update(logits, labels[0])
                if self.windows is not None:
                    self._window(self.windows, logits, labels[0], batch)

    def forget(self) -> None:
        """Drop the batches in flight: another run begins."""
        self._in_flight.clear()

    def _window(self, windows: Windows, logits: Tensor, labels: Tensor, batch: ComputedBatch) -> None:
        before = windows.points[-1] if windows.points else None
        windows.update(logits, labels, batch.time, batch.step)
        if windows.points and (newest := windows.points[-1]) is not before:
            log(self._writer, "window", newest.tasks or {"auc": newest.auc, "logloss": newest.logloss}, batch.step)
