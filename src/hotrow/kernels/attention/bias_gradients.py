"""Gradients of the bias tables: sums of the gradients of scores by distance and by time, without atomics.

A fixed number of programs a head share the tiles of queries in turns and compute the gradients of scores again. Each
has partial sums of its own for both tables, which are added up in order at the end.

positions   In self-attention (SELF) the distance is constant along a tile's diagonals. Turning each row by its number
            makes diagonals columns: column c then has the distances of c, and of c - N where the row was turned around.
            For candidates, whose places are arbitrary, rows with equal places are added up first, one place after
            another; a request's candidates mostly have one. Distances that share the table's last entry are summed
            apart.
times       Neighbouring events mostly share a bucket, so a tile has few: one masked sum for each from the lowest to the
            highest bucket of the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.attention.problem import Problem
from hotrow.kernels.attention.scores import (
    add_biases,
    load_rows,
    own_scores,
    seen_keys,
    time_index,
    weights_and_slopes,
)
from hotrow.kernels.attention.tiles import read_tile
from hotrow.kernels.launch import cached_launch, power_of_2
from hotrow.kernels.rows.layout import loop_range

PROGRAMS = 64  # a head


@triton.jit
def _add_distances(partial, distance, value, real, last, POSITIONS: tl.constexpr):
    """Add values [N] to the entries of their distances, each of which is there once; those of the table's last entry to
    `last` instead, which is returned."""
    apart = distance >= POSITIONS - 1
    mine = real & (distance >= 0) & (distance < POSITIONS - 1)
    old = tl.load(partial + distance, mask=mine, other=0.0)
    tl.debug_barrier()
    tl.store(partial + distance, old + value, mask=mine)
    tl.debug_barrier()  # threads share elements, so the next load may be another thread's
    return last + tl.sum(tl.where(real & apart, value, 0.0), axis=0)


@triton.jit
def _add_diagonals(partial, distance, slope, last, POSITIONS: tl.constexpr, N: tl.constexpr):
    """Add a tile [N, N] of self-attention, whose first query is `distance` after its first key."""
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, N)[None, :]
    turned = tl.gather(slope, (row - column + N) % N, axis=1)
    offset = tl.arange(0, N)
    straight = tl.sum(tl.where(column <= row, turned, 0.0), axis=0)
    last = _add_distances(partial, tl.abs(distance + offset), straight, offset < N, last, POSITIONS)
    around = tl.sum(tl.where(column > row, turned, 0.0), axis=0)
    return _add_distances(partial, tl.abs(distance + offset - N), around, offset > 0, last, POSITIONS)


@triton.jit
def _add_places(partial, place, real, count, key_place, slope, last, POSITIONS: tl.constexpr):
    """Add a tile whose queries have any places: rows of equal place together, from the lowest place to the highest."""
    none = 2147483647
    current = tl.min(tl.where(real, place, none), axis=0)
    for _ in loop_range(0, count):
        if current < none:
            value = tl.sum(tl.where((place == current)[:, None], slope, 0.0), axis=0)
            distance = current - key_place
            last = _add_distances(partial, distance, value, distance >= 0, last, POSITIONS)
            current = tl.min(tl.where(real & (place > current), place, none), axis=0)
    return last


@triton.jit
def _add_times(total, index, slope, mask, T: tl.constexpr):
    """Add a tile to the sums [T] of the buckets."""
    bucket = tl.arange(0, T)
    lowest = tl.min(tl.min(tl.where(mask, index, T), axis=1), axis=0)
    highest = tl.max(tl.max(tl.where(mask, index, -1), axis=1), axis=0)
    for b in loop_range(lowest, highest + 1):
        found = tl.sum(tl.sum(tl.where(index == b, slope, 0.0), axis=1), axis=0)
        total += tl.where(bucket == b, found, 0.0)
    return total


@cached_launch
@triton.jit(do_not_specialize=["bound", "programs"])
def _bias_gradient_kernel(
    q, k, v, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
    q_row, q_head, k_row, k_head, v_row, v_head, own_k_row, own_k_head, own_v_row, own_v_head, scale, divisor,
    tiles, gradient, log_sums, deltas, position_partials, time_partials, bound, programs,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, VALUE_DIM: tl.constexpr, VD: tl.constexpr,
    POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, SILU: tl.constexpr, CAUSAL: tl.constexpr, VISIBLE: tl.constexpr,
    OWN: tl.constexpr, BIDIRECTIONAL: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    partial = position_partials + program.to(tl.int64) * POSITIONS
    last = tl.full((), 0.0, tl.float32)
    own_total = tl.full((), 0.0, tl.float32)
    times = tl.zeros([T], tl.float32)
    for tile in loop_range(program // HEADS, bound, programs):
        first, tile_place, count, _length, first_key, keys = read_tile(tiles, program * 0 + tile)
        row = tl.arange(0, M)
        real = row < count
        at = first + row
        number = tile_place + row
        seen = seen_keys(number, keys, visible + at, real, CAUSAL, VISIBLE)
        place = number if CAUSAL or BIDIRECTIONAL else seen
        time = tl.load(q_times + at, mask=real, other=0) if BUCKETS > 0 else place
        query = load_rows(q + head * q_head, at, real, q_row, DIM, D)
        above = load_rows(gradient + head * VALUE_DIM, at, real, HEADS * VALUE_DIM, VALUE_DIM, VD)
        log_sum = tl.load(log_sums + at * HEADS + head, mask=real, other=0.0)
        delta = log_sum if SILU else tl.load(deltas + at * HEADS + head, mask=real, other=0.0)
        if OWN:
            has_own = real & (keys >= 0)
            own_key = load_rows(own_k + head * own_k_head, at, has_own, own_k_row, DIM, D)
            own_value = load_rows(own_v + head * own_v_head, at, has_own, own_v_row, VALUE_DIM, VD)
            own = own_scores(query, own_key, scale, position_bias, time_bias, head, POSITIONS, BUCKETS)
            own_above = tl.sum(above.to(tl.float32) * own_value.to(tl.float32), axis=1)
            _own_weight, own_slope = weights_and_slopes(own, has_own, log_sum, own_above, delta, divisor, SILU)
            own_total += tl.sum(own_slope, axis=0)

        for begin in loop_range(0, tl.max(seen, axis=0), N):
            key_place = begin + tl.arange(0, N)
            key_real = key_place < keys
            key_at = first_key + key_place
            key = load_rows(k + head * k_head, key_at, key_real, k_row, DIM, D)
            value = load_rows(v + head * v_head, key_at, key_real, v_row, VALUE_DIM, VD)
            key_time = tl.load(k_times + key_at, mask=key_real, other=0) if BUCKETS > 0 else key_place
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            score = add_biases(
                score, place[:, None], key_place[None, :], time[:, None], key_time[None, :], position_bias, time_bias,
                head, POSITIONS, BUCKETS, CAUSAL or BIDIRECTIONAL, BIDIRECTIONAL,
            )  # fmt: skip
            mask = key_place[None, :] < seen[:, None]
            weight_above = tl.dot(above, tl.trans(value), input_precision=PRECISION)
            _weight, slope = weights_and_slopes(
                score, mask, log_sum[:, None], weight_above, delta[:, None], divisor, SILU
            )
            if POSITIONS > 0:
                if CAUSAL or BIDIRECTIONAL:
                    last = _add_diagonals(partial, tile_place - begin, slope, last, POSITIONS, N)
                else:
                    last = _add_places(partial, place, real, count, key_place, slope, last, POSITIONS)
            if BUCKETS > 0:
                index = time_index(time[:, None], key_time[None, :], BUCKETS, BIDIRECTIONAL)
                times = _add_times(times, index, slope, mask, T)

    if POSITIONS > 0:
        tl.store(partial + POSITIONS - 1, last)
        if OWN:
            tl.debug_barrier()
            total = tl.load(partial) + own_total
            tl.debug_barrier()
            tl.store(partial, total)
    if BUCKETS > 0:
        bucket = tl.arange(0, T)
        times += tl.where(bucket == 0, own_total, 0.0)
        tl.store(time_partials + program.to(tl.int64) * BUCKETS + bucket, times, mask=bucket < BUCKETS)


def bias_gradients(problem: Problem, gradient: Tensor, log_sums: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of position_bias and time_bias; empty where there is no table.

    Requires: `gradient` is contiguous.
    """
    positions, buckets = (problem.constants[name] for name in ("POSITIONS", "BUCKETS"))
    if positions == 0 and buckets == 0:
        return gradient.new_empty(0), gradient.new_empty(0)
    sizes, heads = problem.bias_gradient_sizes(), problem.heads
    tiles = problem.query_tiles(sizes.queries)
    bound = tiles.shape[0]
    programs = min(PROGRAMS, bound)
    of_positions, of_times = (
        torch.zeros(programs, heads, width, dtype=torch.float32, device=gradient.device)
        for width in (positions, buckets)
    )
    if programs * heads > 0:
        _bias_gradient_kernel[(programs * heads,)](
            *problem.arguments, tiles, gradient, log_sums, deltas, of_positions, of_times, bound, programs,
            **problem.constants, M=sizes.queries, N=sizes.keys, T=power_of_2(max(1, buckets)), num_warps=sizes.warps,
            num_stages=sizes.stages,
        )  # fmt: skip
    return _total(of_positions, problem.position_bias), _total(of_times, problem.time_bias)


def _total(partials: Tensor, bias: Tensor | None) -> Tensor:
    """The sum over programs, in the dtype of the table."""
    return partials.new_empty(0) if bias is None else partials.sum(0).to(bias.dtype)
