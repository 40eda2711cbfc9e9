"""New keys into their sets: which way each takes, whom it drives out.

A key goes to its first choice of set, unless five or more live there and fewer in its second; where batches in flight
hold so much of either that fewer than six ways could be taken, to the one with more of those. Keys are sorted by the
set they go to, so the new keys of one set lie side by side, and a key learns its rank among them from its few
neighbours. The r-th new key of a set takes the r-th best way: empty ways first, in way order, then ways that no
batch in flight holds, lowest score first, lower way first among equals. A key that finds none gets slot -1; the
caller keeps such rows elsewhere for the batch. Every choice is a function of the index and the sorted keys: no
atomics, no races, the same victims on every run.

`choose` only reads, so that the caller can fetch the victims' rows before `place` writes. `insert_and_evict` is both in
one call over a batch with present and absent keys mixed: it pins the present keys, sorts by set, chooses, and swaps the
rows. Only the choice needs the order of the sets; rows move in the caller's order, so that of the four rows that go
through the swap (values in, old row out of its slot, new row into it, old row to the caller) only those at the slot
are random accesses. Bytes a key there, dim 32, full index: home 12, sort 4 x 24, find 88, choose 148, rank 8, swap 560,
together 910: 0.21 ms a million at 4.3 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hotrow.errors import BatchError, OptionError, choices
from hotrow.kernels.index.dedup import total_before
from hotrow.kernels.index.key_hash import empty_key, half_of, hash_key, home_of
from hotrow.kernels.index.launch_arguments import SETTLED, held_word, term
from hotrow.kernels.index.sets import CROWDED, POLICIES, SPILL, WAYS, SetIndex, check, held_by
from hotrow.kernels.launch import cdiv, fast, power_of_2

BLOCK, WARPS = 64, 2
SWAP_ELEMENTS, SWAP_WARPS = 4096, 4  # of a block that swaps rows: keys * padded dim
RANK_BLOCK = 1024

_NEVER = tl.constexpr(1 << 62)
_HELD = tl.constexpr(-(1 << 40))  # below: the order of an empty way
_WINDOW = tl.constexpr(2 * WAYS)
_SPILL = tl.constexpr(SPILL)
_CROWDED = tl.constexpr(CROWDED)
_NOWHERE = tl.constexpr((1 << 31) - 1)
_EVICTS = tl.constexpr(1 << 30)  # beside a slot: somebody must leave it


class Chosen(NamedTuple):
    """Slots of keys, int32, -1 where there was no room; and the keys' numbers by the sets they go to, int64."""

    slots: torch.Tensor
    order: torch.Tensor


class Evicted(NamedTuple):
    """What insert_and_evict drove out, the first `number` entries, and where each given key is now (-1: nowhere)."""

    keys: torch.Tensor  # int64 [n]
    values: torch.Tensor  # float32 [n, dim]
    slots: torch.Tensor  # int32 [n]
    number: torch.Tensor  # int32 [1]


@triton.jit
def taken_ways(held, home):
    """How many of the ways of each home hold a key."""
    return tl.sum((held != empty_key(home)[:, None]).to(tl.int32), axis=1)


@triton.jit
def open_ways(held, pins, home, valid, settled):
    """How many ways of each home are empty or may be taken from their key."""
    at = (home >> 1)[:, None] * 8 + tl.arange(0, 8)[None, :]
    pin = tl.load(pins + 2 * at, mask=valid[:, None], other=0)
    return tl.sum(((held == empty_key(home)[:, None]) | (pin <= settled)).to(tl.int32), axis=1)


@fast
@triton.jit(do_not_specialize=["n", "batch", "settled"])
def target_kernel(
    index_keys, pins, first, count, keys, tables, number, homes, found, n, batch, settled,
    TABLES: tl.constexpr, MIXED: tl.constexpr, NUMBER: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The home each key goes to, _NOWHERE after the real ones.

    MIXED: a present key's is the one that holds it; its slot is pinned for the batch and goes to `found` (-1: absent).
    """
    settled = term(settled, SETTLED, TERMS)
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
    home, other = home_of(half_of(hash, False), begin, size), home_of(half_of(hash, True), begin, size)
    ways = tl.arange(0, 8)[None, :]
    held = tl.load(index_keys + (home >> 1)[:, None] * 8 + ways, mask=valid[:, None], other=0)
    taken = taken_ways(held, home)
    unsure = valid & (taken >= _SPILL)
    if MIXED:
        here = tl.max(tl.where(held == key[:, None], ways, -1), axis=1)
        unsure = valid & (here < 0)
    beside = tl.load(index_keys + (other >> 1)[:, None] * 8 + ways, mask=unsure[:, None], other=0)
    moves = taken_ways(beside, other) < taken
    if not MIXED:
        first_open = open_ways(held, pins, home, unsure, settled)
        other_open = open_ways(beside, pins, other, unsure, settled)
        moves = tl.where(tl.minimum(first_open, other_open) < _CROWDED, other_open > first_open, moves)
    moves = unsure & (taken >= _SPILL) & moves
    if MIXED:
        there = tl.where(unsure, tl.max(tl.where(beside == key[:, None], ways, -1), axis=1), -1)
        moves |= there >= 0
        slot = tl.where(here >= 0, (home >> 1) * 8 + here, tl.where(there >= 0, (other >> 1) * 8 + there, -1))
        tl.store(found + at, slot, mask=at < n)
        tl.store(pins + 2 * slot, tl.full([BLOCK], batch, tl.int32), mask=valid & (slot >= 0))
    tl.store(homes + at, tl.where(valid, tl.where(moves, other, home), _NOWHERE), mask=at < n)


@triton.jit
def ranked_ways(index_keys, pins, scores, home, valid, settled):
    """Per way of each home an int64 that orders them, its low three bits the way; _NEVER where none may take it."""
    ways = tl.arange(0, 8)[None, :]
    at = (home >> 1)[:, None] * 8 + ways
    valid = valid[:, None]
    held = tl.load(index_keys + at, mask=valid, other=0)
    pin = tl.load(pins + 2 * at, mask=valid, other=0)
    bits = tl.load(scores + 2 * at, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    by_score = tl.where(pin > settled, _NEVER, rising * 8 + ways)
    by_way = ways.to(tl.int64) - _NEVER
    return tl.where(held == empty_key(home)[:, None], by_way, by_score)


@fast
@triton.jit(do_not_specialize=["n", "settled"])
def choose_kernel(
    index_keys, pins, scores, homes, order_of, slots, found, n, settled,
    MIXED: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Homes are sorted, slots come out in the order of the keys. MIXED: some keys are present (found[i] >= 0), and
    slots whose holder must leave have _EVICTS in them."""
    settled = term(settled, SETTLED, TERMS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    home = tl.load(homes + at, mask=at < n, other=_NOWHERE)
    valid = home != _NOWHERE
    asks = valid
    if MIXED:
        source = tl.load(order_of + at, mask=at < n, other=0)
        present = tl.load(found + source, mask=valid, other=0)
        asks = valid & (present < 0)

    # A set has eight ways, so at most eight earlier keys are present and eight absent ones fill it: no need to look
    # further back than sixteen. Most keys are alone in their set, and the loop ends when all have seen the border.
    rank = at * 0
    same = valid
    looking = tl.max(same.to(tl.int32), axis=0)
    step = looking * 0
    while (looking > 0) & (step < _WINDOW):
        step += 1
        before = at - step
        inside = same & (before >= 0)
        same = inside & (tl.load(homes + before, mask=inside, other=-1) == home)
        counted = same
        if MIXED:
            earlier = tl.load(order_of + before, mask=same, other=0)
            counted = same & (tl.load(found + earlier, mask=same, other=0) < 0)
        rank += counted.to(tl.int32)
        looking = tl.max(same.to(tl.int32), axis=0)

    order = ranked_ways(index_keys, pins, scores, home, asks, settled)
    smallest = tl.min(order, axis=1)
    best = smallest
    most = tl.minimum(tl.max(tl.where(asks, rank, 0), axis=0), 7)
    turn = most * 0
    while turn < most:
        turn += 1
        order = tl.where(order == smallest[:, None], _NEVER, order)
        smallest = tl.min(order, axis=1)
        best = tl.where(rank >= turn, smallest, best)
    taken = asks & (rank < 8) & (best < _NEVER)
    slot = tl.where(taken, (home >> 1) * 8 + (best & 7).to(tl.int32), -1)
    if MIXED:
        slot = tl.where(asks, tl.where(taken & (best >= _HELD), slot | _EVICTS, slot), present)
    else:
        source = tl.load(order_of + at, mask=at < n, other=0)
    tl.store(slots + source, slot, mask=at < n)


@fast
@triton.jit(do_not_specialize=["n", "word"])
def place_kernel(
    index_keys, held, keys, slots, number, n, word, NUMBER: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = n
    if NUMBER:
        real = tl.minimum(n, tl.load(number))
    slot = tl.load(slots + at, mask=at < real, other=-1)
    mask = slot >= 0
    tl.store(index_keys + slot, tl.load(keys + at, mask=mask, other=0), mask=mask)
    tl.store(held + slot, tl.full([BLOCK], 0, tl.int64) + held_word(word, TERMS), mask=mask)


@fast
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


@fast
@triton.jit(do_not_specialize=["n"])
def rank_kernel(chosen, ranks, counts, n, BLOCK: tl.constexpr):
    """Each evicting key's place among its block's, -1 for the others, and how many the block has."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(chosen + at, mask=at < n, other=-1)
    evicts = (slot >= _EVICTS).to(tl.int32)
    tl.store(ranks + at, tl.where(evicts > 0, tl.cumsum(evicts, axis=0) - 1, -1), mask=at < n)
    tl.store(counts + tl.program_id(0), tl.sum(evicts, axis=0))


@fast
@triton.jit(do_not_specialize=["n", "word"])
def swap_kernel(
    index_keys, held, rows, keys, values, chosen, ranks, counts, slots, out_keys, out_values, number, n, word,
    DIM: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr,
    RANK_BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    valid = at < n
    slot = tl.load(chosen + at, mask=valid, other=-1)
    rank = tl.load(ranks + at, mask=valid, other=-1)
    column = tl.arange(0, PADDED)[None, :]
    wanted = column < DIM
    placed, evicts = slot >= 0, rank >= 0
    slot = tl.where(placed, slot & (_EVICTS - 1), -1)
    coming = tl.load(
        values + at.to(tl.int64)[:, None] * VALUES_STRIDE + column, mask=placed[:, None] & wanted, other=0.0
    )
    key = tl.load(keys + at, mask=placed, other=0)
    row = rows + slot.to(tl.int64)[:, None] * STRIDE + column
    if tl.max(rank, axis=0) >= 0:
        out = total_before(counts, start // RANK_BLOCK, CHUNK) + rank
        leaving = tl.load(row, mask=evicts[:, None] & wanted, other=0.0)
        old_key = tl.load(index_keys + slot, mask=evicts, other=0)
        tl.store(out_values + out.to(tl.int64)[:, None] * DIM + column, leaving, mask=evicts[:, None] & wanted)
        tl.store(out_keys + out, old_key, mask=evicts)
        tl.debug_barrier()  # the old row and key are read by all threads before they are overwritten
    tl.store(slots + at, slot, mask=valid)
    tl.store(row, coming, mask=placed[:, None] & wanted)
    tl.store(index_keys + slot, key, mask=placed)
    tl.store(held + slot, tl.full([BLOCK], word, tl.int64), mask=placed)
    if tl.program_id(0) == 0:
        tl.store(number, total_before(counts, tl.cdiv(n, RANK_BLOCK), CHUNK))


def choose(
    index: SetIndex,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    number: torch.Tensor | None,
    settled: int,
    policy: str = "lru",
) -> torch.Tensor:
    """Slots for the first `number` (None: all) keys, int32 [n]; -1 where a set has no room, and after them."""
    return choose_in_order(index, keys, tables, number, settled, policy).slots


def choose_in_order(
    index: SetIndex,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    number: torch.Tensor | None,
    settled: int | torch.Tensor,
    policy: str = "lru",
) -> Chosen:
    """choose, with the order of the sets, which is one of tables too; what is after `number` is last.

    Requires: keys are absent and unique; among those of one set, the earlier one has the choice. A row is in the way of
    nobody once the last batch that holds it is at most `settled`. Every policy gives up its lowest score first. In
    place of a number `settled` may be terms (kernels/index/launch_arguments.py).
    """
    if policy not in POLICIES:
        raise OptionError(f"there is no policy {policy!r}; {choices(policy, POLICIES)}")
    n = _checked(index, keys, tables, number)
    slots = torch.empty(n, dtype=torch.int32, device=index.device)
    order = keys
    if n:
        homes, order = _targets(index, keys, tables, number, None, 0, settled)
        choose_kernel[(cdiv(n, BLOCK),)](
            index.keys, index.pins, index.scores, homes, order, slots, slots, n, settled,
            MIXED=False, TERMS=isinstance(settled, torch.Tensor), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return Chosen(slots, order)


def place(
    index: SetIndex,
    keys: torch.Tensor,
    slots: torch.Tensor,
    number: torch.Tensor | None,
    batch: int | torch.Tensor,
    score: float = 0.0,
) -> None:
    """Write the first `number` (None: all) keys to their slots (-1: passed over), pinned for a batch, with a score; in
    place of both, terms."""
    n = _checked(index, keys, None, number, slots)
    if n:
        terms = isinstance(batch, torch.Tensor)
        place_kernel[(cdiv(n, BLOCK),)](
            index.keys, index.held, keys, slots, slots if number is None else number, n,
            batch if isinstance(batch, torch.Tensor) else held_by(batch, score),
            NUMBER=number is not None, TERMS=terms, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def erase(index: SetIndex, slots: torch.Tensor) -> None:
    """Empty the ways at slots, pinned or not; slots outside the index are passed over."""
    n = _checked(index, None, None, None, slots)
    if n:
        erase_kernel[(cdiv(n, BLOCK),)](
            index.keys, index.pins, index.scores, index.first, slots, n, index.capacity, index.tables,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


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
    """Values [n, dim] to the rows of keys: present keys are assigned, absent ones inserted, pinned for `batch`.

    What absent keys drive out is returned, in the order of the keys that did. LRU: the score is the batch. Requires:
    keys are unique in a call, 0 <= settled < batch.
    """
    n = _checked(index, keys, tables, None)
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
    found, chosen, ranks, counts = ints(n), ints(n), ints(n), ints(blocks)
    homes, order = _targets(index, keys, tables, None, found, batch, settled)
    choose_kernel[(cdiv(n, BLOCK),)](
        index.keys, index.pins, index.scores, homes, order, chosen, found, n, settled,
        MIXED=True, TERMS=False, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    rank_kernel[(blocks,)](chosen, ranks, counts, n, BLOCK=RANK_BLOCK, num_warps=WARPS)
    padded = power_of_2(dim)
    block = min(64, max(16, SWAP_ELEMENTS // padded))
    swap_kernel[(cdiv(n, block),)](
        index.keys, index.held, rows, keys, values, chosen, ranks, counts,
        out.slots, out.keys, out.values, out.number, n, held_by(batch, batch),
        DIM=dim, PADDED=padded, STRIDE=rows.stride(0), VALUES_STRIDE=values.stride(0),
        RANK_BLOCK=RANK_BLOCK, CHUNK=RANK_BLOCK, BLOCK=block, num_warps=SWAP_WARPS,
    )  # fmt: skip
    return out


def _targets(
    index: SetIndex,
    keys: torch.Tensor,
    tables: torch.Tensor | None,
    number: torch.Tensor | None,
    found: torch.Tensor | None,
    batch: int,
    settled: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sets that keys go to, sorted, and the order that sorts them; with `found`, where present ones are, pinned."""
    n = keys.numel()
    homes = torch.empty(n, dtype=torch.int32, device=index.device)
    target_kernel[(cdiv(n, BLOCK),)](
        index.keys, index.pins, index.first, index.count, keys, homes if tables is None else tables,
        homes if number is None else number, homes, homes if found is None else found, n, batch, settled,
        TABLES=tables is not None, MIXED=found is not None, NUMBER=number is not None,
        TERMS=isinstance(settled, torch.Tensor), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    sorted_homes, order = homes.sort(stable=True)
    return sorted_homes, order


def _checked(
    index: SetIndex,
    keys: torch.Tensor | None,
    tables: torch.Tensor | None,
    number: torch.Tensor | None,
    slots: torch.Tensor | None = None,
) -> int:
    """How many entries there are, after a look at their types."""
    n = keys.numel() if keys is not None else slots.numel()
    if keys is not None:
        check("keys", keys, torch.int64, n, index.device)
    if slots is not None:
        check("slots", slots, torch.int32, n, index.device)
    if tables is not None:
        check("tables", tables, torch.int32, n, index.device)
    elif index.tables > 1 and slots is None:
        raise BatchError(f"the index has {index.tables} tables; pass tables=, the table of each key")
    if number is not None:
        check("number", number, torch.int32, 1, index.device)
    return n
