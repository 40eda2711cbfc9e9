"""The stream of now. torch's own look-up is a few microseconds of Python, and a step asks ten times: here it is one
call of C and a dictionary. A stream's handle names it for as long as it lives, and torch's live as long as the process.

torch does not document that call; where it is gone, the documented one is made.
"""

from __future__ import annotations

from typing import Any

import torch

from hotrow.undocumented import describe, warn_once

_streams: dict[tuple[int, int], Any] = {}  # by device and handle


def current_stream(device: torch.device) -> Any:
    """The stream that this thread asks things of. Requires: a CUDA device."""
    number = _number(device)
    key = number, stream_handle(number)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def raw_stream(device: torch.device) -> int:
    """Its handle, as the driver knows it; 0 without a GPU."""
    return stream_handle(_number(device)) if device.type == "cuda" else 0


def stream_handle(number: int) -> int:
    """The driver's handle of this thread's stream on the CUDA device of that number."""
    try:
        handle: int = torch._C._cuda_getCurrentRawStream(number)
        return handle
    except AttributeError:
        changed = describe("torch", "has no torch._C._cuda_getCurrentRawStream")
        warn_once(f"{changed}. A launch of a kernel takes some microseconds longer")
        return int(torch.cuda.current_stream(number).cuda_stream)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
