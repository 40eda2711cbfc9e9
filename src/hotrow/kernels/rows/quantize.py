"""int8 rows for serving: a quarter of the bytes, read-only.

Each row has its own scale and bias: value = code * scale + bias, codes 0 to 255. The bias is the row's smallest value
and the scale its span over 255, so a value's error is at most half a scale (and its rounding). A row of equal values
has scale 0 and is exact. Codes are packed four to a float, and scale and bias follow as two floats of state. `gather`
reads such rows with a RowLayout of dtype "int8" and pools them in fp32; there is no update.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.launch import cached_launch, cdiv
from hotrow.kernels.rows.layout import RowLayout, Source, read_values

ELEMENTS = 512  # of a one-warp program


def quantized(layout: RowLayout) -> RowLayout:
    """The layout of the int8 rows made from rows of another.

    >>> quantized(RowLayout(128, (1,))).stride
    36
    """
    return RowLayout(layout.dim, (2,), "int8")


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _quantize_kernel(
    rows, out, count,
    DIM: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, STATE: tl.constexpr, TYPE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, OUT_STATE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    real = row < count
    column = tl.arange(0, D)
    wanted = real[:, None] & (column < DIM)[None, :]
    value = read_values(rows + row.to(tl.int64) * STRIDE, column, wanted, TYPE, STATE)
    low = tl.min(tl.where(wanted, value, float("inf")), axis=1)
    high = tl.max(tl.where(wanted, value, float("-inf")), axis=1)
    scale = tl.div_rn(tl.where(real, high - low, 0.0), tl.full([R], 255.0, tl.float32))
    bias = tl.where(real, low, 0.0)
    scaled = tl.div_rn(value - bias[:, None], tl.where(scale > 0, scale, 1.0)[:, None] + tl.zeros([R, D], tl.float32))
    code = tl.minimum(tl.maximum(scaled + 0.5, 0.0), 255.0).to(tl.uint8)
    place = out + row.to(tl.int64) * OUT_STRIDE
    tl.store(place.to(tl.pointer_type(tl.uint8))[:, None] + column[None, :], code, mask=wanted)
    tl.store(place + OUT_STATE, scale, mask=real)
    tl.store(place + OUT_STATE + 1, bias, mask=real)


def quantize(rows: Tensor, layout: RowLayout, out: Tensor | None = None) -> Tensor:
    """Rows [n, layout.stride] as int8 rows [n, quantized(layout).stride], on the device of the rows."""
    Source(rows).check(layout)
    to = quantized(layout)
    out = torch.zeros(rows.shape[0], to.stride, device=rows.device) if out is None else out
    Source(out).check(to)
    r = max(1, ELEMENTS // layout.block)
    if rows.shape[0]:
        _quantize_kernel[(cdiv(rows.shape[0], r),)](
            rows, out, rows.shape[0], DIM=layout.dim, D=layout.block, STRIDE=layout.stride, STATE=layout.state_offset,
            TYPE=layout.type, OUT_STRIDE=to.stride, OUT_STATE=to.state_offset, R=r,
            num_warps=max(1, min(8, layout.block // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return out
