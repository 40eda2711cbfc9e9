"""The stream of now. torch's own look-up is a few microseconds of Python, and a step asks ten times: here it is one
call of C and a dictionary. A stream's handle names it for as long as it lives, and torch's live as long as the process.
"""

from __future__ import annotations

from typing import Any

import torch

_streams: dict[tuple[int, int], Any] = {}  # by device and handle


def current_stream(device: torch.device) -> Any:
    """The stream that this thread asks things of. Requires: a CUDA device."""
    number = _number(device)
    key = number, torch._C._cuda_getCurrentRawStream(number)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def raw_stream(device: torch.device) -> int:
    """Its handle, as the driver knows it; 0 without a GPU."""
    return int(torch._C._cuda_getCurrentRawStream(_number(device))) if device.type == "cuda" else 0


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
