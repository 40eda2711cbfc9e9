"""What the kernels of attention share: rows of a tile, the keys that a query sees, weights and gradients of scores.

A query sees the first keys of its user, as many as `seen_keys` says, so one comparison masks every variant. Its place
is its number among its user's rows in self-attention (causal or bidirectional), else the number of keys that it sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hotrow.kernels.attention.biases import line_start, line_width

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, at, real, row_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows [R, PADDED] of a matrix; 0 in columns from WIDTH on and where a row is not real."""
    column = tl.arange(0, PADDED)
    mask = real[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + at[:, None] * row_stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, at, real, row_stride, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write rows [R, PADDED] in the type of the matrix."""
    column = tl.arange(0, PADDED)
    mask = real[:, None] & (column < WIDTH)[None, :]
    place = base + at[:, None] * row_stride + column[None, :]
    tl.store(place, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def seen_keys(number, keys, visible, real, CAUSAL: tl.constexpr, VISIBLE: tl.constexpr):
    """How many of its user's `keys` each query sees. `number` is the query's among its user's, `visible` a pointer."""
    if CAUSAL:
        seen = tl.minimum(number + 1, keys)
    elif VISIBLE:
        wanted = tl.load(visible, mask=real, other=0)
        seen = tl.minimum(tl.maximum(wanted, 0), tl.maximum(keys, 0)).to(tl.int32)
    else:
        seen = number * 0 + keys
    return tl.where(real, tl.maximum(seen, 0), 0)


@triton.jit
def own_scores(
    query, own_key, scale, position_bias, time_bias, head, POSITIONS: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """The scores [R] of queries and their own keys, at distance 0. Own keys are never bidirectional."""
    score = tl.sum(query.to(tl.float32) * own_key.to(tl.float32), axis=1) * scale
    if POSITIONS > 0:
        score += tl.load(position_bias + head * line_width(POSITIONS, False) + line_start(POSITIONS, False))
    if BUCKETS > 0:
        score += tl.load(time_bias + head * BUCKETS).to(tl.float32)
    return score


@triton.jit
def weights_and_slopes(score, mask, log_sum, weight_gradient, delta, divisor, SILU: tl.constexpr):
    """The weights of values, and the gradients of scores; both 0 outside of the mask. `log_sum` and `delta` (the sum
    of gradient x output of a query) broadcast to the scores; silu needs neither."""
    if SILU:
        gate = tl.sigmoid(score)
        weight = score * gate / divisor
        slope = weight_gradient / divisor * gate * (1.0 + score * (1.0 - gate))
    else:
        weight = tl.exp2(tl.where(mask, score - log_sum, 0.0) * LOG2E)
        slope = weight * (weight_gradient - delta)
    return tl.where(mask, weight, 0.0), tl.where(mask, slope, 0.0)
