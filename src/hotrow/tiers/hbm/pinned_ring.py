"""Pinned memory that rows pass through between DRAM and HBM, and what of `dram=` it takes.

Rows that are gathered on their way up and rows that go down each lie in a buffer for a moment. A way has so many of
them (UP, DOWN) and no more; who wants another waits until one is free, and rows that are more than a buffer holds go
part by part. torch rounds pinned memory up to powers of two and keeps it for the next who wants as much, so buffers are
such powers.

With `dram=` all buffers have one size, which follows from it: their bytes are charged when the collection is made, and
what is left is for rows. Without it a buffer is as large as the rows need, up to MOST, and what was in use at once is
charged when it is. Without a GPU (under the interpreter) nothing is pinned, and all the same is counted.

What a batch tells the host of its missing keys (36 bytes each) and where their rows are (12) is pinned too, and is the
batch's own, as its keys and vectors are.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.errors import MemoryBudgetError
from hotrow.kernels.launch import power_of_2
from hotrow.tiers.host.store import Budget
from hotrow.units import format_size, round_up_size

UPLOAD_BUFFERS, WRITE_BACK_BUFFERS = 4, 4  # buffers of a way: batches whose rows come, and those that go (the last one is just being let go)
MIN_BYTES, MAX_BYTES = 4 << 10, 256 << 20  # bytes of one; a step of W-gpu-cached with Adam sends 206 MB down
DRAM_SHARE = 8  # of dram= that all together may take, where that is enough for LEAST


def buffer_bytes(dram: int, row_bytes: Sequence[int]) -> int:
    """Bytes of a buffer for ways with rows of these sizes, under a limit of so many bytes (0: none).

    >>> buffer_bytes(0, [528]) == MOST == buffer_bytes(64 << 30, [528])
    True
    >>> buffer_bytes(16 << 20, [208, 32])
    131072
    """
    most, ways = max([MIN_BYTES, *map(power_of_2, row_bytes)]), max(1, len(row_bytes)) * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS)
    if dram == 0:
        return max(most, MAX_BYTES)
    if 2 * most * ways > dram:
        raise MemoryBudgetError(
            f"dram={format_size(dram)} below hbm= is too small: rows pass through {format_size(most * ways)} of pinned "
            f"memory on their way. Give dram= at least {round_up_size(2 * most * ways)}"
        )
    fits = dram // DRAM_SHARE // ways
    return max(most, min(MAX_BYTES, power_of_2(fits + 1) // 2))


class PinnedRing:
    """The buffers of one way."""

    def __init__(self, budget: Budget, size: int, pinned: bool) -> None:
        self.size, self._pinned, self._budget = size, pinned, budget
        self._sized = budget.limit > 0
        self._lock = threading.RLock()
        self._used: Counter[int] = Counter()  # buffers in use, by their bytes
        self._held: Counter[int] = Counter()  # that torch keeps: the most that were in use at once
        self._charged = _Charged(budget)
        weakref.finalize(self, self._charged.clear)
        if self._sized:
            self._held[size] = UPLOAD_BUFFERS + WRITE_BACK_BUFFERS
            self._charged.add(size * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS))

    @property
    def bytes(self) -> int:
        """What is charged."""
        return self._charged.bytes

    def buffer(self, floats: int) -> Tensor:
        """Float32 memory for so many, at most `size` bytes. It is in use for as long as the tensor lives."""
        size = self.size if self._sized else max(MIN_BYTES, power_of_2(4 * floats))
        assert 4 * floats <= self.size, "rows go by a buffer in parts"
        made = torch.empty(size // 4, dtype=torch.float32, pin_memory=self._pinned)
        with self._lock:
            self._used[size] += 1
            more = self._used[size] - self._held[size]
            if more > 0:
                self._held[size] += more
                self._charged.add(more * size)
        weakref.finalize(made, _release, self._lock, self._used, size)
        return made


class _Charged:
    """Bytes of a budget that are held until `clear`."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.bytes = budget, 0

    def add(self, count: int) -> None:
        self._budget.core.take(count)
        self.bytes += count

    def clear(self) -> None:
        self._budget.core.give_back(self.bytes)
        self.bytes = 0


def _release(lock: threading.RLock, used: Counter[int], size: int) -> None:
    with lock:
        used[size] -= 1


def charge(budget: Budget, owner: object, count: int) -> None:
    """So many bytes, rounded up as torch does, are the owner's for as long as it lives."""
    held = _Charged(budget)
    held.add(power_of_2(count) if count else 0)
    weakref.finalize(owner, held.clear)
