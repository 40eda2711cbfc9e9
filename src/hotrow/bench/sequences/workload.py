"""The batch of attention and jagged: 256 users, lengths log-normal with median 50 and sigma 1, at most 1,024 events.

Sizes scaled by HOTROW_BENCH_SCALE, and the device, for all groups.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

USERS, MEDIAN, SIGMA, LONGEST = 256, 50, 1.0, 1024
DIM, HEADS, LAYERS, HIDDEN = 64, 4, 2, 256


def scaled(size: int, least: int) -> int:
    """`size` by HOTROW_BENCH_SCALE."""
    return max(least, math.ceil(size * float(os.environ.get("HOTROW_BENCH_SCALE", "1"))))


def users() -> int:
    """USERS, scaled by HOTROW_BENCH_SCALE."""
    return scaled(USERS, 2)


def device() -> torch.device:
    """Where the groups run: the CPU, or what `hotrow bench --device` says."""
    return torch.device(os.environ.get("HOTROW_BENCH_DEVICE", "cpu"))


def finished(step: Callable[[int], object]) -> Callable[[int], object]:
    """The step, which waits for the device's work."""
    if device().type != "cuda":
        return step

    def run(i: int) -> object:
        found = step(i)
        torch.cuda.synchronize()
        return found

    return run


def drawn_lengths(seed: int = 0) -> Tensor:
    """Lengths of a batch, int64 `[users]`, between 1 and LONGEST. One user has the longest."""
    normal = torch.randn(users(), generator=torch.Generator().manual_seed(seed))
    lengths = (MEDIAN * (SIGMA * normal).exp()).long().clamp(1, LONGEST)
    lengths[0] = LONGEST
    return lengths


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
