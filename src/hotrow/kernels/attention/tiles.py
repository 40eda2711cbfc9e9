"""Tiles: the rows of all users cut into pieces of at most `block` rows, none of which has rows of two users.

How many tiles there are depends on the lengths, which only the device knows. The number of records is a bound that
follows from shapes: rows / block, and a partly filled tile for each user. Records after the last tile have no rows.
Rows beyond the sum of the lengths belong to no user. They are tiles too, marked by OTHERS = -1, so that their results
are written as zeros.

A program walks over the other side's rows of its user, so its work follows their number. GPUs start programs in order
of their number, and a long one that starts last would run alone. Users are therefore sorted into classes by that
number, largest first. With `backwards`, a user's last tile comes first: in causal attention it sees the most keys.

Two launches: one program orders the users by running sums over chunks of them, one pass a class; then each tile finds
its user by binary search. Lengths whose sums exceed the rows are cut, so that no kernel leaves its tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.launch import cached_launch, cdiv
from hotrow.kernels.rows.layout import loop_range

# The fields of a tile, int64.
FIRST = tl.constexpr(0)  # its first row
PLACE = tl.constexpr(1)  # the number of that row among its user's
COUNT = tl.constexpr(2)  # how many rows it has
LENGTH = tl.constexpr(3)  # how many rows its user has
OTHER = tl.constexpr(4)  # the first row of its user on the other side
OTHERS = tl.constexpr(5)  # how many rows its user has on the other side; -1: no user
FIELDS = tl.constexpr(8)  # 64 bytes a tile

CHUNK = 1024  # users at a time
SEARCH = 128  # tiles of a program that searches


@cached_launch
@triton.jit(do_not_specialize=["users", "rows", "other_rows"])
def _order_kernel(lengths, others, ordered, totals, users, rows, other_rows, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    rank_base = tl.full((), 0, tl.int32)
    tile_base = tl.full((), 0, tl.int32)
    for work_class in tl.static_range(4):
        begin_base = tl.full((), 0, tl.int64)
        other_base = tl.full((), 0, tl.int64)
        for start in loop_range(0, users + 1, CHUNK):
            user = start + tl.arange(0, CHUNK)
            real = user < users
            given = tl.maximum(tl.load(lengths + user, mask=real, other=0), 0)
            end = begin_base + tl.cumsum(given, axis=0)
            begin = tl.minimum(end - given, rows)
            end = tl.where(user == users, rows, tl.minimum(end, rows))
            begin_base += tl.sum(given, axis=0)
            other_given = tl.maximum(tl.load(others + user, mask=real, other=0), 0)
            other_end = other_base + tl.cumsum(other_given, axis=0)
            other_begin = tl.minimum(other_end - other_given, other_rows)
            other_base += tl.sum(other_given, axis=0)
            other_length = tl.where(real, tl.minimum(other_end, other_rows) - other_begin, -1)

            length = tl.where(user <= users, end - begin, 0)
            of_class = (other_length < 4096).to(tl.int32) + (other_length < 1024) + (other_length < 256)
            mine = (of_class == work_class) & (length > 0)
            tiles = tl.where(mine, (length + BLOCK - 1) // BLOCK, 0).to(tl.int32)
            record = ordered + (rank_base + tl.cumsum(mine.to(tl.int32), axis=0) - 1) * FIELDS
            tl.store(record + FIRST, begin, mask=mine)
            tl.store(record + PLACE, (tile_base + tl.cumsum(tiles, axis=0) - tiles).to(tl.int64), mask=mine)
            tl.store(record + LENGTH, length, mask=mine)
            tl.store(record + OTHER, other_begin, mask=mine)
            tl.store(record + OTHERS, other_length, mask=mine)
            rank_base += tl.sum(mine.to(tl.int32), axis=0)
            tile_base += tl.sum(tiles, axis=0)
    tl.store(totals, rank_base)
    tl.store(totals + 1, tile_base)


@cached_launch
@triton.jit(do_not_specialize=["bound"])
def _cut_kernel(
    ordered, totals, table, bound,
    BLOCK: tl.constexpr, BACKWARDS: tl.constexpr, HALVINGS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """In `ordered`, PLACE is the user's first tile."""
    tile = tl.program_id(0) * SEARCH + tl.arange(0, SEARCH)
    ranks = tl.load(totals)
    rank = tl.zeros([SEARCH], tl.int32)  # the last user whose first tile is not after this one
    for i in tl.static_range(HALVINGS):
        probe = rank + (1 << (HALVINGS - 1 - i))
        first = tl.load(ordered + probe * FIELDS + PLACE, mask=probe < ranks, other=9223372036854775807)
        rank = tl.where(first <= tile, probe, rank)
    real = tile < tl.load(totals + 1)
    record = ordered + rank * FIELDS
    length = tl.load(record + LENGTH, mask=real, other=0)
    number = tile - tl.load(record + PLACE, mask=real, other=0)
    if BACKWARDS:
        number = (length + BLOCK - 1) // BLOCK - 1 - number
    place = number * BLOCK
    made = table + tile.to(tl.int64) * FIELDS
    inside = tile < bound
    tl.store(made + FIRST, tl.load(record + FIRST, mask=real, other=0) + tl.where(real, place, 0), mask=inside)
    tl.store(made + PLACE, tl.where(real, place, 0), mask=inside)
    tl.store(made + COUNT, tl.where(real, tl.minimum(length - place, BLOCK), 0), mask=inside)
    tl.store(made + LENGTH, length, mask=inside)
    tl.store(made + OTHER, tl.load(record + OTHER, mask=real, other=0), mask=inside)
    tl.store(made + OTHERS, tl.load(record + OTHERS, mask=real, other=-1), mask=inside)


@triton.jit
def read_tile(table, tile):
    """The fields of a tile, with rows as int64 and numbers within a user as int32."""
    record = table + tile.to(tl.int64) * FIELDS
    return (
        tl.load(record + FIRST),
        tl.load(record + PLACE).to(tl.int32),
        tl.load(record + COUNT).to(tl.int32),
        tl.load(record + LENGTH).to(tl.int32),
        tl.load(record + OTHER),
        tl.load(record + OTHERS).to(tl.int32),
    )


def most_tiles(rows: int, users: int, block: int) -> int:
    """The most tiles that the rows can make, whatever the lengths of the users are.

    >>> most_tiles(100, 1, 64), most_tiles(3, 1000, 64)
    (3, 3)
    """
    return min(rows, (rows + (users + 1) * (block - 1)) // block)


def tile_table(lengths: Tensor, others: Tensor, rows: int, other_rows: int, block: int, backwards: bool) -> Tensor:
    """The tiles of `rows` rows, int64 [most_tiles, FIELDS]. `lengths` and `others` are int64 [users]: how many rows
    each user has on this side and on the other, which has `other_rows` rows."""
    users, bound = lengths.numel(), most_tiles(rows, lengths.numel(), block)
    memory = torch.empty(users + 2 + bound, FIELDS.value, dtype=torch.int64, device=lengths.device)
    ordered, totals, table = memory[: users + 1], memory[users + 1], memory[users + 2 :]
    if bound == 0:
        return table
    _order_kernel[(1,)](
        lengths, others, ordered, totals, users, rows, other_rows, BLOCK=block, CHUNK=CHUNK, num_warps=8
    )  # fmt: skip
    _cut_kernel[(cdiv(bound, SEARCH),)](
        ordered, totals, table, bound, BLOCK=block, BACKWARDS=backwards, HALVINGS=(users + 1).bit_length(),
        SEARCH=SEARCH, num_warps=4,
    )  # fmt: skip
    return table
