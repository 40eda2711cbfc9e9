"""keep_freed_memory: let the C library keep the memory that a step frees, for the next step.

A step allocates and frees the same matrices as the one before: pooled rows, activations, gradients. By default glibc
gives such memory back to the system, which clears each page again before its next use: 0.7 to 1.2 ms of a 12 ms step
(W-rows' tables, dim 16, two ranks). So `fit` raises glibc's thresholds once for the process. At most KEPT bytes that
are free stay with it. MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_ in the environment come first.
"""

from __future__ import annotations

import ctypes
import functools
import os

KEPT = 64 << 20
LARGEST = 32 << 20  # the most that every glibc accepts
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@functools.cache
def keep_freed_memory(kept: int = KEPT, largest: int = LARGEST) -> bool:
    """Raise the thresholds; returns whether it did. Allocations above `largest` bytes are returned at once."""
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False  # another C library
    return all([libc.mallopt(M_MMAP_THRESHOLD, largest), libc.mallopt(M_TRIM_THRESHOLD, kept)])
