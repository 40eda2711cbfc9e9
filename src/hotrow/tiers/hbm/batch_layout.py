"""A batch's features as arrays on the device: all keys, contiguous, and how positions map to outputs
(kernels/rows/layout.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.device.streams import to_device
from hotrow.kernels.current_stream import raw_stream
from hotrow.kernels.rows.layout import Items, cached_table, items_of_positions
from hotrow.tiers.plan import Feature


def lay_out(features: Sequence[Sequence[Feature]], device: torch.device) -> tuple[Tensor, Tensor, Items]:
    """The keys of all features, contiguous; where each table's keys begin; and how positions map to outputs."""
    values, sizes, plain = [], [], True
    for of_table in features:
        for jagged, _ in of_table:
            values.append(jagged.values)
            sizes.append(jagged.values.numel())
            plain = plain and jagged.offsets is None and jagged.weights is None
        sizes.append(-1)  # marks the end of a table
    keys = join(values, device)
    if not plain:
        return keys, _begins(features, device), _items(features, keys.numel(), device)
    # One id per bag: the layout depends on the sizes alone and is kept. Each stream keeps its own copy, because nothing
    # orders one stream after the upload of another.
    what = tuple(sizes), device, raw_stream(device)
    known = _UNIFORM_LAYOUTS.get(what)
    if known is None:
        if len(_UNIFORM_LAYOUTS) > 64:
            _UNIFORM_LAYOUTS.clear()
        known = _UNIFORM_LAYOUTS[what] = _begins(features, device), _items(features, keys.numel(), device)
    return keys, *known


_UNIFORM_LAYOUTS: dict[tuple[tuple[int, ...], torch.device, int], tuple[Tensor, Items]] = {}


def _begins(features: Sequence[Sequence[Feature]], device: torch.device) -> Tensor:
    sizes = [sum(jagged.values.numel() for jagged, _ in of_table) for of_table in features]
    return _cumulative(sizes, device)


def _cumulative(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Cumulative sums that start with 0, int32."""
    return cached_table(tuple(itertools.accumulate(sizes, initial=0)), device, torch.int32)


def _items(of_tables: Sequence[Sequence[Feature]], ids: int, device: torch.device) -> Items:
    """How positions map to outputs."""
    features = [feature for of_table in of_tables for feature in of_table]
    tables = [table for table, of_table in enumerate(of_tables) for _ in of_table]
    jagged = [j.offsets is not None and pooling != "none" for j, pooling in features]
    sizes = [j.size if bags else j.values.numel() for (j, _), bags in zip(features, jagged, strict=True)]
    begins = _cumulative(sizes, device)
    offsets = item_of = scales = None
    if any(jagged):
        parts, at = [], 0
        for (j, _), bags in zip(features, jagged, strict=True):
            of_feature = j.offsets[:-1] if bags else torch.arange(j.values.numel(), device=j.values.device)  # type: ignore[index]
            parts.append(of_feature + at)
            at += j.values.numel()
        parts.append(torch.tensor([at], device=parts[0].device))
        offsets = join(parts, device).to(torch.int32)
        item_of = items_of_positions(offsets, sum(sizes), ids)
    if any(j.weights is not None for j, _ in features) or any(
        pooling == "mean" and bags for (_, pooling), bags in zip(features, jagged, strict=True)
    ):
        scales = join([scale_of_ids(j, pooling) for j, pooling in features], device)
    return Items(begins, cached_table(tuple(tables), device, torch.int32), offsets, scales, item_of)


def scale_of_ids(jagged: Jagged, pooling: str) -> Tensor:
    """The factor of each id's vector: its weight, times 1 / length for a mean."""
    weights = jagged.weights if jagged.weights is not None else torch.ones(
        jagged.values.numel(), dtype=torch.float32, device=jagged.values.device
    )  # fmt: skip
    if pooling != "mean" or jagged.offsets is None:
        return weights
    lengths = jagged.lengths()
    return weights / torch.repeat_interleave(lengths, lengths).float()


def join(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The tensors concatenated, on the device."""
    tensors = [t for t in tensors if t.numel()] or list(tensors[:1])
    if all(t.device == device for t in tensors):
        return torch.cat(tensors)
    joined = torch.cat([t.cpu() for t in tensors])
    return to_device(_pinned(joined), device)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
