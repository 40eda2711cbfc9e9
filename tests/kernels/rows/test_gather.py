from __future__ import annotations

import pytest
import torch
from kernels import reference
from kernels.gather_one_feature import gather_one_feature

from hotrow.errors import BatchError
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import Items, RowLayout, Source, items_of_positions


def _source(layout: RowLayout, capacity: int, extra: int, device: torch.device, seed: int = 0) -> Source:
    draws = torch.Generator().manual_seed(seed)
    rows = torch.full((capacity + extra, layout.stride), float("nan"))  # padding must never be read
    rows[:, : layout.width] = torch.randn(capacity + extra, layout.width, generator=draws)
    values = layout.values(rows)
    values.copy_(torch.randn(values.shape, generator=draws))
    more = rows[capacity:].to(device) if extra else None
    return Source(rows[:capacity].clone().to(device), more)


def _offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dim", [1, 3, 8, 17, 128, 200])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_come_out_as_they_are(dim: int, dtype: str, device: torch.device) -> None:
    layout = RowLayout(dim, (dim,), dtype)
    source = _source(layout, 50, 7, device)
    slots = torch.randint(-1, 57, (61,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)).to(device)
    out = gather_one_feature(source, layout, slots, None)
    assert torch.equal(out, reference.row_values(source, layout, slots))


@pytest.mark.parametrize("n", [0, 1, 2, 1037])
def test_any_number_of_rows(n: int, device: torch.device) -> None:
    layout = RowLayout(8)
    source = _source(layout, 20, 0, device)
    slots = torch.arange(n, dtype=torch.int32, device=device) % 20
    assert torch.equal(gather_one_feature(source, layout, slots, None), source.rows[slots.long(), :8])


@pytest.mark.parametrize("dim", [1, 17, 128])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_summed_in_order(dim: int, weighted: bool, device: torch.device) -> None:
    layout = RowLayout(dim, (1,))
    source = _source(layout, 30, 5, device)
    offsets = _offsets([0, 3, 1, 0, 40, 5, 4, 0, 9, 2, 1, 0], device)
    n = int(offsets[-1])
    slots = torch.randint(-1, 35, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(2)).to(device)
    scales = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(device) if weighted else None
    out = gather_one_feature(source, layout, slots, offsets, scales)
    assert torch.equal(out, reference.pool(reference.row_values(source, layout, slots), offsets, scales))
    assert (out[offsets.diff() == 0] == 0).all()


@pytest.mark.parametrize("pooled", [False, True])
def test_each_feature_fills_its_own_matrix(pooled: bool, device: torch.device) -> None:
    layout = RowLayout(12)
    source = _source(layout, 40, 0, device)
    counts = [5, 0, 1, 0, 0, 33, 2, 90, 0]  # items of each feature
    items = sum(counts)
    draws = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 4, (items,), generator=draws).tolist() if pooled else [1] * items
    offsets = _offsets(lengths, device)
    slots = torch.randint(0, 40, (int(offsets[-1]),), dtype=torch.int32, generator=draws).to(device)
    begins = _offsets(counts, device)
    tables = torch.zeros(len(counts), dtype=torch.int32, device=device)
    # Slices of wide matrices (aligned and not), separate matrices, and half precision give equal results.
    wide = torch.full((90, 64), 7.0, device=device)
    outputs = [torch.full((n, 12), 7.0, device=device) for n in counts]
    outputs[7], outputs[5] = wide[:, 16:28], torch.full((33, 13), 7.0, device=device)[:, 1:]
    gather(source, layout, slots, Items(begins, tables, offsets if pooled else None), outputs)
    expected = reference.pool(reference.row_values(source, layout, slots), offsets, None)
    assert torch.equal(torch.cat(outputs), expected)
    assert (wide[:, :16] == 7).all() and (wide[:, 28:] == 7).all()
    halves = [torch.empty(n, 12, dtype=torch.bfloat16, device=device) for n in counts]
    gather(source, layout, slots, Items(begins, tables, offsets if pooled else None), halves)
    assert torch.allclose(torch.cat(halves).float(), expected, rtol=1e-2, atol=1e-2)


def test_tiles_do_not_change_a_bit(device: torch.device) -> None:
    layout = RowLayout(16)
    source = _source(layout, 30, 0, device)
    offsets = _offsets([7, 0, 13, 2, 30], device)
    slots = torch.arange(52, dtype=torch.int32, device=device) * 7 % 30
    begins = torch.tensor([0, 5], dtype=torch.int32, device=device)
    outs = [torch.empty(5, 16, device=device) for _ in range(3)]
    for out, tile in zip(outs, [(1, 1), (2, 2), (16, 4)], strict=True):
        gather(source, layout, slots, Items(begins, begins[:1], offsets), [out], tile)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_outputs_that_do_not_fit_are_refused(device: torch.device) -> None:
    layout = RowLayout(4)
    source = _source(layout, 3, 0, device)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    begins = torch.tensor([0, 3], dtype=torch.int32, device=device)
    items = Items(begins, begins[:1])
    with pytest.raises(BatchError, match="3 items"):
        gather(source, layout, slots, items, [torch.empty(4, 4, device=device)])
    with pytest.raises(BatchError, match="side by side"):
        gather(source, layout, slots, items, [torch.empty(4, 3, device=device).t()])
    with pytest.raises(BatchError, match=r"float32 \[n, 8\]"):
        gather(source, RowLayout(8), slots, items, [torch.empty(3, 8, device=device)])


def test_positions_are_spread_over_bags_with_gaps(device: torch.device) -> None:
    offsets = _offsets([0, 2, 0, 0, 3, 1, 0], device)
    assert items_of_positions(offsets, 7, 6).tolist() == [1, 1, 4, 4, 4, 5]
    assert items_of_positions(_offsets([0], device), 1, 0).tolist() == []
