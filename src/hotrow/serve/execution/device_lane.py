"""A lane on a GPU: a TensorBatch in, logits out, by two captured CUDA graphs on the lane's stream.

    keys → [graph: find and gather] → missing rows → [graph: insert them, tower, copy logits] → logits

A lane has a BucketRunner for each bucket of its ladder: static inputs (keys, pooled vectors, dense features), both
graphs and pinned memory for the logits. A batch uses the smallest bucket that holds it. Between the graphs the host
reads the rows that HBM lacks (tiers/hbm/serving_reader.py). All of that is one call of the core without Python's lock
(core/device/graph_runner.h). Padding rows keep old contents: a tower is row-wise, and their logits are never read.

A batch of more than MAX_PIECE_ROWS is split, and its pieces are pipelined through RUNNERS_IN_FLIGHT runners. The lookup
of the next piece is enqueued before the tower of this one, so the CPU gathers missing rows while the previous tower
runs.

    lookup 0   lookup 1   misses + tower 0   lookup 2   misses + tower 1   logits 0   lookup 3   ...

Batches with multi-hot features or histories have buckets of their own (jagged_lane.py), captured when traffic asks for
them (jagged_lanes.py).

A lane runs one batch at a time, on any thread. Lanes share only the rows and the weights. Graphs contain the addresses
of the weights, so new weights are copied into the same storage. Captures run one after another, under the lock of
kernels/graph_capture.py: a capture fails if another thread captures, or waits for the whole device, at the same time.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import OptionError, choices
from hotrow.kernels.graph_capture import capturing, new_stream
from hotrow.kernels.launch import cdiv
from hotrow.kernels.rows.serving_lookup import StagedRows
from hotrow.nn import EmbeddingCollection
from hotrow.serve.execution.jagged_lanes import JaggedLanes, Runners
from hotrow.serve.execution.tower_precision import EXACT, PRECISIONS, tower_precision
from hotrow.serve.execution.two_part_tower import PartWeights, TwoPartTower
from hotrow.serve.graph.tower import OriginalTower
from hotrow.tiers.hbm.rows_below import BatchBelow
from hotrow.tiers.hbm.serving_reader import ServingReader
from hotrow.tiers.host.store import LATE

Tower = Callable[[Mapping[str, Tensor], Tensor | None], Tensor]
Result = tuple[Tensor, Tensor | None, int]  # as DeviceLane.run returns
Run = Callable[[str, BatchBelow | None], Result]
LADDER = (32, 128, 512, 1024, 4096, 8192)
MAX_PIECE_ROWS = 8192  # rows
RUNNERS_IN_FLIGHT = 3  # runners that the pieces of a large batch use in turn
WARM_UP = 3  # runs of a tower before it is captured: libraries choose algorithms and allocate in the first ones


class DeviceLane:
    """One lane. One `run` at a time."""

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
        self.stream = new_stream(self.device)
        self.number = reader.add_lane()
        self.pool = torch.cuda.graph_pool_handle()
        self.piece_rows = min(MAX_PIECE_ROWS, max(ladder))
        self.ladder = tuple(sorted({min(size, self.piece_rows) for size in ladder}))
        self.runners: dict[tuple[int, int], BucketRunner] = {}
        self._staging: dict[int, list[StagedRows]] = {}  # by turn; all buckets share the staging buffers of turn 0

    def warm(self) -> None:
        """Create every runner, before traffic."""
        for size in self.ladder:
            self._runner(size)
        for turn in range(1, RUNNERS_IN_FLIGHT):
            self._runner(self.piece_rows, turn)

    def run(self, batch: KeyedBatch, policy: str = "wait", below: BatchBelow | None = None) -> Result:
        """Logits on the host, the ids of each example that a policy answered (int32; None: none), and their total.

        Over a remote store the missing rows are read through `below`, and LeftError says that some must be loaded
        first. Requires: `reader.supports(batch)`.
        """
        if batch.size <= self.piece_rows:
            return self._runner(next(size for size in self.ladder if size >= batch.size)).run(batch, policy, below)
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
            runners[n].fill_misses_and_enqueue_tower(policy, below)
        parts += [runner.copy_logits() for runner in runners[max(0, count - RUNNERS_IN_FLIGHT + 1) :]]
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
    """A bucket's static buffers and graphs. One batch at a time: enqueue_lookup, fill_misses_and_enqueue_tower,
    copy_logits."""

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
        self._graph: Any = None
        self._core: Any = self._capture() if lane.graphs else None

    def run(self, batch: KeyedBatch, policy: str, below: BatchBelow | None = None) -> Result:
        """As DeviceLane.run."""
        if self._core is None:
            self.enqueue_lookup(batch)
            self.fill_misses_and_enqueue_tower(policy, below)
            return self.copy_logits()
        keys, dense = self._inputs(batch)
        logits = torch.empty(self.count, *self.host_logits.shape[1:])
        addresses = [values.data_ptr() for values in keys]
        self._core.run(addresses, self.count, _address(dense), LATE[policy], logits.data_ptr())
        return self._result(logits, policy)

    def enqueue_lookup(self, batch: KeyedBatch) -> None:
        """Enqueue the lookup. Does not block."""
        keys, dense = self._inputs(batch)
        if self._core is not None:
            self._core.enqueue_lookup([values.data_ptr() for values in keys], self.count, _address(dense))
            return
        with torch.cuda.stream(self.lane.stream), torch.inference_mode():
            if dense is not None:
                self.dense_in[: self.count] = dense
            self.reader.enqueue_lookup(batch)

    def fill_misses_and_enqueue_tower(self, policy: str, below: BatchBelow | None = None) -> None:
        """Wait for the lookup, read the missing rows and enqueue the tower."""
        self.policy = policy
        if self._core is not None:
            self._core.fill_misses_and_enqueue_tower(LATE[policy])
            return
        with torch.cuda.stream(self.lane.stream), torch.inference_mode():
            if self._graph is None:
                self.reader.fill_misses(policy, below)
                self._tower_and_copy_logits()
            else:  # over a remote store, whose rows the core does not know
                self.reader.read_misses(policy, below)
                self._graph.replay()
                self.reader.offer()
            self._done.record()

    def copy_logits(self) -> Result:
        """Wait for the tower and return as DeviceLane.run."""
        logits = torch.empty(self.count, *self.host_logits.shape[1:])
        if self._core is not None:
            self._core.copy_logits(logits.data_ptr())
        else:
            self._done.synchronize()
            logits.copy_(self.host_logits[: self.count])
        return self._result(logits, self.policy)

    def _inputs(self, batch: KeyedBatch) -> tuple[list[Tensor], Tensor | None]:
        """The inputs that the core copies. They must outlive the call of the core."""
        self.count = batch.size
        keys = [batch.ids[name].values.contiguous() for name in self.reader.names]
        return keys, batch.dense.contiguous() if batch.dense is not None and self.lane.dense else None

    def _result(self, logits: Tensor, policy: str) -> Result:
        if self._core is not None:
            self.reader.offer()
        late = self.reader.late[: self.count]
        if policy == "wait" or not late.any():
            return logits, None, 0
        return logits, torch.from_numpy(late.astype("int32")), int(late.sum())

    def _capture(self) -> Any:
        """Capture both graphs. Returns the core's runner of them."""
        self.reader.capture()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # owns the captured memory
        lane, reader = self.lane, self.reader
        with (
            capturing(),
            torch.cuda.graph(self._graph, pool=lane.pool, stream=lane.stream, capture_error_mode="thread_local"),
        ):
            reader.insert_staged()
            self._tower_and_copy_logits()
        if reader.reader.cache.below is not None:
            return None
        return _core.GraphRunner(
            lane.reader.gate.core, lane.number, lane.stream.cuda_stream, reader.graph.raw_cuda_graph(),
            self._graph.raw_cuda_graph(), capacity=self.size, features=len(reader.names), dense=lane.dense,
            width=reader.out.stride(0), tasks=self.host_logits[0].numel(), keys=reader.keys.data_ptr(),
            examples=reader.examples.data_ptr(), dense_in=self.dense_in.data_ptr(), logits=self.host_logits.data_ptr(),
            late=reader.late.ctypes.data, missing=reader.missing(),
        )  # fmt: skip

    def _tower(self) -> Tensor:
        self.dense.copy_(self.dense_in, non_blocking=True)
        with tower_precision(self.lane.precision):
            return self.lane.tower(self.vectors, self.dense if self.lane.dense else None).float()

    def _tower_and_copy_logits(self) -> None:
        self.host_logits.copy_(self._tower(), non_blocking=True)


class DeviceLanes:
    """The lanes of an engine. A batch takes a free lane, or blocks until one is free."""

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        tower: OriginalTower | TwoPartTower,
        dense: int,
        ladder: Sequence[int] | None,
        precision: str,
        lanes: int = 1,
    ) -> None:
        assert embeddings.hbm_cache is not None
        self.reader = ServingReader(embeddings.layout, embeddings.hbm_cache)
        parts = (tower.user, tower.candidates) if isinstance(tower, TwoPartTower) else (tower,)
        self._parts = [part for part in parts if isinstance(part, OriginalTower)]
        for part in self._parts if precision in EXACT else ():
            part.join_activations()
        self.tower, self.dense, self.ladder, self.precision = tower, dense, ladder or LADDER, precision
        self.free: queue.SimpleQueue[DeviceLane] = queue.SimpleQueue()
        made = [DeviceLane(self.reader, tower.run, dense, self.ladder, precision) for _ in range(lanes)]
        inputs = tower.inputs
        self.one_id_each = not (inputs.sequences or inputs.numbers or inputs.user)  # whether batches can be so
        for lane in made:
            if self.one_id_each:
                lane.warm()
            self.free.put(lane)
        self.jagged = JaggedLanes(self.reader, tower, made, self.free, sorted(made[0].ladder))

    def plan(self, batch: KeyedBatch) -> Run | None:
        """The function that runs this batch on a free lane, as DeviceLane.run; None if the lanes do not take it."""
        if batch.size == 0 or (batch.dense is not None and batch.dense.is_cuda) or self.jagged.all_held:
            return None
        if self.one_id_each and self.reader.supports(batch):
            return partial(self.run, batch)
        runners = self.jagged.plan(batch)
        return None if runners is None else partial(self._run_jagged, runners, batch)

    def run(self, batch: KeyedBatch, policy: str, below: BatchBelow | None = None) -> Result:
        """As DeviceLane.run, on a free lane. Requires: one id each."""
        lane = self.free.get()
        try:
            return lane.run(batch, policy, below)
        finally:
            self.free.put(lane)

    def _run_jagged(self, runners: Runners, batch: KeyedBatch, policy: str, below: BatchBelow | None) -> Result:
        lane = self.free.get()
        try:
            return runners[lane.number].run(batch, policy, below)
        finally:
            self.free.put(lane)

    def set_weights(self, weights: Mapping[str, Tensor] | PartWeights) -> None:
        """Copy new weights into the storage of the old ones. Requires: no batch runs."""
        states = (weights.user, weights.candidates) if isinstance(weights, PartWeights) else (weights,)
        with torch.inference_mode(), capturing():
            torch.cuda.synchronize(self.reader.device)
            for part, state in zip(self._parts, states, strict=True):
                for name, weight in part.weights.items():
                    weight.copy_(state[name])
            torch.cuda.synchronize(self.reader.device)

    def close(self) -> None:
        """Stop the filler and captures."""
        self.jagged.close()
        self.reader.close()


def _cut(batch: KeyedBatch, begin: int, end: int) -> KeyedBatch:
    ids = {name: Jagged(jagged.values[begin:end]) for name, jagged in batch.ids.items()}
    return KeyedBatch(ids, None if batch.dense is None else batch.dense[begin:end])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _join_late(late: Sequence[Tensor | None], logits: Sequence[Tensor]) -> Tensor | None:
    """Concatenate the late counts of pieces; None if no piece has any."""
    if all(part is None for part in late):
        return None
    rows = [part.shape[0] for part in logits]
    return torch.cat([torch.zeros(n, dtype=torch.int32) if p is None else p for p, n in zip(late, rows, strict=True)])
