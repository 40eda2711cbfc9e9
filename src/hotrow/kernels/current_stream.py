"""The calling thread's current CUDA stream.

torch.cuda.current_stream is a few microseconds of Python, and a training step needs it ten times. Here it is one C call
and a dictionary lookup: a stream's handle identifies it for as long as it lives, and torch's streams live as long as
the process. torch does not document that C call; where it is missing, the documented one is made.
"""

from __future__ import annotations

from typing import Any

import torch

from hotrow.undocumented import describe, warn_once

_streams: dict[tuple[int, int], Any] = {}  # by device index and handle


def current_stream(device: torch.device) -> Any:
    """The current stream of this thread. Requires: a CUDA device."""
    index = _device_index(device)
    key = index, current_stream_handle(index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def raw_stream(device: torch.device) -> int:
    """The driver's handle of this thread's current stream; 0 without a GPU."""
    return current_stream_handle(_device_index(device)) if device.type == "cuda" else 0


def current_stream_handle(index: int) -> int:
    """The driver's handle of this thread's current stream on the CUDA device of that index."""
    try:
        handle: int = torch._C._cuda_getCurrentRawStream(index)
        return handle
    except AttributeError:
        changed = describe("torch", "has no torch._C._cuda_getCurrentRawStream")
        warn_once(f"{changed}. A launch of a kernel takes some microseconds longer")
        return int(torch.cuda.current_stream(index).cuda_stream)


def _device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
