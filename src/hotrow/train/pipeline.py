"""The path of a training batch, top to bottom: read, route, prefetch, stage, fetch, compute.

    step      what it does                                                         thread    stage in reports
    read      decodes events into a KeyedBatch, with the cursor to resume after    read      read
    route     deduplicates the batch's keys and sends them to their owners         route     route
    prefetch  loads rows from SSD into DRAM ahead of the batch's turn              prefetch  fetch
    stage     loads rows into HBM ahead of the batch's turn (none without a GPU)   stage     stage
    fetch     on the batch's turn: finds all its rows, creates unseen ones         training  fetch
    compute   gathers, runs tower forward and backward, updates rows and weights   training  compute

The verbs are those of tiers/plan.py. Running one batch after another defines what training computes. With `lookahead`,
the first four steps work on later batches while one is computed, each on its own thread (lookahead.py). Results have
the same bits, because these steps only deduplicate keys and move rows between tiers. Everything that depends on earlier
batches (which keys are new, which are admitted, which rows have expired, which step this is) is decided by `fetch`, on
the training thread, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.device import stream_trace
from hotrow.errors import MemoryBudgetError
from hotrow.nn import EmbeddingCollection
from hotrow.table import Lookup
from hotrow.train.lookahead import InFlightBatch, Lookahead, LookaheadOptions
from hotrow.train.stage_times import Stages, now

Result = TypeVar("Result")


def run(
    source: Source,
    embeddings: EmbeddingCollection,
    compute: Callable[[Lookup], Result],
    cursor: Cursor | None = None,
    options: LookaheadOptions | None = None,
) -> Iterator[tuple[Result, KeyedBatch, Cursor]]:
    """Take every batch of `source` through the pipeline; yields what `compute` returned for it."""
    options = options or LookaheadOptions(0)
    pipeline, lookahead = Pipeline(embeddings, options.stages), Lookahead(embeddings, options)
    read = ((InFlightBatch(batch, after), _bytes(batch)) for batch, after in source.batches(cursor))
    with closing(lookahead.run(read, pipeline.route, pipeline.prefetch, pipeline.stage)) as due:
        try:
            for item in due:
                lookup = pipeline.fetch(item)
                lookahead.shrink_if_futile(item, lookup.plan.prefetch_misses)
                with stream_trace.computing(embeddings.device, f"batch {options.stages.fetch_on_turn.batches}"):
                    yield compute(lookup), item.batch, item.after
        finally:
            if (end := getattr(source, "end", None)) is not None:  # an endless source
                end()


class Pipeline:
    """The steps between `read` and `compute`. Each returns the bytes it moved, except `fetch`."""

    def __init__(self, embeddings: EmbeddingCollection, stages: Stages) -> None:
        self.embeddings, self.stages = embeddings, stages
        self._prefetching, self._staging = threading.Lock(), threading.Lock()  # held by the thread in that step

    def route(self, item: InFlightBatch) -> int:
        """Deduplicate the keys."""
        item.lookup = self.embeddings.route(item.batch)
        return 8 * item.batch.id_count()

    def prefetch(self, item: InFlightBatch) -> int:
        """Load rows from SSD into DRAM, and keep them there until the batch's turn."""
        assert item.lookup is not None
        with self._prefetching:
            item.prefetched = item.lookup.prefetch()
        return item.prefetched.bytes

    def stage(self, item: InFlightBatch) -> int:
        """Load rows into HBM."""
        assert item.lookup is not None
        with self._staging:
            return item.lookup.stage().bytes

    def fetch(self, item: InFlightBatch) -> Lookup:
        """On the batch's turn: find its rows, and create those of unseen keys. The batch has been routed."""
        assert item.lookup is not None
        begin, lookup = now(), item.lookup
        try:
            self.embeddings.fetch(lookup)
        except MemoryBudgetError:  # a prefetch may hold memory for a moment: try once more with none running
            with self._prefetching, self._staging:
                self.embeddings.fetch(lookup)
        clock = self.stages.fetch_on_turn
        clock.record(begin, now(), 0, clock.batches + 1, "compute (fetch)")
        return lookup


def _bytes(batch: KeyedBatch) -> int:
    tensors: list[Tensor | None] = [batch.dense, batch.labels, batch.time]
    for jagged in (*batch.ids.values(), *batch.numbers.values()):
        tensors += [jagged.values, jagged.offsets, jagged.weights]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
