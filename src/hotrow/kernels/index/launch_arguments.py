"""What a batch's search depends on beside its keys, on the device: a captured launch reads there what a plain one gets
as numbers, and how many ids were missing is known there before the host has heard of it.

Terms are int64 [4]: the batch's number, the last settled batch, the last clean step, and the score of a new row (the
bits of a float32).
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.launch import fast

BATCH, SETTLED, CLEAN, SCORE = (tl.constexpr(n) for n in range(4))


@triton.jit
def term(given, NUMBER: tl.constexpr, TERMS: tl.constexpr):
    """A whole number, or one of the terms."""
    if TERMS:
        return tl.load(given + NUMBER).to(tl.int32)
    else:
        return given


@triton.jit
def held_word(given, TERMS: tl.constexpr):
    """What `held` says of a row that the batch has pinned (sets.held_by)."""
    if TERMS:
        return (tl.load(given + SCORE) << 32) | tl.load(given + BATCH)
    else:
        return given


@triton.jit
def real_of(n, count, COUNTED: tl.constexpr):
    """How many of n entries are real: all, or as many as `count` says; none where that is more than there is room."""
    if COUNTED:
        real = tl.load(count)
        return tl.where(real <= n, real, 0)
    else:
        return n


@fast
@triton.jit(do_not_specialize=["address"])
def _terms_kernel(terms, address):
    at = tl.arange(0, 4)
    tl.store(terms + at, tl.load(address.to(tl.pointer_type(tl.int64)) + at))


class Terms:
    """Terms that the host says and the device reads when it comes to `read`."""

    def __init__(self, device: torch.device) -> None:
        self.there = torch.zeros(4, dtype=torch.int64, device=device)
        self._said = torch.zeros(4, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._numbers = self._said.numpy()

    def say(self, batch: int, settled: int, clean: int, score: float) -> None:
        """Requires: the device has read what was said before."""
        self._numbers[:] = batch, settled, clean, struct.unpack("<i", struct.pack("<f", score))[0]

    def read(self) -> Tensor:
        """The terms on the device, as they have been said when it comes here."""
        _terms_kernel[(1,)](self.there, self._said.data_ptr())
        return self.there
