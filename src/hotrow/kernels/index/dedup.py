"""The absent keys of a batch, and unique (table, key) pairs with their inverse.

`dedup` sorts hashes, not keys. The hash is a bijection, so equal hashes are equal keys, and unique keys come out in the
order of their sets: insert.py needs that order, and it reads the index front to back. Several tables take a second,
stable sort by table, because (table, hash) has more than 64 bits. Where the inputs lie table by table the first sort
already brings equal pairs together, and the second is left out if their order does not matter.

After the sort each block counts the runs that begin in it, and the next kernel adds up the counts of the blocks before
it: a prefix sum in two launches whose result depends on the input alone.

Bytes a key (one table): 8 + 8 hash, 8 radix passes of 2 x 16 in torch.sort, 8 + 8 heads, 8 + 8 + 4 + at most 20 out.
The sort is nearly all of it: 0.22 ms for a million int64 keys on an H200.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hotrow.errors import BatchError
from hotrow.kernels.index.key_hash import hash_key, unhash
from hotrow.kernels.index.launch_arguments import valid_count
from hotrow.kernels.index.sets import check_tensor
from hotrow.kernels.launch import cached_launch, cdiv

BLOCK, WARPS = 1024, 4
CHUNK = 256  # block counts added up at a time

_SIGN = tl.constexpr(1 << 63)
_LAST = tl.constexpr((1 << 63) - 1)


class Unique(NamedTuple):
    """Unique (table, key) pairs, sorted by table (unless `dedup` got tables_sorted), then by unsigned hash. The first
    `number` entries are real, the rest 0 (`starts`: undefined).

    `inverse[i]` is the unique entry of input i. `order` is the input positions sorted by unique entry; entry p's are
    order[starts[p]] to order[starts[p] + counts[p] - 1], in input order.
    """

    keys: torch.Tensor  # int64 [n]
    tables: torch.Tensor  # int32 [n]
    counts: torch.Tensor  # int32 [n]
    inverse: torch.Tensor  # int32 [n]
    number: torch.Tensor  # int32 [1]
    order: torch.Tensor  # int32 [n]
    starts: torch.Tensor  # int32 [n]


@triton.jit
def sum_before(counts, block, CHUNK: tl.constexpr):
    """The sum of counts[0] to counts[block - 1]: a scalar."""
    total = tl.zeros([CHUNK], tl.int32)
    begin = block * 0
    while begin < block:
        at = begin + tl.arange(0, CHUNK)
        total += tl.load(counts + at, mask=at < block, other=0)
        begin += CHUNK
    return tl.sum(total, axis=0)


@cached_launch
@triton.jit(do_not_specialize=["n"])
def count_absent_kernel(slots, counts, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    absent = tl.load(slots + at, mask=at < n, other=0) < 0
    tl.store(counts + tl.program_id(0), tl.sum(absent.to(tl.int32), axis=0))


@cached_launch
@triton.jit(do_not_specialize=["n", "number"])
def compact_kernel(
    slots, counts, positions, keys, begins, absent_keys, absent_tables, n, number,
    TABLES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    absent = tl.load(slots + at, mask=at < n, other=0) < 0
    place = sum_before(counts, block, CHUNK) + tl.cumsum(absent.to(tl.int32), axis=0) - 1
    mask = absent & (place < number)
    tl.store(positions + place, at, mask=mask)
    tl.store(absent_keys + place, tl.load(keys + at, mask=mask, other=0), mask=mask)
    table = tl.zeros([BLOCK], tl.int32)
    for t in tl.static_range(1, TABLES):
        table += (at >= tl.load(begins + t)).to(tl.int32)
    tl.store(absent_tables + place, table, mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["n"])
def hash_kernel(keys, hashes, count, n, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hash = hash_key(tl.load(keys + at, mask=at < n, other=0))
    signed = (hash ^ _SIGN).to(tl.int64, bitcast=True)
    if COUNTED:  # entries that are not real sort last; the sort is stable, so they stay behind a real one of that hash
        signed = tl.where(at < valid_count(n, count, COUNTED), signed, _LAST)
    tl.store(hashes + at, signed, mask=at < n)


@triton.jit
def sorted_pair(hashes, by_hash, by_table, tables, at, valid, TABLES: tl.constexpr):
    """Hash, table and input position at sorted positions. TABLES: 0 one table, 1 sorted by table too, 2 by hash
    alone."""
    if TABLES == 0:
        return tl.load(hashes + at, mask=valid, other=0), at * 0, tl.load(by_hash + at, mask=valid, other=0)
    elif TABLES == 1:
        source = tl.load(by_table + at, mask=valid, other=0)
        table = tl.load(tables + at, mask=valid, other=0).to(tl.int32)
        return tl.load(hashes + source, mask=valid, other=0), table, tl.load(by_hash + source, mask=valid, other=0)
    else:
        source = tl.load(by_hash + at, mask=valid, other=0)
        return tl.load(hashes + at, mask=valid, other=0), tl.load(tables + source, mask=valid, other=0), source


@triton.jit
def run_heads(hashes, by_hash, by_table, tables, at, n, TABLES: tl.constexpr):
    """Hashes, tables and input positions at sorted positions, and which of them differ from the one before."""
    valid = at < n
    hash, table, position = sorted_pair(hashes, by_hash, by_table, tables, at, valid, TABLES)
    before, table_before, _ = sorted_pair(hashes, by_hash, by_table, tables, at - 1, valid & (at > 0), TABLES)
    return hash, table, position, valid & ((hash != before) | (table != table_before) | (at == 0))


@cached_launch
@triton.jit(do_not_specialize=["n"])
def count_heads_kernel(
    hashes, by_hash, by_table, tables, counts, count, n,
    TABLES: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = valid_count(n, count, COUNTED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, _, _, head = run_heads(hashes, by_hash, by_table, tables, at, n, TABLES)
    tl.store(counts + tl.program_id(0), tl.sum(head.to(tl.int32), axis=0))


@cached_launch
@triton.jit(do_not_specialize=["n"])
def unique_kernel(
    hashes, by_hash, by_table, tables, counts, keys, unique_tables, starts, order, inverse, number, count, n,
    TABLES: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    n = valid_count(n, count, COUNTED)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    valid = at < n
    hash, table, position, head = run_heads(hashes, by_hash, by_table, tables, at, n, TABLES)
    position = position.to(tl.int32)
    place = sum_before(counts, block, CHUNK) + tl.cumsum(head.to(tl.int32), axis=0) - 1
    tl.store(keys + place, unhash(hash.to(tl.uint64, bitcast=True) ^ _SIGN), mask=head)
    tl.store(starts + place, at, mask=head)
    if TABLES > 0:
        tl.store(unique_tables + place, table, mask=head)
    tl.store(order + at, position, mask=valid)
    tl.store(inverse + position, place, mask=valid)
    tl.store(number + at * 0, place + 1, mask=at == n - 1)


@cached_launch
@triton.jit(do_not_specialize=["n"])
def finish_kernel(
    keys, tables, counts, starts, number, count, n, TABLES: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = tl.load(number)
    padding = (at >= real) & (at < n)
    start = tl.load(starts + at, mask=at < real, other=0)
    end = tl.load(starts + at + 1, mask=at + 1 < real, other=0)
    end = tl.where(at + 1 == real, valid_count(n, count, COUNTED), end)
    tl.store(counts + at, tl.where(at < real, end - start, 0), mask=at < n)
    tl.store(keys + at, tl.zeros([BLOCK], tl.int64), mask=padding)
    if TABLES:
        tl.store(tables + at, tl.zeros([BLOCK], tl.int32), mask=padding)


def compact_keys(
    slots: torch.Tensor, count: int, keys: torch.Tensor, begins: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rising positions, int32 [count], where slots are below 0; the keys at those positions and their tables.

    Table t's keys are at positions begins[t] to begins[t + 1]. If fewer than `count` slots are below 0, the entries
    after them are undefined; if more, the rest is left out.
    """
    check_tensor("slots", slots, torch.int32, None, slots.device)
    n = slots.numel()
    if not 0 <= count <= n:
        raise BatchError(f"count is {count}, but there are {n} slots; pass the number of absent ones")
    positions = torch.empty(count, dtype=torch.int32, device=slots.device)
    absent_keys, absent_tables = torch.empty(count, dtype=torch.int64, device=slots.device), torch.empty_like(positions)
    if count == 0:
        return positions, absent_keys, absent_tables
    grid = (cdiv(n, BLOCK),)
    counts = torch.empty(grid[0], dtype=torch.int32, device=slots.device)
    count_absent_kernel[grid](slots, counts, n, BLOCK=BLOCK, num_warps=WARPS)
    compact_kernel[grid](
        slots, counts, positions, keys, begins, absent_keys, absent_tables, n, count, TABLES=begins.numel() - 1,
        BLOCK=BLOCK, CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    return positions, absent_keys, absent_tables


def hashes_of(keys: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Hashes with their sign bit flipped, int64, so that they sort as unsigned; the largest int64 from `count` on."""
    hashes, n = torch.empty_like(keys), keys.numel()
    if n:
        hash_kernel[(cdiv(n, BLOCK),)](
            keys, hashes, hashes if count is None else count, n, COUNTED=count is not None, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return hashes


def dedup(
    keys: torch.Tensor,
    tables: torch.Tensor | None = None,
    table_count: int | None = None,
    tables_sorted: bool = False,
    count: torch.Tensor | None = None,
) -> Unique:
    """Unique (table, key) pairs of int64 keys and int32 tables (None: one table), with counts and the inverse.

    `table_count`, if known: every table is below it, so there are fewer bits to sort. `tables_sorted`: tables never
    decrease from one input to the next; then there is one sort, and pairs come out by hash, those of one hash by
    table. `count`, int32 [1]: only that many keys are real, and none if it is more than there are.
    """
    check_tensor("keys", keys, torch.int64, None, keys.device)
    n, device = keys.numel(), keys.device
    if n >= 1 << 31:
        raise BatchError(f"{n:,} keys in one call; positions are int32, so split the batch below {1 << 31:,}")
    several = tables is not None
    if several:
        check_tensor("tables", tables, torch.int32, n, device)

    def ints(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    unique = Unique(
        torch.empty_like(keys), ints(n) if several else ints(n).zero_(), ints(n), ints(n), ints(1).zero_(),
        ints(n), ints(n),
    )  # fmt: skip
    if n == 0:
        return unique
    grid = (cdiv(n, BLOCK),)
    hashes = hashes_of(keys, count)
    hashes, by_hash = hashes.sort(stable=True)
    by_table = by_hash
    tables = unique.tables if tables is None else tables
    if several and not tables_sorted:
        tables, by_table = tables.to(narrowest_type(table_count))[by_hash].sort(stable=True)
    counts, mode, counted = ints(grid[0]), int(several) + int(several and tables_sorted), count is not None
    count = unique.number if count is None else count
    count_heads_kernel[grid](
        hashes, by_hash, by_table, tables, counts, count, n, TABLES=mode, COUNTED=counted, BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    unique_kernel[grid](
        hashes, by_hash, by_table, tables, counts, unique.keys, unique.tables, unique.starts, unique.order,
        unique.inverse, unique.number, count, n, TABLES=mode, COUNTED=counted, BLOCK=BLOCK, CHUNK=CHUNK,
        num_warps=WARPS,
    )  # fmt: skip
    finish_kernel[grid](
        unique.keys, unique.tables, unique.counts, unique.starts, unique.number, count, n,
        TABLES=several, COUNTED=counted, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return unique


def narrowest_type(table_count: int | None) -> torch.dtype:
    """The narrowest type to sort tables by: a radix sort's time goes with the bits."""
    if table_count is None or table_count > 1 << 15:
        return torch.int32
    return torch.uint8 if table_count <= 1 << 8 else torch.int16
