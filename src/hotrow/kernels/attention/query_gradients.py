"""Gradients of queries and of their own keys and values: a program takes a tile of queries and walks over its keys.

Scores are computed again, and with the stored log-sums they give the weights. delta, the sum of gradient x output of
each query and head, is stored for the kernels of keys and biases, which run after this one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.attention.biases import biased_by_keys, clamped, line_width, lowest_place, time_range
from hotrow.kernels.attention.problem import Problem
from hotrow.kernels.attention.scores import (
    load_rows,
    own_scores,
    seen_keys,
    store_rows,
    weights_and_slopes,
)
from hotrow.kernels.attention.tiles import read_tile
from hotrow.kernels.launch import cached_launch
from hotrow.kernels.rows.layout import loop_range


@cached_launch
@triton.jit
def _query_gradient_kernel(
    q, k, v, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
    q_row, q_head, k_row, k_head, v_row, v_head, own_k_row, own_k_head, own_v_row, own_v_head, scale, divisor,
    tiles, gradient, out, log_sums, deltas, q_gradient, own_k_gradient, own_v_gradient,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, VALUE_DIM: tl.constexpr, VD: tl.constexpr,
    POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, SILU: tl.constexpr, CAUSAL: tl.constexpr, VISIBLE: tl.constexpr,
    OWN: tl.constexpr, BIDIRECTIONAL: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    first, tile_place, count, _length, first_key, keys = read_tile(tiles, program // HEADS)
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
    delta = tl.zeros([M], tl.float32)
    if not SILU:
        output = load_rows(out + head * VALUE_DIM, at, real, HEADS * VALUE_DIM, VALUE_DIM, VD)
        delta = tl.sum(above.to(tl.float32) * output.to(tl.float32), axis=1)
        tl.store(deltas + at * HEADS + head, delta, mask=real)

    result = tl.zeros([M, D], tl.float32)  # without the factor `scale`
    if OWN:
        has_own = real & (keys >= 0)
        own_key = load_rows(own_k + head * own_k_head, at, has_own, own_k_row, DIM, D)
        own_value = load_rows(own_v + head * own_v_head, at, has_own, own_v_row, VALUE_DIM, VD)
        own = own_scores(query, own_key, scale, position_bias, time_bias, head, POSITIONS, BUCKETS)
        own_above = tl.sum(above.to(tl.float32) * own_value.to(tl.float32), axis=1)
        own_weight, own_slope = weights_and_slopes(own, has_own, log_sum, own_above, delta, divisor, SILU)
        result = own_slope[:, None] * own_key.to(tl.float32)
        key_slope = (own_slope * scale)[:, None] * query.to(tl.float32)
        store_rows(own_k_gradient + head * DIM, at, real, HEADS * DIM, key_slope, DIM, D)
        value_slope = own_weight[:, None] * above.to(tl.float32)
        store_rows(own_v_gradient + head * VALUE_DIM, at, real, HEADS * VALUE_DIM, value_slope, VALUE_DIM, VD)

    for begin in loop_range(0, tl.max(seen, axis=0), N):
        key_place = begin + tl.arange(0, N)
        key_real = key_place < keys
        key_at = first_key + key_place
        key = load_rows(k + head * k_head, key_at, key_real, k_row, DIM, D)
        value = load_rows(v + head * v_head, key_at, key_real, v_row, VALUE_DIM, VD)
        key_time = tl.load(k_times + key_at, mask=key_real, other=0) if BUCKETS > 0 else key_place
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score, _first_bucket, _last_bucket = biased_by_keys(
            score, place, lowest, time, low, high, begin, key_time, key_real, line, time_bias + head * BUCKETS,
            N, POSITIONS, BUCKETS, BIDIRECTIONAL,
        )  # fmt: skip
        mask = key_place[None, :] < seen[:, None]
        weight_above = tl.dot(above, tl.trans(value), input_precision=PRECISION)
        _weight, slope = weights_and_slopes(score, mask, log_sum[:, None], weight_above, delta[:, None], divisor, SILU)
        result = tl.dot(slope.to(key.dtype), key, result, input_precision=PRECISION)

    store_rows(q_gradient + head * DIM, at, real, HEADS * DIM, result * scale, DIM, D)


def query_gradients(
    problem: Problem, gradient: Tensor, out: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, own_k and own_v (empty without own keys), and delta, float32 [n, heads].

    Requires: `gradient` and `out` are contiguous.
    """
    q, heads = problem.q, problem.heads
    q_gradient = torch.empty(problem.queries, heads, problem.dim, dtype=q.dtype, device=q.device)
    own_k_gradient, own_v_gradient = q.new_empty(0), q.new_empty(0)
    if problem.own_k is not None:
        own_k_gradient, own_v_gradient = torch.empty_like(q_gradient), torch.empty_like(out)
    deltas = torch.empty_like(log_sums)
    if q_gradient.shape[0] * heads == 0:
        return q_gradient, own_k_gradient, own_v_gradient, deltas
    sizes = problem.query_gradient_sizes()
    tiles = problem.query_tiles(sizes.queries)
    _query_gradient_kernel[(tiles.shape[0] * heads,)](
        *problem.arguments, tiles, gradient, out, log_sums, deltas, q_gradient, own_k_gradient, own_v_gradient,
        **problem.constants, M=sizes.queries, N=sizes.keys, num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return q_gradient, own_k_gradient, own_v_gradient, deltas
