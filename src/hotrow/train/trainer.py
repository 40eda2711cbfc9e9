"""Trainer: batches in, a better model out, with numbers on the way.

One step is: the batch through the stages (pipeline.py), loss, backward, rows updated by their sparse optimizers, dense
weights by a torch optimizer. Everything that decides a number is a function of the seed and the batches; the clock only
decides when the progress bar moves. A gradient that is NaN or infinite stops the run before anything has changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.errors import BatchError, GradientError, OptionError
from hotrow.nn import Recommender
from hotrow.table import Lookup
from hotrow.train import pipeline
from hotrow.train.metrics import Metrics
from hotrow.train.progress import ProgressView
from hotrow.train.saving import load_model, save_model
from hotrow.train.tensorboard import open_writer

Loss = Callable[[Tensor, Tensor], Tensor]
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Report:
    """What a run did: its metrics over all its examples, its speed, and where it stopped."""

    metrics: dict[str, float]
    steps: int
    examples: int
    ids: int
    seconds: float
    losses: list[float] = field(repr=False)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list, repr=False)
    cursor: Cursor | None = field(default=None, repr=False)

    @property
    def examples_per_second(self) -> float:
        """Speed over the whole run, reading included."""
        return self.examples / max(self.seconds, 1e-9)

    @property
    def ids_per_second(self) -> float:
        """Ids looked up and updated per second."""
        return self.ids / max(self.seconds, 1e-9)


class Trainer:
    """Trains a Recommender.

    `precision` is the tower's: "fp32", "bf16" or "fp16" (rows and their updates stay fp32). `accumulate` batches make
    one step. `clip_dense_norm` clips the dense gradient's norm; rows are clipped by their own optimizer. With `log_dir`
    the metrics also go to TensorBoard, if it is installed.

    >>> import hotrow as hr
    >>> clicks = hr.data.synthetic.criteo_like(examples=2048, batch_size=256)
    >>> embeddings = hr.EmbeddingCollection([hr.Table(name, dim=8) for name in clicks.shape.sparse])
    >>> tower = hr.models.DLRM(embeddings.features, dense_features=13, bottom=(16,), top=(32,))
    >>> trainer = hr.Trainer(hr.Recommender(embeddings, tower))
    >>> trainer.fit(clicks, progress=False).examples
    2048
    """

    def __init__(
        self,
        model: Recommender,
        dense_optimizer: torch.optim.Optimizer | None = None,
        *,
        loss: Loss | None = None,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_dense_norm: float | None = None,
        log_dir: str | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise OptionError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
        if accumulate < 1:
            raise OptionError(f"accumulate={accumulate}: give a whole number of batches, 1 or more")
        self.model = model
        self.parameters = [p for p in model.tower.parameters() if p.requires_grad]
        self.dense_optimizer = dense_optimizer or (torch.optim.Adam(self.parameters) if self.parameters else None)
        self.loss = loss or nn.functional.binary_cross_entropy_with_logits
        self.precision = precision
        self.accumulate = accumulate
        self.clip_dense_norm = clip_dense_norm
        self.scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        self.metrics = Metrics()
        self.cursor: Cursor | None = None
        self.writer = open_writer(log_dir)

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self.model.embeddings.steps

    def fit(
        self,
        source: Source,
        *,
        steps: int | None = None,
        cursor: Cursor | None = None,
        evaluate: Source | None = None,
        evaluate_every: int | None = None,
        progress: bool = True,
    ) -> Report:
        """Train on `source` from its start (or `cursor`), to its end or for `steps` updates.

        With `evaluate` and `evaluate_every`, that source is evaluated every so many updates.
        """
        self.model.train()
        self.metrics.reset()
        losses: list[float] = []
        evaluations: list[tuple[int, dict[str, float]]] = []
        examples = ids = waiting = 0
        first_step, start = self.steps, time.perf_counter()
        total = source.examples
        with ProgressView("train", total, progress) as view:
            for (logits, value), batch, after in pipeline.run(
                source, self.model.embeddings, self._forward_backward, cursor
            ):
                waiting += 1
                if waiting == self.accumulate:
                    self._step()
                    waiting = 0
                self.cursor = after
                losses.append(float(value))
                self.metrics.update(logits, _labels(batch))
                examples += batch.size
                ids += batch.id_count()
                if view.due:
                    view.update(examples, ids, self.metrics.compute())
                if waiting:
                    continue
                if evaluate is not None and evaluate_every and (self.steps - first_step) % evaluate_every == 0:
                    evaluations.append((self.steps, self.evaluate(evaluate, progress=False)))
                    self._log("eval", evaluations[-1][1])
                self._log("train", {"loss": losses[-1]})
                if steps is not None and self.steps - first_step >= steps:
                    break
            if waiting:
                self._step()
            figures = self.metrics.compute()
            if progress:
                view.update(examples, ids, figures)
        seconds = time.perf_counter() - start
        self._log("train", figures)
        return Report(figures, self.steps - first_step, examples, ids, seconds, losses, evaluations, self.cursor)

    def evaluate(self, source: Source, *, steps: int | None = None, progress: bool = True) -> dict[str, float]:
        """Metrics of the model on `source`. Creates no row and touches no count."""
        was_training = self.model.training
        self.model.eval()
        metrics = Metrics()
        examples = ids = 0
        try:
            with torch.inference_mode(), ProgressView("evaluate", source.examples, progress) as view:
                for step, (batch, _) in enumerate(source.batches()):
                    if steps is not None and step >= steps:
                        break
                    with self._autocast():
                        logits = self.model(batch)
                    metrics.update(logits, _labels(batch))
                    examples += batch.size
                    ids += batch.id_count()
                    if view.due:
                        view.update(examples, ids, metrics.compute())
        finally:
            self.model.train(was_training)
        return metrics.compute()

    def predict(self, batch: KeyedBatch) -> Tensor:
        """Probabilities of a batch."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), self._autocast():
                return torch.sigmoid(self.model(batch))
        finally:
            self.model.train(was_training)

    def save(self, path: str | os.PathLike[str], **extra: Any) -> None:
        """Write the model (rows with optimizer state, dense weights, definition) to a folder; see `hotrow inspect`."""
        save_model(self.model, path, extra)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read rows and dense weights back into this model, which must have the same tables and tower."""
        load_model(self.model, path)

    def _forward_backward(self, lookup: Lookup) -> tuple[Tensor, Tensor]:
        labels = _labels(lookup.batch)
        with self._autocast():
            logits = self.model(lookup)
        value = self.loss(logits, labels) / self.accumulate
        if not bool(torch.isfinite(value)) and not self.scaler.is_enabled():
            self._forget()
            raise GradientError(
                f"the loss is {value.item()} at step {self.steps + 1}; nothing was changed by this batch. "
                "Lower the learning rate, clip gradients (clip_norm=, clip_dense_norm=), or look for bad dense features"
            )
        self.scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        return logits.detach(), value.detach() * self.accumulate

    def _step(self) -> None:
        """Rows first: they are checked for NaN before anything changes. Then the dense part."""
        if self.scaler.is_enabled():
            self._scaled_step()
            return
        self._clip_dense()
        try:
            self.model.embeddings.step()
        except GradientError:
            self._forget()
            raise
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
            self.dense_optimizer.zero_grad()

    def _scaled_step(self) -> None:
        """fp16: where any gradient overflowed, skip the whole step, rows and dense alike, and lower the scale."""
        scale = self.scaler.get_scale()
        if self.dense_optimizer is not None:
            self.scaler.unscale_(self.dense_optimizer)
        try:
            if not all(bool(torch.isfinite(p.grad).all()) for p in self.parameters if p.grad is not None):
                raise GradientError("a dense gradient overflowed")
            self._clip_dense()
            self.model.embeddings.step(grad_scale=1.0 / scale)
        except GradientError:
            self._forget()
            self.scaler.update(scale * self.scaler.get_backoff_factor())
            return
        if self.dense_optimizer is not None:
            self.scaler.step(self.dense_optimizer)
            self.dense_optimizer.zero_grad()
        self.scaler.update()

    def _clip_dense(self) -> None:
        if self.clip_dense_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_dense_norm)

    def _forget(self) -> None:
        self.model.embeddings.discard()
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _log(self, group: str, figures: dict[str, float]) -> None:
        if self.writer is not None:
            for name, value in figures.items():
                self.writer.add_scalar(f"{group}/{name}", value, self.steps)


def _labels(batch: KeyedBatch) -> Tensor:
    if batch.labels is None:
        raise BatchError("the batch has no labels; give the feature spec label=, or use predict()")
    return batch.labels.float()
