"""Lookahead: how many batches are in flight, on which threads their steps run, and when the number shrinks.

With a lookahead of n, at most n batches beside the one in compute are in flight: read, routed, prefetched and staged by
a thread for each step (stage_threads.py). With 0, every step runs on the training thread, one batch after another.

A batch's turn comes when it is the next one to compute. Prefetched rows stay in their tier until then. They are evicted
only if the batch on turn finds no other memory; later they are read again. If that happens to too many rows, the memory
cannot hold the rows of all batches in flight: the lookahead shrinks by one, with a warning. With ranks it only warns,
because all must run equally far ahead. A batch that exceeds the memory by itself is an error, as without a lookahead.

Called by the training thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor
from hotrow.nn import EmbeddingCollection
from hotrow.table import Lookup
from hotrow.tiers.batch_values import TransferStats
from hotrow.train.stage_threads import Stage, StageThreads
from hotrow.train.stage_times import Moment, Stages, now
from hotrow.units import format_size

FUTILE = 0.25  # of the prefetched rows: when more were evicted before their batch's turn, the lookahead shrinks


@dataclass
class LookaheadOptions:
    """How many batches to run ahead, and when to stop.

    `needed` returns how many more batches are wanted (None: all of the source), `should_stop` whether to stop waiting
    for the next one. Both are called on the training thread.
    """

    lookahead: int
    stages: Stages = field(default_factory=Stages)
    needed: Callable[[], int | None] = lambda: None
    should_stop: Callable[[], bool] = lambda: False


@dataclass
class InFlightBatch:
    """A batch between read and compute. `after` is the cursor after it."""

    batch: KeyedBatch
    after: Cursor
    lookup: Lookup | None = None  # once it is routed
    prefetched: TransferStats | None = None


Work = Callable[[InFlightBatch], int]


class Lookahead:
    """Runs the steps before fetch on later batches, and yields batches in order, each on its turn."""

    def __init__(self, embeddings: EmbeddingCollection, options: LookaheadOptions) -> None:
        self.embeddings, self.stages, self.options = embeddings, options.stages, options
        self.threads: StageThreads[InFlightBatch] | None = None
        self._warned = False

    def run(
        self, batches: Iterator[tuple[InFlightBatch, int]], route: Work, prefetch: Work, stage: Work
    ) -> Generator[InFlightBatch, None, None]:
        """Yield each batch on its turn, routed. `batches` come with their size in bytes."""
        options, clocks = self.options, self.stages
        if options.lookahead == 0:
            yield from self._measure_compute(self._one_by_one(batches, route))
            self.embeddings.settle()
            return
        stages = [
            Stage("route", clocks["route"], route, self._route_blocked),
            Stage("prefetch", clocks["fetch"], prefetch),
            Stage("stage", clocks["stage"], stage),
        ]
        if not self.embeddings.routes_ahead:
            stages = []
        with StageThreads(
            batches, clocks["read"], stages, options.lookahead, _release, options.needed, options.should_stop
        ) as threads:
            self.threads = threads
            try:
                for item in self._measure_compute(iter(threads)):
                    if item.lookup is None:
                        route(item)
                    if self._finished(item):
                        break
                    yield item
            except GeneratorExit:
                if not self._all_ranks_fail:
                    raise
            self.embeddings.settle(threads.close)  # with ranks, all ranks end their routes in flight together

    def shrink_if_futile(self, item: InFlightBatch, misses: int) -> None:
        """Run one batch less ahead if too many of its prefetched rows (`misses`) were evicted before its turn."""
        if item.prefetched is None or self.threads is None or self.threads.ahead == 0:
            return
        if misses > max(FUTILE * (item.prefetched.rows + misses), item.batch.id_count() / 16):
            self._shrink(self.threads)

    def _shrink(self, threads: StageThreads[InFlightBatch]) -> None:
        memory, ranks = self.embeddings.memory, self.embeddings.ranks
        tier = f"dram={format_size(memory.dram_bytes)}" if memory.ssd is not None else f"hbm={memory.hbm!r}"
        fact = f"{tier} cannot hold the rows of the batches in flight"
        if ranks is not None:
            if not self._warned:
                warnings.warn(
                    f"{fact} on rank {ranks.rank}: some are read from SSD a second time; results stay the same. Raise "
                    f"{tier.partition('=')[0]}=, or set lookahead={threads.ahead - 1} on all ranks",
                    stacklevel=2,
                )
            self._warned = True
            return
        threads.ahead -= 1
        warnings.warn(
            f"{fact}: lookahead goes down to {threads.ahead}; results stay the same. Raise "
            f"{tier.partition('=')[0]}=, or set lookahead={threads.ahead}",
            stacklevel=2,
        )

    @property
    def _all_ranks_fail(self) -> bool:
        """Whether an error ends all ranks here, so that none waits for this one in a route."""
        return self.embeddings.ranks is not None and self.embeddings.ranks.failing

    def _finished(self, item: InFlightBatch) -> bool:
        """Whether no rank has a batch left."""
        assert item.lookup is not None
        if item.lookup.finished:
            self.embeddings.release(item.lookup)
        return item.lookup.finished

    @property
    def _route_blocked(self) -> str:
        single = self.embeddings.ranks is None
        return Stage.blocked if single else "it waits for another rank, which has not come to this exchange"

    def _one_by_one(self, batches: Iterator[tuple[InFlightBatch, int]], route: Work) -> Iterator[InFlightBatch]:
        read_clock, route_clock = self.stages["read"], self.stages["route"]
        while (needed := self.options.needed()) is None or needed > 0:
            begin = now()
            item, size = next(batches, (None, 0))
            if item is None or self.options.should_stop():
                return
            done = now()
            read_clock.record(begin, done, size, read_clock.batches + 1)
            size = route(item)
            route_clock.record(done, now(), size, route_clock.batches + 1)
            if self._finished(item):
                return
            yield item

    def _measure_compute(self, items: Iterator[InFlightBatch]) -> Iterator[InFlightBatch]:
        """Record compute's times: it waits for `items` and is busy in between, except while fetch runs."""
        clock, fetch = self.stages["compute"], self.stages.fetch_on_turn
        while True:
            with clock.waiting():
                item = next(items, None)
            if item is None:
                return
            begin, before = now(), fetch.elapsed
            try:
                yield item
            finally:
                after = fetch.elapsed
                begin = Moment(begin.at + after.at - before.at, begin.waited + after.waited - before.waited)
                moved = 8 * item.batch.size * self.embeddings.width  # vectors out, gradients back
                clock.record(begin, now(), moved, clock.batches + 1)


def _release(item: InFlightBatch) -> None:
    if item.lookup is not None:
        item.lookup.plan.release()
