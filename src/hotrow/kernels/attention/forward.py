"""Outputs of jagged attention: a program takes a tile of queries of one user and one head, and walks over its keys.

Softmax keeps the largest score so far and the sum of exponentials for each query, and rescales its output when a larger
score appears, so scores need no memory. The logarithm of the sum is stored for the backward pass. silu needs neither.
A query's own key comes first, as a start of these sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.attention.biases import biased_by_keys, clamped, line_width, lowest_place, time_range
from hotrow.kernels.attention.problem import Problem
from hotrow.kernels.attention.scores import LN2, LOG2E, load_rows, own_scores, seen_keys, store_rows
from hotrow.kernels.attention.tiles import read_tile
from hotrow.kernels.launch import cached_launch
from hotrow.kernels.rows.layout import loop_range


@cached_launch
@triton.jit
def _forward_kernel(
    q, k, v, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
    q_row, q_head, k_row, k_head, v_row, v_head, own_k_row, own_k_head, own_v_row, own_v_head, scale, divisor,
    tiles, out, log_sums,
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

    highest = tl.full([M], -float("inf"), tl.float32)  # in powers of two
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, VD], tl.float32)
    if OWN:
        has_own = real & (keys >= 0)
        own_key = load_rows(own_k + head * own_k_head, at, has_own, own_k_row, DIM, D)
        own_value = load_rows(own_v + head * own_v_head, at, has_own, own_v_row, VALUE_DIM, VD).to(tl.float32)
        own = own_scores(query, own_key, scale, position_bias, time_bias, head, POSITIONS, BUCKETS)
        if SILU:
            result = tl.where(has_own, own * tl.sigmoid(own), 0.0)[:, None] * own_value
        else:
            highest = tl.where(has_own, own * LOG2E, highest)
            total = tl.where(has_own, 1.0, 0.0)
            result = own_value

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
        if SILU:
            weight = tl.where(mask, score * tl.sigmoid(score), 0.0)
        else:
            score = tl.where(mask, score * LOG2E, -float("inf"))
            higher = tl.maximum(highest, tl.max(score, axis=1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            weight = tl.exp2(score - base[:, None])
            kept = tl.exp2(highest - base)
            total = total * kept + tl.sum(weight, axis=1)
            result = result * kept[:, None]
            highest = higher
        result = tl.dot(weight.to(value.dtype), value, result, input_precision=PRECISION)

    if SILU:
        result = result / divisor
    else:
        sees = total > 0
        result = result / tl.where(sees, total, 1.0)[:, None]
        log_sum = tl.where(sees, highest + tl.log2(tl.where(sees, total, 1.0)), -float("inf")) * LN2
        tl.store(log_sums + at * HEADS + head, tl.where(keys >= 0, log_sum, 0.0), mask=real)
    store_rows(out + head * VALUE_DIM, at, real, HEADS * VALUE_DIM, result, VALUE_DIM, VD)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    visible: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    kind: str,
    causal: bool,
    scale: float,
    divisor: float,
) -> tuple[Tensor, Tensor]:
    """`out` [n, heads, value_dim], and for each query and head the logarithm of its sum of exponentials, float32
    [n, heads]: -inf for a query that sees no key, 0 for padding and for silu."""
    problem = Problem(
        q, k, v, q_lengths, k_lengths, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
        kind, causal, scale, divisor,
    )  # fmt: skip
    out = torch.empty(problem.queries, problem.heads, problem.value_dim, dtype=q.dtype, device=q.device)
    sums = torch.zeros if problem.silu else torch.empty
    log_sums = sums(problem.queries, problem.heads, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, log_sums.zero_()
    sizes = problem.forward_sizes()
    tiles = problem.query_tiles(sizes.queries)
    _forward_kernel[(tiles.shape[0] * problem.heads,)](
        *problem.arguments, tiles, out, log_sums, **problem.constants, M=sizes.queries, N=sizes.keys,
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return out, log_sums
