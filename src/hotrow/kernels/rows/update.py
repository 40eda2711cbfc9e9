"""Gradients into rows: each unique row's gradients summed, clipped, and its optimizer's rule applied in place.

Three launches, none of which waits for the host:

- locate: for every sorted position the address of its gradient row, so that what follows need not know about features,
  bags or matrices. 16 bytes a position.
- partial: runs longer than PIECE are cut at multiples of PIECE from their own start and each piece is summed. One key
  can own thousands of positions, and one program walking them would be all that the GPU waits for.
- apply: one run a warp (more where a row is narrower than a warp's 128 elements). A short run's gradients are added in
  batch order, a long one's pieces in order. So a sum depends on the run alone: not on its slot, on other runs or on how
  many programs there are. Then the rule, on rows that were asked for before the sums began.

A piece's sum lies at 2 * (start / PIECE), plus one if it is its run's first. At most one of each kind can begin within
PIECE positions, because a run that is cut is longer than that; so there is no list of pieces to build.

apply runs on a fixed number of programs that step through the runs, since only the device knows how many there are,
and each asks for its next runs and addresses before it works on these. There are several times as many programs as fit
the GPU at once, so that none is left with a long share at the end. Where `flag` is set nothing at all is written.

Bytes that must move at dim 128, fp32, W-gpu: 0.54 GB of gradients and twice the 380,012 rows: 0.93 GB for SGD, 0.95 for
row-wise Adagrad, 1.7 for Adam; 0.22, 0.22 and 0.40 ms at 4.3 TB/s.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.errors import BatchError
from hotrow.kernels.launch import cdiv, fast
from hotrow.kernels.rows import rules
from hotrow.kernels.rows.counts import add_count, seen_in_all
from hotrow.kernels.rows.layout import (
    TRITON,
    Items,
    RowLayout,
    Source,
    matrices,
    matrix_rows,
    nothing,
    read_values,
    row_at,
    steps,
    with_columns_together,
)
from hotrow.kernels.rows.rounding import draws, round_by_chance
from hotrow.kernels.rows.runs import Runs


@dataclass(frozen=True)
class Meta:
    """What a row carries besides its floats: int32, by slot. Two columns of one [capacity, 2] tensor share a sector."""

    last_steps: Tensor
    counts: Tensor
    extra_last_steps: Tensor | None = None
    extra_counts: Tensor | None = None


class Coefficients(NamedTuple):
    """What one table's rule reads at this step, up to eight numbers, and where its gradients are clipped (0: not)."""

    rule: tuple[float, ...]
    clip_value: float = 0.0
    clip_norm: float = 0.0


@dataclass(frozen=True)
class Tuning:
    """How the work is cut. Only `piece` changes results, by rounding."""

    piece: int = 64
    elements: int = 128  # of a tile, a warp: rows of a program = elements / block
    programs: int = 128  # of apply, per multiprocessor
    ahead: int = 4  # gradients of a run that apply reads at once
    partial_ahead: int = 8
    registers: int = 0  # of a thread of apply, at most; 0: fitted to the tile


DEFAULT = Tuning()
LOCATE_BLOCK = 1024


@fast
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
def _gradient(
    address, scale, mask, column, wanted,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, MISSING: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The gradients [R, D] at addresses [R]; -0.0 where there is none."""
    if MISSING:
        mask = mask & (address != 0)
    place = matrix_rows(address, TYPE, ALIGNED)[:, None] + column[None, :]
    value = tl.load(place, mask=mask[:, None] & wanted[None, :], other=nothing(R, D).to(TYPE)).to(tl.float32)
    if SCALED:
        value = value * tl.load(scale, mask=mask, other=1.0)[:, None]
    return value


@triton.jit
def _add_gradients(
    total, some, addresses, scales, begin, count, done, end, column, wanted,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, MISSING: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add gradients `done` to `count` of some runs to their totals, in order. `end` is no less than any count.

    A step loads AHEAD gradients and the next step's addresses, then adds. `some` counts the gradients.
    """
    ahead = _addresses(addresses, begin + done, count - done, AHEAD)
    for at in steps(done, end, AHEAD):
        values = ()
        for i in tl.static_range(AHEAD):
            value = _gradient(ahead[i], scales + begin + at + i, at + i < count, column, wanted,
                              TYPE, ALIGNED, SCALED, MISSING, R, D)  # fmt: skip
            values = values + (value,)  # noqa: RUF005
            if MISSING:
                some += (ahead[i] != 0).to(tl.int32)
        ahead = _addresses(addresses, begin + at + AHEAD, count - at - AHEAD, AHEAD)
        for i in tl.static_range(AHEAD):
            total = total + values[i]
    return total, some


@triton.jit
def _addresses(addresses, at, left, AHEAD: tl.constexpr):
    found = ()
    for i in tl.static_range(AHEAD):
        found = found + (tl.load(addresses + at + i, mask=i < left, other=0),)  # noqa: RUF005
    return found


@fast
@triton.jit(do_not_specialize=["n"])
def _partial_kernel(
    addresses, scales, run_of, starts, slots, partials, given, n,
    DIM: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
    MISSING: tl.constexpr, PIECE: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    stretch = tl.program_id(0) * R + tl.arange(0, R)  # of PIECE sorted positions
    low = stretch * PIECE
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
        total, some = _add_gradients(
            nothing(R, D), count * 0, addresses, scales, cut, count, 0, tl.max(count, axis=0), column, column < DIM,
            TYPE, ALIGNED, SCALED, MISSING, R, D, AHEAD,
        )  # fmt: skip
        place = 2 * stretch + (cut == start).to(tl.int32)
        tl.store(partials + place.to(tl.int64)[:, None] * D + column[None, :], total, mask=mine[:, None])
        if MISSING:
            tl.store(given + place, some, mask=mine)


@triton.jit
def _runs_at(starts, slots, run_tables, run, number, SHARED: tl.constexpr):
    """Slot, first sorted position, length and table of some runs; no run has slot -1 and length 0."""
    real = run < number
    slot = tl.load(slots + run, mask=real, other=-1)
    begin = tl.load(starts + run, mask=real, other=0)
    end = tl.load(starts + run + 1, mask=real, other=0)
    table = run * 0
    if not SHARED:
        table = tl.load(run_tables + run, mask=real, other=0)
    return slot, begin, tl.where(slot >= 0, end - begin, 0), table


@triton.jit
def _keys_and_streams(keys, order, begin, streams, run_tables, run, live, TABLES: tl.constexpr):
    """What draws of these runs are keyed by."""
    key = tl.load(keys + tl.load(order + begin, mask=live, other=0), mask=live, other=0)
    table = run * 0
    if TABLES > 1:
        table = tl.load(run_tables + run, mask=live, other=0)
    return key, tl.load(streams + table)


@triton.jit
def _add_partials(total, some, partials, given, begin, length, longest, column, MISSING: tl.constexpr,
                  PIECE: tl.constexpr, R: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """The sums of runs that were cut, their pieces added in order. Other runs keep their total."""
    pieces = tl.where(length > PIECE, tl.cdiv(length, PIECE), 0)
    none = nothing(R, D)
    for done in steps(0, tl.where(longest > PIECE, tl.cdiv(longest, PIECE), 0), AHEAD):
        values = ()
        for i in tl.static_range(AHEAD):
            piece = done + i
            place = 2 * ((begin + piece * PIECE) // PIECE) + (piece == 0)
            mask = piece < pieces
            row = partials + place.to(tl.int64)[:, None] * D + column[None, :]
            values = values + (tl.load(row, mask=mask[:, None], other=none),)  # noqa: RUF005
            if MISSING:
                some += tl.load(given + place, mask=mask, other=0)
        for i in tl.static_range(AHEAD):
            total = total + values[i]
    return total, some


@fast
@triton.jit(do_not_specialize=["step", "capacity"])
def _apply_kernel(
    rows, extra, starts, slots, number, order, keys, addresses, scales, partials, given, run_tables, coefficients,
    clips, count_streams, rounding_streams, last_steps, counts, extra_last_steps, extra_counts, seen, flag, capacity,
    step, grad_scale, c0, c1, c2, c3, c4, c5, c6, c7, clip_value, clip_norm,
    RULE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, STATE: tl.constexpr,
    TYPE: tl.constexpr, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, MISSING: tl.constexpr,
    TABLES: tl.constexpr, SHARED: tl.constexpr, CLIP: tl.constexpr, HAS_EXTRA: tl.constexpr, META: tl.constexpr,
    META_STRIDE: tl.constexpr, SEEN: tl.constexpr, PIECE: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    runs = tl.load(number)
    runs = tl.where(tl.load(flag) == 0, runs, 0)
    shared = (c0, c1, c2, c3, c4, c5, c6, c7)
    column = tl.arange(0, D)
    wanted = column < DIM
    # A step needs to know its runs, then where their first gradients are, then the gradients. Each is asked for one
    # step before, so that most steps wait for memory once: five of six runs of W-gpu have one gradient.
    run = tl.program_id(0) * R + tl.arange(0, R)
    skip = tl.num_programs(0) * R
    slot, begin, length, table = _runs_at(starts, slots, run_tables, run, runs, SHARED)
    next_slot, next_begin, next_length, next_table = _runs_at(starts, slots, run_tables, run + skip, runs, SHARED)
    address = tl.load(addresses + begin, mask=length > 0, other=0)
    for tile in steps(tl.program_id(0), tl.cdiv(runs, R), tl.num_programs(0)):
        live = slot >= 0
        mask = live[:, None] & wanted[None, :]
        place = row_at(rows, extra, slot, capacity, STRIDE, HAS_EXTRA)
        part = place[:, None] + column[None, :] + STATE
        w = read_values(place, column, mask, TYPE, STATE)
        if RULE == rules.ROW_WISE_ADAGRAD:
            row_state = tl.load(place + STATE, mask=live, other=0.0)
        elif RULE != rules.SGD:
            first = tl.load(part, mask=mask, other=0.0)
            if RULE != rules.ADAGRAD:
                second = tl.load(part + DIM, mask=mask, other=0.0)
        if META:
            stamp = row_at(last_steps, extra_last_steps, slot, capacity, META_STRIDE, HAS_EXTRA)
            counter = row_at(counts, extra_counts, slot, capacity, META_STRIDE, HAS_EXTRA)
            code = tl.load(counter, mask=live, other=0)
        c = ()
        for i in tl.static_range(8):
            if SHARED:
                c = c + (tl.full([R], shared[i], tl.float32),)  # noqa: RUF005
            else:
                c = c + (tl.load(coefficients + table * 8 + i),)  # noqa: RUF005
        short = tl.where(length > PIECE, 0, length)
        g = _gradient(address, scales + begin, short > 0, column, wanted, GRADIENT, ALIGNED, SCALED, MISSING, R, D)
        some = (address != 0).to(tl.int32)
        next_address = tl.load(addresses + next_begin, mask=next_length > 0, other=0)
        run = tile * R + tl.arange(0, R)
        later = run + 2 * skip
        last_slot, last_begin, last_length, last_table = _runs_at(starts, slots, run_tables, later, runs, SHARED)

        longest = tl.max(length, axis=0)
        g, some = _add_gradients(
            g, some, addresses, scales, begin, short, 1, tl.minimum(longest, PIECE), column, wanted,
            GRADIENT, ALIGNED, SCALED, MISSING, R, D, AHEAD,
        )  # fmt: skip
        g, some = _add_partials(g, some, partials, given, begin, length, longest, column, MISSING, PIECE, R, D, AHEAD)
        if MISSING:
            live_rows = live & (some > 0)
            mask = mask & live_rows[:, None]
        else:
            live_rows = live
        g = g * grad_scale
        if CLIP:
            if SHARED:
                g = rules.clip(g, tl.full([R], clip_value, tl.float32), tl.full([R], clip_norm, tl.float32), R, D)
            else:
                g = rules.clip(g, tl.load(clips + table * 2), tl.load(clips + table * 2 + 1), R, D)

        if RULE == rules.SGD:
            w = rules.sgd(w, g, c)
        elif RULE == rules.ADAGRAD:
            w, first = rules.adagrad(w, g, first, c)
        elif RULE == rules.ROW_WISE_ADAGRAD:
            w, row_state = rules.row_wise_adagrad(w, g, row_state, c, DIM, R, D)
            tl.store(place + STATE, row_state, mask=live_rows)
        elif RULE == rules.FTRL:
            w, first, second = rules.ftrl(w, g, first, second, c)
        else:
            w, first, second = rules.adam(w, g, first, second, c, RULE == rules.ADAMW)
        if TYPE == tl.float32:  # noqa: SIM300
            tl.store(place[:, None] + column[None, :], w, mask=mask)
        else:
            key, stream = _keys_and_streams(keys, order, begin, rounding_streams, run_tables, run, live, TABLES)
            bits = draws(stream, key, step, R, D)
            packed = place.to(tl.pointer_type(tl.int16))[:, None] + column[None, :]
            tl.store(packed, round_by_chance(w, bits, TYPE), mask=mask)
        if RULE != rules.SGD and RULE != rules.ROW_WISE_ADAGRAD:
            tl.store(part, first, mask=mask)
            if RULE != rules.ADAGRAD:
                tl.store(part + DIM, second, mask=mask)

        if META:
            times = length
            if SEEN:
                times = tl.load(seen + run, mask=live, other=0)
            total = seen_in_all(code, times)
            if tl.max(total, axis=0) > 4095:
                owner, draw = _keys_and_streams(keys, order, begin, count_streams, run_tables, run, live, TABLES)
                total = add_count(code, times, draw, owner, step).to(tl.uint32)
            tl.store(counter, total.to(tl.int32), mask=live)
            tl.store(stamp, tl.zeros([R], tl.int32) + step, mask=live)
        slot, begin, length, table = next_slot, next_begin, next_length, next_table
        next_slot, next_begin, next_length, next_table = last_slot, last_begin, last_length, last_table
        address = next_address


def update(
    source: Source,
    layout: RowLayout,
    rule: int,
    runs: Runs,
    items: Items,
    gradients: Sequence[Tensor | None],
    keys: Tensor,
    coefficients: Sequence[Coefficients],
    streams: Tensor,
    rounding_streams: Tensor | None,
    step: int,
    grad_scale: float,
    meta: Meta | None,
    flag: Tensor,
    tuning: Tuning = DEFAULT,
    seen: Tensor | None = None,
) -> None:
    """Apply one matrix of gradients [items of the feature, dim] a feature, or None, to the rows of a batch.

    coefficients has one entry a table, or one for all tables, which is quicker. streams and rounding_streams are int64
    [T]; keys int64 [N] by position. A run's key and table are those of its first position. A run with no gradient at
    all changes only its meta. `seen` is int32 [N], how often each run's row was seen, where that is more than the
    length of the run.
    """
    if len(gradients) != items.tables.numel():
        raise BatchError(f"{items.tables.numel()} features need as many gradients or None, got {len(gradients)}")
    if items.offsets is not None and items.item_of is None:
        raise BatchError("items with offsets need item_of for an update; make it with layout.spread")
    if layout.dtype == "int8":
        raise BatchError("int8 rows are read-only; keep rows that are trained in fp32, fp16 or bf16")
    if layout.dtype != "fp32" and rounding_streams is None:
        raise BatchError(f"{layout.dtype} rows need rounding_streams")
    if runs.order.numel() == 0:
        return
    source.check(layout)
    gradients = [g if g is None else with_columns_together(g) for g in gradients]  # a copy must live until the end
    shared = coefficients[0]
    one = len(coefficients) == 1
    several, clips = (streams, streams) if one else _on_device(tuple(coefficients), streams.device)
    work = locate(layout, runs, items, gradients, streams.numel(), tuning)
    partial(layout, runs, work, tuning)
    last_steps, counts, more_steps, more_counts, stride = _meta(meta, source, work.addresses)
    rows, warps = _tile(layout, tuning)
    most = _multiprocessors(work.addresses.device) * tuning.programs
    _apply_kernel[(min(cdiv(runs.order.numel(), rows), most),)](
        source.rows, source.rows if source.extra is None else source.extra, runs.starts, runs.slots, runs.number,
        runs.order, keys, work.addresses, work.scales, work.partials, work.given, work.run_tables, several, clips,
        streams, streams if rounding_streams is None else rounding_streams, last_steps, counts, more_steps, more_counts,
        flag if seen is None else seen, flag, source.capacity, step, float(grad_scale), *_eight(shared.rule),
        shared.clip_value, shared.clip_norm,
        RULE=rule, DIM=layout.dim, D=layout.block, STRIDE=layout.stride, STATE=layout.state_offset, TYPE=layout.type,
        GRADIENT=work.type, ALIGNED=work.aligned, SCALED=work.scaled, MISSING=work.missing, TABLES=streams.numel(),
        SHARED=one, CLIP=any(c.clip_value or c.clip_norm for c in coefficients), HAS_EXTRA=source.extra is not None,
        META=meta is not None, META_STRIDE=stride, SEEN=seen is not None, PIECE=tuning.piece, R=rows,
        AHEAD=tuning.ahead, num_warps=warps, enable_fp_fusion=False, maxnreg=tuning.registers or _registers(rows),
    )  # fmt: skip


def _eight(rule: tuple[float, ...]) -> tuple[float, ...]:
    return rule + (0.0,) * (rules.COEFFICIENTS - len(rule))


@functools.lru_cache(maxsize=64)
def _on_device(coefficients: tuple[Coefficients, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables' coefficients, float32 [tables, 8], and clips, [tables, 2]."""
    numbers = torch.tensor([[*_eight(c.rule), c.clip_value, c.clip_norm] for c in coefficients])
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    return numbers[:, : rules.COEFFICIENTS].contiguous(), numbers[:, rules.COEFFICIENTS :].contiguous()


@dataclass(frozen=True)
class Work:
    """What the launches of one update hand on. A tensor that is not needed is another one, never read."""

    addresses: Tensor  # int64 [N], by sorted position
    scales: Tensor  # float32 [N], likewise
    run_tables: Tensor  # int32 [N], by run
    partials: Tensor  # float32 [2 * N / piece, block]
    given: Tensor  # int32, how many gradients went into each partial sum
    type: tl.dtype
    aligned: bool
    scaled: bool
    missing: bool


def locate(
    layout: RowLayout, runs: Runs, items: Items, gradients: Sequence[Tensor | None], tables: int, tuning: Tuning
) -> Work:
    """The addresses of the sorted positions' gradients, and room for the sums."""
    n, device, features = runs.order.numel(), runs.order.device, items.tables.numel()
    found = matrices(gradients, layout.dim, device)
    scaled, missing = items.scales is not None, found.missing > 0
    addresses = torch.empty(n, dtype=torch.int64, device=device)
    halves = 2 * cdiv(n, tuning.piece)
    work = Work(
        addresses,
        torch.empty(n, dtype=torch.float32, device=device) if scaled else addresses,
        torch.empty(n, dtype=torch.int32, device=device) if tables > 1 else addresses,
        torch.empty(halves, layout.block, dtype=torch.float32, device=device),
        torch.empty(halves, dtype=torch.int32, device=device) if missing else addresses,
        TRITON[found.dtype],
        found.aligned,
        scaled,
        missing,
    )
    _locate_kernel[(cdiv(n, LOCATE_BLOCK),)](
        runs.order, runs.run_of, addresses if items.item_of is None else items.item_of, items.begins, items.tables,
        items.scales if scaled else addresses, found.table, addresses, work.scales, work.run_tables, n,
        FEATURES=features, HALVINGS=(features - 1).bit_length(), BAGS=items.item_of is not None, SCALED=scaled,
        TABLES=tables, BLOCK=LOCATE_BLOCK, num_warps=4,
    )  # fmt: skip
    return work


def partial(layout: RowLayout, runs: Runs, work: Work, tuning: Tuning) -> None:
    """Sums of the pieces of long runs."""
    n, block = runs.order.numel(), layout.block
    if n <= tuning.piece:
        return
    rows, warps = _tile(layout, tuning)
    _partial_kernel[(cdiv(cdiv(n, tuning.piece), rows),)](
        work.addresses, work.scales, runs.run_of, runs.starts, runs.slots, work.partials, work.given, n,
        DIM=layout.dim, D=block, TYPE=work.type, ALIGNED=work.aligned, SCALED=work.scaled, MISSING=work.missing,
        PIECE=tuning.piece, R=rows, AHEAD=tuning.partial_ahead, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def _tile(layout: RowLayout, tuning: Tuning) -> tuple[int, int]:
    """(rows of a program, warps)."""
    return max(1, tuning.elements // layout.block), max(1, min(8, layout.block // tuning.elements))


def _registers(rows: int) -> int:
    """Left alone the compiler takes about 70 for one row and loads its gradients one after another to get by with them.

    At 64, 32 programs of one warp fit a multiprocessor, and no rule spills at dim 128. With several rows a program,
    numbers that were the same for a warp differ from lane to lane and need 96.
    """
    return 64 if rows == 1 else 96


def _meta(meta: Meta | None, source: Source, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    if meta is None:
        return other, other, other, other, 1
    extras = (meta.extra_last_steps, meta.extra_counts)
    if source.extra is None:
        extras = (meta.last_steps, meta.counts)
    elif extras[0] is None or extras[1] is None:
        raise BatchError("a source with extra rows needs extra_last_steps and extra_counts in its meta")
    strides = {tensor.stride(0) for tensor in (meta.last_steps, meta.counts, *extras) if tensor.numel() > 1}
    if len(strides) > 1:
        raise BatchError(f"the columns of meta have strides {sorted(strides)}; give them one")
    return meta.last_steps, meta.counts, extras[0], extras[1], strides.pop() if strides else 1


_multiprocessor_counts: dict[torch.device, int] = {}


def _multiprocessors(device: torch.device) -> int:
    if device not in _multiprocessor_counts:
        on_cuda = device.type == "cuda"
        _multiprocessor_counts[device] = (
            torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 1
        )
    return _multiprocessor_counts[device]
