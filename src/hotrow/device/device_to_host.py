"""Asynchronous copies from a GPU to the host. Imported on machines without a GPU too, so it must not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.current_stream import current_stream


class HostCopy:
    """Copies of some tensors on the CPU. Those of GPU tensors are in flight until `wait`."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [_begin_copy(tensor) for tensor in tensors]
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        self._event = None if device is None else current_stream(device).record_event()

    @property
    def in_flight(self) -> bool:
        """Whether `wait` may block."""
        return self._event is not None

    def wait(self) -> list[Tensor]:
        """Wait, then return all copies in order."""
        if (
            self._event is not None and not self._event.query()
        ):  # synchronize() releases Python's lock, query() does not
            self._event.synchronize()
        return self._copies


def _begin_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
