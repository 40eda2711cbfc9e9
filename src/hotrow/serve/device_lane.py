"""A lane on a GPU: a joined batch in, logits out, by two captured graphs on a stream of its own.

    keys → [graph: find and gather] → rows that were missing → [graph: tower, logits down] → logits on the host

A lane has a *room* for each bucket of its ladder: static inputs (keys, pooled vectors, dense features), both graphs and
a pinned place for the logits. A batch takes the smallest room it fits; one that fits none is cut. Between the graphs
the host learns what HBM lacked and has it filled in (table/hot_read.py). Rows of a room behind the batch hold what was
there before: a tower is row-wise, and nobody reads them.

A lane runs one batch at a time, on whatever thread has it. Lanes share the rows, the weights and nothing else; graphs
know the weights' addresses, so new weights are copied into the same storage. Lanes and their rooms are captured before
traffic comes, one after the other: a capture does not bear what another one does to the device beside it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import OptionError, choices
from hotrow.nn import EmbeddingCollection
from hotrow.serve.tower import OriginalTower
from hotrow.table.hot_read import HotReader

Tower = Callable[[Mapping[str, Tensor], Tensor | None], Tensor]
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
LADDER = (32, 128, 512, 1024, 4096, 16384)
WARM_UP = 3  # runs of a tower before it is captured: libraries choose algorithms and allocate in the first ones


class DeviceLane:
    """One lane: one `run` at a time."""

    def __init__(
        self,
        reader: HotReader,
        tower: Tower,
        dense: int,
        ladder: Sequence[int] = LADDER,
        precision: str = "fp32",
        graphs: bool = True,
    ) -> None:
        if precision not in PRECISIONS:
            raise OptionError(f"precision={precision!r}: {choices(precision, PRECISIONS)}")
        self.reader, self.tower, self.dense, self.precision, self.graphs = reader, tower, dense, precision, graphs
        self.device = reader.device
        self.stream = torch.cuda.Stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()
        self.ladder = tuple(sorted(ladder))
        self.rooms: dict[int, Room] = {}
        self.late_ids = 0

    def warm(self) -> None:
        """Make every room of the ladder before traffic comes."""
        for size in self.ladder:
            self._room(size)

    def run(self, batch: KeyedBatch, policy: str = "wait") -> tuple[Tensor, Tensor, int]:
        """Logits on the host, which of each example's ids a policy answered (int32), and how many they are.

        Requires: `reader.takes(batch)`.
        """
        largest = self.ladder[-1]
        if batch.size <= largest:
            return self._run(batch, policy)
        parts = [self._run(_cut(batch, at, at + largest), policy) for at in range(0, batch.size, largest)]
        logits, late, count = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(late), sum(count)

    def _run(self, batch: KeyedBatch, policy: str) -> tuple[Tensor, Tensor, int]:
        room = self._room(next(size for size in self.ladder if size >= batch.size))
        with torch.cuda.stream(self.stream), torch.inference_mode():
            return room.run(batch, policy)

    def _room(self, size: int) -> Room:
        if size not in self.rooms:
            with torch.cuda.stream(self.stream), torch.inference_mode():
                self.rooms[size] = Room(self, size)
        return self.rooms[size]


class Room:
    """A bucket's static buffers and graphs."""

    def __init__(self, lane: DeviceLane, size: int) -> None:
        self.lane, self.size = lane, size
        self.reader = lane.reader.lane(size)
        self.vectors = {
            place.feature: self.reader.out[:, place.begin : place.end] for place in lane.reader.layout.places
        }
        self.dense_in = torch.zeros(size, lane.dense, dtype=torch.float32, pin_memory=True)
        self.dense = torch.zeros_like(self.dense_in, device=lane.device)
        self._done = torch.cuda.Event()
        for _ in range(WARM_UP):
            logits = self._tower()
        self.logits = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
        lane.stream.synchronize()
        self._graph: Any = None
        if lane.graphs:
            self.reader.capture()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=lane.pool, stream=lane.stream, capture_error_mode="thread_local"):
                self._tower_and_down()
            self._graph = graph

    def run(self, batch: KeyedBatch, policy: str) -> tuple[Tensor, Tensor, int]:
        """Find, run, and wait for the logits."""
        count = batch.size
        if batch.dense is not None and self.lane.dense:
            self.dense_in[:count] = batch.dense
        _, late = self.reader.find(batch, policy)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._tower_and_down()
        self._done.record()
        self._done.synchronize()
        by_example = torch.from_numpy(self.reader.late[:count].astype("int32"))
        return self.logits[:count].clone(), by_example, late

    def _tower(self) -> Tensor:
        self.dense.copy_(self.dense_in, non_blocking=True)
        with _precision(self.lane.precision):
            return self.lane.tower(self.vectors, self.dense if self.lane.dense else None).float()

    def _tower_and_down(self) -> None:
        self.logits.copy_(self._tower(), non_blocking=True)


class DeviceLanes:
    """The lanes of an engine: a batch takes one that is free, and waits if none is."""

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        tower: OriginalTower,
        dense: int,
        ladder: Sequence[int] | None,
        precision: str,
        lanes: int = 1,
    ) -> None:
        assert embeddings.hot is not None
        self.reader = HotReader(embeddings.layout, embeddings.hot)
        self.tower, self.dense, self.ladder, self.precision = tower, dense, ladder or LADDER, precision
        self.free: queue.SimpleQueue[DeviceLane] = queue.SimpleQueue()
        for _ in range(lanes):
            lane = DeviceLane(self.reader, tower.run, dense, self.ladder, precision)
            lane.warm()
            self.free.put(lane)

    def takes(self, batch: KeyedBatch) -> bool:
        """Whether lanes run such batches."""
        return batch.size > 0 and self.reader.takes(batch)

    def run(self, batch: KeyedBatch, policy: str) -> tuple[Tensor, Tensor, int]:
        """As DeviceLane.run, on a free lane."""
        lane = self.free.get()
        try:
            return lane.run(batch, policy)
        finally:
            self.free.put(lane)

    def set_weights(self, state: Mapping[str, Tensor]) -> None:
        """New weights into the storage of the old ones. Requires: no batch runs."""
        with torch.inference_mode():
            torch.cuda.synchronize(self.reader.device)
            for name, weight in self.tower.weights.items():
                weight.copy_(state[name])
            torch.cuda.synchronize(self.reader.device)

    def close(self) -> None:
        """End the filler."""
        self.reader.close()


def _cut(batch: KeyedBatch, begin: int, end: int) -> KeyedBatch:
    ids = {name: Jagged(jagged.values[begin:end]) for name, jagged in batch.ids.items()}
    return KeyedBatch(ids, None if batch.dense is None else batch.dense[begin:end])


def _precision(name: str) -> AbstractContextManager[Any]:
    """Inside it, towers compute so. fp32 is exact; the others are faster and equal to about three digits."""
    if name in ("bf16", "fp16"):
        return torch.autocast("cuda", torch.bfloat16 if name == "bf16" else torch.float16, cache_enabled=False)
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    return nullcontext()
