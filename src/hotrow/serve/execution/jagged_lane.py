"""A lane's bucket for batches with multi-hot features or histories: a TensorBatch in, logits out, by two captured
graphs.

    ids → [graph: look up] → missing rows → [graph: insert them, pool, tower, copy logits] → logits

It differs from BucketRunner (device_lane.py) in its inputs: JaggedBuffers (tiers/hbm/jagged_reader.py) has the ids of
all features, one after another, and makes the tensors that the tower reads. The core runs both graphs in one call
(core/device/graph_runner.h). A tower with two parts runs both of them in the second graph.

A runner is made and run on its lane's stream, while nobody else uses the lane. jagged_lanes.py says when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import KeyedBatch
from hotrow.kernels.graph_capture import capturing
from hotrow.serve.execution.cuda_graphs import WARM_UP, CaptureError
from hotrow.serve.execution.tower_precision import tower_precision
from hotrow.serve.graph.tower_graph import Shape
from hotrow.tiers.hbm.jagged_reader import JaggedBuffers, JaggedReader, Scratch, empty_batch
from hotrow.tiers.hbm.rows_below import BatchBelow
from hotrow.tiers.host.store import LATE

if TYPE_CHECKING:
    from hotrow.serve.execution.device_lane import DeviceLane


class JaggedRunner:
    """One bucket of one lane. One batch at a time."""

    def __init__(self, lane: DeviceLane, reader: JaggedReader, shape: Shape, weighted: bool, scratch: Scratch) -> None:
        self.lane, self.shape = lane, shape
        with torch.cuda.stream(lane.stream), torch.inference_mode():
            self.buffers = JaggedBuffers(reader, shape.rows, shape.lengths, weighted, lane.number, scratch)
            self.dense_in = torch.zeros(shape.rows, lane.dense, dtype=torch.float32, pin_memory=True)
            self.dense = torch.zeros_like(self.dense_in, device=lane.device)
            self.buffers.fill(empty_batch(reader))
            self.buffers.launch_lookup()  # of no id, so it needs no gate; compiles the kernels
            for _ in range(WARM_UP):
                logits = self._tower()
            self.host_logits = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
            self._rows = torch.zeros(shape.rows, dtype=torch.int32)  # the core's count of late ids by row; not used
            lane.stream.synchronize()
            self._done = torch.cuda.Event()
            self._graph: Any = None
            self._core: Any = self._capture() if lane.graphs else None

    def run(self, batch: KeyedBatch, policy: str, below: BatchBelow | None = None) -> tuple[Tensor, Tensor | None, int]:
        """As DeviceLane.run. Requires: the batch fits."""
        self.buffers.fill(batch)
        logits = torch.empty(batch.size, *self.host_logits.shape[1:])
        dense = batch.dense.contiguous() if batch.dense is not None and self.lane.dense else None
        if self._core is not None:
            self.buffers.forget_late(policy)
            self._core.run([], batch.size, 0 if dense is None else dense.data_ptr(), LATE[policy], logits.data_ptr())
        else:
            self._run_in_steps(batch, dense, policy, below)
            logits.copy_(self.host_logits[: batch.size])
        self.buffers.offer()
        late, ids = (None, 0) if policy == "wait" else self.buffers.late(batch)
        return logits, late, ids

    def _run_in_steps(self, batch: KeyedBatch, dense: Tensor | None, policy: str, below: BatchBelow | None) -> None:
        """Without the core, which does not know the rows of a remote store."""
        with torch.cuda.stream(self.lane.stream), torch.inference_mode():
            if dense is not None:
                self.dense_in[: batch.size] = dense
            self.buffers.enqueue_lookup()
            self.buffers.read_misses(policy, below)
            if self._graph is None:
                self._tower_and_copy_logits()
            else:
                self._graph.replay()
            self._done.record()
        self._done.synchronize()

    def _tower(self) -> Tensor:
        vectors = self.buffers.vectors()
        self.dense.copy_(self.dense_in, non_blocking=True)
        with tower_precision(self.lane.precision):
            return self.lane.tower(vectors, self.dense if self.lane.dense else None).float()

    def _tower_and_copy_logits(self) -> None:
        self.host_logits.copy_(self._tower(), non_blocking=True)

    def _capture(self) -> Any:
        """Capture both graphs. Returns the core's runner of them."""
        lane, buffers = self.lane, self.buffers
        lookup, self._graph = (torch.cuda.CUDAGraph(keep_graph=True) for _ in range(2))
        mode = "thread_local"
        try:
            with capturing(), torch.cuda.graph(lookup, stream=lane.stream, capture_error_mode=mode):
                buffers.launch_lookup()
            with (
                capturing(),
                torch.cuda.graph(self._graph, pool=lane.pool, stream=lane.stream, capture_error_mode=mode),
            ):
                self._tower_and_copy_logits()
        except RuntimeError as error:
            lane.pool = torch.cuda.graph_pool_handle()  # the pool of a failed capture cannot be used again
            first = str(error.__context__ or error).partition("\n")[0]
            raise CaptureError(f"it cannot be captured as a CUDA graph: {first}") from error
        buffers.graph = lookup
        if buffers.reader.base.cache.below is not None:
            return None
        return _core.GraphRunner(
            buffers.reader.base.gate.core, lane.number, lane.stream.cuda_stream, lookup.raw_cuda_graph(),
            self._graph.raw_cuda_graph(), capacity=self.shape.rows, features=0, dense=lane.dense, width=1,
            tasks=self.host_logits[0].numel(), keys=0, examples=buffers.examples.data_ptr(),
            dense_in=self.dense_in.data_ptr(), logits=self.host_logits.data_ptr(), late=self._rows.data_ptr(),
            missing=buffers.missing(),
        )  # fmt: skip
