"""A lane on a GPU: a joined batch in, logits out, by two captured graphs on a stream of its own.

    keys → [graph: find and gather] → rows that were missing → [graph: put them, tower, logits down] → logits

A lane has a *room* for each bucket of its ladder: static inputs (keys, pooled vectors, dense features), both graphs and
a pinned place for the logits. A batch takes the smallest room it fits. Between the graphs the host learns what HBM
lacked and has it filled in (serving_reader.py). All that is one call of the core, which needs no lock of Python's
(core/device/graph_runner.h). Rows of a room behind the batch hold what was there before: a tower is row-wise, and
nobody reads them.

A batch of more than PIECE rows is cut, and its pieces go through rooms in turn: the device has been asked for the next
piece's rows before it gets this one's tower, so the cores gather what is missing of one while the tower of the one
before runs.

    ask 0   ask 1   fill 0, tower 0   ask 2   fill 1, tower 1   logits 0   ask 3   fill 2, tower 2   logits 1   ...

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

from hotrow import _core
from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import OptionError, choices
from hotrow.kernels.launch import cdiv
from hotrow.kernels.rows.serving_lookup import StagedRows
from hotrow.nn import EmbeddingCollection
from hotrow.serve.graph.tower import OriginalTower
from hotrow.tiers.hbm.serving_reader import ServingReader
from hotrow.tiers.host.store import LATE

Tower = Callable[[Mapping[str, Tensor], Tensor | None], Tensor]
EXACT = ("fp32", "tf32")  # towers run as they are; the others cast what a layer reads
PRECISIONS = (*EXACT, "bf16", "fp16")
LADDER = (32, 128, 512, 1024, 4096, 8192)
MAX_PIECE_ROWS = 8192  # rows
RUNNERS_IN_FLIGHT = 3  # rooms that pieces of a large batch take in turn
WARM_UP = 3  # runs of a tower before it is captured: libraries choose algorithms and allocate in the first ones


class DeviceLane:
    """One lane: one `run` at a time."""

    def __init__(
        self,
        reader: ServingReader,
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
        self.number = reader.add_lane()
        self.pool = torch.cuda.graph_pool_handle()
        self.piece_rows = min(MAX_PIECE_ROWS, max(ladder))
        self.ladder = tuple(sorted({min(size, self.piece_rows) for size in ladder}))
        self.runners: dict[tuple[int, int], BucketRunner] = {}
        self._staging: dict[int, list[StagedRows]] = {}  # of rooms that take turns; the others have the first one's

    def warm(self) -> None:
        """Make every room before traffic comes."""
        for size in self.ladder:
            self._runner(size)
        for turn in range(1, RUNNERS_IN_FLIGHT):
            self._runner(self.piece_rows, turn)

    def run(self, batch: KeyedBatch, policy: str = "wait") -> tuple[Tensor, Tensor | None, int]:
        """Logits on the host, how many ids of each example a policy answered (int32; None for none), and of all.

        Requires: `reader.supports(batch)`.
        """
        if batch.size <= self.piece_rows:
            return self._runner(next(size for size in self.ladder if size >= batch.size)).run(batch, policy)
        count = cdiv(batch.size, self.piece_rows)
        size = cdiv(batch.size, count)
        runners = [self._runner(self.piece_rows, n % RUNNERS_IN_FLIGHT) for n in range(count)]
        parts = []
        runners[0].enqueue_lookup(_cut(batch, 0, size))
        for n in range(count):
            if n >= RUNNERS_IN_FLIGHT - 1:
                parts.append(runners[n - RUNNERS_IN_FLIGHT + 1].copy_logits())
            if n + 1 < count:
                runners[n + 1].enqueue_lookup(_cut(batch, (n + 1) * size, (n + 2) * size))
            runners[n].fill_misses_and_enqueue_tower(policy)
        parts += [room.copy_logits() for room in runners[max(0, count - RUNNERS_IN_FLIGHT + 1) :]]
        logits, late, ids = zip(*parts, strict=True)
        return torch.cat(logits), _join_late(late, logits), sum(ids)

    def _runner(self, size: int, turn: int = 0) -> BucketRunner:
        if (size, turn) not in self.runners:
            if turn not in self._staging:
                self._staging[turn] = self.reader.staging(self.piece_rows)
            with torch.cuda.stream(self.stream), torch.inference_mode():
                self.runners[size, turn] = BucketRunner(self, size, self._staging[turn])
        return self.runners[size, turn]


class BucketRunner:
    """A bucket's static buffers and graphs. One batch at a time: ask, answer, logits."""

    def __init__(self, lane: DeviceLane, size: int, staging: Sequence[StagedRows]) -> None:
        self.lane, self.size, self.count, self.policy = lane, size, 0, "wait"
        self.reader = lane.reader.lane(size, lane.number, staging)
        self.vectors = {
            place.feature: self.reader.out[:, place.begin : place.end] for place in lane.reader.layout.outputs
        }
        self.dense_in = torch.zeros(size, lane.dense, dtype=torch.float32, pin_memory=True)
        self.dense = torch.zeros_like(self.dense_in, device=lane.device)
        for _ in range(WARM_UP):
            logits = self._tower()
        self.host_logits = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
        lane.stream.synchronize()
        self._done = torch.cuda.Event()
        self._core: Any = self._capture() if lane.graphs else None

    def run(self, batch: KeyedBatch, policy: str) -> tuple[Tensor, Tensor | None, int]:
        """As DeviceLane.run."""
        if self._core is None:
            self.enqueue_lookup(batch)
            self.fill_misses_and_enqueue_tower(policy)
            return self.copy_logits()
        keys, dense = self._inputs(batch)
        logits = torch.empty(self.count, *self.host_logits.shape[1:])
        addresses = [values.data_ptr() for values in keys]
        self._core.run(addresses, self.count, _address(dense), LATE[policy], logits.data_ptr())
        return self._result(logits, policy)

    def enqueue_lookup(self, batch: KeyedBatch) -> None:
        """Have the device look for the batch's rows."""
        keys, dense = self._inputs(batch)
        if self._core is not None:
            self._core.enqueue_lookup([values.data_ptr() for values in keys], self.count, _address(dense))
            return
        with torch.cuda.stream(self.lane.stream), torch.inference_mode():
            if dense is not None:
                self.dense_in[: self.count] = dense
            self.reader.enqueue_lookup(batch)

    def fill_misses_and_enqueue_tower(self, policy: str) -> None:
        """Fill in what is missing, and have the device run the tower."""
        self.policy = policy
        if self._core is not None:
            self._core.fill_misses_and_enqueue_tower(LATE[policy])
            return
        with torch.cuda.stream(self.lane.stream), torch.inference_mode():
            self.reader.fill_misses(policy)
            self._tower_and_copy_logits()
            self._done.record()

    def copy_logits(self) -> tuple[Tensor, Tensor | None, int]:
        """Wait for the tower."""
        logits = torch.empty(self.count, *self.host_logits.shape[1:])
        if self._core is not None:
            self._core.copy_logits(logits.data_ptr())
        else:
            self._done.synchronize()
            logits.copy_(self.host_logits[: self.count])
        return self._result(logits, self.policy)

    def _inputs(self, batch: KeyedBatch) -> tuple[list[Tensor], Tensor | None]:
        """What the core copies: they must outlive its call."""
        self.count = batch.size
        keys = [batch.ids[name].values.contiguous() for name in self.reader.names]
        return keys, batch.dense.contiguous() if batch.dense is not None and self.lane.dense else None

    def _result(self, logits: Tensor, policy: str) -> tuple[Tensor, Tensor | None, int]:
        if self._core is not None:
            self.reader.offer()
        late = self.reader.late[: self.count]
        if policy == "wait" or not late.any():
            return logits, None, 0
        return logits, torch.from_numpy(late.astype("int32")), int(late.sum())

    def _capture(self) -> Any:
        """Both graphs, and what runs them."""
        self.reader.capture()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # owns the memory that was captured
        lane, reader = self.lane, self.reader
        with torch.cuda.graph(self._graph, pool=lane.pool, stream=lane.stream, capture_error_mode="thread_local"):
            reader.insert_staged()
            self._tower_and_copy_logits()
        return _core.GraphRunner(
            lane.reader.gate.core, lane.number, lane.stream.cuda_stream, reader.graph.raw_cuda_graph(),
            self._graph.raw_cuda_graph(), capacity=self.size, features=len(reader.names), dense=lane.dense,
            width=reader.out.stride(0), tasks=self.host_logits[0].numel(), keys=reader.keys.data_ptr(),
            examples=reader.examples.data_ptr(), dense_in=self.dense_in.data_ptr(), logits=self.host_logits.data_ptr(),
            late=reader.late.ctypes.data, missing=reader.missing(),
        )  # fmt: skip

    def _tower(self) -> Tensor:
        self.dense.copy_(self.dense_in, non_blocking=True)
        with _precision(self.lane.precision):
            return self.lane.tower(self.vectors, self.dense if self.lane.dense else None).float()

    def _tower_and_copy_logits(self) -> None:
        self.host_logits.copy_(self._tower(), non_blocking=True)


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
        assert embeddings.hbm_cache is not None
        self.reader = ServingReader(embeddings.layout, embeddings.hbm_cache)
        if precision in EXACT:
            tower.join_activations()
        self.tower, self.dense, self.ladder, self.precision = tower, dense, ladder or LADDER, precision
        self.free: queue.SimpleQueue[DeviceLane] = queue.SimpleQueue()
        for _ in range(lanes):
            lane = DeviceLane(self.reader, tower.run, dense, self.ladder, precision)
            lane.warm()
            self.free.put(lane)

    def supports(self, batch: KeyedBatch) -> bool:
        """Whether lanes run such batches."""
        return batch.size > 0 and not (batch.dense is not None and batch.dense.is_cuda) and self.reader.supports(batch)

    def run(self, batch: KeyedBatch, policy: str) -> tuple[Tensor, Tensor | None, int]:
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


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _join_late(late: Sequence[Tensor | None], logits: Sequence[Tensor]) -> Tensor | None:
    """Of pieces, what each one's rows were answered by policy."""
    if all(part is None for part in late):
        return None
    rows = [part.shape[0] for part in logits]
    return torch.cat([torch.zeros(n, dtype=torch.int32) if p is None else p for p, n in zip(late, rows, strict=True)])


def _precision(name: str) -> AbstractContextManager[Any]:
    """Inside it, towers compute so. fp32 is exact; the others are faster and equal to about three digits."""
    if name in ("bf16", "fp16"):
        return torch.autocast("cuda", torch.bfloat16 if name == "bf16" else torch.float16, cache_enabled=False)
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    return nullcontext()
