"""A bucket as a CUDA graph: one call launches all kernels of a tower. Each lane has its own graph for each bucket.

A graph replays the same kernels on the same addresses. So it has static input tensors, into which a batch is copied,
and a static output, from which the real rows are copied. It reads the weights at the addresses of its capture, so
towers.py copies new weights into the same storage while no lane runs. The graphs of one lane share a memory pool,
because a lane runs one at a time; lanes never share a pool. A lane captures and replays on its own thread and stream
while other lanes run (capture_error_mode="thread_local"). A function that synchronizes with the host cannot be
captured: that raises CaptureError and leaves the thread and its stream unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotrow.errors import HotRowError
from hotrow.kernels.graph_capture import capturing

WARM_UP = 3  # runs before capture, in which libraries choose algorithms and allocate workspaces


class CaptureError(HotRowError, RuntimeError):
    """A function that cannot be captured as a CUDA graph."""


class LanePool:
    """The stream and the memory pool that all graphs of a lane share."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()


class BucketGraph:
    """`function(inputs) -> outputs`, captured over `inputs`, which must stay the same tensors."""

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor], lane: LanePool
    ) -> None:
        self._inputs = inputs  # kept alive: the graph reads their addresses
        self._graph = torch.cuda.CUDAGraph()
        lane.stream.wait_stream(torch.cuda.current_stream(inputs[0].device))
        with torch.cuda.stream(lane.stream), torch.inference_mode():
            for _ in range(WARM_UP):
                function(inputs)
        lane.stream.synchronize()
        self._capture(function, lane)
        torch.cuda.current_stream(inputs[0].device).wait_stream(lane.stream)

    def _capture(self, function: Callable[[Sequence[Tensor]], Sequence[Tensor]], lane: LanePool) -> None:
        try:
            with (
                capturing(),
                torch.cuda.stream(torch.cuda.current_stream(lane.stream.device)),  # torch.cuda.graph may not restore it
                torch.inference_mode(),
                torch.cuda.graph(self._graph, pool=lane.pool, stream=lane.stream, capture_error_mode="thread_local"),
            ):
                self._outputs = function(self._inputs)
        except RuntimeError as error:
            first = str(error.__context__ or error).partition("\n")[0]
            raise CaptureError(f"it cannot be captured as a CUDA graph: {first}") from error

    def replay(self, cut: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> list[Tensor]:
        """Run the graph on what its inputs hold now; returns copies of what `cut` takes of the outputs, on the current
        stream."""
        self._graph.replay()
        return [tensor.clone() for tensor in cut(self._outputs)]
