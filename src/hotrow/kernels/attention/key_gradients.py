"""Gradients of keys and values: a program takes a tile of keys of one user and one head, and walks over its queries.

Its sums stay in registers until they are written once, so no atomics are needed. Scores lie transposed, keys by
queries, so that the two products that add up gradients read them as they are. In causal attention the first query that
sees a key has the key's own place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.attention.problem import Problem
from hotrow.kernels.attention.scores import add_biases, load_rows, seen_keys, store_rows, weights_and_slopes
from hotrow.kernels.attention.tiles import read_tile
from hotrow.kernels.launch import cached_launch
from hotrow.kernels.rows.layout import loop_range


@cached_launch
@triton.jit
def _key_gradient_kernel(
    q, k, v, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
    q_row, q_head, k_row, k_head, v_row, v_head, own_k_row, own_k_head, own_v_row, own_v_head, scale, divisor,
    tiles, gradient, log_sums, deltas, k_gradient, v_gradient,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, VALUE_DIM: tl.constexpr, VD: tl.constexpr,
    POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, SILU: tl.constexpr, CAUSAL: tl.constexpr, VISIBLE: tl.constexpr,
    OWN: tl.constexpr, BIDIRECTIONAL: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    first, tile_place, count, keys, first_query, queries = read_tile(tiles, program // HEADS)
    row = tl.arange(0, N)
    key_real = row < count
    key_at = first + row
    key_place = tile_place + row
    key = load_rows(k + head * k_head, key_at, key_real, k_row, DIM, D)
    value = load_rows(v + head * v_head, key_at, key_real, v_row, VALUE_DIM, VD)
    key_time = tl.load(k_times + key_at, mask=key_real, other=0) if BUCKETS > 0 else key_place

    k_result = tl.zeros([N, D], tl.float32)  # without the factor `scale`
    v_result = tl.zeros([N, VD], tl.float32)
    for begin in loop_range(tile_place if CAUSAL else 0, queries, M):
        number = begin + tl.arange(0, M)
        real = number < queries
        at = first_query + number
        seen = seen_keys(number, keys, visible + at, real, CAUSAL, VISIBLE)
        place = number if CAUSAL or BIDIRECTIONAL else seen
        time = tl.load(q_times + at, mask=real, other=0) if BUCKETS > 0 else place
        query = load_rows(q + head * q_head, at, real, q_row, DIM, D)
        above = load_rows(gradient + head * VALUE_DIM, at, real, HEADS * VALUE_DIM, VALUE_DIM, VD)
        log_sum = tl.load(log_sums + at * HEADS + head, mask=real, other=0.0)
        delta = log_sum if SILU else tl.load(deltas + at * HEADS + head, mask=real, other=0.0)
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale
        score = add_biases(
            score, place[None, :], key_place[:, None], time[None, :], key_time[:, None], position_bias, time_bias, head,
            POSITIONS, BUCKETS, CAUSAL or BIDIRECTIONAL, BIDIRECTIONAL,
        )  # fmt: skip
        mask = key_place[:, None] < seen[None, :]
        weight_above = tl.dot(value, tl.trans(above), input_precision=PRECISION)
        weight, slope = weights_and_slopes(
            score, mask, log_sum[None, :], weight_above, delta[None, :], divisor, SILU
        )  # fmt: skip
        v_result = tl.dot(weight.to(above.dtype), above, v_result, input_precision=PRECISION)
        k_result = tl.dot(slope.to(query.dtype), query, k_result, input_precision=PRECISION)

    store_rows(k_gradient + head * DIM, key_at, key_real, HEADS * DIM, k_result * scale, DIM, D)
    store_rows(v_gradient + head * VALUE_DIM, key_at, key_real, HEADS * VALUE_DIM, v_result, VALUE_DIM, VD)


def key_gradients(problem: Problem, gradient: Tensor, log_sums: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of k and v.

    Requires: `gradient` is contiguous.
    """
    k, heads = problem.k, problem.heads
    k_gradient = torch.empty(problem.keys, heads, problem.dim, dtype=k.dtype, device=k.device)
    v_gradient = torch.empty(problem.keys, heads, problem.value_dim, dtype=k.dtype, device=k.device)
    if problem.keys * heads == 0:
        return k_gradient, v_gradient
    sizes = problem.key_gradient_sizes()
    tiles = problem.key_tiles(sizes.keys)
    _key_gradient_kernel[(tiles.shape[0] * heads,)](
        *problem.arguments, tiles, gradient, log_sums, deltas, k_gradient, v_gradient, **problem.constants,
        M=sizes.queries, N=sizes.keys, num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return k_gradient, v_gradient
