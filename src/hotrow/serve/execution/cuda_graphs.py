"""A bucket as a CUDA graph: all kernels of a tower launched by one call. One per lane and bucket.

A graph replays the same kernels on the same addresses, so it has inputs of its own, into which a batch is copied, an
output of its own, out of which the real rows are copied, and reads the weights where they were when it was captured:
new weights are copied into the same storage (towers.py does so while no lane runs). A lane's graphs share the
lane's memory pool, since a lane runs one at a time; no two lanes share one. Capture and replay belong to the lane's
own thread and stream; other lanes go on meanwhile (capture_error_mode="thread_local"). A function that waits for the
device or goes through the host cannot be captured: that is a CaptureError, after which the thread and its stream are as
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hotrow.errors import HotRowError

WARM_UP = 3  # runs before capture: libraries choose algorithms and allocate workspaces in the first ones


class CaptureError(HotRowError, RuntimeError):
    """A function that runs, but not inside a CUDA graph."""


class LanePool:
    """What all graphs of a lane share: its stream and its memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()


class BucketGraph:
    """`function(inputs) -> logits`, captured over `inputs`, which must stay the same tensors."""

    def __init__(
        self, function: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], lane: LanePool
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

    def _capture(self, function: Callable[[Sequence[Tensor]], Tensor], lane: LanePool) -> None:
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(lane.stream.device)),  # torch.cuda.graph may not restore it
                torch.inference_mode(),
                torch.cuda.graph(self._graph, pool=lane.pool, stream=lane.stream, capture_error_mode="thread_local"),
            ):
                self._logits = function(self._inputs)
        except RuntimeError as error:
            first = str(error.__context__ or error).partition("\n")[0]
            raise CaptureError(f"it cannot be captured as a CUDA graph: {first}") from error

    def replay(self, rows: int) -> Tensor:
        """The first `rows` logits of what the inputs hold now, in memory of their own, on the current stream."""
        self._graph.replay()
        return self._logits[:rows].clone()
