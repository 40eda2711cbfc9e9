"""Gradients into rows: each unique row's gradients summed, clipped, and its optimizer's rule applied in place.

Three launches, none of which waits for the host: locate and partial (gradient_sums.py), then apply. In apply a warp
handles one run (more where a row is narrower than a warp's 128 elements): it sums the run's gradients in a fixed order
and applies the rule to the row, which it loads before the sum begins.

apply runs on a fixed number of programs that step through the runs, since only the device knows how many there are.
Each loads its next runs and addresses before it works on the current ones. There are several times as many programs as
fit the GPU at once, so that none is left with a long tail of work. Where `flag` is set nothing is written.

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
from hotrow.kernels.launch import cached_launch, cdiv
from hotrow.kernels.rows import rules
from hotrow.kernels.rows.counts import add_count, total_count
from hotrow.kernels.rows.gradient_sums import (
    DEFAULT,
    Tuning,
    add_gradients,
    add_partials,
    gradient_at,
    locate,
    partial,
    tile_of,
)
from hotrow.kernels.rows.layout import (
    Items,
    RowLayout,
    Source,
    loop_range,
    read_values,
    row_pointers,
    with_contiguous_columns,
)
from hotrow.kernels.rows.runs import Runs
from hotrow.kernels.rows.stochastic_rounding import draws, stochastic_round


@dataclass(frozen=True)
class RowMetadata:
    """A row's metadata: int32, by slot. Two columns of one [capacity, 2] tensor share a sector of memory."""

    last_steps: Tensor
    counts: Tensor
    extra_last_steps: Tensor | None = None
    extra_counts: Tensor | None = None


class Coefficients(NamedTuple):
    """The numbers that one table's rule reads at this step, up to eight, and the limits of its gradients (0: none)."""

    rule: tuple[float, ...]
    clip_value: float = 0.0
    clip_norm: float = 0.0


@triton.jit
def _load_runs(starts, slots, run_tables, run, number, SHARED: tl.constexpr):
    """Slot, first sorted position, length and table of runs. Beyond the last run: slot -1 and length 0."""
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
    """The key and the random stream of each run."""
    key = tl.load(keys + tl.load(order + begin, mask=live, other=0), mask=live, other=0)
    table = run * 0
    if TABLES > 1:
        table = tl.load(run_tables + run, mask=live, other=0)
    return key, tl.load(streams + table)


@cached_launch
@triton.jit(do_not_specialize=["step", "capacity"])
def _apply_kernel(
    rows, extra, starts, slots, number, order, keys, addresses, scales, partials, partial_counts, run_tables,
    coefficients, clips, count_streams, rounding_streams, last_steps, counts, extra_last_steps, extra_counts, seen,
    flag, capacity,
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
    # A step needs its runs, then the addresses of their first gradients, then the gradients. Each is loaded one step
    # ahead, so that most steps wait for memory once: five of six runs of W-gpu have one gradient.
    run = tl.program_id(0) * R + tl.arange(0, R)
    skip = tl.num_programs(0) * R
    slot, begin, length, table = _load_runs(starts, slots, run_tables, run, runs, SHARED)
    next_slot, next_begin, next_length, next_table = _load_runs(starts, slots, run_tables, run + skip, runs, SHARED)
    address = tl.load(addresses + begin, mask=length > 0, other=0)
    for tile in loop_range(tl.program_id(0), tl.cdiv(runs, R), tl.num_programs(0)):
        live = slot >= 0
        mask = live[:, None] & wanted[None, :]
        place = row_pointers(rows, extra, slot, capacity, STRIDE, HAS_EXTRA)
        part = place[:, None] + column[None, :] + STATE
        w = read_values(place, column, mask, TYPE, STATE)
        if RULE == rules.ROW_WISE_ADAGRAD:
            row_state = tl.load(place + STATE, mask=live, other=0.0)
        elif RULE != rules.SGD:
            first = tl.load(part, mask=mask, other=0.0)
            if RULE != rules.ADAGRAD:
                second = tl.load(part + DIM, mask=mask, other=0.0)
        if META:
            stamp = row_pointers(last_steps, extra_last_steps, slot, capacity, META_STRIDE, HAS_EXTRA)
            counter = row_pointers(counts, extra_counts, slot, capacity, META_STRIDE, HAS_EXTRA)
            code = tl.load(counter, mask=live, other=0)
        c = ()
        for i in tl.static_range(8):
            if SHARED:
                c = c + (tl.full([R], shared[i], tl.float32),)  # noqa: RUF005
            else:
                c = c + (tl.load(coefficients + table * 8 + i),)  # noqa: RUF005
        short = tl.where(length > PIECE, 0, length)
        g = gradient_at(address, scales + begin, short > 0, column, wanted, GRADIENT, ALIGNED, SCALED, MISSING, R, D)
        present = (address != 0).to(tl.int32)
        next_address = tl.load(addresses + next_begin, mask=next_length > 0, other=0)
        run = tile * R + tl.arange(0, R)
        later = run + 2 * skip
        last_slot, last_begin, last_length, last_table = _load_runs(starts, slots, run_tables, later, runs, SHARED)

        longest = tl.max(length, axis=0)
        g, present = add_gradients(
            g, present, addresses, scales, begin, short, 1, tl.minimum(longest, PIECE), column, wanted,
            GRADIENT, ALIGNED, SCALED, MISSING, R, D, AHEAD,
        )  # fmt: skip
        g, present = add_partials(
            g, present, partials, partial_counts, begin, length, longest, column, MISSING, PIECE, R, D, AHEAD
        )
        if MISSING:
            live_rows = live & (present > 0)
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
            tl.static_assert(RULE == rules.ADAM or RULE == rules.ADAMW, "a rule without a branch here")
            w, first, second = rules.adam(w, g, first, second, c, RULE == rules.ADAMW)
        if TYPE == tl.float32:  # noqa: SIM300
            tl.store(place[:, None] + column[None, :], w, mask=mask)
        else:
            key, stream = _keys_and_streams(keys, order, begin, rounding_streams, run_tables, run, live, TABLES)
            bits = draws(stream, key, step, R, D)
            packed = place.to(tl.pointer_type(tl.int16))[:, None] + column[None, :]
            tl.store(packed, stochastic_round(w, bits, TYPE), mask=mask)
        if RULE != rules.SGD and RULE != rules.ROW_WISE_ADAGRAD:
            tl.store(part, first, mask=mask)
            if RULE != rules.ADAGRAD:
                tl.store(part + DIM, second, mask=mask)

        if META:
            times = length
            if SEEN:
                times = tl.load(seen + run, mask=live, other=0)
            total = total_count(code, times)
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
    meta: RowMetadata | None,
    flag: Tensor,
    tuning: Tuning = DEFAULT,
    seen: Tensor | None = None,
) -> None:
    """Apply one matrix of gradients [items of the feature, dim] a feature, or None, to the rows of a batch.

    coefficients has one entry a table, or one for all tables, which is faster. streams and rounding_streams are int64
    [T]; keys int64 [N] by position. A run's key and table are those of its first position. A run without any
    gradient changes only its metadata. `seen`, int32 [N], is how often each run's row was seen, where that is more than
    the length of the run.
    """
    if len(gradients) != items.tables.numel():
        raise BatchError(f"{items.tables.numel()} features need as many gradients or None, got {len(gradients)}")
    if items.offsets is not None and items.item_of is None:
        raise BatchError("items with offsets need item_of for an update; make it with layout.items_of_positions")
    if layout.dtype == "int8":
        raise BatchError("int8 rows are read-only; keep rows that are trained in fp32, fp16 or bf16")
    if layout.dtype != "fp32" and rounding_streams is None:
        raise BatchError(f"{layout.dtype} rows need rounding_streams")
    if runs.order.numel() == 0:
        return
    source.check(layout)
    gradients = [g if g is None else with_contiguous_columns(g) for g in gradients]  # a copy must live until the end
    shared = coefficients[0]
    shared_by_all = len(coefficients) == 1
    table_coefficients, clips = (streams, streams) if shared_by_all else _on_device(tuple(coefficients), streams.device)
    sums = locate(layout, runs, items, gradients, streams.numel(), tuning)
    partial(layout, runs, sums, tuning)
    last_steps, counts, more_steps, more_counts, stride = _meta(meta, source, sums.addresses)
    rows, warps = tile_of(layout, tuning)
    most_programs = _multiprocessors(sums.addresses.device) * tuning.programs
    _apply_kernel[(min(cdiv(runs.order.numel(), rows), most_programs),)](
        source.rows, source.rows if source.extra is None else source.extra, runs.starts, runs.slots, runs.number,
        runs.order, keys, sums.addresses, sums.scales, sums.partials, sums.partial_counts, sums.run_tables,
        table_coefficients, clips, streams, streams if rounding_streams is None else rounding_streams, last_steps,
        counts, more_steps, more_counts,
        flag if seen is None else seen, flag, source.capacity, step, float(grad_scale), *_pad_to_eight(shared.rule),
        shared.clip_value, shared.clip_norm,
        RULE=rule, DIM=layout.dim, D=layout.block, STRIDE=layout.stride, STATE=layout.state_offset, TYPE=layout.type,
        GRADIENT=sums.type, ALIGNED=sums.aligned, SCALED=sums.scaled, MISSING=sums.missing, TABLES=streams.numel(),
        SHARED=shared_by_all, CLIP=any(c.clip_value or c.clip_norm for c in coefficients),
        HAS_EXTRA=source.extra is not None, META=meta is not None, META_STRIDE=stride, SEEN=seen is not None,
        PIECE=tuning.piece, R=rows, AHEAD=tuning.ahead, num_warps=warps, enable_fp_fusion=False,
        maxnreg=tuning.registers or _registers(rows),
    )  # fmt: skip


def _pad_to_eight(rule: tuple[float, ...]) -> tuple[float, ...]:
    return rule + (0.0,) * (rules.COEFFICIENTS - len(rule))


@functools.lru_cache(maxsize=64)
def _on_device(coefficients: tuple[Coefficients, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables' coefficients, float32 [tables, 8], and clips, [tables, 2]."""
    numbers = torch.tensor([[*_pad_to_eight(c.rule), c.clip_value, c.clip_norm] for c in coefficients])
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    return numbers[:, : rules.COEFFICIENTS].contiguous(), numbers[:, rules.COEFFICIENTS :].contiguous()


def _registers(rows: int) -> int:
    """Registers a thread of apply. By default the compiler takes about 70 for one row, and loads its gradients one
    after another to need no more.

    At 64, 32 programs of one warp fit a multiprocessor, and no rule spills at dim 128. With several rows a program,
    numbers that were the same for a warp differ from lane to lane and need 96.
    """
    return 64 if rows == 1 else 96


def _meta(meta: RowMetadata | None, source: Source, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
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
