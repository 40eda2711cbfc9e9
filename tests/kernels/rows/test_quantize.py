from __future__ import annotations

import pytest
import torch
from kernels import reference
from kernels.gather_one_feature import gather_one_feature

from hotrow.kernels.rows.layout import RowLayout, Source
from hotrow.kernels.rows.quantize import quantize, quantized


def _rows(layout: RowLayout, n: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(n)
    rows = torch.full((n, layout.stride), float("nan"))
    values = layout.values(rows)
    values.copy_(torch.randn(values.shape, generator=draws) * torch.logspace(-6, 3, max(n, 1))[:n, None])
    return rows


@pytest.mark.parametrize("dim", [1, 3, 8, 17, 128, 200])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_codes_scale_and_bias_are_the_references(dim: int, dtype: str, device: torch.device) -> None:
    layout = RowLayout(dim, (dim,), dtype)
    rows = _rows(layout, 33)
    got = quantize(rows.to(device), layout).cpu()
    values = layout.values(rows).float()
    codes, scale, bias = reference.quantize(values)
    to = quantized(layout)
    assert torch.equal(to.values(got), codes)
    assert torch.equal(got[:, to.state_offset], scale) and torch.equal(got[:, to.state_offset + 1], bias)
    error = (codes * scale[:, None] + bias[:, None] - values).abs()
    assert (error <= scale[:, None] * 0.501 + bias.abs()[:, None] * 1e-6).all()


@pytest.mark.parametrize("n", [0, 1])
def test_small_numbers_of_rows(n: int, device: torch.device) -> None:
    layout = RowLayout(8)
    assert quantize(_rows(layout, n).to(device), layout).shape == (n, 4)


def test_equal_values_are_exact(device: torch.device) -> None:
    layout = RowLayout(5)
    rows = torch.zeros(3, layout.stride)
    rows[:, :5] = torch.tensor([0.0, -0.3, 1e30])[:, None]
    source = Source(quantize(rows.to(device), layout))
    out = gather_one_feature(source, quantized(layout), torch.arange(3, dtype=torch.int32, device=device), None)
    assert torch.equal(out.cpu(), rows[:, :5])


@pytest.mark.parametrize("dim", [3, 17, 128])
def test_int8_rows_are_gathered_and_pooled(dim: int, device: torch.device) -> None:
    layout = RowLayout(dim)
    to = quantized(layout)
    small = quantize(_rows(layout, 40).to(device), layout)
    source = Source(small[:30].clone(), small[30:].clone())
    slots = torch.randint(-1, 40, (70,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)).to(device)
    expected = reference.row_values(source, to, slots)
    assert torch.equal(gather_one_feature(source, to, slots, None), expected)
    offsets = torch.tensor([0, 0, 5, 6, 36, 36, 70], dtype=torch.int32, device=device)
    scales = torch.rand(70, generator=torch.Generator().manual_seed(1)).to(device)
    out = gather_one_feature(source, to, slots, offsets, scales)
    assert torch.equal(out, reference.pool(expected, offsets, scales))
