"""gather() of a single feature, in the short form that tests need."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import Items, RowLayout, Source


def gather_one_feature(
    source: Source, layout: RowLayout, slots: Tensor, offsets: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """gather of one feature into a new float32 matrix."""
    count = slots.numel() if offsets is None else offsets.numel() - 1
    begins = torch.tensor([0, count], dtype=torch.int32, device=slots.device)
    out = torch.empty(count, layout.dim, device=slots.device)
    gather(source, layout, slots, Items(begins, torch.zeros_like(begins[:1]), offsets, scales), [out])
    return out
