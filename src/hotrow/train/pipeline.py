"""The five stages of a training batch, top to bottom.

    read     decode events and make a KeyedBatch, with the cursor that resumes after it
    route    deduplicate its keys, table by table
    fetch    bring its rows up from SSD and keep them in DRAM
    stage    copy rows up to HBM (nothing to do without a GPU)
    compute  find the rows (unseen keys get theirs), gather and pool, tower forward and backward, update rows in place,
             step the dense part

One batch after another is the definition of what training computes. With `lookahead`, the first four stages work on
later batches while one is computed, each on its own thread (threaded_stages.py), and give the same bits, because they do only what
nobody can observe: keys are deduplicated, rows change their tier. What depends on the batches before (which keys are
new, who is admitted, what has expired, which step this is) is decided when the batch's turn has come, on the training
thread, by `fetch`. Rows that came up stay until then; only a batch whose turn has come, and which has no other room,
takes theirs, and they are read again.

Where the memory cannot hold the rows of so many batches, the lookahead shrinks, and says so; a batch that does not fit
on its own is an error, as it is one at a time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.device import stream_trace
from hotrow.errors import MemoryBudgetError
from hotrow.nn import EmbeddingCollection
from hotrow.table import Lookup
from hotrow.tiers.batch_values import TransferStats
from hotrow.train.stage_times import Moment, Stages, now
from hotrow.train.threaded_stages import Flow, Stage
from hotrow.units import format_size

Result = TypeVar("Result")
FUTILE = 0.25  # of the rows from SSD: when more were gone again at their batch's turn, fewer batches run ahead


@dataclass
class Ahead:
    """How far to run ahead, and what the run says about it meanwhile.

    `needed` gives how many batches are still wanted (None: all there are), `given_up` whether to stop waiting.
    """

    lookahead: int
    stages: Stages = field(default_factory=Stages)
    needed: Callable[[], int | None] = lambda: None
    given_up: Callable[[], bool] = lambda: False


@dataclass
class Travelling:
    """A batch on its way."""

    batch: KeyedBatch
    after: Cursor
    lookup: Lookup | None = None
    moved: TransferStats | None = None  # by fetch


def run(
    source: Source,
    embeddings: EmbeddingCollection,
    compute: Callable[[Lookup], Result],
    cursor: Cursor | None = None,
    ahead: Ahead | None = None,
) -> Iterator[tuple[Result, KeyedBatch, Cursor]]:
    """Take every batch of `source` through the five stages; yields what `compute` made of it."""
    ahead = ahead or Ahead(0)
    pipeline = Pipeline(embeddings, ahead)
    batches = ((Travelling(batch, after), _bytes(batch)) for batch, after in source.batches(cursor))
    with closing(pipeline.travel(batches)) as travelled:  # read, route, fetch, stage
        try:
            for item in travelled:
                lookup = pipeline.land(item)
                with stream_trace.computing(embeddings.device, f"batch {ahead.stages.landing.batches}"):
                    yield compute(lookup), item.batch, item.after
        finally:
            if (end := getattr(source, "end", None)) is not None:  # a source that never ends by itself
                end()


class Pipeline:
    """The stages between the source and compute."""

    def __init__(self, embeddings: EmbeddingCollection, ahead: Ahead) -> None:
        self.embeddings, self.stages, self.options = embeddings, ahead.stages, ahead
        self.flow: Flow[Travelling] | None = None
        self._fetching, self._staging = threading.Lock(), threading.Lock()  # held by who works there
        self._warned = False

    def travel(self, batches: Iterator[tuple[Travelling, int]]) -> Generator[Travelling, None, None]:
        """Batches whose turn has come."""
        if self.options.lookahead == 0:
            yield from self._one_by_one(batches)
            self.embeddings.settle()
            return
        ahead, clocks = self.options, self.stages
        work = [
            Stage(clocks["route"], self.route, self._route_stuck),
            Stage(clocks["fetch"], self.fetch),
            Stage(clocks["stage"], self.stage),
        ]
        if not self.embeddings.routes_ahead:
            work = []
        with Flow(batches, clocks["read"], work, ahead.lookahead, _drop, ahead.needed, ahead.given_up) as flow:
            self.flow = flow
            try:
                for item in self._timed(iter(flow)):
                    if item.lookup is None:
                        self.route(item)
                    if self._over(item):
                        break
                    yield item
            except GeneratorExit:
                if not self._all_fail:
                    raise
            self.embeddings.settle(flow.close)  # with ranks, routes that ran ahead end together

    @property
    def _all_fail(self) -> bool:
        """Whether all ranks end here, by an error: none is left behind in a route."""
        return self.embeddings.ranks is not None and self.embeddings.ranks.failing

    def _over(self, item: Travelling) -> bool:
        """Whether no rank has a batch left."""
        assert item.lookup is not None
        if item.lookup.finished:
            self.embeddings.release(item.lookup)
        return item.lookup.finished

    @property
    def _route_stuck(self) -> str:
        alone = self.embeddings.ranks is None
        return Stage.stuck if alone else "it waits for another rank, which has not come to this exchange"

    def route(self, item: Travelling) -> int:
        """Deduplicate the keys."""
        item.lookup = self.embeddings.route(item.batch)
        return 8 * item.batch.id_count()

    def fetch(self, item: Travelling) -> int:
        """Bring rows up from SSD, and keep them."""
        assert item.lookup is not None
        with self._fetching:
            item.moved = item.lookup.prefetch()
        return item.moved.bytes

    def stage(self, item: Travelling) -> int:
        """Copy rows up to HBM."""
        assert item.lookup is not None
        with self._staging:
            return item.lookup.stage().bytes

    def land(self, item: Travelling) -> Lookup:
        """The batch's turn: its rows are found, those of unseen keys created."""
        begin, lookup = now(), item.lookup or self.embeddings.route(item.batch)
        try:
            self.embeddings.fetch(lookup)
        except MemoryBudgetError:
            with self._fetching, self._staging:  # again, with nobody beside it: what is left is the truth
                self.embeddings.fetch(lookup)
        if self._in_vain(item, lookup.plan.prefetch_misses):
            self._shrink()
        self.stages.landing.worked(begin, now(), 0, self.stages.landing.batches + 1, "compute (fetch)")
        return lookup

    def _in_vain(self, item: Travelling, late: int) -> bool:
        """Whether too much of what fetch brought was gone again when the batch's turn came."""
        return item.moved is not None and late > max(FUTILE * (item.moved.rows + late), item.batch.id_count() / 16)

    def _shrink(self) -> None:
        """Rows came up and had to go before their batch's turn: one batch less ahead, from the next one on."""
        if self.flow is None or self.flow.ahead == 0:
            return
        memory, ranks = self.embeddings.memory, self.embeddings.ranks
        tier = f"dram={format_size(memory.dram_bytes)}" if memory.ssd is not None else f"hbm={memory.hbm!r}"
        fact = f"{tier} cannot hold the rows of the batches in flight"
        if ranks is not None:  # they must run ahead equally far, and only this one knows
            if not self._warned:
                warnings.warn(
                    f"{fact} on rank {ranks.rank}: some are read from SSD a second time; results stay the same. Raise "
                    f"{tier.partition('=')[0]}=, or set lookahead={self.flow.ahead - 1} on all ranks",
                    stacklevel=2,
                )
            self._warned = True
            return
        self.flow.ahead -= 1
        warnings.warn(
            f"{fact}: lookahead goes down to {self.flow.ahead}; results stay the same. Raise "
            f"{tier.partition('=')[0]}=, or set lookahead={self.flow.ahead}",
            stacklevel=2,
        )

    def _one_by_one(self, batches: Iterator[tuple[Travelling, int]]) -> Iterator[Travelling]:
        """The same stages with nothing ahead."""

        def inline() -> Iterator[Travelling]:
            read, route = self.stages["read"], self.stages["route"]
            while (needed := self.options.needed()) is None or needed > 0:
                begin = now()
                item, size = next(batches, (None, 0))
                if item is None or self.options.given_up():
                    return
                done = now()
                read.worked(begin, done, size, read.batches + 1)
                size = self.route(item)
                route.worked(done, now(), size, route.batches + 1)
                if self._over(item):
                    return
                yield item

        return self._timed(inline())

    def _timed(self, items: Iterator[Travelling]) -> Iterator[Travelling]:
        """Keeps compute's account: it waits for `items`, and is busy in between, less what fetch takes of that."""
        clock, landing = self.stages["compute"], self.stages.landing
        while True:
            with clock.waiting():
                item = next(items, None)
            if item is None:
                return
            begin, before = now(), landing.took
            try:
                yield item
            finally:
                landed = landing.took
                begin = Moment(begin.at + landed.at - before.at, begin.waited + landed.waited - before.waited)
                moved = 8 * item.batch.size * self.embeddings.width  # vectors out, gradients back
                clock.worked(begin, now(), moved, clock.batches + 1)


def _bytes(batch: KeyedBatch) -> int:
    tensors: list[Tensor | None] = [batch.dense, batch.labels, batch.time]
    for jagged in batch.ids.values():
        tensors += [jagged.values, jagged.offsets, jagged.weights]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _drop(item: Travelling) -> None:
    if item.lookup is not None:
        item.lookup.plan.release()
