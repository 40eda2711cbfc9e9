"""What the kernels of attention share: rows of a tile, the keys that a query sees, the biases of a score.

A query sees the first keys of its user, as many as `seen_keys` says, so one comparison masks every variant. Its place
is its number among its user's rows in self-attention (causal or bidirectional), else the number of keys that it sees.

The bucket of a time is the place of the highest bit of 1 + whole seconds. It comes from comparisons of whole
milliseconds, so no rounding of a logarithm can move a time into its neighbour.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def position_index(place, key_place, POSITIONS: tl.constexpr, SELF: tl.constexpr):
    """The entry of the table of positions. Requires: places that broadcast to the shape of the scores."""
    distance = place - key_place
    if SELF:
        distance = tl.abs(distance)
    return tl.minimum(tl.maximum(distance, 0), POSITIONS - 1)


@triton.jit
def time_index(time, key_time, BUCKETS: tl.constexpr, BIDIRECTIONAL: tl.constexpr):
    """The bucket of the milliseconds between a query and a key."""
    elapsed = time - key_time
    if BIDIRECTIONAL:
        elapsed = tl.abs(elapsed)
    later = tl.minimum(tl.maximum(elapsed, 0), 1 << 62) + 1000
    # The highest bit, or the one above it where the float is rounded up to a power of two; 1000 is above 2**9, so the
    # comparison corrects both.
    bit = (later.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    full = (bit * 0 + 1000).to(tl.int64) << (bit - 9).to(tl.int64)
    bucket = bit - 9 - (later < full).to(tl.int32)
    return tl.minimum(bucket, BUCKETS - 1)


@triton.jit
def add_biases(
    score, place, key_place, time, key_time, position_bias, time_bias, head,
    POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, SELF: tl.constexpr, BIDIRECTIONAL: tl.constexpr,
):  # fmt: skip
    """Scores with the biases of one head, whose tables are [heads, POSITIONS] and [heads, BUCKETS]; 0: no table."""
    if POSITIONS > 0:
        index = position_index(place, key_place, POSITIONS, SELF)
        score += tl.load(position_bias + head * POSITIONS + index).to(tl.float32)
    if BUCKETS > 0:
        index = time_index(time, key_time, BUCKETS, BIDIRECTIONAL)
        score += tl.load(time_bias + head * BUCKETS + index).to(tl.float32)
    return score


@triton.jit
def own_scores(
    query, own_key, scale, position_bias, time_bias, head, POSITIONS: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """The scores [R] of queries and their own keys, at distance 0."""
    score = tl.sum(query.to(tl.float32) * own_key.to(tl.float32), axis=1) * scale
    if POSITIONS > 0:
        score += tl.load(position_bias + head * POSITIONS).to(tl.float32)
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
