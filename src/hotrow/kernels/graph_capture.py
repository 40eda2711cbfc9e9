"""Launches that a GPU remembers: how they are captured.

Only the thread that trains captures, or who makes a collection: while anything is captured torch refuses random numbers
in the whole process (2.11 to 2.13), so that a tower's dropout beside it would fail. And only on a stream for nothing
else, because what others ask of it meanwhile would be captured too. torch has 32 streams that it hands out in turn, and
a group of tables takes three: where each capture had one of its own, with six groups it was at last one that rows come
up on. So a device has one for all of them, taken first (`new_stream` passes it over), and captures are one at a time.
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
_streams: dict[int, Any] = {}  # for capturing, by device


def capture_stream(device: torch.device) -> Any:
    """The stream of that device on which launches are captured, and nothing else is asked for."""
    number = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if number not in _streams:
            _streams[number] = torch.cuda.Stream(device)
        return _streams[number]


def new_stream(device: torch.device, urgent: bool = False) -> Any:
    """Another stream of that device. What is urgent gets room before what is not."""
    kept = capture_stream(device)
    while (stream := torch.cuda.Stream(device, priority=-int(urgent))) == kept:
        pass
    return stream


@contextmanager
def captured(device: torch.device, keep_graph: bool = False) -> Iterator[Any]:
    """A graph of what is asked of the device inside the block; nothing of it is done. What the stream of now is asked
    for comes before and after it."""
    stream, here = capture_stream(device), current_stream(device)
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with _lock, _no_collection():
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads may go on with theirs
            try:
                yield graph
            finally:
                graph.capture_end()
        here.wait_stream(stream)


@contextmanager
def _no_collection() -> Iterator[None]:
    """What Python's collector lets go of may wait for the device, and who captures must not."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
