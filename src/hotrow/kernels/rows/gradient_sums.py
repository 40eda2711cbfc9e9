"""Each row's gradients: where they are, and their sum in a fixed order.

Two launches, neither of which waits for the host:

- locate: the address of the gradient row of every sorted position, so that what follows need not know about features,
  bags or matrices. 16 bytes a position.
- partial: runs longer than PIECE are cut at multiples of PIECE from their own start, and each piece is summed. One key
  can have thousands of positions, and the whole GPU would wait for the one program that walks them.

update.py adds a short run's gradients in batch order and a long run's pieces in order. So a sum depends on the run
alone: not on its slot, on other runs, or on the number of programs.

A piece's sum is stored at 2 * (start / PIECE), plus one if it is its run's first. At most one of each kind can begin
within PIECE positions, because a run that is cut is longer than that; so there is no list of pieces to build.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.launch import cached_launch, cdiv
from hotrow.kernels.rows.layout import TRITON, Items, RowLayout, loop_range, matrices, matrix_rows, negative_zeros
from hotrow.kernels.rows.runs import Runs

LOCATE_BLOCK = 1024


@dataclass(frozen=True)
class Tuning:
    """How the work is cut into programs. Only `piece` changes results, by rounding."""

    piece: int = 64
    elements: int = 128  # of a tile, a warp: rows of a program = elements / block
    programs: int = 128  # of apply, per multiprocessor
    ahead: int = 4  # gradients of a run that apply reads at once
    partial_ahead: int = 8
    registers: int = 0  # of a thread of apply, at most; 0: fitted to the tile


DEFAULT = Tuning()


@cached_launch
@triton.jit(do_not_specialize=["n"])
def _locate_kernel(
    order, run_of, item_of, begins, tables, scales, gradients, addresses, sorted_scales, run_tables, n,
    FEATURES: tl.constexpr, HALVINGS: tl.constexpr, BAGS: tl.constexpr, SCALED: tl.constexpr, TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < n
    position = tl.load(order + at, mask=real, other=0)
    item = position.to(tl.int32)
    if BAGS:
        item = tl.load(item_of + position, mask=real, other=0)
    feature = tl.zeros([BLOCK], tl.int32)  # the number of features that end at or before the item
    for i in tl.static_range(HALVINGS):
        probe = feature + (1 << (HALVINGS - 1 - i))
        end = tl.load(begins + probe, mask=probe <= FEATURES, other=2147483647)
        feature = tl.where(end <= item, probe, feature)
    base = tl.load(gradients + 2 * feature)
    row = (item - tl.load(begins + feature)).to(tl.int64)
    address = tl.where(base != 0, base + row * tl.load(gradients + 2 * feature + 1), 0)
    tl.store(addresses + at, address, mask=real)
    if SCALED:
        tl.store(sorted_scales + at, tl.load(scales + position, mask=real, other=0.0), mask=real)
    if TABLES > 1:
        run = tl.load(run_of + at, mask=real, other=0)
        head = (at == 0) | (run != tl.load(run_of + at - 1, mask=real & (at > 0), other=-1))
        tl.store(run_tables + run, tl.load(tables + feature), mask=real & head)


@triton.jit
def gradient_at(
    address, scale, mask, column, wanted,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, MISSING: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The gradients [R, D] at addresses [R]; -0.0 where there is none."""
    if MISSING:
        mask = mask & (address != 0)
    place = matrix_rows(address, TYPE, ALIGNED)[:, None] + column[None, :]
    value = tl.load(place, mask=mask[:, None] & wanted[None, :], other=negative_zeros(R, D).to(TYPE)).to(tl.float32)
    if SCALED:
        value = value * tl.load(scale, mask=mask, other=1.0)[:, None]
    return value


@triton.jit
def add_gradients(
    total, present, addresses, scales, begin, count, done, end, column, wanted,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, MISSING: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add gradients `done` to `count` of R runs to their totals, in order. `end` is no less than any count.

    A step loads AHEAD gradients and the next step's addresses, then adds. `present` counts the gradients.
    """
    ahead = _addresses(addresses, begin + done, count - done, AHEAD)
    for at in loop_range(done, end, AHEAD):
        values = ()
        for i in tl.static_range(AHEAD):
            value = gradient_at(ahead[i], scales + begin + at + i, at + i < count, column, wanted,
                              TYPE, ALIGNED, SCALED, MISSING, R, D)  # fmt: skip
            values = values + (value,)  # noqa: RUF005
            if MISSING:
                present += (ahead[i] != 0).to(tl.int32)
        ahead = _addresses(addresses, begin + at + AHEAD, count - at - AHEAD, AHEAD)
        for i in tl.static_range(AHEAD):
            total = total + values[i]
    return total, present


@triton.jit
def _addresses(addresses, at, left, AHEAD: tl.constexpr):
    found = ()
    for i in tl.static_range(AHEAD):
        found = found + (tl.load(addresses + at + i, mask=i < left, other=0),)  # noqa: RUF005
    return found


@cached_launch
@triton.jit(do_not_specialize=["n"])
def _partial_kernel(
    addresses, scales, run_of, starts, slots, partials, partial_counts, n,
    DIM: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
    MISSING: tl.constexpr, PIECE: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    piece_index = tl.program_id(0) * R + tl.arange(0, R)  # of PIECE sorted positions
    low = piece_index * PIECE
    high = tl.minimum(low + PIECE, n)
    real = low < n
    column = tl.arange(0, D)
    # Only the runs of the first and of the last position can have a piece that begins in here.
    for last in tl.static_range(2):
        run = tl.load(run_of + (high - 1 if last else low), mask=real, other=0)
        start = tl.load(starts + run)
        end = tl.load(starts + run + 1)
        if last:
            cut = start
            mine = (cut > low) & (cut < high)
        else:
            cut = start + tl.cdiv(tl.maximum(low - start, 0), PIECE) * PIECE
            mine = cut < tl.minimum(high, end)
        mine = mine & real & (end - start > PIECE) & (tl.load(slots + run) >= 0)
        count = tl.where(mine, tl.minimum(end - cut, PIECE), 0)
        total, present = add_gradients(
            negative_zeros(R, D), count * 0, addresses, scales, cut, count, 0, tl.max(count, axis=0), column,
            column < DIM, TYPE, ALIGNED, SCALED, MISSING, R, D, AHEAD,
        )  # fmt: skip
        place = 2 * piece_index + (cut == start).to(tl.int32)
        tl.store(partials + place.to(tl.int64)[:, None] * D + column[None, :], total, mask=mine[:, None])
        if MISSING:
            tl.store(partial_counts + place, present, mask=mine)


@triton.jit
def add_partials(total, present, partials, partial_counts, begin, length, longest, column, MISSING: tl.constexpr,
                  PIECE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """The sums of runs that were cut, their pieces added in order. Other runs keep their total."""
    pieces = tl.where(length > PIECE, tl.cdiv(length, PIECE), 0)
    none = negative_zeros(R, D)
    for done in loop_range(0, tl.where(longest > PIECE, tl.cdiv(longest, PIECE), 0), AHEAD):
        values = ()
        for i in tl.static_range(AHEAD):
            piece = done + i
            place = 2 * ((begin + piece * PIECE) // PIECE) + (piece == 0)
            mask = piece < pieces
            row = partials + place.to(tl.int64)[:, None] * D + column[None, :]
            values = values + (tl.load(row, mask=mask[:, None], other=none),)  # noqa: RUF005
            if MISSING:
                present += tl.load(partial_counts + place, mask=mask, other=0)
        for i in tl.static_range(AHEAD):
            total = total + values[i]
    return total, present


@dataclass(frozen=True)
class GradientSums:
    """What the launches of one update pass on. A tensor that is not needed is replaced by another one, never read."""

    addresses: Tensor  # int64 [N], by sorted position
    scales: Tensor  # float32 [N], likewise
    run_tables: Tensor  # int32 [N], by run
    partials: Tensor  # float32 [2 * N / piece, block]
    partial_counts: Tensor  # int32, the number of gradients in each partial sum
    type: tl.dtype
    aligned: bool
    scaled: bool
    missing: bool


def locate(
    layout: RowLayout, runs: Runs, items: Items, gradients: Sequence[Tensor | None], tables: int, tuning: Tuning
) -> GradientSums:
    """The addresses of the sorted positions' gradients, and memory for the partial sums."""
    n, device, features = runs.order.numel(), runs.order.device, items.tables.numel()
    described = matrices(gradients, layout.dim, device)
    scaled, missing = items.scales is not None, described.missing > 0
    addresses = torch.empty(n, dtype=torch.int64, device=device)
    partials = 2 * cdiv(n, tuning.piece)
    sums = GradientSums(
        addresses,
        torch.empty(n, dtype=torch.float32, device=device) if scaled else addresses,
        torch.empty(n, dtype=torch.int32, device=device) if tables > 1 else addresses,
        torch.empty(partials, layout.block, dtype=torch.float32, device=device),
        torch.empty(partials, dtype=torch.int32, device=device) if missing else addresses,
        TRITON[described.dtype],
        described.aligned,
        scaled,
        missing,
    )
    _locate_kernel[(cdiv(n, LOCATE_BLOCK),)](
        runs.order, runs.run_of, addresses if items.item_of is None else items.item_of, items.begins, items.tables,
        items.scales if scaled else addresses, described.table, addresses, sums.scales, sums.run_tables, n,
        FEATURES=features, HALVINGS=(features - 1).bit_length(), BAGS=items.item_of is not None, SCALED=scaled,
        TABLES=tables, BLOCK=LOCATE_BLOCK, num_warps=4,
    )  # fmt: skip
    return sums


def partial(layout: RowLayout, runs: Runs, sums: GradientSums, tuning: Tuning) -> None:
    """Sum the pieces of long runs."""
    n, block = runs.order.numel(), layout.block
    if n <= tuning.piece:
        return
    rows, warps = tile_of(layout, tuning)
    _partial_kernel[(cdiv(cdiv(n, tuning.piece), rows),)](
        sums.addresses, sums.scales, runs.run_of, runs.starts, runs.slots, sums.partials, sums.partial_counts, n,
        DIM=layout.dim, D=block, TYPE=sums.type, ALIGNED=sums.aligned, SCALED=sums.scaled, MISSING=sums.missing,
        PIECE=tuning.piece, R=rows, AHEAD=tuning.partial_ahead, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def tile_of(layout: RowLayout, tuning: Tuning) -> tuple[int, int]:
    """(rows of a program, warps)."""
    return max(1, tuning.elements // layout.block), max(1, min(8, layout.block // tuning.elements))
