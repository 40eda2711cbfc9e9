"""What a trainer does in a job of several ranks. Without ranks there is no RankTeam, and nothing here runs.

All ranks make the same calls in the same order on the same model. The models are compared once, when the trainer is
made (`describe`). A step is the mean over the examples of all ranks' batches: each rank's loss is weighted by its share
of the examples, so that sums over ranks give that mean. Every rank has the same tower and dense optimizer with the same
bits; metrics and random state are the rank's own and are merged only for a report.

All ranks stop after the same step; otherwise the others would wait in the next exchange. A stop request on one rank is
exchanged with every step (`Ranks.stop_signal`). During an evaluation and at the end of a run, where no step is made,
`exchange_stop` exchanges it. Called by the training thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotrow import trace
from hotrow.data import Source
from hotrow.errors import OptionError
from hotrow.features import FeatureSpec
from hotrow.parallel.dense_all_reduce import DenseGradients
from hotrow.parallel.rank_batches import NoBatches, RankSource
from hotrow.parallel.ranks import Ranks
from hotrow.table import Lookup
from hotrow.train.interrupt import Interrupted
from hotrow.train.stage_times import StageReport, add_exchange, merge_ranks
from hotrow.train.task_metrics import StreamingMetrics, metrics_of

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


class RankTeam:
    """The calls of a trainer that involve the other ranks."""

    def __init__(self, ranks: Ranks, trainer: Trainer) -> None:
        self.ranks = ranks
        self.embeddings = trainer.model.embeddings
        ranks.agree("the trainer", describe(trainer))
        self._in_fit = False
        self.tower, self.tasks = trainer.model.tower, trainer.tasks
        # Sums over several towers; one alone has them already, and a row rank has none.
        self.dense = DenseGradients(trainer.parameters, ranks) if self._has_other_towers else None
        if self._has_other_towers:
            ranks.broadcast_tensors([*self.tower.parameters(), *self.tower.buffers()], "dense")
        self._sent = 0  # bytes, before the run
        # Dropout differs from rank to rank; rank 0 draws as one process would.
        if len(ranks.roles.requesters) > 1:
            torch.manual_seed(torch.initial_seed() + ranks.rank)

    @contextmanager
    def fitting(self, stop_signal: Callable[[], int]) -> Iterator[None]:
        """While `fit` runs, exchange with every step whether a rank wants to stop."""
        ranks = self.ranks
        ranks.stop_signal, ranks.stopping, ranks.failing, self._in_fit = stop_signal, 0, False, True
        try:
            yield
        finally:
            ranks.stop_signal, ranks.stopping, self._in_fit = lambda: 0, 0, False

    @property
    def stopping(self) -> int:
        """The number of the signal for which all ranks stop after this step, or 0."""
        return self.ranks.stopping

    def exchange_stop(self) -> int:
        """Exchange stop requests now; returns `stopping`. All ranks call it, between two batches."""
        if self._in_fit:
            requests = self.ranks.rows.gather_numbers(self.ranks.stop_signal())
            self.ranks.stopping = max(self.ranks.stopping, *(wants for (wants,) in requests))
        return self.ranks.stopping

    def compare(self, call: str, source: Source, options: dict[str, Any]) -> None:
        """Raise if a call of `fit` or `evaluate` differs between ranks: they would end at different steps, or hash
        keys differently."""
        if not self.ranks.has_tower:
            return self.ranks.agree(f"the call of {call}", options)
        spec = getattr(source, "features", None)
        features = json.loads(spec.to_json()) if isinstance(spec, FeatureSpec) else None
        self.ranks.agree(f"the call of {call}", {**options, "the source's feature spec": features})

    def source(self, source: Source) -> Source:
        """This rank's share of a source; empty batches on a row rank, which does not read it."""
        if not self.ranks.has_tower:
            return NoBatches([place.feature for place in self.embeddings.layout.outputs], self.ranks)
        return RankSource(source, self.ranks)

    @property
    def _has_other_towers(self) -> bool:
        return self.ranks.has_tower and len(self.ranks.roles.requesters) > 1

    def check_first(self, lookup: Lookup) -> None:
        """Raise if the source has fewer batches than there are ranks."""
        sizes = lookup.routed.batch_sizes
        if min(sizes) == 0:
            self.ranks.failing = True
            raise OptionError(
                f"rank {sizes.index(0)} gets no batch: the source has fewer batches than there are ranks that read "
                f"({len(sizes)}); use fewer, or a smaller batch_size"
            )

    def stand_in(self, lookup: Lookup) -> tuple[Tensor, Tensor, int]:
        """Take part in a step without a batch of this rank's own."""
        self.embeddings.step_without_gradients(lookup)
        return torch.zeros(0), torch.zeros(()), lookup.examples

    def reduce_dense(self) -> None:
        """Sum dense gradients over all ranks; copy the tower's buffers from rank 0."""
        if self.dense is not None:
            self.dense.finish()
            self.ranks.broadcast_tensors(list(self.tower.buffers()), "dense")

    def arm_dense(self) -> None:
        """The next backward is the last of this step: sum its gradients over ranks as they are made."""
        if self.dense is not None:
            self.dense.arm()

    @contextmanager
    def recording(self, path: Path | None) -> Iterator[None]:
        """Record this rank's part of a trace for one run; `path` may be None on some ranks. All ranks call it. After a
        run without an error, rank 0 joins the parts that it can see."""
        starts = self.ranks.patient.gather_json([path is not None, time.time()])
        origin, rank = min(at for _, at in starts), self.ranks.rank
        self._sent = sum(self.ranks.bytes_sent.values())

        def join() -> None:
            if any(wanted for wanted, _ in starts):
                self.ranks.barrier()  # all parts are complete
            if path is not None and self.ranks.first:
                trace.join(path)

        try:
            with trace.recording(None if path is None else trace.part(path, rank), rank, f"rank {rank}", origin):
                yield
        except Interrupted:  # on all ranks, after the same step
            join()
            raise
        join()

    def stages(self, mine: list[StageReport]) -> tuple[list[StageReport], dict[str, list[StageReport]]]:
        """The stage reports of all ranks as one, with their exchanges; and those of each role, if roles are apart."""
        mine = add_exchange(mine, sum(self.ranks.bytes_sent.values()) - self._sent)
        gathered = self.ranks.patient.gather_json([asdict(stage) for stage in mine])
        reports = {rank: [StageReport(**stage) for stage in one] for rank, one in enumerate(gathered)}
        roles = self.ranks.roles
        by_role = {"towers": roles.requesters, "rows": roles.owners} if roles.are_apart else {}
        return merge_ranks(reports), {
            role: merge_ranks({rank: reports[rank] for rank in ranks}) for role, ranks in by_role.items()
        }

    def label_counts(self, mine: Tensor) -> Tensor:
        """How many examples of all ranks have the label of each task. A row rank gets its own zeros back.

        All tower ranks call it before each backward, also without a batch of their own.
        """
        return sum(self.ranks.dense.all_gather(mine), torch.zeros_like(mine)) if self._has_other_towers else mine

    def merged(self, metrics: StreamingMetrics) -> StreamingMetrics:
        """The metrics of all ranks' examples, the same on every rank."""
        total = metrics_of(self.tasks)
        for state in self.ranks.patient.gather_json(metrics.state()):
            one = metrics_of(self.tasks)
            one.load_state(state)
            total.merge(one)
        return total

    def sums(self, values: list[float]) -> list[float]:
        """Sums over ranks, in rank order. Requires: the same number of values on every rank."""
        if not values:
            return []
        parts = self.ranks.patient.all_gather(torch.tensor(values, dtype=torch.float64))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return [float(value) for value in total]


def describe(trainer: Trainer) -> dict[str, Any]:
    """Everything that must be the same on every rank, as JSON values. A row rank leaves out what concerns the tower."""
    import hotrow

    embeddings, optimizer = trainer.model.embeddings, trainer.dense_optimizer
    ranks = embeddings.ranks
    of_tower = {
        "tower": type(trainer.model.tower).__name__,
        "the tower's weights": {
            name: [list(value.shape), str(value.dtype)] for name, value in trainer.model.tower.state_dict().items()
        },
        "dense optimizer": None
        if optimizer is None
        else [type(optimizer).__name__, {name: repr(value) for name, value in optimizer.defaults.items()}],
        "clip_dense_norm": trainer.clip_dense_norm,
        "the kind of device": embeddings.device.type,
    }
    return {
        "HotRow's version": hotrow.__version__,
        "torch's version": str(torch.__version__),
        "tables": [{**rows.table.to_dict(), "optimizer": rows.optimizer.to_dict()} for rows in embeddings.tables],
        "seed": embeddings.seed,
        "precision": trainer.precision,
        "accumulate": trainer.accumulate,
        "tasks": [[task.name, task.kind, task.weight, task.loss_name] for task in trainer.tasks],
        "lookahead": trainer.lookahead,
        "checkpoints": None if trainer.checkpoints is None else str(trainer.checkpoints),
        "checkpoint_every": trainer.checkpoint_every,
        "wire": None if ranks is None else str(ranks.wire),
        **(of_tower if ranks is None or ranks.has_tower else {}),
    }
