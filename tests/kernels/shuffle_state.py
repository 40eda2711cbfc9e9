"""Random scores and pins for an index under test."""

from __future__ import annotations

import torch

from hotrow.kernels.index.sets import SetIndex


def shuffle_state(index: SetIndex, seed: int = 0, settled: int = 5) -> None:
    """Scores with many ties, some below 0; about a third of the slots pinned above `settled`."""
    g = torch.Generator().manual_seed(seed)
    index.scores.copy_(torch.randint(-2, 3, (index.capacity,), generator=g) / 2 + 0.0)
    index.pins.copy_(torch.where(torch.rand(index.capacity, generator=g) < 0.3, settled + 1, settled).int())
