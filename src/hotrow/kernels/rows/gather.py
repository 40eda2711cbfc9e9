"""Rows to outputs: slots in, one matrix a feature out, in one launch for all features of all tables of a group.

A program handles R items. Without pooling it reads R slots and their rows, and writes the rows. With pooling it walks R
bags side by side, one position of each at a time, and loads the next positions' slots together with this step's rows,
so that a step waits for memory once, not twice. A bag is summed in the order of its positions by one accumulator,
whatever R is; empty bags and slots of -1 give zeros.

The items of a program mostly belong to one feature. The program finds its first and last feature by counting the
features that end before its items, and stores once for each feature in between.

Bytes that must move at dim 128, fp32: 512 in (less what L2 keeps of hot rows) and 512 out a row; W-gpu is 0.73 GB,
0.17 ms at 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from hotrow.errors import BatchError
from hotrow.kernels.launch import cached_launch, cdiv, power_of_2
from hotrow.kernels.rows.layout import (
    TRITON,
    Items,
    Matrices,
    RowLayout,
    Source,
    loop_range,
    matrices,
    matrix_rows,
    negative_zeros,
    read_slots,
)

AHEAD = 4  # positions of a bag that are read at once
LARGE = 16 << 20  # bytes of output that would evict rows from L2


@cached_launch
@triton.jit(do_not_specialize=["items", "capacity"])
def _gather_kernel(
    rows, extra, slots, begins, offsets, scales, outputs, items, capacity,
    DIM: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, STATE: tl.constexpr, TYPE: tl.constexpr,
    OUT: tl.constexpr, ALIGNED: tl.constexpr, HAS_EXTRA: tl.constexpr, EXTRA_STRIDE: tl.constexpr,
    POOLED: tl.constexpr, SCALED: tl.constexpr, FEATURES: tl.constexpr, FEATURES_PADDED: tl.constexpr,
    R: tl.constexpr, AHEAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * R
    item = start + tl.arange(0, R)
    real = item < items
    column = tl.arange(0, BLOCK)
    wanted = column < DIM
    if POOLED:
        begin = tl.load(offsets + item, mask=real, other=0)
        count = tl.load(offsets + item + 1, mask=real, other=0) - begin
        value = _pool(
            rows, extra, slots, scales, capacity, begin, count, column, wanted,
            STRIDE, STATE, TYPE, HAS_EXTRA, EXTRA_STRIDE, SCALED, R, BLOCK, AHEAD,
        )  # fmt: skip
    else:
        slot = tl.load(slots + item, mask=real, other=-1)
        value = read_slots(rows, extra, slot, capacity, column, wanted, STRIDE, STATE, TYPE, HAS_EXTRA, EXTRA_STRIDE)
        if SCALED:
            value = value * tl.load(scales + item, mask=real, other=0.0)[:, None]
    value = value.to(OUT)

    features = tl.arange(0, FEATURES_PADDED)
    ends = tl.load(begins + 1 + features, mask=features < FEATURES, other=2147483647)
    feature = tl.sum((ends <= start).to(tl.int32), axis=0)
    last = tl.sum((ends <= tl.minimum(start + R, items) - 1).to(tl.int32), axis=0)
    for at in loop_range(feature, last + 1):
        first = tl.load(begins + at)
        here = (item >= first) & (item < tl.load(begins + at + 1))
        address = tl.load(outputs + 2 * at) + (item - first).to(tl.int64) * tl.load(outputs + 2 * at + 1)
        target = matrix_rows(address, OUT, ALIGNED)
        tl.store(target[:, None] + column[None, :], value, mask=here[:, None] & wanted[None, :], cache_modifier=STORE)


@triton.jit
def _slots_ahead(slots, at, left, AHEAD: tl.constexpr):
    found = ()
    for i in tl.static_range(AHEAD):
        found = found + (tl.load(slots + at + i, mask=i < left, other=-1),)  # noqa: RUF005
    return found


@triton.jit
def _pool(
    rows, extra, slots, scales, capacity, begin, count, column, wanted,
    STRIDE: tl.constexpr, STATE: tl.constexpr, TYPE: tl.constexpr, HAS_EXTRA: tl.constexpr,
    EXTRA_STRIDE: tl.constexpr, SCALED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Sums of `count` positions from `begin` on, [R, BLOCK]."""
    none = negative_zeros(R, BLOCK)
    total = none
    ahead = _slots_ahead(slots, begin, count, AHEAD)
    for done in loop_range(0, tl.max(count, axis=0), AHEAD):
        values = ()
        for i in tl.static_range(AHEAD):
            value = read_slots(
                rows, extra, ahead[i], capacity, column, wanted, STRIDE, STATE, TYPE, HAS_EXTRA, EXTRA_STRIDE
            )
            if SCALED:
                value = value * tl.load(scales + begin + done + i, mask=done + i < count, other=0.0)[:, None]
            values = values + (tl.where((done + i < count)[:, None], value, none),)  # noqa: RUF005
        ahead = _slots_ahead(slots, begin + done + AHEAD, count - done - AHEAD, AHEAD)
        for i in tl.static_range(AHEAD):
            total = total + values[i]
    return tl.where((count > 0)[:, None], total, 0.0)


def gather(
    source: Source,
    layout: RowLayout,
    slots: Tensor,
    items: Items,
    outputs: Sequence[Tensor],
    tile: tuple[int, int] | None = None,
    past_cache: bool | None = None,
    described: Matrices | None = None,
) -> None:
    """Fill one matrix [items of the feature, dim] a feature, of float32, float16 or bfloat16.

    `described` are the outputs as `matrices` described them before, for launches that are captured.

    Benchmarks set `tile`, (items a program, warps), which by default follows the dim; and `past_cache`, whether outputs
    are the first to be evicted from L2, by default where they are too large to stay in it.
    """
    count = items.count(slots.numel())
    features = items.tables.numel()
    if len(outputs) != features or sum(out.shape[0] for out in outputs) != count:
        raise BatchError(
            f"{features} features with {count} items need as many outputs with as many rows in all, got "
            f"{len(outputs)} outputs with {[out.shape[0] for out in outputs]} rows"
        )
    if count == 0:
        return
    source.check(layout)
    out = described or matrices(outputs, layout.dim, slots.device)
    r, warps = tile or default_tile(layout.block, items.offsets is not None)
    if past_cache is None:
        past_cache = count * layout.dim * out.dtype.itemsize > LARGE
    _gather_kernel[(cdiv(count, r),)](
        source.rows, source.rows if source.extra is None else source.extra, slots, items.begins,
        slots if items.offsets is None else items.offsets, slots if items.scales is None else items.scales, out.table,
        count, source.capacity, DIM=layout.dim, BLOCK=layout.block, STRIDE=layout.stride, STATE=layout.state_offset,
        TYPE=layout.type, OUT=TRITON[out.dtype], ALIGNED=out.aligned, HAS_EXTRA=source.extra is not None,
        EXTRA_STRIDE=0 if source.extra_layout is None else source.extra_layout.stride,
        POOLED=items.offsets is not None, SCALED=items.scales is not None, FEATURES=features,
        FEATURES_PADDED=power_of_2(features), R=r, AHEAD=AHEAD,
        STORE=".cs" if past_cache else "", num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def default_tile(block: int, pooled: bool) -> tuple[int, int]:
    """(items a program, warps). A warp holds 512 elements; 128 of bags, whose rows are then all loaded at once."""
    elements = 128 if pooled else 512
    return max(1, elements // block), max(1, min(8, block // elements))
