"""Trainer: the options of training, and its calls: fit, evaluate, predict, save, load, stop.

`fit` is in fit.py. One step passes a batch through the pipeline (pipeline.py), computes loss and gradients, and updates
rows by their sparse optimizers and dense weights by a torch optimizer. Every number that training computes is a
function of the seed and the batches; the clock decides only when the progress bar moves. A gradient that is NaN or
infinite stops the run before anything has changed.

A checkpoint is taken between two steps (checkpoint/saving.py) and holds everything that later steps depend on, so a run
that was interrupted and resumed (checkpoint/loading.py) computes the same bits as one that was not.

One thread calls a trainer; `stop` may be called by any.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.errors import CheckpointError, OptionError
from hotrow.features import FeatureSpec
from hotrow.nn import Recommender
from hotrow.publish.publisher import Publish, Publisher
from hotrow.table import Lookup
from hotrow.task import Task, apply_links, check_tasks
from hotrow.train.checkpoint import loading
from hotrow.train.checkpoint.background_save import Saver
from hotrow.train.checkpoint.saving import capture
from hotrow.train.checkpoint.shared_folder import check_shared_folder
from hotrow.train.distributed import RankTeam
from hotrow.train.fit import FitOptions, FitRun
from hotrow.train.interrupt import StopRequests
from hotrow.train.progress_view import ProgressView
from hotrow.train.progressive_validation import Windows
from hotrow.train.report import Report, SaveReport
from hotrow.train.run_position import RunPosition
from hotrow.train.step_metrics import RunCounts
from hotrow.train.task_loss import check_heads, check_labels_of_spec, label_counts, task_logits, task_loss
from hotrow.train.task_metrics import StreamingMetrics, metrics_of, without_labels
from hotrow.train.tensorboard import log, open_writer
from hotrow.train.train_step import (
    ForwardResult,
    PendingBatch,
    checks_loss_in_step,
    drop_gradients,
    labels_of,
    loss_error,
)

Loss = Callable[[Tensor, Tensor], Tensor]
# In batches. With HBM, one batch is routed and another one's rows are staged while a third is computed. The core
# distinguishes at most 15 batches in flight.
LOOKAHEAD, LOOKAHEAD_HBM, MOST_AHEAD = 2, 3, 12
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a Recommender.

    `precision` is the tower's: "fp32", "bf16" or "fp16" (rows have a `dtype` of their own, in their table).
    `accumulate` batches make one step. `clip_dense_norm` clips the dense gradient's norm; rows are clipped by their own
    optimizer. With `log_dir` the metrics also go to TensorBoard, if it is installed.

    `checkpoints` is the folder of this run's checkpoints. With `checkpoint_every`, `fit` saves there every
    `checkpoint_every` steps in the background and keeps the last `keep` (None keeps all). If a scheduler changes the
    dense optimizer's learning rate, save its state yourself: the checkpoint has only the rate that it last set. Ctrl-C
    or SIGTERM ends `fit` after a whole step, saves there and raises KeyboardInterrupt. Your own signal handlers are not
    replaced.

    `lookahead` is how many batches are read, routed and fetched while one is computed; results are the same for any
    number, and 0 runs the stages one after another. `trace` is a file for a trace of every `fit`, which
    https://ui.perfetto.dev opens; with ranks the trace shows one process per rank.

    `publish` sends rows and weights to servers during training (docs/online.md). `window` is a number of examples, or
    event time ("1h"). Each window gives one point of progressive validation (`report.windows`): the AUC and log loss of
    predictions on examples that the model had not trained on yet.

    `tasks` names what the tower's logits `[batch, tasks]` predict, in their order. Each task has its own loss, weight
    and metrics (docs/tasks.md). Without it the tower has one logit, and `loss` is its loss.

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
        tasks: Sequence[Task] | None = None,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_dense_norm: float | None = None,
        log_dir: str | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep: int | None = 3,
        lookahead: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        publish: Publish | None = None,
        window: int | str | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise OptionError(f"precision={precision!r}: choose one of {', '.join(PRECISIONS)}")
        if accumulate < 1:
            raise OptionError(f"accumulate={accumulate}: give a whole number of batches, 1 or more")
        if checkpoint_every is not None and (checkpoint_every < 1 or checkpoints is None):
            raise OptionError(
                f"checkpoint_every={checkpoint_every} with checkpoints={checkpoints!r}: give a number of steps, 1 or "
                "more, and the folder, such as checkpoints='checkpoints/'"
            )
        if keep is not None and keep < 1:
            raise OptionError(f"keep={keep}: give how many checkpoints stay, 1 or more, or None for all")
        if lookahead is None:
            lookahead = LOOKAHEAD if model.embeddings.hbm_cache is None else LOOKAHEAD_HBM
        if not isinstance(lookahead, int) or isinstance(lookahead, bool) or not 0 <= lookahead <= MOST_AHEAD:
            raise OptionError(f"lookahead={lookahead!r}: give a number of batches from 0 to {MOST_AHEAD}")
        self.model = model
        ranks = model.embeddings.ranks
        self.has_tower = ranks is None or ranks.has_tower  # a row rank runs none, and has nothing dense to train
        self.parameters = [p for p in model.tower.parameters() if p.requires_grad] if self.has_tower else []
        self.dense_optimizer = None
        if self.parameters:
            self.dense_optimizer = dense_optimizer or torch.optim.Adam(self.parameters)
        if tasks is not None and loss is not None:
            raise OptionError("loss= beside tasks=: each task has its own; pass hr.Task(..., loss=...)")
        self.tasks = () if tasks is None else check_tasks(tasks)
        if self.tasks and self.has_tower:
            check_heads(self.tasks, model.tower)
        self.loss = loss or nn.functional.binary_cross_entropy_with_logits
        self.precision = precision
        self.accumulate = accumulate
        self.clip_dense_norm = clip_dense_norm
        self.checkpoints = None if checkpoints is None else Path(checkpoints)
        self.checkpoint_every = checkpoint_every
        self.scaler = torch.amp.GradScaler(model.embeddings.device.type, enabled=precision == "fp16")
        if window is not None and model.embeddings.ranks is not None:
            raise OptionError(f"window={window!r} with ranks: each sees a part of the examples; leave window= out")
        self.cursor: Cursor | None = None
        self.position = RunPosition()
        self.features: FeatureSpec | None = None
        self.job: dict[str, Any] | None = None  # how the tower is built, to open a checkpoint without a model
        self.saver = Saver(keep)
        self.lookahead = lookahead
        self.trace = None if trace is None else Path(trace)
        self.stop_requests = StopRequests()
        self.pending: list[PendingBatch] = []  # batches whose gradients the next step will apply
        self.team = None if ranks is None else RankTeam(ranks, self)
        self.writer = open_writer(log_dir) if self.is_first else None
        windows = None if window is None else Windows(window, self.tasks)
        self.counts = RunCounts(metrics_of(self.tasks), windows, self.writer)
        self.publisher = None
        if publish is not None:
            self.publisher = Publisher(publish, model.embeddings, model.tower, self.checkpoints)

    @property
    def is_first(self) -> bool:
        """Whether this process shows progress and writes logs."""
        return self.team is None or self.team.ranks.first

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self.model.embeddings.steps

    @property
    def metrics(self) -> StreamingMetrics:
        """Metrics of all steps since the epoch began."""
        self.counts.finish()
        return self.counts.metrics

    @metrics.setter
    def metrics(self, counted: StreamingMetrics) -> None:
        self.counts.forget()
        self.counts.metrics = counted

    @property
    def windows(self) -> Windows | None:
        """Points of progressive validation, with `window=`."""
        self.counts.finish()
        return self.counts.windows

    def fit(
        self,
        source: Source,
        *,
        steps: int | None = None,
        epochs: int = 1,
        cursor: Cursor | None = None,
        evaluate: Source | None = None,
        evaluate_every: int | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> Report:
        """Train on `source` from its start (or `cursor`), for `epochs` passes or `steps` updates, whichever is first.

        `evaluate` is a source that is evaluated every `evaluate_every` updates. With `resume`, the newest valid
        checkpoint is loaded and its run continues as if it had never stopped: `steps` and `epochs` count from the
        start of that run. Without a checkpoint a new run starts.
        """
        if self.team is not None:
            given = {"steps": steps, "epochs": epochs, "cursor": cursor, "resume": resume}
            given |= {"evaluate": evaluate is not None, "evaluate_every": evaluate_every}
            self.team.compare("fit", source, given)
            if self.checkpoints is not None:
                check_shared_folder(self.checkpoints, self.team.ranks)
        if epochs < 1:
            raise OptionError(f"epochs={epochs}: give a whole number of passes, 1 or more")
        options = FitOptions(steps, epochs, cursor, evaluate, evaluate_every, resume, progress)
        return FitRun(self, source, options).run()

    def evaluate(self, source: Source, *, steps: int | None = None, progress: bool = True) -> dict[str, float]:
        """Metrics of the model on `source`. Creates no row and changes no count.

        With ranks, each evaluates its share of the batches and all return the metrics of the whole; `steps` then counts
        the batches of all ranks together.
        """
        if self.team is not None:
            self.team.compare("evaluate", source, {"steps": steps})
        spec = getattr(source, "features", None)
        self.check_source(spec if isinstance(spec, FeatureSpec) else None)
        source = source if self.team is None else self.team.source(source)
        embeddings, progress = self.model.embeddings, progress and self.is_first
        was_training = self.model.training
        self.model.eval()
        metrics = metrics_of(self.tasks)
        examples = ids = 0
        try:
            with torch.inference_mode(), ProgressView("evaluate", source.examples, progress) as view:
                for step, (batch, _) in enumerate(source.batches()):
                    if (steps is not None and step >= steps) or self.asked_to_stop():
                        break
                    lookup = embeddings.route(batch, ahead=False)
                    if lookup.finished:
                        embeddings.release(lookup)
                        break
                    examples += lookup.examples
                    if batch.size == 0:  # other ranks have one
                        embeddings(lookup.read())
                        continue
                    with self._autocast():
                        logits = self.model(lookup.read())
                    if self.tasks:
                        logits = task_logits(self.tasks, logits)
                    metrics.update(logits.cpu(), labels_of(batch, self.tasks).cpu())
                    ids += batch.id_count()
                    if view.due:
                        shown, owner = self.figures_of_this_rank(ids)
                        view.update(examples, shown, metrics.compute(), owner=owner)
        finally:
            self.model.train(was_training)
        figures = (metrics if self.team is None else self.team.merged(metrics)).compute()
        self.warn_of_unlabelled(figures, "the evaluation")
        return figures

    def predict(self, batch: KeyedBatch) -> Tensor:
        """Probabilities of a batch. With tasks `[batch, tasks]`: probabilities, values and rates by their kinds."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), self._autocast():
                logits = self.model(batch)
                if not self.tasks:
                    return torch.sigmoid(logits)
                return apply_links([task.kind for task in self.tasks], task_logits(self.tasks, logits))
        finally:
            self.model.train(was_training)

    def save(
        self, path: str | os.PathLike[str] | None = None, wait: bool = True, notes: dict[str, Any] | None = None
    ) -> SaveReport:
        """Save the current state into a folder of checkpoints (this run's own, unless `path` names another).

        The result is `path/step-000000001000`, complete or absent; checkpoints beyond `keep` there are removed. With
        `wait=False` only the capture happens now, and training may continue while it is written; an error is raised by
        the next save, by `wait()` or at the end of `fit`. `notes` are your own JSON values, which `hotrow inspect`
        shows.
        """
        folder = self.checkpoints if path is None else Path(path)
        if folder is None:
            raise OptionError(
                "save() does not know where: pass a folder, or give the Trainer checkpoints='checkpoints/'"
            )
        if self.pending or self.model.embeddings._waiting:
            raise CheckpointError(
                f"gradients wait for step {self.steps + 1}; save between two steps (checkpoint_every= does), or drop "
                "them with forget()"
            )
        if self.publisher is not None:
            self.publisher.before_save()
        return self.saver.save(lambda: capture(self, folder, notes), folder, wait)

    def wait(self) -> None:
        """Wait for a background save; raises its error if it failed."""
        self.saver.wait()

    def load(
        self,
        path: str | os.PathLike[str],
        rename: Mapping[str, str] | None = None,
        tables: Sequence[str] | None = None,
    ) -> None:
        """Load a checkpoint (or the newest of a folder): rows, tower, optimizer, metrics, random state.

        `rename` maps saved tables to this model's. Sightings and expiry continue, but the generator of new rows and
        of admission with a probability is keyed by the new name. With `tables`, only the rows of those tables of this
        model are loaded, and everything else stays. Memory budgets may differ. If the checkpoint does not match the
        model, an error is raised and nothing has changed.
        """
        self.saver.settle()
        if self.publisher is not None:
            self.publisher.close()
        loading.load(self, Path(path), rename, tables)

    def check_source(self, spec: FeatureSpec | None) -> None:
        """Raise if a source's labels are not those of the tasks."""
        if self.tasks and spec is not None:
            check_labels_of_spec(self.tasks, spec)

    def warn_of_unlabelled(self, figures: Mapping[str, float], where: str) -> None:
        """Warn of tasks that had no label at all."""
        if self.tasks and self.is_first:
            for name in without_labels(figures):
                warnings.warn(f"task {name!r} had no labels in {where}: nothing was learned or measured", stacklevel=4)

    def forget(self) -> None:
        """Drop the gradients of batches that no step has applied yet."""
        self.pending.clear()
        drop_gradients(self)

    def figures_of_this_rank(self, ids: int) -> tuple[int | None, str]:
        """The ids to show before figures are summed over ranks (None: unknown), and a prefix for one rank's metrics."""
        return (ids, "") if self.team is None else (None, "rank 0: ")

    @contextmanager
    def stoppable(self, end_source: Callable[[], None] | None = None) -> Iterator[None]:
        """Intercept Ctrl-C and SIGTERM: the code inside polls for them (`asked_to_stop`) where it can stop.

        `fit` does so itself; a block around several calls (job.py) covers them and the code between them. All ranks
        enter it.
        """
        if self.stop_requests.held:
            with self.stop_requests.ending(end_source):
                yield
            return
        self.stop_requests = StopRequests()
        together = nullcontext() if self.team is None else self.team.fitting(lambda: self.stop_requests.number)
        with self.stop_requests, self.stop_requests.ending(end_source), together:
            yield

    def asked_to_stop(self) -> int:
        """The number of the signal that requested a stop, or 0. For code that makes no step: ranks exchange it, so
        all ranks call it."""
        return self.stop_requests.number if self.team is None else self.team.exchange_stop()

    def stop(self) -> None:
        """End a running `fit` as Ctrl-C does: after a whole step, with a checkpoint, by `Interrupted`. Any thread."""
        self.stop_requests.request()

    def _after_step(self, report: Report, evaluate: Source | None, evaluate_every: int | None) -> None:
        """Publish, evaluate and save, where each is due after this step."""
        if self.publisher is not None:
            self.publisher.after_step()
        if evaluate is not None and evaluate_every and (self.steps - self.position.first_step) % evaluate_every == 0:
            report.evaluations.append((self.steps, self.evaluate(evaluate, progress=False)))
            self.log("eval", report.evaluations[-1][1])
        if self.checkpoint_every is not None and self.steps % self.checkpoint_every == 0:
            self.save(wait=False)

    def _forward_backward(self, lookup: Lookup) -> ForwardResult:
        """Logits, loss (with ranks, this rank's contribution) and the number of examples of all ranks together."""
        if self.team is not None and self.cursor is None:
            self.team.check_first(lookup)
        if self.team is not None and lookup.batch.size == 0:
            if self.tasks:
                self.team.label_counts(torch.zeros(len(self.tasks), dtype=torch.float64))
            return self.team.stand_in(lookup)
        labels = labels_of(lookup.batch, self.tasks)
        counts = self._label_counts(labels) if self.tasks else None
        labels = labels.to(self.model.embeddings.device, non_blocking=True)
        with self._autocast():
            logits = self.model(lookup)
        if counts is None:
            value = self.loss(logits, labels) * lookup.example_fraction / self.accumulate
        else:
            logits = task_logits(self.tasks, logits)
            value = task_loss(self.tasks, logits, labels, counts) / self.accumulate
        if not (checks_loss_in_step(self) or self.scaler.is_enabled() or bool(torch.isfinite(value))):
            if self.team is not None:  # the step tells all ranks, by `not_finite`
                self.team.ranks.not_finite = True
                self.model.embeddings.step_without_gradients(lookup, gathered=True)
                return logits.detach()[:0], value.detach(), lookup.examples
            self.forget()
            raise loss_error(self, value)
        if self.team is not None and len(self.pending) + 1 == self.accumulate:
            self.team.arm_dense()
        self.scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        return logits.detach(), value.detach() * self.accumulate, lookup.examples

    def _label_counts(self, labels: Tensor) -> Tensor:
        """How many examples of this batch have the label of each task, over all ranks."""
        counts = label_counts(labels).cpu()
        return counts if self.team is None else self.team.label_counts(counts)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.model.embeddings.device.type, dtype=dtype)

    def log(self, group: str, figures: dict[str, float]) -> None:
        """Write some figures of the current step to TensorBoard, if `log_dir` was given."""
        log(self.writer, group, figures, self.steps)
