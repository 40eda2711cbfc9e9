"""Streams of a GPU and their order, copies to and from it. Without a GPU nothing waits and nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hotrow.device.device_to_host import HostCopy
from hotrow.kernels import graph_capture
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.rows.transfer import copy_to_pinned


def new_stream(device: torch.device, urgent: bool = False) -> Any:
    """A stream of that device, None without a GPU. Kernels of an urgent stream are scheduled first."""
    return graph_capture.new_stream(device, urgent) if device.type == "cuda" else None


def on(stream: Any) -> AbstractContextManager[Any]:
    """Inside the block, that stream is the current one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def follow(stream: Any) -> None:
    """Make `stream` wait for the work that the current stream has so far."""
    if stream is not None:
        stream.wait_stream(current_stream(stream.device))


def wait_for(stream: Any) -> None:
    """Make the current stream wait for the work that `stream` has so far."""
    if stream is not None:
        current_stream(stream.device).wait_stream(stream)


def used_on(stream: Any, *tensors: Tensor | None) -> None:
    """Tell torch that `stream` uses these tensors, so that it does not reuse their memory earlier."""
    if stream is not None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


class CapturedSteps:
    """Steps captured as a CUDA graph. `replay` launches it on the current stream and returns the steps' outputs.
    Without a GPU nothing is captured, and `replay` runs the steps. kernels/graph_capture.py says which thread may
    capture."""

    def __init__(self, device: torch.device, steps: Callable[[], Any], keep_graph: bool = False) -> None:
        self.graph: Any = None
        if device.type == "cuda":
            with graph_capture.capture_graph(device, keep_graph) as graph:
                self.outputs = steps()
            self.graph = graph

    def replay(self, steps: Callable[[], Any]) -> Any:
        """Requires: `steps` are the captured ones."""
        if self.graph is None:
            return steps()
        self.graph.replay()
        return self.outputs


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU, through pinned memory. Waits for the device."""
    return HostCopy(tensor).wait()[0]


def to_host_by_kernel(numbers: Tensor) -> Tensor:
    """As `to_host`, for int32 tensors, by a kernel: the copy engine may be busy with write-backs."""
    if numbers.device.type == "cpu":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    if numbers.numel():
        copy_to_pinned(numbers, pinned)
    current_stream(numbers.device).synchronize()
    return pinned


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. Does not wait if the tensor is pinned."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
