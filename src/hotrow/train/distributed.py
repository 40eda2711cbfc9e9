"""A trainer's part in a job of several ranks. Without ranks there is no RankTeam, and nothing here runs.

All ranks make the same calls in the same order on the same model. That is compared once, when the trainer is made
(`describe`), and then relied upon. A step is the mean over the examples of all ranks' batches: each rank's loss is
weighted by its share of them, so that sums over ranks give that mean. Every rank has the same tower and dense
optimizer with the same bits; metrics and random state are the rank's own and are merged only for a report.

A rank never stops alone, because the others would wait for it in the next exchange. A stop request on one rank is
exchanged with every step (`Ranks.wants_to_stop`), and all ranks stop after the same step. Where no step is made, in an
evaluation and at the end, `exchange_stop` does it. Called by the training thread.
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
from hotrow.parallel.rank_batches import RankSource
from hotrow.parallel.ranks import Ranks
from hotrow.table import Lookup
from hotrow.train.interrupt import Interrupted
from hotrow.train.metrics import Metrics
from hotrow.train.stage_times import StageReport, add_exchange, merge_ranks

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer


class RankTeam:
    """A trainer's part in a job of several ranks."""

    def __init__(self, ranks: Ranks, trainer: Trainer) -> None:
        self.ranks = ranks
        self.embeddings = trainer.model.embeddings
        ranks.agree("the trainer", describe(trainer))
        self._in_fit = False
        self.tower = trainer.model.tower
        ranks.broadcast_tensors([*self.tower.parameters(), *self.tower.buffers()])
        self.dense = DenseGradients(trainer.parameters, ranks)
        self._sent = 0  # bytes, before the run
        # Dropout differs from rank to rank; rank 0 draws as one process would.
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
        """Refuse a call of `fit` or `evaluate` that differs between ranks: they would end at different steps, or hash
        keys differently."""
        spec = getattr(source, "features", None)
        features = json.loads(spec.to_json()) if isinstance(spec, FeatureSpec) else None
        self.ranks.agree(f"the call of {call}", {**options, "the source's feature spec": features})

    def source(self, source: Source) -> Source:
        """This rank's share of a source."""
        return RankSource(source, self.ranks)

    def check_first(self, lookup: Lookup) -> None:
        """Refuse a source that has not even one batch for every rank."""
        sizes = lookup.routed.batch_sizes
        if min(sizes) == 0:
            self.ranks.failing = True
            raise OptionError(
                f"rank {sizes.index(0)} gets no batch: the source has fewer batches than there are ranks "
                f"({self.ranks.world}); use fewer ranks, or a smaller batch_size"
            )

    def stand_in(self, lookup: Lookup) -> tuple[Tensor, Tensor, int]:
        """Take part in a step without a batch of this rank's own."""
        self.embeddings.step_without_gradients(lookup)
        return torch.zeros(0), torch.zeros(()), lookup.examples

    def reduce_dense(self) -> None:
        """Sum dense gradients over all ranks; copy the tower's buffers from rank 0."""
        self.dense.finish()
        self.ranks.broadcast_tensors(list(self.tower.buffers()), "dense")

    @contextmanager
    def recording(self, path: Path | None) -> Iterator[None]:
        """Record this rank's part of a trace for one run; `path` may be None on some ranks. All ranks call it. After a
        run that ends in order, rank 0 joins the parts that it can see."""
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

    def stages(self, mine: list[StageReport]) -> list[StageReport]:
        """The stage reports of all ranks as one, with their exchanges."""
        mine = add_exchange(mine, sum(self.ranks.bytes_sent.values()) - self._sent)
        reports = self.ranks.patient.gather_json([asdict(stage) for stage in mine])
        return merge_ranks([[StageReport(**stage) for stage in one] for one in reports])

    def merged(self, metrics: Metrics) -> Metrics:
        """The metrics of all ranks' examples, the same on every rank."""
        total = Metrics()
        for state in self.ranks.patient.gather_json(metrics.state()):
            one = Metrics()
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
    """Everything that must be the same on every rank, as JSON values."""
    import hotrow

    embeddings, optimizer = trainer.model.embeddings, trainer.dense_optimizer
    return {
        "HotRow's version": hotrow.__version__,
        "torch's version": str(torch.__version__),
        "tables": [{**rows.table.to_dict(), "optimizer": rows.optimizer.to_dict()} for rows in embeddings.tables],
        "seed": embeddings.seed,
        "tower": type(trainer.model.tower).__name__,
        "the tower's weights": {
            name: [list(value.shape), str(value.dtype)] for name, value in trainer.model.tower.state_dict().items()
        },
        "dense optimizer": None
        if optimizer is None
        else [type(optimizer).__name__, {name: repr(value) for name, value in optimizer.defaults.items()}],
        "precision": trainer.precision,
        "accumulate": trainer.accumulate,
        "lookahead": trainer.lookahead,
        "clip_dense_norm": trainer.clip_dense_norm,
        "checkpoints": None if trainer.checkpoints is None else str(trainer.checkpoints),
        "checkpoint_every": trainer.checkpoint_every,
        "the kind of device": embeddings.device.type,
        "wire": None if embeddings.ranks is None else str(embeddings.ranks.wire),
    }
