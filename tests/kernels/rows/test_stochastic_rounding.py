from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from kernels import reference

from hotrow.kernels.rows.layout import TRITON
from hotrow.kernels.rows.stochastic_rounding import draws, stochastic_round


@triton.jit
def _draw_kernel(streams, keys, out, step, R: tl.constexpr, D: tl.constexpr):  # noqa: N803
    row, column = tl.arange(0, R), tl.arange(0, D)
    bits = draws(tl.load(streams + row), tl.load(keys + row), step, R, D)
    tl.store(out + row[:, None] * D + column[None, :], bits.to(tl.int64))


@triton.jit
def _round_kernel(values, bits, out, TYPE: tl.constexpr, N: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, stochastic_round(tl.load(values + at), tl.load(bits + at).to(tl.uint32), TYPE))


def _round(values: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = torch.empty(len(values), dtype=torch.int16, device=device)
    _round_kernel[(len(values) // 1024,)](values.to(device), bits.to(device), out, TYPE=TRITON[dtype], N=1024)
    return out.view(dtype).cpu()


@pytest.mark.parametrize("dim", [8, 32])
def test_bits_depend_on_stream_key_step_and_element(dim: int, device: torch.device) -> None:
    streams = torch.tensor([0, -1, 2**62, 5], device=device)
    keys = torch.tensor([0, -1, -(2**63), 2**63 - 1], device=device)
    out = torch.empty(4, dim, dtype=torch.int64, device=device)
    _draw_kernel[(1,)](streams, keys, out, 9, R=4, D=dim)
    expected = [reference.draws(s, k, 9, dim) for s, k in zip(streams.tolist(), keys.tolist(), strict=True)]
    assert out.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_every_size(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 8192
    patterns = torch.randint(-(2**31), 2**31 - 1, (n,), dtype=torch.int32, generator=generator)
    values = patterns.view(torch.float32).clone()
    # Around fp16: normals, subnormals, the step between them, the end of the range.
    values[: n // 2] = torch.randn(n // 2, generator=generator) * 2.0 ** torch.randint(
        -28, 17, (n // 2,), generator=generator
    )
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        65504.0,
        65519.0,
        65536.0,
        2.0**-14,
        2.0**-24,
        2.0**-25,
        3.4e38,
    ]
    values[: len(special)] = torch.tensor(special)
    bits = torch.randint(0, 2**32, (n,), generator=generator)
    got, expected = _round(values, bits, dtype, device), reference.stochastic_round(values, bits, dtype)
    assert torch.equal(got.isnan(), values.isnan())
    real = ~values.isnan()
    assert torch.equal(got.view(torch.int16)[real], expected.view(torch.int16)[real])
    assert got[values.isfinite()].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_type_holds_is_left_alone(dtype: torch.dtype, device: torch.device) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = torch.where(every.isfinite(), every, torch.zeros((), dtype=dtype))
    bits = torch.full((len(every),), 2**32 - 1)
    got = _round(every.float(), bits, dtype, device)
    assert torch.equal(got.view(torch.int16), every.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_is_kept(dtype: torch.dtype, device: torch.device) -> None:
    n = 1 << 14
    values = torch.full((n,), 1.0 + 2.0**-12)
    bits = torch.randint(0, 2**32, (n,), generator=torch.Generator().manual_seed(0))
    got = _round(values, bits, dtype, device).double()
    step = torch.finfo(dtype).eps
    assert got.mean().item() == pytest.approx(1.0 + 2.0**-12, abs=3 * step / 2 / math.sqrt(n))
    assert set(got.tolist()) == {1.0, 1.0 + step}
