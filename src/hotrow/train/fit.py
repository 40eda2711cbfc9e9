"""One call of `Trainer.fit`: the loop over batches and steps, from its start or a checkpoint to its report.

`FitRun.run` reads top to bottom. It takes batches out of the pipeline with their gradients computed, collects
`accumulate` of them, makes a step (train_step.py) and counts the batches (step_metrics.py). Between two steps it does
what is due: publish, evaluate, save, draw.

A run ends after its last batch, after `steps` updates, or on a stop request (interrupt.py), always between two steps.
What decides a number (cursor, metrics, examples) changes only when a step is complete, so a checkpoint taken between
steps resumes to the same bits. Everything here runs on the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hotrow import trace
from hotrow.batch import KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.errors import HotRowError, OptionError
from hotrow.features import FeatureSpec
from hotrow.train import interrupt, pipeline
from hotrow.train.checkpoint import loading
from hotrow.train.checkpoint.manifest import list_checkpoints, step_name
from hotrow.train.checkpoint.row_logs import open_logs
from hotrow.train.freed_memory import keep_freed_memory
from hotrow.train.interrupt import Interrupted
from hotrow.train.lookahead import LookaheadOptions
from hotrow.train.progress_view import ProgressView
from hotrow.train.report import Report
from hotrow.train.run_position import RunPosition
from hotrow.train.stage_times import Stages
from hotrow.train.step_metrics import ComputedBatch
from hotrow.train.tier_traffic import HbmCounters, TierTraffic, hit_rate
from hotrow.train.train_step import ForwardResult, PendingBatch, labels_of, make_step

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


@dataclass(frozen=True)
class FitOptions:
    """The options of `Trainer.fit`."""

    steps: int | None = None
    epochs: int = 1
    cursor: Cursor | None = None
    evaluate: Source | None = None
    evaluate_every: int | None = None
    resume: bool = False
    progress: bool = True


class FitRun:
    """The state of one `fit`. What outlives it (cursor, metrics, position, pending gradients) is the trainer's."""

    def __init__(self, trainer: Trainer, source: Source, options: FitOptions) -> None:
        self.trainer, self.source, self.options = trainer, source, options
        self.report = Report()
        self.stages = Stages()
        self._last_step = 0  # the last step after which due work was done

    def run(self) -> Report:
        """Train until the end; returns what was done. Raises Interrupted after a stop request."""
        keep_freed_memory()
        trainer, team, report, epochs = self.trainer, self.trainer.team, self.report, self.options.epochs
        report.resumed_from = self._begin()
        first, saves, start = trainer.steps, len(trainer.saver.reports), time.perf_counter()
        total = None if self.source.examples is None else self.source.examples * epochs
        end_source: Callable[[], None] | None = getattr(self.source, "end", None)  # of a source that never ends
        if end_source is not None and team is not None:
            raise OptionError(f"{self.source.describe()}: a stream is followed by one process; leave --ranks out")
        self.source = self.source if team is None else team.source(self.source)
        progress = self.options.progress and trainer.is_first
        view = ProgressView("train", total, progress, done=trainer.position.examples)
        windows = trainer.windows
        points = 0 if windows is None else len(windows.points)
        recording = trace.recording(trainer.trace) if team is None else team.recording(trainer.trace)
        hbm = HbmCounters(trainer.model.embeddings)
        with recording, TierTraffic(trainer.model.embeddings) as traffic, trainer.stoppable(end_source), view:
            while not self._reached_end():
                with closing(self._batches()) as batches:
                    for computed in batches:
                        trainer.pending.append(computed)
                        if len(trainer.pending) == trainer.accumulate:
                            self._step()
                        traffic.draw()
                        if view.due:
                            self._show(view)
                if trainer.pending and not self._should_stop_waiting():
                    self._step()
                if trainer.position.epoch + 1 >= epochs or self._reached_end():
                    break
                trainer.position.epoch, trainer.cursor = trainer.position.epoch + 1, None
                trainer.metrics.reset()
            self._reduce()
            report.seconds = time.perf_counter() - start
            report.stages, report.hbm = self.stages.report(report.seconds), hbm.since_start()
            if team is not None:
                report.stages, report.stages_by_role = team.stages(report.stages)
            if trainer.publisher is not None:
                trainer.publisher.finish()
            if windows is not None:
                report.windows = windows.points[points:]
            if number := trainer.asked_to_stop():
                self._interrupt(number)
            if progress:
                self._show(view)
            trainer.saver.wait()
        report.steps, report.cursor = trainer.steps - first, trainer.cursor
        report.saves = trainer.saver.reports[saves:]
        trainer.log("train", report.metrics)
        if report.hbm:
            trainer.log("hbm", report.hbm | {"hit rate": hit_rate(report.hbm)})
        return report

    def _begin(self) -> int | None:
        """Prepare the trainer, or load the newest checkpoint to resume from; returns that checkpoint's step."""
        trainer, resume = self.trainer, self.options.resume
        trainer.model.train()
        trainer.forget()
        spec = getattr(self.source, "features", None)
        features = spec if isinstance(spec, FeatureSpec) else None
        trainer.check_source(features)
        if resume and trainer.checkpoints is None:
            raise OptionError("resume=True does not know from where: give the Trainer checkpoints='checkpoints/'")
        if trainer.checkpoints is not None and trainer.checkpoint_every is not None:
            if not resume:
                self._check_folder(trainer.checkpoints)
            open_logs(trainer.model.embeddings, trainer.checkpoints)
        checkpoint = None
        if resume and trainer.checkpoints is not None:
            trainer.saver.settle()
            checkpoint = loading.resume(trainer, trainer.checkpoints, features)
        trainer.features, self._last_step = features or trainer.features, trainer.steps
        if trainer.publisher is not None:
            trainer.publisher.start(None if checkpoint is None else checkpoint.manifest.get("publish"), resume)
        if checkpoint is not None:
            return checkpoint.step
        trainer.metrics.reset()
        if trainer.windows is not None:
            trainer.windows.begin()
        trainer.cursor, trainer.position = self.options.cursor, RunPosition(first_step=trainer.steps)
        return None

    def _batches(self) -> Generator[PendingBatch, None, None]:
        """Batches from the cursor on with their gradients computed, as many as `steps` still needs."""
        trainer, steps = self.trainer, self.options.steps

        def needed() -> int | None:
            if steps is None:
                return None
            return (steps - trainer.steps + trainer.position.first_step) * trainer.accumulate - len(trainer.pending)

        def should_stop() -> bool:
            self._publish_idle_time()
            return self._should_stop_waiting()

        embeddings, ahead = trainer.model.embeddings, trainer.lookahead
        embeddings.in_flight(ahead + trainer.accumulate if ahead and embeddings.routes_ahead else 0)
        options = LookaheadOptions(ahead, self.stages, needed, should_stop)
        yield from pipeline.run(self.source, embeddings, trainer._forward_backward, trainer.cursor, options)

    def _step(self) -> None:
        """Make the step of the pending batches, count them, and do what is due after it."""
        trainer = self.trainer
        trainer.counts.finish()  # of the previous step; the device is busy with this one meanwhile
        make_step(trainer, [loss for (_, loss, _), _, _ in trainer.pending])
        for batch in trainer.pending:
            self._count(*batch)
        trainer.pending.clear()
        if trainer.writer is not None:
            trainer.counts.finish()
            trainer.log("train", {"loss": trainer.counts.loss})
        if trainer.steps != self._last_step:  # else fp16 skipped the step
            self._last_step = trainer.steps
            trainer._after_step(self.report, self.options.evaluate, self.options.evaluate_every)

    def _count(self, result: ForwardResult, batch: KeyedBatch, after: Cursor) -> None:
        trainer, (logits, loss, examples) = self.trainer, result
        trainer.cursor = after
        if trainer.publisher is not None:
            trainer.publisher.note_event_times(batch.time)
        labels = labels_of(batch, trainer.tasks) if logits.numel() else None
        scale = examples / max(1, batch.size)
        trainer.counts.add(self.report, ComputedBatch(logits, labels, loss, scale, batch.time, trainer.steps))
        trainer.position.examples += examples
        self.report.examples += examples
        self.report.ids += batch.id_count()

    def _reduce(self) -> None:
        """Turn this rank's part of the report into that of the whole job."""
        report, team = self.report, self.trainer.team
        if team is None:
            report.metrics = self.trainer.metrics.compute()
            self.trainer.warn_of_unlabelled(report.metrics, "training")
            return
        report.metrics = team.merged(self.trainer.metrics).compute()
        self.trainer.warn_of_unlabelled(report.metrics, "training")
        report.losses = team.sums(report.losses)
        report.ids = int(team.sums([report.ids])[0])

    def _show(self, view: ProgressView) -> None:
        """Draw the figures counted so far, without waiting for the device."""
        trainer, report, counts = self.trainer, self.report, self.trainer.counts
        metrics = report.metrics or counts.metrics.compute()
        if counts.windows is not None and counts.windows.points:
            newest = counts.windows.points[-1]
            shown = {"auc": newest.auc} if not newest.tasks else newest.tasks
            metrics = metrics | {f"window {name}": value for name, value in shown.items()}
        if figures := HbmCounters(trainer.model.embeddings).totals:
            metrics = metrics | {"hbm hits": hit_rate(figures)}
        ids, owner = (report.ids, "") if report.metrics else trainer.figures_of_this_rank(report.ids)
        view.update(report.examples, ids, metrics, trainer.saver.running, self.stages.utilisation(), owner)

    def _publish_idle_time(self) -> None:
        """While waiting for a batch: let readers of publications know that nothing happened since the newest event.

        The watermark of a stream that was idle for a second is a second after its newest event.
        """
        trainer = self.trainer
        idle_seconds: Callable[[Cursor | None], float | None] | None = getattr(self.source, "idle_seconds", None)
        newest = trainer.model.embeddings.watermark
        if trainer.publisher is None or idle_seconds is None or newest is None or trainer.pending:
            return
        if (seconds := idle_seconds(trainer.cursor)) is not None:
            trainer.publisher.idle(newest + int(1000 * seconds))

    def _should_stop_waiting(self) -> bool:
        """Whether to stop waiting for the next batch, after a stop request.

        Between two steps at once; within a step after interrupt.STEP_TIMEOUT. Ranks always wait for the rest of a step,
        because none can know whether another has its batch.
        """
        if self.trainer.team is not None:
            return self.trainer.team.stopping > 0
        requested = self.trainer.stop_requests.seconds
        return requested is not None and (not self.trainer.pending or requested > interrupt.STEP_TIMEOUT)

    def _reached_end(self) -> bool:
        trainer, steps = self.trainer, self.options.steps
        stopping = trainer.stop_requests.number if trainer.team is None else trainer.team.stopping
        return stopping > 0 or (steps is not None and trainer.steps - trainer.position.first_step >= steps)

    def _interrupt(self, number: int) -> NoReturn:
        """Save the last complete step and raise Interrupted with the checkpoint's path."""
        trainer, report = self.trainer, self.report
        incomplete, folder = len(trainer.pending), trainer.checkpoints
        trainer.forget()
        if folder is None:
            raise Interrupted(trainer.steps, None, "nothing was saved: there is no checkpoints=", report, number)
        if incomplete:  # these batches advanced the random state, so a checkpoint now would not resume to the same bits
            why = f"{incomplete} of {trainer.accumulate} batches of the next step had been computed, and no more came"
            why = f"nothing was saved: {why}. Earlier checkpoints are unchanged"
            raise Interrupted(trainer.steps, None, why, report, number)
        try:
            trainer.saver.wait()
            newest = self._newest(folder)
            if newest is None or newest.name != step_name(trainer.steps):
                self._check_folder(folder)
                newest = trainer.save(notes={"interrupted": True}).path
        except HotRowError as error:
            raise Interrupted(trainer.steps, None, f"no checkpoint was written: {error}", report, number) from error
        raise Interrupted(trainer.steps, newest, report=report, number=number)

    def _newest(self, folder: Path) -> Path | None:
        """The newest checkpoint, as rank 0 sees it."""
        team = self.trainer.team

        def newest_name() -> str | None:
            return next((path.name for path in list_checkpoints(folder)), None)

        name = newest_name() if team is None else team.ranks.broadcast_result(f"looking into {folder}", newest_name)
        return None if name is None else folder / name

    def _check_folder(self, folder: Path) -> None:
        """Raise if the folder has another run's checkpoints; if one rank raises, all do."""
        team, check = self.trainer.team, partial(self.trainer.saver.check_folder, folder)
        check() if team is None else team.ranks.collective(f"looking into {folder}", check)
