"""The batch that all groups use: 256 users, lengths log-normal with median 50 and sigma 1, at most 1,024 events."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

USERS, MEDIAN, SIGMA, LONGEST = 256, 50, 1.0, 1024
DIM, HEADS, LAYERS, HIDDEN = 64, 4, 2, 256


def users() -> int:
    """USERS, scaled by HOTROW_BENCH_SCALE."""
    return max(2, math.ceil(USERS * float(os.environ.get("HOTROW_BENCH_SCALE", "1"))))


def drawn_lengths(seed: int = 0) -> Tensor:
    """Lengths of a batch, int64 `[users]`, between 1 and LONGEST. One user has the longest."""
    normal = torch.randn(users(), generator=torch.Generator().manual_seed(seed))
    lengths = (MEDIAN * (SIGMA * normal).exp()).long().clamp(1, LONGEST)
    lengths[0] = LONGEST
    return lengths


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
