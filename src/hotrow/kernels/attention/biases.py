"""Biases of scores by distance and by time, for a whole tile of scores at once.

A tile's scores share a few numbers, so that little is left to do for a score:

positions   Kernels read the table as a *line*: its entries by distance, with its first entry repeated before it (in
            bidirectional attention, the entries backwards) and its last one after it. Offsets of queries are clamped,
            so every score of a tile reads the line at offset - column, without a comparison. Tiles that lie wholly
            beyond the table's end add one number.
times       A bucket begins at 2**bucket - 1 whole seconds. The least and the greatest time of the rows bound a tile's
            buckets. All scores start with the bias of the lowest, and for each higher one a comparison of whole
            milliseconds says which scores have come to it. Tiles far from a query mostly have one or two buckets.

Buckets come from comparisons of whole milliseconds, so no rounding of a logarithm can move a time into its neighbour.
Times beyond 2**62 count as 2**62, so no sum overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels import launch
from hotrow.kernels.launch import cached_launch, cdiv
from hotrow.kernels.rows.layout import loop_range

INTERPRETED = tl.constexpr(launch.INTERPRETED)
PAD = 64  # entries on each side of a line; tiles have at most so many keys
FARTHEST = tl.constexpr(1 << 62)
SECOND = tl.constexpr(1000)
BLOCK = 256  # entries of a program that makes lines


@triton.constexpr_function
def line_start(positions, bidirectional):
    """The entry of distance 0 in a line."""
    return PAD + (positions - 1 if bidirectional else 0)


@triton.constexpr_function
def line_width(positions, bidirectional):
    """The entries of a line."""
    return line_start(positions, bidirectional) + positions + PAD


@cached_launch
@triton.jit
def _line_kernel(table, lines, POSITIONS: tl.constexpr, BIDIRECTIONAL: tl.constexpr, BLOCK: tl.constexpr):
    width: tl.constexpr = line_width(POSITIONS, BIDIRECTIONAL)
    blocks: tl.constexpr = (width + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)
    entry = program % blocks * BLOCK + tl.arange(0, BLOCK)
    distance = entry - line_start(POSITIONS, BIDIRECTIONAL)
    if BIDIRECTIONAL:
        distance = tl.abs(distance)
    distance = tl.minimum(tl.maximum(distance, 0), POSITIONS - 1)
    inside = entry < width
    value = tl.load(table + head * POSITIONS + distance, mask=inside, other=0.0)
    tl.store(lines + head * width + entry, value.to(tl.float32), mask=inside)


def position_lines(table: Tensor, bidirectional: bool) -> Tensor:
    """The line of each head, float32 [heads, entries], of a table [heads, positions]."""
    heads, positions = table.shape
    width = line_width(positions, bidirectional)
    lines = torch.empty(heads, width, dtype=torch.float32, device=table.device)
    if lines.numel():
        _line_kernel[(heads * cdiv(width, BLOCK),)](
            table.contiguous(), lines, POSITIONS=positions, BIDIRECTIONAL=bidirectional, BLOCK=BLOCK, num_warps=4
        )
    return lines


@triton.jit
def lowest_place(place, first, real, SELF: tl.constexpr):
    """The lowest place of a tile's queries, whose first query has the number `first`."""
    return first if SELF else tl.min(tl.where(real, place, 2147483647), axis=0)


@triton.jit
def query_offsets(place, first_key, N: tl.constexpr, POSITIONS: tl.constexpr, BIDIRECTIONAL: tl.constexpr):
    """Where the queries of a tile read a line for the key `first_key`, the first of N."""
    lowest = 1 - POSITIONS if BIDIRECTIONAL else -1
    offset = tl.minimum(tl.maximum(place - first_key, lowest), POSITIONS - 1 + N)
    return offset + line_start(POSITIONS, BIDIRECTIONAL)


@triton.jit
def add_positions(
    score, offset, column, distance, line, N: tl.constexpr, POSITIONS: tl.constexpr, BIDIRECTIONAL: tl.constexpr
):
    """Scores with the biases of their distances. `offset` (of queries) and `column` (numbers of keys in their tile)
    broadcast to the scores; `distance` is the tile's lowest place less its first key."""
    if distance - (N - 1) >= POSITIONS - 1:
        score += tl.load(line + (line_start(POSITIONS, BIDIRECTIONAL) + POSITIONS - 1))
    else:
        at = line + offset - column
        score += tl.load(at) if INTERPRETED else _load_in_place(at)
    return score


@triton.jit
def _load_in_place(at):
    """tl.load of float32 without its own distribution over threads: each thread loads what it adds, so that nothing
    goes through shared memory."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def clamped(time):
    """Times within the bounds that keep a sum with a bucket's start in 64 bits."""
    return tl.minimum(tl.maximum(time, -FARTHEST), FARTHEST - 1)


@triton.jit
def time_range(time, real):
    """The least and the greatest time of the real rows."""
    time = time.to(tl.int64)
    least = tl.min(tl.where(real, time, FARTHEST - 1), axis=0)
    return clamped(least), clamped(tl.max(tl.where(real, time, -FARTHEST), axis=0))


@triton.jit
def bucket_start(bucket):
    """The milliseconds at which a bucket begins."""
    return (tl.full((), SECOND, tl.int64) << (tl.full((), 0, tl.int64) + bucket)) - SECOND


@triton.jit
def _bucket(elapsed, BUCKETS: tl.constexpr):
    """The bucket of a number of milliseconds, 0 where it is negative."""
    later = tl.minimum(tl.maximum(elapsed, 0), FARTHEST) + SECOND
    # The highest bit, or the one above it where the float is rounded up to a power of two; 1000 is above 2**9, so the
    # comparison corrects both.
    bit = (later.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    bucket = bit - 9 - (later - SECOND < bucket_start(bit - 9)).to(tl.int32)
    return tl.minimum(bucket, BUCKETS - 1)


@triton.jit
def bucket_range(low, high, key_low, key_high, BUCKETS: tl.constexpr, BIDIRECTIONAL: tl.constexpr):
    """The lowest and the highest bucket between queries and keys whose times lie in these ranges."""
    least, most = low - key_high, high - key_low
    if BIDIRECTIONAL:
        least, most = tl.maximum(least, key_low - high), tl.maximum(most, key_high - low)
    return _bucket(least, BUCKETS), _bucket(most, BUCKETS)


@triton.jit
def has_reached(bucket, row, column, KEY_ROWS: tl.constexpr, BIDIRECTIONAL: tl.constexpr):
    """Whether the milliseconds between queries and keys reach a bucket above 0. `row` are clamped times of the tile's
    rows (its keys if KEY_ROWS), `column` those of its columns; the sums are made for rows alone."""
    start = bucket_start(bucket)
    if BIDIRECTIONAL:
        reached = (row - start >= column) | (row + start <= column)
    elif KEY_ROWS:
        reached = row + start <= column
    else:
        reached = row - start >= column
    return reached


@triton.jit
def add_times(score, row, column, lowest, highest, table, KEY_ROWS: tl.constexpr, BIDIRECTIONAL: tl.constexpr):
    """Scores with the biases of their times, given as in `has_reached`. `lowest` and `highest` bound the buckets;
    `table` is the head's."""
    biased = score + tl.load(table + lowest).to(tl.float32)
    for bucket in loop_range(lowest + 1, highest + 1):
        reached = has_reached(bucket, row, column, KEY_ROWS, BIDIRECTIONAL)
        biased = tl.where(reached, score + tl.load(table + bucket).to(tl.float32), biased)
    return biased


@triton.jit
def biased_by_keys(
    score, place, lowest, time, low, high, begin, key_time, key_real, line, buckets,
    N: tl.constexpr, POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, BIDIRECTIONAL: tl.constexpr,
):  # fmt: skip
    """Scores [queries, N keys] with both biases, and the lowest and highest bucket between them (0 without times).

    Of the queries: their places, the lowest one, their times and the range of these. Of the keys: the place `begin` of
    the first, their times and which are real. `line` and `buckets` are the tables of a head.
    """
    first_bucket = 0
    last_bucket = 0
    if POSITIONS > 0:
        offset = query_offsets(place, begin, N, POSITIONS, BIDIRECTIONAL)
        score = add_positions(
            score, offset[:, None], tl.arange(0, N)[None, :], lowest - begin, line, N, POSITIONS, BIDIRECTIONAL
        )  # fmt: skip
    if BUCKETS > 0:
        key_low, key_high = time_range(key_time, key_real)
        first_bucket, last_bucket = bucket_range(low, high, key_low, key_high, BUCKETS, BIDIRECTIONAL)
        score = add_times(
            score, time[:, None], key_time[None, :], first_bucket, last_bucket, buckets, False, BIDIRECTIONAL
        )  # fmt: skip
    return score, first_bucket, last_bucket
