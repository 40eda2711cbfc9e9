"""New keys into the index: the slot each gets, and the row it evicts.

A key goes to its first choice of set, unless five or more ways are occupied there and fewer in its second. Where
batches in flight have pinned so much of either set that fewer than six ways are available, it goes to the set with
more available ways.

Keys are sorted by set, so new keys of one set lie side by side, and each key counts its rank among its few neighbours.
The r-th new key of a set gets the r-th best way: empty ways first, in way order; then unpinned ways, lowest score
first, lower way first among equals. A key for which no way is left gets slot -1, and the caller keeps its row outside
the cache for the batch. Every choice is a function of the index and the sorted keys: no atomics, no races, the same
evictions on every run.

`choose_slots` only reads, so the caller can copy the evicted rows out before `insert_keys` writes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hotrow.errors import BatchError, OptionError, choices
from hotrow.kernels.index.key_hash import empty_key, half_of, hash_key, home_of
from hotrow.kernels.index.launch_arguments import SETTLED, argument, pin_and_score
from hotrow.kernels.index.sets import CROWDED, POLICIES, SPILL, WAYS, SetIndex, check_tensor, pack_pin_and_score
from hotrow.kernels.launch import cached_launch, cdiv

BLOCK, WARPS = 64, 2

UNAVAILABLE = tl.constexpr(1 << 62)  # the priority of a pinned way; an empty way's is -UNAVAILABLE plus its number
NO_HOME = tl.constexpr((1 << 31) - 1)  # of entries after the real keys; sorts last
WINDOW = tl.constexpr(2 * WAYS)
_SPILL = tl.constexpr(SPILL)
_CROWDED = tl.constexpr(CROWDED)


class Chosen(NamedTuple):
    """Slots of keys, int32, -1 where no way was left; and the positions of the keys sorted by home, int64."""

    slots: torch.Tensor
    order: torch.Tensor


@triton.jit
def occupied_ways(resident, home):
    """How many ways of each home hold a key."""
    return tl.sum((resident != empty_key(home)[:, None]).to(tl.int32), axis=1)


@triton.jit
def available_ways(resident, pins, home, valid, settled):
    """How many ways of each home are empty or hold a row that may be evicted."""
    at = (home >> 1)[:, None] * 8 + tl.arange(0, 8)[None, :]
    pin = tl.load(pins + 2 * at, mask=valid[:, None], other=0)
    return tl.sum(((resident == empty_key(home)[:, None]) | (pin <= settled)).to(tl.int32), axis=1)


@cached_launch
@triton.jit(do_not_specialize=["n", "settled"])
def home_kernel(
    index_keys, pins, first, count, keys, tables, number, homes, n, settled,
    TABLES: tl.constexpr, NUMBER: tl.constexpr, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The home each key goes to; NO_HOME after the real keys."""
    settled = argument(settled, SETTLED, ON_DEVICE)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = n
    if NUMBER:
        real = tl.minimum(n, tl.load(number))
    valid = at < real
    key = tl.load(keys + at, mask=valid, other=0)
    table = at * 0
    if TABLES:
        table = tl.load(tables + at, mask=valid, other=0)
    begin, size, hash = tl.load(first + table), tl.load(count + table), hash_key(key)
    home, second = home_of(half_of(hash, False), begin, size), home_of(half_of(hash, True), begin, size)
    ways = tl.arange(0, 8)[None, :]
    resident = tl.load(index_keys + (home >> 1)[:, None] * 8 + ways, mask=valid[:, None], other=0)
    occupied = occupied_ways(resident, home)
    spills = valid & (occupied >= _SPILL)
    in_second = tl.load(index_keys + (second >> 1)[:, None] * 8 + ways, mask=spills[:, None], other=0)
    to_second = occupied_ways(in_second, second) < occupied
    available = available_ways(resident, pins, home, spills, settled)
    second_available = available_ways(in_second, pins, second, spills, settled)
    crowded = tl.minimum(available, second_available) < _CROWDED
    to_second = spills & tl.where(crowded, second_available > available, to_second)
    tl.store(homes + at, tl.where(valid, tl.where(to_second, second, home), NO_HOME), mask=at < n)


@triton.jit
def way_priorities(index_keys, pins, scores, home, valid, settled):
    """An int64 for each way of each home: lowest is taken first, the low three bits are the way, UNAVAILABLE if
    pinned."""
    ways = tl.arange(0, 8)[None, :]
    at = (home >> 1)[:, None] * 8 + ways
    valid = valid[:, None]
    resident = tl.load(index_keys + at, mask=valid, other=0)
    pin = tl.load(pins + 2 * at, mask=valid, other=0)
    bits = tl.load(scores + 2 * at, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # an integer that orders as the float does
    by_score = tl.where(pin > settled, UNAVAILABLE, rising * 8 + ways)
    by_way = ways.to(tl.int64) - UNAVAILABLE
    return tl.where(resident == empty_key(home)[:, None], by_way, by_score)


@triton.jit
def priority_of_rank(priorities, rank, wanted):
    """The rank-th lowest of each key's eight priorities."""
    smallest = tl.min(priorities, axis=1)
    best = smallest
    most = tl.minimum(tl.max(tl.where(wanted, rank, 0), axis=0), 7)
    turn = most * 0
    while turn < most:
        turn += 1
        priorities = tl.where(priorities == smallest[:, None], UNAVAILABLE, priorities)
        smallest = tl.min(priorities, axis=1)
        best = tl.where(rank >= turn, smallest, best)
    return best


@cached_launch
@triton.jit(do_not_specialize=["n", "settled"])
def choose_kernel(
    index_keys, pins, scores, homes, order_of, slots, n, settled, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Homes are sorted; slots come out in the order of the keys."""
    settled = argument(settled, SETTLED, ON_DEVICE)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    home = tl.load(homes + at, mask=at < n, other=NO_HOME)
    valid = home != NO_HOME
    # A set has eight ways, so all ranks of eight or more mean "no way left", and sixteen neighbours are enough. Most
    # keys are the only new one of their set, and the loop ends when every key has seen the border of its set.
    rank = at * 0
    same = valid
    looking = tl.max(same.to(tl.int32), axis=0)
    step = looking * 0
    while (looking > 0) & (step < WINDOW):
        step += 1
        before = at - step
        inside = same & (before >= 0)
        same = inside & (tl.load(homes + before, mask=inside, other=-1) == home)
        rank += same.to(tl.int32)
        looking = tl.max(same.to(tl.int32), axis=0)
    best = priority_of_rank(way_priorities(index_keys, pins, scores, home, valid, settled), rank, valid)
    chosen = valid & (rank < 8) & (best < UNAVAILABLE)
    slot = tl.where(chosen, (home >> 1) * 8 + (best & 7).to(tl.int32), -1)
    position = tl.load(order_of + at, mask=at < n, other=0)
    tl.store(slots + position, slot, mask=at < n)


@cached_launch
@triton.jit(do_not_specialize=["n", "word"])
def insert_kernel(
    index_keys, pins_and_scores, keys, slots, number, n, word,
    NUMBER: tl.constexpr, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = n
    if NUMBER:
        real = tl.minimum(n, tl.load(number))
    slot = tl.load(slots + at, mask=at < real, other=-1)
    mask = slot >= 0
    tl.store(index_keys + slot, tl.load(keys + at, mask=mask, other=0), mask=mask)
    tl.store(pins_and_scores + slot, tl.full([BLOCK], 0, tl.int64) + pin_and_score(word, ON_DEVICE), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["n", "capacity", "tables"])
def erase_kernel(index_keys, pins, scores, first, slots, n, capacity, tables, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < n, other=-1)
    mask = (slot >= 0) & (slot < capacity)
    home = (slot // 8) * 2
    table = tables * 0
    while table < tables:
        home |= (tl.load(first + table).to(tl.int32) == slot // 8).to(tl.int32)
        table += 1
    tl.store(index_keys + slot, empty_key(home), mask=mask)
    tl.store(pins + 2 * slot, tl.zeros([BLOCK], tl.int32), mask=mask)
    tl.store(scores + 2 * slot, tl.zeros([BLOCK], tl.float32), mask=mask)


def choose_slots(
    index: SetIndex,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    number: torch.Tensor | None,
    settled: int | torch.Tensor,
    policy: str = "lru",
) -> Chosen:
    """Slots for the first `number` (None: all) keys; -1 where no way is left, and after the real keys.

    Requires: keys are absent and unique. Among keys of one set the earlier one chooses first. A row may be evicted once
    the last batch that pinned it is at most `settled`. Every policy evicts the lowest score first. `settled` may be a
    number or the batch's arguments on the device (launch_arguments.py).
    """
    if policy not in POLICIES:
        raise OptionError(f"there is no policy {policy!r}; {choices(policy, POLICIES)}")
    n = checked_count(index, keys, tables, number)
    slots = torch.empty(n, dtype=torch.int32, device=index.device)
    if n == 0:
        return Chosen(slots, keys)
    on_device = isinstance(settled, torch.Tensor)
    homes = torch.empty(n, dtype=torch.int32, device=index.device)
    home_kernel[(cdiv(n, BLOCK),)](
        index.keys, index.pins, index.first, index.count, keys, homes if tables is None else tables,
        homes if number is None else number, homes, n, settled, TABLES=tables is not None, NUMBER=number is not None,
        ON_DEVICE=on_device, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    homes, order = homes.sort(stable=True)
    choose_kernel[(cdiv(n, BLOCK),)](
        index.keys, index.pins, index.scores, homes, order, slots, n, settled, ON_DEVICE=on_device, BLOCK=BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    return Chosen(slots, order)


def insert_keys(
    index: SetIndex,
    keys: torch.Tensor,
    slots: torch.Tensor,
    number: torch.Tensor | None,
    batch: int | torch.Tensor,
    score: float = 0.0,
) -> None:
    """Write the first `number` (None: all) keys to their slots (-1: skipped), pinned for a batch, with a score.

    `batch` may be the batch's arguments on the device, which hold the score too.
    """
    n = checked_count(index, keys, None, number, slots)
    if n:
        on_device = isinstance(batch, torch.Tensor)
        insert_kernel[(cdiv(n, BLOCK),)](
            index.keys, index.pins_and_scores, keys, slots, slots if number is None else number, n,
            batch if isinstance(batch, torch.Tensor) else pack_pin_and_score(batch, score),
            NUMBER=number is not None, ON_DEVICE=on_device, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def erase(index: SetIndex, slots: torch.Tensor) -> None:
    """Empty the ways at slots, pinned or not; slots outside the index are skipped."""
    n = checked_count(index, None, None, None, slots)
    if n:
        erase_kernel[(cdiv(n, BLOCK),)](
            index.keys, index.pins, index.scores, index.first, slots, n, index.capacity, index.tables,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def checked_count(
    index: SetIndex,
    keys: torch.Tensor | None,
    tables: torch.Tensor | None,
    number: torch.Tensor | None,
    slots: torch.Tensor | None = None,
) -> int:
    """The number of entries, after a check of their types, sizes and devices."""
    n = keys.numel() if keys is not None else slots.numel()
    if keys is not None:
        check_tensor("keys", keys, torch.int64, n, index.device)
    if slots is not None:
        check_tensor("slots", slots, torch.int32, n, index.device)
    if tables is not None:
        check_tensor("tables", tables, torch.int32, n, index.device)
    elif index.tables > 1 and slots is None:
        raise BatchError(f"the index has {index.tables} tables; pass tables=, the table of each key")
    if number is not None:
        check_tensor("number", number, torch.int32, 1, index.device)
    return n
