"""The pinned ring buffer for rows between DRAM and HBM, and how it is charged to `dram=`.

Every uploaded row that the CPU gathers, and every row that is written back, passes through one pinned buffer. A
RowTransfer has UPLOAD_BUFFERS and WRITE_BACK_BUFFERS of them. A caller blocks until one is free. A transfer larger than
one buffer is split. torch rounds pinned memory up to powers of two and caches it, so buffer sizes are powers of two.

With `dram=`, all buffers have one size that follows from it. They are charged when the collection is made. Without it,
a buffer is as large as its rows, up to MAX_BYTES, and the peak use is charged. Without a GPU (Triton's interpreter)
nothing is pinned, but everything is charged the same.

Not charged: what a batch copies to the host about its missing keys (36 bytes per key) and their locations in DRAM (12
bytes per key). These belong to the batch, like its keys and vectors.
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

UPLOAD_BUFFERS, WRITE_BACK_BUFFERS = 4, 4  # of a RowTransfer; the last write-back buffer is being freed
MIN_BYTES, MAX_BYTES = 4 << 10, 256 << 20  # bytes of one; a step of W-gpu-cached with Adam writes back 206 MB
DRAM_SHARE = 8  # all buffers together take at most this fraction (1/8) of dram=, if that gives each MIN_BYTES


def buffer_bytes(dram: int, row_bytes: Sequence[int]) -> int:
    """The size of one buffer, for transfers of rows of these sizes under `dram=` (0: no limit).

    >>> buffer_bytes(0, [528]) == MAX_BYTES == buffer_bytes(64 << 30, [528])
    True
    >>> buffer_bytes(16 << 20, [208, 32])
    131072
    """
    smallest, buffers = (
        max([MIN_BYTES, *map(power_of_2, row_bytes)]),
        max(1, len(row_bytes)) * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS),
    )
    if dram == 0:
        return max(smallest, MAX_BYTES)
    if 2 * smallest * buffers > dram:
        raise MemoryBudgetError(
            f"dram={format_size(dram)} below hbm= is too small: rows pass through "
            f"{format_size(smallest * buffers)} of pinned memory between DRAM and HBM. "
            f"Give dram= at least {round_up_size(2 * smallest * buffers)}"
        )
    affordable = dram // DRAM_SHARE // buffers
    return max(smallest, min(MAX_BYTES, power_of_2(affordable + 1) // 2))


class PinnedRing:
    """The buffers of one RowTransfer. Any thread."""

    def __init__(self, budget: Budget, size: int, pinned: bool) -> None:
        self.size, self._pinned, self._budget = size, pinned, budget
        self._sized = budget.limit > 0
        self._lock = threading.RLock()
        self._used: Counter[int] = Counter()  # buffers in use, by their bytes
        self._held: Counter[int] = Counter()  # buffers that torch keeps: the peak of those in use
        self._charged = _Charged(budget)
        weakref.finalize(self, self._charged.clear)
        if self._sized:
            self._held[size] = UPLOAD_BUFFERS + WRITE_BACK_BUFFERS
            self._charged.add(size * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS))

    @property
    def bytes(self) -> int:
        """Bytes charged to the budget."""
        return self._charged.bytes

    def buffer(self, floats: int) -> Tensor:
        """A float32 tensor of at least this many elements, at most `size` bytes. It is in use while the tensor
        lives."""
        size = self.size if self._sized else max(MIN_BYTES, power_of_2(4 * floats))
        assert 4 * floats <= self.size, "split the rows over several buffers"
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
    """Bytes charged to a budget until `clear`."""

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
    """Charge `count` bytes, rounded up as torch does, while `owner` lives."""
    held = _Charged(budget)
    held.add(power_of_2(count) if count else 0)
    weakref.finalize(owner, held.clear)
