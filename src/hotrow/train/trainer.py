"""Trainer: batches in, a better model out, with numbers on the way.

One step is: the batch through the stages (pipeline.py), loss, backward, rows updated by their sparse optimizers, dense
weights by a torch optimizer. The stages before compute run ahead on threads of their own, `lookahead` batches of them;
everything here runs on the thread that called. Everything that decides a number is a function of the seed and the
batches; the clock only decides when the progress bar moves. A gradient that is NaN or infinite stops the run before
anything has changed.

A checkpoint is taken between two steps (saving.py) and holds everything that decides what comes next, so a run that was
interrupted and resumed (loading.py) computes the same bits as one that was not. What is counted (cursor, metrics,
examples) is counted when its step is whole, so that a run can stop between any two batches and be saved: Ctrl-C and
SIGTERM do that (interrupt.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hotrow import trace
from hotrow.batch import KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.errors import BatchError, CheckpointError, HotRowError, OptionError
from hotrow.features import FeatureSpec
from hotrow.nn import Recommender
from hotrow.publish.publisher import Publish, Publisher
from hotrow.table import Lookup
from hotrow.train import interrupt, pipeline
from hotrow.train.checkpoint import loading
from hotrow.train.checkpoint.background_save import Saver
from hotrow.train.checkpoint.manifest import list_checkpoints, step_name
from hotrow.train.checkpoint.row_logs import open_logs
from hotrow.train.checkpoint.saving import capture
from hotrow.train.distributed import Team
from hotrow.train.interrupt import Interrupted, Interrupts
from hotrow.train.metrics import Metrics
from hotrow.train.progress import ProgressView
from hotrow.train.progressive_validation import Windows
from hotrow.train.report import Report, SaveReport
from hotrow.train.run_position import Place
from hotrow.train.stage_times import Stages
from hotrow.train.step_metrics import Computed, Counting
from hotrow.train.tensorboard import log, open_writer
from hotrow.train.tier_traffic import Hbm, Traffic, hit_rate
from hotrow.train.train_step import bad_loss, checks_with_rows, drop_gradients, make_step

Loss = Callable[[Tensor, Tensor], Tensor]
Counted = tuple[tuple[Tensor, Tensor, int], KeyedBatch, Cursor]  # logits, loss, examples of a batch, and its end
# Batches. With HBM, one is looked up and another's rows move while a third is computed. The core tells 15 apart.
LOOKAHEAD, LOOKAHEAD_HBM, MOST_AHEAD = 2, 3, 12
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a Recommender.

    `precision` is the tower's: "fp32", "bf16" or "fp16" (rows have a `dtype` of their own, in their table).
    `accumulate` batches make one step. `clip_dense_norm` clips the dense gradient's norm; rows are clipped by their own
    optimizer. With `log_dir` the metrics also go to TensorBoard, if it is installed.

    `checkpoints` is the folder of this run's checkpoints. With `checkpoint_every`, `fit` saves there at every so many
    steps while training goes on; the last `keep` stay (None keeps all). A scheduler that changes the dense optimizer's
    learning rate is yours to save: the checkpoint has the rate that it last set, not its own counters. Ctrl-C or
    SIGTERM ends `fit` after a whole step and saves there too; it raises KeyboardInterrupt. Signal handlers of your own
    stay.

    `lookahead` is how many batches are read, routed and fetched while one is computed; results are the same for any
    number, and 0 does one thing after another. `trace` is a file for a trace of every `fit`, which
    https://ui.perfetto.dev opens; with ranks it has a process for each.

    `publish` sends rows and weights to servers while training goes on (docs/online.md). `window` is a number of
    examples, or event time ("1h"), after each of which there is a point of progressive validation: the AUC and log loss
    of the predictions made before they were learned from (`report.windows`).

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
        self.parameters = [p for p in model.tower.parameters() if p.requires_grad]
        self.dense_optimizer = dense_optimizer or (torch.optim.Adam(self.parameters) if self.parameters else None)
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
        self.place = Place()
        self.features: FeatureSpec | None = None
        self.job: dict[str, Any] | None = None  # how the tower is built, for who opens a checkpoint without a model
        self.saver = Saver(keep)
        self.lookahead = lookahead
        self.trace = None if trace is None else Path(trace)
        self._interrupts = Interrupts()
        self._waiting: list[Counted] = []  # batches whose gradients wait for a step
        self._seen = 0  # the last step after which there was a look at what is due
        ranks = model.embeddings.ranks
        self.team = None if ranks is None else Team(ranks, self)
        self.writer = open_writer(log_dir) if self._speaks else None
        self._counting = Counting(None if window is None else Windows(window), self.writer)
        self.publisher = None
        if publish is not None:
            self.publisher = Publisher(publish, model.embeddings, model.tower, self.checkpoints)

    @property
    def _speaks(self) -> bool:
        """Whether this process is the one that shows progress and writes logs."""
        return self.team is None or self.team.ranks.first

    @property
    def steps(self) -> int:
        """Updates made so far."""
        return self.model.embeddings.steps

    @property
    def metrics(self) -> Metrics:
        """Of all steps since the epoch began."""
        self._counting.finish()
        return self._counting.metrics

    @metrics.setter
    def metrics(self, counted: Metrics) -> None:
        self._counting.forget()
        self._counting.metrics = counted

    @property
    def windows(self) -> Windows | None:
        """Points of progressive validation, with `window=`."""
        self._counting.finish()
        return self._counting.windows

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
        """Train on `source` from its start (or `cursor`), for `epochs` passes or `steps` updates, what comes first.

        With `evaluate` and `evaluate_every`, that source is evaluated every so many updates. With `resume`, the newest
        valid checkpoint is loaded and the run that made it goes on, as if it had never stopped: `steps` and `epochs`
        count from its start. Without a checkpoint it begins here.
        """
        if self.team is not None:
            given = {"steps": steps, "epochs": epochs, "cursor": cursor, "resume": resume}
            given |= {"evaluate": evaluate is not None, "evaluate_every": evaluate_every}
            self.team.compare("fit", source, given)
        if epochs < 1:
            raise OptionError(f"epochs={epochs}: give a whole number of passes, 1 or more")
        report = Report(resumed_from=self._begin(source, cursor, resume))
        first, saves, start = self.steps, len(self.saver.reports), time.perf_counter()
        total = None if source.examples is None else source.examples * epochs
        ends: Callable[[], None] | None = getattr(source, "end", None)  # of one that never does by itself
        if ends is not None and self.team is not None:
            raise OptionError(f"{source.describe()}: a stream is followed by one process; leave --ranks out")
        source = source if self.team is None else self.team.source(source)
        progress = progress and self._speaks
        stages = Stages()
        view = ProgressView("train", total, progress, done=self.place.examples)
        windows = self.windows
        seen = 0 if windows is None else len(windows.points)
        running = trace.recording(self.trace) if self.team is None else self.team.running(self.trace)
        hbm = Hbm(self.model.embeddings)
        with running, Traffic(self.model.embeddings) as traffic, self.stoppable(ends), view:
            while not self._stops(steps):
                with closing(self._batches(source, steps, stages)) as batches:
                    for computed in batches:
                        self._waiting.append(computed)
                        if len(self._waiting) == self.accumulate:
                            self._commit(report)
                            self._between_steps(report, evaluate, evaluate_every)
                        traffic.show()
                        if view.due:
                            self._show(view, report, stages)
                if self._waiting and not self._gives_up():
                    self._commit(report)
                    self._between_steps(report, evaluate, evaluate_every)
                if self.place.epoch + 1 >= epochs or self._stops(steps):
                    break
                self.place.epoch, self.cursor = self.place.epoch + 1, None
                self.metrics.reset()
            self._reduce(report)
            report.seconds = time.perf_counter() - start
            report.stages, report.hbm = stages.report(report.seconds), hbm.so_far()
            if self.team is not None:
                report.stages = self.team.stages(report.stages)
            if self.publisher is not None:
                self.publisher.finish()
            if windows is not None:
                report.windows = windows.points[seen:]
            if number := self.asked_to_stop():
                self._interrupted(report, number)
            if progress:
                self._show(view, report, stages)
            self.saver.wait()
        report.steps, report.cursor, report.saves = self.steps - first, self.cursor, self.saver.reports[saves:]
        self._log("train", report.metrics)
        if report.hbm:
            self._log("hbm", report.hbm | {"hit rate": hit_rate(report.hbm)})
        return report

    def evaluate(self, source: Source, *, steps: int | None = None, progress: bool = True) -> dict[str, float]:
        """Metrics of the model on `source`. Creates no row and touches no count.

        With ranks, each evaluates its share of the batches and all get the metrics of the whole; `steps` are then those
        of all ranks together.
        """
        if self.team is not None:
            self.team.compare("evaluate", source, {"steps": steps})
            source = self.team.source(source)
        embeddings, progress = self.model.embeddings, progress and self._speaks
        was_training = self.model.training
        self.model.eval()
        metrics = Metrics()
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
                    metrics.update(logits.cpu(), _labels(batch).cpu())
                    ids += batch.id_count()
                    if view.due:
                        some, whose = self._of_one(ids)
                        view.update(examples, some, metrics.compute(), whose=whose)
        finally:
            self.model.train(was_training)
        return (metrics if self.team is None else self.team.merged(metrics)).compute()

    def predict(self, batch: KeyedBatch) -> Tensor:
        """Probabilities of a batch."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), self._autocast():
                return torch.sigmoid(self.model(batch))
        finally:
            self.model.train(was_training)

    def save(
        self, path: str | os.PathLike[str] | None = None, wait: bool = True, notes: dict[str, Any] | None = None
    ) -> SaveReport:
        """Save everything as it is now into a folder of checkpoints (this run's own, unless `path` names another).

        That gives `path/step-000000001000`, whole or not at all; what is beyond `keep` there is removed. With
        `wait=False` only the capture happens now and training may go on while it is written; an error comes up at the
        next save, at `wait()` or at the end of `fit`. `notes` are plain values of yours, for `hotrow inspect`.
        """
        folder = self.checkpoints if path is None else Path(path)
        if folder is None:
            raise OptionError(
                "save() does not know where: pass a folder, or give the Trainer checkpoints='checkpoints/'"
            )
        if self._waiting or self.model.embeddings._waiting:
            raise CheckpointError(
                f"gradients wait for step {self.steps + 1}; save between two steps (checkpoint_every= does), or drop "
                "them with forget()"
            )
        if self.publisher is not None:
            self.publisher.before_save()
        return self.saver.save(lambda: capture(self, folder, notes), folder, wait)

    def wait(self) -> None:
        """Wait for a save that is running behind training; raises its error if it failed."""
        self.saver.wait()

    def load(
        self,
        path: str | os.PathLike[str],
        rename: Mapping[str, str] | None = None,
        tables: Sequence[str] | None = None,
    ) -> None:
        """Become what a checkpoint holds (or the newest of a folder): rows, tower, optimizer, metrics, random state.

        `rename` maps saved tables to this model's; sightings and expiry go on, while new rows and draws of an admission
        with a probability are those of the new name. With `tables`, only the rows of those tables of this model are
        loaded, and everything else stays. Other memory budgets are fine; what does not fit is an error, and then
        nothing has changed.
        """
        self.saver.settle()
        if self.publisher is not None:
            self.publisher.close()
        loading.load(self, Path(path), rename, tables)

    def forget(self) -> None:
        """Drop gradients that wait for a step."""
        self._waiting.clear()
        drop_gradients(self)

    def _begin(self, source: Source, cursor: Cursor | None, resume: bool) -> int | None:
        """Make ready for a run; returns the step of the checkpoint from which an earlier one goes on."""
        self.model.train()
        self.forget()
        spec = getattr(source, "features", None)
        features = spec if isinstance(spec, FeatureSpec) else None
        if resume and self.checkpoints is None:
            raise OptionError("resume=True does not know from where: give the Trainer checkpoints='checkpoints/'")
        if self.checkpoints is not None and self.checkpoint_every is not None:
            if not resume:
                self._check_home(self.checkpoints)
            open_logs(self.model.embeddings, self.checkpoints)
        checkpoint = None
        if resume and self.checkpoints is not None:
            self.saver.settle()
            checkpoint = loading.resume(self, self.checkpoints, features)
        self.features, self._seen = features or self.features, self.steps
        if self.publisher is not None:
            self.publisher.start(None if checkpoint is None else checkpoint.manifest.get("publish"), resume)
        if checkpoint is not None:
            return checkpoint.step
        self.metrics.reset()
        if self.windows is not None:
            self.windows.begin()
        self.cursor, self.place = cursor, Place(first_step=self.steps)
        return None

    def _batches(self, source: Source, steps: int | None, stages: Stages) -> Generator[Counted, None, None]:
        """Batches of `source` from the cursor on, computed; as many as `steps` still wants."""

        def needed() -> int | None:
            if steps is None:
                return None
            return (steps - self.steps + self.place.first_step) * self.accumulate - len(self._waiting)

        embeddings = self.model.embeddings
        embeddings.in_flight(self.lookahead + self.accumulate if self.lookahead and embeddings.routes_ahead else 0)

        def given_up() -> bool:
            self._tell_quiet(source)
            return self._gives_up()

        ahead = pipeline.Ahead(self.lookahead, stages, needed, given_up)
        yield from pipeline.run(source, self.model.embeddings, self._forward_backward, self.cursor, ahead)

    def _show(self, view: ProgressView, report: Report, stages: Stages) -> None:
        counted, running = self._counting, self.saver.running  # as far as it is: nobody is waited for
        metrics = report.metrics or counted.metrics.compute()
        if counted.windows is not None and counted.windows.points:
            metrics = metrics | {"window auc": counted.windows.points[-1].auc}
        if figures := Hbm(self.model.embeddings).totals:
            metrics = metrics | {"hbm hits": hit_rate(figures)}
        ids, whose = (report.ids, "") if report.metrics else self._of_one(report.ids)  # at the end: of all ranks
        view.update(report.examples, ids, metrics, running, stages.utilisation(), whose)

    def _of_one(self, ids: int) -> tuple[int | None, str]:
        """Ids to show while ranks have not told each other theirs, and whose the metrics are."""
        return (ids, "") if self.team is None else (None, "rank 0: ")

    def _tell_quiet(self, source: Source) -> None:
        """While a batch is waited for: readers of publications learn that nothing has happened since.

        A stream that has been quiet for a second is a second further than its newest event.
        """
        idle_seconds: Callable[[Cursor | None], float | None] | None = getattr(source, "idle_seconds", None)
        newest = self.model.embeddings.watermark
        if self.publisher is None or idle_seconds is None or newest is None or self._waiting:
            return
        if (seconds := idle_seconds(self.cursor)) is not None:
            self.publisher.idle(newest + int(1000 * seconds))

    def _gives_up(self) -> bool:
        """Ctrl-C ends a run between two steps; for the rest of a step's batches it waits a while, not for ever.

        Ranks wait for them all the same: none can know whether another has them.
        """
        if self.team is not None:
            return self.team.stopping > 0
        asked = self._interrupts.seconds
        return asked is not None and (not self._waiting or asked > interrupt.PATIENCE)

    @contextmanager
    def stoppable(self, end_source: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold Ctrl-C and SIGTERM back: the work inside asks for them (`asked_to_stop`) where it can stop.

        `fit` is such work by itself; several calls may be one, too (job.py). All ranks come here.
        """
        if self._interrupts.held:
            with self._interrupts.ending(end_source):
                yield
            return
        self._interrupts = Interrupts()
        together = nullcontext() if self.team is None else self.team.fitting(lambda: self._interrupts.number)
        with self._interrupts, self._interrupts.ending(end_source), together:
            yield

    def asked_to_stop(self) -> int:
        """The number of the signal that ends what is going on, or 0. For places where no step is made: ranks ask each
        other, so all ranks call it."""
        return self._interrupts.number if self.team is None else self.team.ask()

    def stop(self) -> None:
        """End a running `fit` as Ctrl-C does: after a whole step, with a checkpoint, by `Interrupted`. Any thread."""
        self._interrupts.ask()

    def _interrupted(self, report: Report, number: int) -> NoReturn:
        """A signal came: save what is whole, and say where it is."""
        half, folder = len(self._waiting), self.checkpoints
        self.forget()
        if folder is None:
            raise Interrupted(self.steps, None, "nothing was saved: there is no checkpoints=", report, number)
        if half:  # they drew from the random state, which a checkpoint would have
            why = f"{half} of {self.accumulate} batches of the next step had been computed, and no more came"
            why = f"nothing was saved: {why}. Earlier checkpoints are as they were"
            raise Interrupted(self.steps, None, why, report, number)
        try:
            self.saver.wait()
            newest = self._newest(folder)
            if newest is None or newest.name != step_name(self.steps):
                self._check_home(folder)
                newest = self.save(notes={"interrupted": True}).path
        except HotRowError as error:
            raise Interrupted(self.steps, None, f"no checkpoint was written: {error}", report, number) from error
        raise Interrupted(self.steps, newest, report=report, number=number)

    def _newest(self, folder: Path) -> Path | None:
        """The newest checkpoint, as rank 0 sees it."""

        def look() -> str | None:
            return next((path.name for path in list_checkpoints(folder)), None)

        name = look() if self.team is None else self.team.ranks.broadcast_result(f"looking into {folder}", look)
        return None if name is None else folder / name

    def _check_home(self, folder: Path) -> None:
        """Refuse to mix this run's checkpoints with another's; where one rank must, all do."""
        check = partial(self.saver.check_home, folder)
        check() if self.team is None else self.team.ranks.collective(f"looking into {folder}", check)

    def _commit(self, report: Report) -> None:
        """Make the step for which gradients wait; what its batches were is then part of the run."""
        self._counting.finish()  # of the step before: here the device has work
        make_step(self, [loss for (_, loss, _), _, _ in self._waiting])
        for result, batch, after in self._waiting:
            self._count(report, result, batch, after)
        self._waiting.clear()

    def _count(self, report: Report, result: tuple[Tensor, Tensor, int], batch: KeyedBatch, after: Cursor) -> None:
        logits, value, examples = result
        self.cursor = after
        if self.publisher is not None:
            self.publisher.seen(batch.time)
        labels, scale = _labels(batch) if logits.numel() else None, examples / max(1, batch.size)
        self._counting.add(report, Computed(logits, labels, value, scale, batch.time, self.steps))
        self.place.examples += examples
        report.examples += examples
        report.ids += batch.id_count()

    def _reduce(self, report: Report) -> None:
        """What the whole job did, out of what this rank did."""
        if self.team is None:
            report.metrics = self.metrics.compute()
            return
        report.metrics = self.team.merged(self.metrics).compute()
        report.losses = self.team.sums(report.losses)
        report.ids = int(self.team.sums([report.ids])[0])

    def _between_steps(self, report: Report, evaluate: Source | None, evaluate_every: int | None) -> None:
        if self.writer is not None:
            self._counting.finish()
            self._log("train", {"loss": self._counting.loss})
        if self.steps == self._seen:  # fp16 skipped it
            return
        self._seen = self.steps
        if self.publisher is not None:
            self.publisher.after_step()
        if evaluate is not None and evaluate_every and (self.steps - self.place.first_step) % evaluate_every == 0:
            report.evaluations.append((self.steps, self.evaluate(evaluate, progress=False)))
            self._log("eval", report.evaluations[-1][1])
        if self.checkpoint_every is not None and self.steps % self.checkpoint_every == 0:
            self.save(wait=False)

    def _stops(self, steps: int | None) -> bool:
        stopping = self._interrupts.number if self.team is None else self.team.stopping
        return stopping > 0 or (steps is not None and self.steps - self.place.first_step >= steps)

    def _forward_backward(self, lookup: Lookup) -> tuple[Tensor, Tensor, int]:
        """Logits, loss (with ranks, what this one adds to it) and the number of examples, all ranks' together."""
        if self.team is not None and self.cursor is None:
            self.team.check_first(lookup)
        if self.team is not None and lookup.batch.size == 0:
            return self.team.stand_in(lookup)
        labels = _labels(lookup.batch).to(self.model.embeddings.device, non_blocking=True)
        with self._autocast():
            logits = self.model(lookup)
        value = self.loss(logits, labels) * lookup.example_fraction / self.accumulate
        if not (checks_with_rows(self) or self.scaler.is_enabled() or bool(torch.isfinite(value))):
            if self.team is not None:  # all ranks must hear of it: they do in the step
                self.team.ranks.not_finite = True
                self.model.embeddings.step_without_gradients(lookup, gathered=True)
                return logits.detach()[:0], value.detach(), lookup.examples
            self.forget()
            raise bad_loss(self, value)
        if self.team is not None and len(self._waiting) + 1 == self.accumulate:
            self.team.dense.arm()
        self.scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        return logits.detach(), value.detach() * self.accumulate, lookup.examples

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.model.embeddings.device.type, dtype=dtype)

    def _log(self, group: str, figures: dict[str, float]) -> None:
        log(self.writer, group, figures, self.steps)


def _labels(batch: KeyedBatch) -> Tensor:
    if batch.labels is None:
        raise BatchError("the batch has no labels; give the feature spec label=, or use predict()")
    return batch.labels.float()
