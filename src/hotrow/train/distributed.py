"""What a trainer does because it is one of several ranks. Without ranks there is no Team, and nothing here runs.

All ranks make the same calls in the same order, on the same model: that is compared once, when the trainer is made
(`agree`), and then relied upon. A step is the mean over the examples of all ranks' batches: a rank's loss is weighed by
its share of them, so that sums over ranks are that mean. Every rank has the same tower, the same dense optimizer and
the same bits in both; its metrics and its random state are its own, and are put together only when somebody looks.

A rank never stops alone: the others would wait for it in the next exchange. Ctrl-C or SIGTERM on one of them is a wish,
which all hear of in the step that it falls into (`Ranks.stop_signal`, plan.py); all stop behind that step. Where no
step is made, in an evaluation and at the end, they ask each other.
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


class Team:
    """A trainer's part in a job of several ranks."""

    def __init__(self, ranks: Ranks, trainer: Trainer) -> None:
        self.ranks = ranks
        self.embeddings = trainer.model.embeddings
        ranks.agree("the trainer", describe(trainer))
        self._fits = False
        self.tower = trainer.model.tower
        ranks.broadcast_tensors([*self.tower.parameters(), *self.tower.buffers()])
        self.dense = DenseGradients(trainer.parameters, ranks)
        self._sent = 0  # bytes, before the run
        # Dropout differs from rank to rank; rank 0 draws as one process would.
        torch.manual_seed(torch.initial_seed() + ranks.rank)

    @contextmanager
    def fitting(self, stop_signal: Callable[[], int]) -> Iterator[None]:
        """While `fit` runs: whether this rank wants to stop is heard by all."""
        ranks = self.ranks
        ranks.stop_signal, ranks.stopping, ranks.failing, self._fits = stop_signal, 0, False, True
        try:
            yield
        finally:
            ranks.stop_signal, ranks.stopping, self._fits = lambda: 0, 0, False

    @property
    def stopping(self) -> int:
        """The number of the signal for which all stop here: it came to a rank, and all have heard of it. Else 0."""
        return self.ranks.stopping

    def ask(self) -> int:
        """The same, after they have asked each other once more. All ranks call it, between two batches."""
        if self._fits:
            words = self.ranks.rows.gather_numbers(self.ranks.stop_signal())
            self.ranks.stopping = max(self.ranks.stopping, *(wants for (wants,) in words))
        return self.ranks.stopping

    def compare(self, call: str, source: Source, options: dict[str, Any]) -> None:
        """Refuse a call of `fit` or `evaluate` that is not the same on every rank: they would end at different steps,
        or look at other keys."""
        spec = getattr(source, "features", None)
        features = json.loads(spec.to_json()) if isinstance(spec, FeatureSpec) else None
        self.ranks.agree(f"the call of {call}", {**options, "the source's feature spec": features})

    def source(self, source: Source) -> Source:
        """This rank's share of a source."""
        return RankSource(source, self.ranks)

    def check_first(self, lookup: Lookup) -> None:
        """Refuse a source that has not even one batch for every rank."""
        sizes = lookup.routed.sizes
        if min(sizes) == 0:
            self.ranks.failing = True
            raise OptionError(
                f"rank {sizes.index(0)} gets no batch: the source has fewer batches than there are ranks "
                f"({self.ranks.world}); use fewer ranks, or a smaller batch_size"
            )

    def stand_in(self, lookup: Lookup) -> tuple[Tensor, Tensor, int]:
        """Take part in a step without a batch of one's own, or with one that came to nothing."""
        self.embeddings.step_without_gradients(lookup)
        return torch.zeros(0), torch.zeros(()), lookup.examples

    def reduce_dense(self) -> None:
        """Dense gradients become the sums over all ranks; what is not a parameter becomes rank 0's."""
        self.dense.finish()
        self.ranks.broadcast_tensors(list(self.tower.buffers()), "dense")

    @contextmanager
    def running(self, path: Path | None) -> Iterator[None]:
        """A run, from its begin to its end, with this rank's part of a trace; some ranks may want none. All ranks come
        here. When a run ends in order, rank 0 joins the parts that it can see."""
        said = self.ranks.patient.gather_json([path is not None, time.time()])
        origin, rank = min(at for _, at in said), self.ranks.rank
        self._sent = sum(self.ranks.bytes_sent.values())

        def join() -> None:
            if any(wanted for wanted, _ in said):
                self.ranks.barrier()  # all parts are whole
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
        """The stages of all ranks, with their exchanges."""
        mine = add_exchange(mine, sum(self.ranks.bytes_sent.values()) - self._sent)
        everyones = self.ranks.patient.gather_json([asdict(stage) for stage in mine])
        return merge_ranks([[StageReport(**stage) for stage in one] for one in everyones])

    def merged(self, metrics: Metrics) -> Metrics:
        """The metrics of all ranks' examples, the same on every rank."""
        total = Metrics()
        for state in self.ranks.patient.gather_json(metrics.state()):
            one = Metrics()
            one.load_state(state)
            total.merge(one)
        return total

    def sums(self, values: list[float]) -> list[float]:
        """Sums over ranks, in rank order. Requires: as many on every rank."""
        if not values:
            return []
        parts = self.ranks.patient.all_gather(torch.tensor(values, dtype=torch.float64))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return [float(value) for value in total]


def describe(trainer: Trainer) -> dict[str, Any]:
    """All that must be the same on every rank, as plain values."""
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
