"""Arguments of a batch's index kernels that may lie on the device.

A captured graph replays its launches with fixed arguments. What changes from batch to batch is therefore read from
device memory: int64 [4] of the batch's number, the last settled batch, the last clean step, and the score of a new row
(the bits of a float32). A kernel's constexpr ON_DEVICE says whether it was given such a tensor or plain numbers.

Likewise the number of missing ids is known on the device before the host has it: a kernel whose constexpr COUNTED is
set reads the number of its real entries from `count`.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.launch import cached_launch

BATCH, SETTLED, CLEAN, SCORE = (tl.constexpr(n) for n in range(4))


@triton.jit
def argument(given, WHICH: tl.constexpr, ON_DEVICE: tl.constexpr):
    """One argument: `given` is its value, or the address of all four."""
    if ON_DEVICE:
        return tl.load(given + WHICH).to(tl.int32)
    else:
        return given


@triton.jit
def pin_and_score(given, ON_DEVICE: tl.constexpr):
    """The word of a row that the batch has pinned: `given`, or made from the arguments (sets.pack_pin_and_score)."""
    if ON_DEVICE:
        return (tl.load(given + SCORE) << 32) | tl.load(given + BATCH)
    else:
        return given


@triton.jit
def valid_count(n, count, COUNTED: tl.constexpr):
    """How many of n entries are real: all; or the number at `count`, and none if that is more than n."""
    if COUNTED:
        real = tl.load(count)
        return tl.where(real <= n, real, 0)
    else:
        return n


@cached_launch
@triton.jit(do_not_specialize=["address"])
def _load_kernel(arguments, address):
    at = tl.arange(0, 4)
    tl.store(arguments + at, tl.load(address.to(tl.pointer_type(tl.int64)) + at))


class BatchArguments:
    """The arguments of one batch after another: the host sets them, the device loads them when it reaches `load`."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = torch.zeros(4, dtype=torch.int64, device=device)
        self._pinned = torch.zeros(4, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = self._pinned.numpy()

    def set(self, batch: int, settled: int, clean: int, score: float) -> None:
        """Requires: the device has loaded the last ones."""
        self._numbers[:] = batch, settled, clean, struct.unpack("<i", struct.pack("<f", score))[0]

    def load(self) -> Tensor:
        """The arguments on the device, as they are set when the device reaches this launch."""
        _load_kernel[(1,)](self._on_device, self._pinned.data_ptr())
        return self._on_device
