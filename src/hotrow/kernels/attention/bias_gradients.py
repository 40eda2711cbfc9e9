"""Gradients of the bias tables: sums of the gradients of scores by distance and by time, without atomics.

A fixed number of programs a head share the tiles of queries in turns and compute the gradients of scores again. Each
has partial sums of its own for both tables, which are added up in order at the end.

positions   In self-attention (SELF) the distance is constant along a tile's diagonals. Turning each row by its number
            makes diagonals columns: column c then has the distances of c, and of c - N where the row was turned around.
            The latter are those of the next tile's c, so they are kept for it. A bidirectional table is summed by
            signed distance and folded at the end. For candidates, whose places are arbitrary, rows with equal places
            are added up first, one place after another; a request's candidates mostly have one. Distances that share
            the table's last entry are summed apart, and a tile that has no other is one sum.
times       Buckets are taken from the tile's lowest to its highest (biases.py): those scores that have not reached the
            next one are summed for each query. Queries are added up at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.attention.biases import biased_by_keys, clamped, has_reached, line_width, lowest_place, time_range
from hotrow.kernels.attention.problem import Problem
from hotrow.kernels.attention.scores import load_rows, own_scores, seen_keys, weights_and_slopes
from hotrow.kernels.attention.tiles import read_tile
from hotrow.kernels.launch import cached_launch, power_of_2
from hotrow.kernels.rows.layout import loop_range

PROGRAMS = 1024  # of all heads
MOST_BUCKETS = 64  # no time of 64 bits has a bucket beyond


@triton.jit
def _add_distances(partial, distance, value, real, beyond, POSITIONS: tl.constexpr):
    """Add values [N] to the entries of their distances, each of which is there once; those of the table's last entry to
    `beyond` [N] instead, which is returned."""
    mine = real & (distance >= 0) & (distance < POSITIONS - 1)
    old = tl.load(partial + distance, mask=mine, other=0.0)
    tl.debug_barrier()
    tl.store(partial + distance, old + value, mask=mine)
    tl.debug_barrier()  # threads share elements, so the next load may be another thread's
    return beyond + tl.where(real & (distance >= POSITIONS - 1), value, 0.0)


@triton.jit
def _is_near(distance, POSITIONS: tl.constexpr, BIDIRECTIONAL: tl.constexpr):
    """Whether signed distances have an entry of their own."""
    return (distance > 1 - POSITIONS if BIDIRECTIONAL else distance >= 0) & (distance < POSITIONS - 1)


@triton.jit
def _diagonals(slope, N: tl.constexpr):
    """The sums [N] along diagonals of a tile [N, N]: of those that begin at its first key, by their row, and of those
    that begin at its first query, by N less their column."""
    row = tl.arange(0, N)[:, None]
    column = tl.arange(0, N)[None, :]
    turned = tl.gather(slope, (row - column) & (N - 1), axis=1)
    straight = tl.where(column <= row, turned, 0.0)
    return tl.sum(straight, axis=0), tl.sum(turned - straight, axis=0)


@triton.jit
def _add_places(partial, place, real, count, key_place, slope, beyond, POSITIONS: tl.constexpr):
    """Add a tile whose queries have any places: rows of equal place together, from the lowest place to the highest."""
    none = 2147483647
    current = tl.min(tl.where(real, place, none), axis=0)
    for _ in loop_range(0, count):
        if current < none:
            value = tl.sum(tl.where((place == current)[:, None], slope, 0.0), axis=0)
            distance = current - key_place
            beyond = _add_distances(partial, distance, value, distance >= 0, beyond, POSITIONS)
            current = tl.min(tl.where(real & (place > current), place, none), axis=0)
    return beyond


@triton.jit
def _add_times(times, slope, time, key_time, lowest, highest, BIDIRECTIONAL: tl.constexpr, T: tl.constexpr):
    """Add a tile, whose buckets are `lowest` to `highest`, to the sums [M, T] of its queries' buckets."""
    column = tl.arange(0, T)[None, :]
    for bucket in loop_range(lowest, highest):
        reached = has_reached(bucket + 1, time, key_time, False, BIDIRECTIONAL)
        here = tl.sum(tl.where(reached, 0.0, slope), axis=1)
        times += tl.where(column == bucket, here[:, None], 0.0)
        slope = tl.where(reached, slope, 0.0)
    return times + tl.where(column == highest, tl.sum(slope, axis=1)[:, None], 0.0)


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
    before: tl.constexpr = POSITIONS - 1 if BIDIRECTIONAL else 0  # the entry of distance 0
    last: tl.constexpr = POSITIONS - 1
    partial = position_partials + program.to(tl.int64) * (before + POSITIONS)
    beyond = tl.zeros([N], tl.float32)
    far = tl.zeros([M], tl.float32)
    own_total = tl.full((), 0.0, tl.float32)
    times = tl.zeros([M, T], tl.float32)
    for tile in loop_range(program // HEADS, bound, programs):
        first, tile_place, count, _length, first_key, keys = read_tile(tiles, program * 0 + tile)
        row = tl.arange(0, M)
        real = row < count
        at = first + row
        number = tile_place + row
        seen = seen_keys(number, keys, visible + at, real, CAUSAL, VISIBLE)
        place = number if CAUSAL or BIDIRECTIONAL else seen
        time = clamped(tl.load(q_times + at, mask=real, other=0)) if BUCKETS > 0 else place
        low, high = time_range(time, real)
        lowest = lowest_place(place, tile_place, real, CAUSAL or BIDIRECTIONAL)
        line = position_bias + head * line_width(POSITIONS, BIDIRECTIONAL)
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

        begun = tl.zeros([N], tl.float32)  # diagonals that began in the tile before
        end = tl.max(seen, axis=0)
        for begin in loop_range(0, end, N):
            if POSITIONS > 0 and (CAUSAL or BIDIRECTIONAL):
                entry = partial + before + tile_place - begin + tl.arange(0, N)
                near = _is_near(tile_place - begin + tl.arange(0, N), POSITIONS, BIDIRECTIONAL)
                old = tl.load(entry, mask=near, other=0.0)  # here, so that the products hide its latency
            key_place = begin + tl.arange(0, N)
            key_real = key_place < keys
            key_at = first_key + key_place
            key = load_rows(k + head * k_head, key_at, key_real, k_row, DIM, D)
            value = load_rows(v + head * v_head, key_at, key_real, v_row, VALUE_DIM, VD)
            key_time = tl.load(k_times + key_at, mask=key_real, other=0) if BUCKETS > 0 else key_place
            score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            score, first_bucket, last_bucket = biased_by_keys(
                score, place, lowest, time, low, high, begin, key_time, key_real, line, time_bias + head * BUCKETS,
                N, POSITIONS, BUCKETS, BIDIRECTIONAL,
            )  # fmt: skip
            mask = key_place[None, :] < seen[:, None]
            weight_above = tl.dot(above, tl.trans(value), input_precision=PRECISION)
            _weight, slope = weights_and_slopes(
                score, mask, log_sum[:, None], weight_above, delta[:, None], divisor, SILU
            )
            if POSITIONS > 0:
                if lowest - begin - (N - 1) >= last:
                    far += tl.sum(slope, axis=1)
                elif CAUSAL or BIDIRECTIONAL:
                    straight, around = _diagonals(slope, N)
                    sums = straight + begun
                    begun = around
                    tl.debug_barrier()
                    tl.store(entry, old + sums, mask=near)
                    tl.debug_barrier()  # threads share elements, so the next load may be another thread's
                    beyond += tl.where(near, 0.0, sums)
                else:
                    beyond = _add_places(partial, place, real, count, key_place, slope, beyond, POSITIONS)
            if BUCKETS > 0:
                times = _add_times(
                    times, slope, time[:, None], key_time[None, :], first_bucket, last_bucket, BIDIRECTIONAL, T
                )  # fmt: skip
        if POSITIONS > 0 and BIDIRECTIONAL:
            distance = tile_place - (end + N - 1) // N * N + tl.arange(0, N)
            near = _is_near(distance, POSITIONS, BIDIRECTIONAL)
            old = tl.load(partial + before + distance, mask=near, other=0.0)
            tl.debug_barrier()
            tl.store(partial + before + distance, old + begun, mask=near)
            tl.debug_barrier()
            beyond += tl.where(near, 0.0, begun)

    if POSITIONS > 0:
        tl.store(partial + before + last, tl.sum(beyond, axis=0) + tl.sum(far, axis=0))
        if OWN:
            tl.debug_barrier()
            total = tl.load(partial) + own_total
            tl.debug_barrier()
            tl.store(partial, total)
    if BUCKETS > 0:
        bucket = tl.arange(0, T)
        total = tl.sum(times, axis=0) + tl.where(bucket == 0, own_total, 0.0)
        tl.store(time_partials + program.to(tl.int64) * BUCKETS + bucket, total, mask=bucket < BUCKETS)


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
    programs = min(max(1, PROGRAMS // max(1, heads)), bound)
    before = positions - 1 if problem.bidirectional and positions else 0
    of_positions, of_times = (
        torch.zeros(programs, heads, width, dtype=torch.float32, device=gradient.device)
        for width in (before + positions, buckets)
    )
    if programs * heads > 0:
        _bias_gradient_kernel[(programs * heads,)](
            *problem.arguments, tiles, gradient, log_sums, deltas, of_positions, of_times, bound, programs,
            **problem.constants, M=sizes.queries, N=sizes.keys, T=min(MOST_BUCKETS, power_of_2(max(1, buckets))),
            num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    signed = of_positions.sum(0)
    summed = signed[:, before:]
    summed[:, 1 : before + 1] += signed[:, :before].flip(1)
    return _converted(summed, problem.position_bias), _converted(of_times.sum(0), problem.time_bias)


def _converted(summed: Tensor, bias: Tensor | None) -> Tensor:
    """The sums in the dtype of the table."""
    return summed.new_empty(0) if bias is None else summed.to(bias.dtype).contiguous()
