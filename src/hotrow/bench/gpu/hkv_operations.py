"""Two operations of HierarchicalKV over our index, for its benchmark (hbm_find.py): no tier of HotRow calls them.

`find_rows` finds keys and copies their rows in one kernel. `insert_and_evict` takes a batch of present and absent keys
with their rows: it pins the present keys, sorts by set, chooses slots as insert.py does, and swaps the rows. Only the
choice of slots needs the order of the sets; rows move in the caller's order. So of the four row accesses of a swap
(read the new values, read the old row, write the new row, write the old row to the caller) only the two at the slot are
random.

Bytes per key of insert_and_evict at dim 32 with a full index: home 12, sort 4 x 24, find 88, choose 148, rank 8, swap
560, together 910: 0.21 ms for a million keys at 4.3 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hotrow.errors import BatchError
from hotrow.kernels.index.dedup import sum_before
from hotrow.kernels.index.find import find_block
from hotrow.kernels.index.insert import (
    NO_HOME,
    UNAVAILABLE,
    WINDOW,
    checked_count,
    occupied_ways,
    priority_of_rank,
    way_priorities,
)
from hotrow.kernels.index.key_hash import half_of, hash_key, home_of
from hotrow.kernels.index.sets import SPILL, SetIndex, check_tensor, pack_pin_and_score
from hotrow.kernels.launch import cached_launch, cdiv, power_of_2

FIND_BLOCK, FIND_ELEMENTS, FIND_WARPS = 256, 4096, 4  # elements of a block of find_rows: keys * padded dim
INSERT_BLOCK, INSERT_WARPS = 64, 2
SWAP_ELEMENTS, SWAP_WARPS = 4096, 4  # elements of a block that swaps rows: keys * padded dim
RANK_BLOCK = 1024

_SPILL = tl.constexpr(SPILL)
_FIRST_OCCUPIED = tl.constexpr(-(1 << 40))  # below: the priority of an empty way
EVICTS = tl.constexpr(1 << 30)  # set beside a slot whose row is evicted


class Evicted(NamedTuple):
    """What insert_and_evict evicted, the first `number` entries; and the slot of each given key (-1: none)."""

    keys: torch.Tensor  # int64 [n]
    values: torch.Tensor  # float32 [n, dim]
    slots: torch.Tensor  # int32 [n]
    number: torch.Tensor  # int32 [1]


@cached_launch
@triton.jit(do_not_specialize=["n", "only"])
def find_rows_kernel(
    index_keys, first, count, keys, begins, slots, rows, out, n, only,
    TABLES: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at, valid, slot = find_block(index_keys, first, count, keys, begins, n, only, TABLES, PADDED, BLOCK)
    tl.store(slots + at, slot, mask=valid)
    column = tl.arange(0, DIM_PADDED)
    inside = column[None, :] < DIM
    row = tl.load(
        rows + slot.to(tl.int64)[:, None] * STRIDE + column[None, :], mask=(slot >= 0)[:, None] & inside, other=0.0
    )
    tl.store(out + at.to(tl.int64)[:, None] * DIM + column[None, :], row, mask=valid[:, None] & inside)


def find_rows(
    index: SetIndex, rows: torch.Tensor, dim: int, keys: torch.Tensor, out: torch.Tensor, begins: torch.Tensor
) -> torch.Tensor:
    """find, and the first `dim` columns of the rows [capacity, stride] into out [n, dim]; zeros where absent."""
    if rows.dim() != 2 or rows.shape[0] != index.capacity or rows.stride(1) != 1 or not 0 < dim <= rows.shape[1]:
        raise BatchError(f"rows is {list(rows.shape)}; it must be [{index.capacity}, {dim} or more], rows contiguous")
    if out.shape != (keys.numel(), dim) or out.dtype != rows.dtype or not out.is_contiguous():
        raise BatchError(f"out is {out.dtype} {list(out.shape)}; it must be {rows.dtype} [{keys.numel()}, {dim}]")
    check_tensor("keys", keys, torch.int64, None, index.device)
    check_tensor("begins", begins, torch.int32, index.tables + 1, index.device)
    n = keys.numel()
    slots = torch.empty(n, dtype=torch.int32, device=index.device)
    if n:
        padded = power_of_2(dim)
        block = min(FIND_BLOCK, max(16, FIND_ELEMENTS // padded))
        find_rows_kernel[(cdiv(n, block),)](
            index.keys, index.first, index.count, keys, begins, slots, rows, out, n, index.counts[0],
            TABLES=index.tables, PADDED=power_of_2(index.tables), DIM=dim, DIM_PADDED=padded, STRIDE=rows.stride(0),
            BLOCK=block, num_warps=FIND_WARPS,
        )  # fmt: skip
    return slots


@cached_launch
@triton.jit(do_not_specialize=["n", "batch"])
def mixed_home_kernel(
    index_keys, pins, first, count, keys, tables, homes, found, n, batch, TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The home set of each key. For a present key it is the set that has the key; its slot is pinned for the batch and
    written to `found` (-1: absent)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = at < n
    key = tl.load(keys + at, mask=valid, other=0)
    table = at * 0
    if TABLES:
        table = tl.load(tables + at, mask=valid, other=0)
    begin, size, hash = tl.load(first + table), tl.load(count + table), hash_key(key)
    home, second = home_of(half_of(hash, False), begin, size), home_of(half_of(hash, True), begin, size)
    ways = tl.arange(0, 8)[None, :]
    resident = tl.load(index_keys + (home >> 1)[:, None] * 8 + ways, mask=valid[:, None], other=0)
    occupied = occupied_ways(resident, home)
    way = tl.max(tl.where(resident == key[:, None], ways, -1), axis=1)
    unsure = valid & (way < 0)
    in_second = tl.load(index_keys + (second >> 1)[:, None] * 8 + ways, mask=unsure[:, None], other=0)
    to_second = unsure & (occupied >= _SPILL) & (occupied_ways(in_second, second) < occupied)
    second_way = tl.where(unsure, tl.max(tl.where(in_second == key[:, None], ways, -1), axis=1), -1)
    to_second |= second_way >= 0
    slot = tl.where(second_way >= 0, (second >> 1) * 8 + second_way, -1)
    slot = tl.where(way >= 0, (home >> 1) * 8 + way, slot)
    tl.store(found + at, slot, mask=valid)
    tl.store(pins + 2 * slot, tl.full([BLOCK], batch, tl.int32), mask=valid & (slot >= 0))
    tl.store(homes + at, tl.where(valid, tl.where(to_second, second, home), NO_HOME), mask=valid)


@cached_launch
@triton.jit(do_not_specialize=["n", "settled"])
def mixed_choose_kernel(index_keys, pins, scores, homes, order_of, slots, found, n, settled, BLOCK: tl.constexpr):
    """Homes are sorted; slots are written in the order of the keys, with EVICTS where the slot's row is evicted."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    home = tl.load(homes + at, mask=at < n, other=NO_HOME)
    valid = home != NO_HOME
    position = tl.load(order_of + at, mask=at < n, other=0)
    present = tl.load(found + position, mask=valid, other=0)
    absent = valid & (present < 0)
    # At most eight earlier keys of a set are present and eight absent ones fill it: sixteen neighbours are enough.
    rank = at * 0
    same = valid
    looking = tl.max(same.to(tl.int32), axis=0)
    step = looking * 0
    while (looking > 0) & (step < WINDOW):
        step += 1
        before = at - step
        inside = same & (before >= 0)
        same = inside & (tl.load(homes + before, mask=inside, other=-1) == home)
        earlier = tl.load(order_of + before, mask=same, other=0)
        rank += (same & (tl.load(found + earlier, mask=same, other=0) < 0)).to(tl.int32)
        looking = tl.max(same.to(tl.int32), axis=0)
    best = priority_of_rank(way_priorities(index_keys, pins, scores, home, absent, settled), rank, absent)
    chosen = absent & (rank < 8) & (best < UNAVAILABLE)
    slot = tl.where(chosen, (home >> 1) * 8 + (best & 7).to(tl.int32), -1)
    slot = tl.where(absent, tl.where(chosen & (best >= _FIRST_OCCUPIED), slot | EVICTS, slot), present)
    tl.store(slots + position, slot, mask=at < n)


@cached_launch
@triton.jit(do_not_specialize=["n"])
def rank_kernel(chosen, ranks, counts, n, BLOCK: tl.constexpr):
    """The rank of each evicting key in its block, -1 for the others; and how many evicting keys the block has."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(chosen + at, mask=at < n, other=-1)
    evicts = (slot >= EVICTS).to(tl.int32)
    tl.store(ranks + at, tl.where(evicts > 0, tl.cumsum(evicts, axis=0) - 1, -1), mask=at < n)
    tl.store(counts + tl.program_id(0), tl.sum(evicts, axis=0))


@cached_launch
@triton.jit(do_not_specialize=["n", "word"])
def swap_kernel(
    index_keys, pins_and_scores, rows, keys, values, chosen, ranks, counts, slots, out_keys, out_values, number, n,
    word, DIM: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr,
    RANK_BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    valid = at < n
    slot = tl.load(chosen + at, mask=valid, other=-1)
    rank = tl.load(ranks + at, mask=valid, other=-1)
    column = tl.arange(0, PADDED)[None, :]
    inside = column < DIM
    placed, evicts = slot >= 0, rank >= 0
    slot = tl.where(placed, slot & (EVICTS - 1), -1)
    incoming = tl.load(
        values + at.to(tl.int64)[:, None] * VALUES_STRIDE + column, mask=placed[:, None] & inside, other=0.0
    )
    key = tl.load(keys + at, mask=placed, other=0)
    row = rows + slot.to(tl.int64)[:, None] * STRIDE + column
    if tl.max(rank, axis=0) >= 0:
        out = sum_before(counts, start // RANK_BLOCK, CHUNK) + rank
        evicted = tl.load(row, mask=evicts[:, None] & inside, other=0.0)
        old_key = tl.load(index_keys + slot, mask=evicts, other=0)
        tl.store(out_values + out.to(tl.int64)[:, None] * DIM + column, evicted, mask=evicts[:, None] & inside)
        tl.store(out_keys + out, old_key, mask=evicts)
        tl.debug_barrier()  # the old row and key are read by all threads before they are overwritten
    tl.store(slots + at, slot, mask=valid)
    tl.store(row, incoming, mask=placed[:, None] & inside)
    tl.store(index_keys + slot, key, mask=placed)
    tl.store(pins_and_scores + slot, tl.full([BLOCK], word, tl.int64), mask=placed)
    if tl.program_id(0) == 0:
        tl.store(number, sum_before(counts, tl.cdiv(n, RANK_BLOCK), CHUNK))


def insert_and_evict(
    index: SetIndex,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor | None = None,
    *,
    batch: int,
    settled: int,
) -> Evicted:
    """Write values [n, dim] to the rows of keys: present keys are assigned, absent ones inserted; all are pinned for
    `batch`.

    Evicted keys and rows are returned, in the order of the keys that evicted them. LRU: the score is the batch.
    Requires: keys are unique in a call, 0 <= settled < batch.
    """
    n = checked_count(index, keys, tables, None)
    dim = values.shape[1] if values.dim() == 2 else 0
    if values.shape[:1] != (n,) or dim == 0 or values.dtype != rows.dtype or values.stride(1) != 1:
        raise BatchError(f"values is {values.dtype} {list(values.shape)}; it must be {rows.dtype} [{n}, dim]")
    if rows.dim() != 2 or rows.shape[0] != index.capacity or rows.shape[1] < dim or rows.stride(1) != 1:
        raise BatchError(f"rows is {list(rows.shape)}; it must be [{index.capacity}, {dim} or more], rows contiguous")
    if not 0 <= settled < batch:
        raise BatchError(f"batch {batch} cannot pin rows over settled {settled}; number batches from 1, rising")

    def ints(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=index.device)

    out = Evicted(torch.empty_like(keys), values.new_empty(n, dim), ints(n), ints(1))
    if n == 0:
        return out._replace(number=out.number.zero_())
    blocks = cdiv(n, RANK_BLOCK)
    homes, found, chosen, ranks, counts = ints(n), ints(n), ints(n), ints(n), ints(blocks)
    mixed_home_kernel[(cdiv(n, INSERT_BLOCK),)](
        index.keys, index.pins, index.first, index.count, keys, homes if tables is None else tables, homes, found, n,
        batch, TABLES=tables is not None, BLOCK=INSERT_BLOCK, num_warps=INSERT_WARPS,
    )  # fmt: skip
    homes, order = homes.sort(stable=True)
    mixed_choose_kernel[(cdiv(n, INSERT_BLOCK),)](
        index.keys, index.pins, index.scores, homes, order, chosen, found, n, settled, BLOCK=INSERT_BLOCK,
        num_warps=INSERT_WARPS,
    )  # fmt: skip
    rank_kernel[(blocks,)](chosen, ranks, counts, n, BLOCK=RANK_BLOCK, num_warps=INSERT_WARPS)
    padded = power_of_2(dim)
    block = min(64, max(16, SWAP_ELEMENTS // padded))
    swap_kernel[(cdiv(n, block),)](
        index.keys, index.pins_and_scores, rows, keys, values, chosen, ranks, counts,
        out.slots, out.keys, out.values, out.number, n, pack_pin_and_score(batch, batch),
        DIM=dim, PADDED=padded, STRIDE=rows.stride(0), VALUES_STRIDE=values.stride(0),
        RANK_BLOCK=RANK_BLOCK, CHUNK=RANK_BLOCK, BLOCK=block, num_warps=SWAP_WARPS,
    )  # fmt: skip
    return out
