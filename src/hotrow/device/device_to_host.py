"""Tensors on their way down from a GPU. Imported without one, too: it must not need Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.current_stream import current_stream


class Down:
    """Copies of some tensors on the CPU, of those that are on a GPU on their way: `wait` for them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [_sent_down(tensor) for tensor in tensors]
        there = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        self._event = None if there is None else current_stream(there).record_event()

    @property
    def on_its_way(self) -> bool:
        """Whether there is something to wait for."""
        return self._event is not None

    def wait(self) -> list[Tensor]:
        """All of them, in order."""
        if self._event is not None and not self._event.query():  # waiting gives Python's lock away, asking does not
            self._event.synchronize()
        return self._copies


def _sent_down(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
