"""Capturing CUDA graphs: under one lock, and on one reserved stream a device.

Two rules follow from how torch captures:
- Only the training thread captures, or the thread that makes a collection; in a server, where no tower draws random
  numbers, a thread for captures. While anything is captured torch (2.11 to 2.13) refuses random numbers in the whole
  process, so a tower's dropout in another thread would fail.
- Nothing else may run on the capturing stream, because it would be captured too. torch hands out 32 streams in turn, so
  a stream for each capture would sooner or later be one that is in use. Therefore a device has one capture stream, and
  `new_stream` skips it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotrow.kernels.current_stream import current_stream

_lock = threading.RLock()
_streams: dict[int, Any] = {}  # the capture stream of each device


def capture_stream(device: torch.device) -> Any:
    """The device's stream for captures; nothing else runs on it."""
    number = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if number not in _streams:
            _streams[number] = torch.cuda.Stream(device)
        return _streams[number]


def new_stream(device: torch.device, urgent: bool = False) -> Any:
    """A stream of that device, never the capture stream. The GPU schedules work of high priority first."""
    reserved = capture_stream(device)
    while (stream := torch.cuda.Stream(device, priority=-int(urgent))) == reserved:
        pass
    return stream


@contextmanager
def capture_graph(device: torch.device, keep_graph: bool = False) -> Iterator[Any]:
    """Capture the launches of the block in a graph; none of them runs. The capture is ordered after earlier and before
    later work of the current stream."""
    stream, current = capture_stream(device), current_stream(device)
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with capturing():
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may launch meanwhile
            try:
                yield graph
            finally:
                graph.capture_end()
        current.wait_stream(stream)


@contextmanager
def capturing() -> Iterator[None]:
    """Nobody else captures inside the block. Wait for the whole device only in such a block: it is an error while
    anything is captured, and breaks the capture."""
    with _lock, _garbage_collector_off():
        yield


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """Objects that the collector frees may wait for the device, which is an error during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
