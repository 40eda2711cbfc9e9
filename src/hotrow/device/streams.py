"""Streams of a GPU, and copies to and from it; without one, nothing waits for anything and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hotrow.device.device_to_host import Down
from hotrow.kernels import graph_capture
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.rows.move import tell


def new_stream(device: torch.device, urgent: bool = False) -> Any:
    """A stream of that device, None where it has none. What is urgent gets room before what is not."""
    return graph_capture.new_stream(device, urgent) if device.type == "cuda" else None


def on(stream: Any) -> AbstractContextManager[Any]:
    """Inside it, work goes to that stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def follow(stream: Any) -> None:
    """What goes to that stream from now on comes after what was asked of this one."""
    if stream is not None:
        stream.wait_stream(current_stream(stream.device))


def wait_for(stream: Any) -> None:
    """What is asked of this stream from now on comes after what was asked of that one."""
    if stream is not None:
        current_stream(stream.device).wait_stream(stream)


def used_on(stream: Any, *tensors: Tensor | None) -> None:
    """That stream reads these: their memory is not given to others before it has."""
    if stream is not None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


class Recorded:
    """Steps that the device remembers: `replay` asks it for all of them, on the stream of then, and returns what they
    make. Without a device nothing is recorded. kernels/graph_capture.py says who may record."""

    def __init__(self, device: torch.device, steps: Callable[[], Any], keep_graph: bool = False) -> None:
        self.graph: Any = None
        if device.type == "cuda":
            with graph_capture.captured(device, keep_graph) as graph:
                self.made = steps()
            self.graph = graph

    def replay(self, steps: Callable[[], Any]) -> Any:
        """Requires: `steps` are those that were recorded."""
        if self.graph is None:
            return steps()
        self.graph.replay()
        return self.made


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU, by way of pinned memory. Waits for it."""
    return Down(tensor).wait()[0]


def told(numbers: Tensor) -> Tensor:
    """As to_host, for int32 numbers that are waited for while rows are on their way down."""
    if numbers.device.type == "cpu":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    if numbers.numel():
        tell(numbers, pinned)
    current_stream(numbers.device).synchronize()
    return pinned


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; does not wait where the tensor is pinned."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
