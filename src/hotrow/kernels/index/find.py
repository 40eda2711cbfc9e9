"""Keys to slots: one 64-byte load of the first set, eight compares; the same for the second set where that fails.

Keys are laid out table by table. A block of keys mostly lies in one table, which it finds by counting the tables that
begin before it; other tables are visited only by a block that crosses into them. The search loads the keys and their
sets and nothing else: 72 bytes a key in, 4 out.

For a batch in flight the same pass pins the found slots and raises their scores (touch.py). Pin and score are one word
of eight bytes, and every writer computes it from the same old word, so the order of writers does not matter. The number
of absent keys is added up on the device; from it the host learns whether there is anything to fetch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hotrow.kernels.index.key_hash import half_of, hash_key, set_of
from hotrow.kernels.index.launch_arguments import BATCH, SCORE, argument
from hotrow.kernels.index.sets import SetIndex, check_tensor
from hotrow.kernels.index.touch import initial_score, score_after_use
from hotrow.kernels.launch import cached_launch, cdiv, power_of_2

BLOCK, WARPS = 256, 4


class ScorePolicy(NamedTuple):
    """How a use raises a score: the arguments of touch()."""

    policy: str
    half_life: float


@triton.jit
def table_of_position(begins, position, TABLES: tl.constexpr, PADDED: tl.constexpr):
    """The last table that begins at or before a position: a scalar."""
    at = tl.arange(0, PADDED)
    inner = (at > 0) & (at < TABLES)
    begin = tl.load(begins + at, mask=inner, other=0)
    return tl.sum((inner & (begin <= position)).to(tl.int32), axis=0)


@triton.jit
def sets_of(halves, at, start, last, begins, first, count, only, TABLES: tl.constexpr, PADDED: tl.constexpr):
    """Sets of a block of half hashes at rising positions `at`; `start` is the first and `last` the last valid one."""
    if TABLES == 1:
        sets = (halves * only.to(tl.uint64) >> 32).to(tl.int32)
    else:
        table = table_of_position(begins, start, TABLES, PADDED)
        until = table_of_position(begins, last, TABLES, PADDED)
        sets = set_of(halves, tl.load(first + table), tl.load(count + table))
        while table < until:  # a range() of loaded numbers fails in the interpreter with numpy 2.4
            table += 1
            inside = at >= tl.load(begins + table)
            sets = tl.where(inside, set_of(halves, tl.load(first + table), tl.load(count + table)), sets)
    return sets


@triton.jit
def find_in_set(index_keys, sets, keys, valid):
    """The slot that holds each key in its set, or -1."""
    ways = tl.arange(0, 8)
    resident = tl.load(index_keys + sets[:, None] * 8 + ways[None, :], mask=valid[:, None], other=0)
    way = tl.max(tl.where(resident == keys[:, None], ways[None, :], -1), axis=1)
    return tl.where(valid & (way >= 0), sets * 8 + way, -1)


@triton.jit
def find_block(index_keys, first, count, keys, begins, n, only, TABLES: tl.constexpr, PADDED: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """A program's positions, which of them are keys, and their slots (-1: absent)."""
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    valid = at < n
    key = tl.load(keys + at, mask=valid, other=0)
    last = tl.minimum(start + BLOCK, n) - 1
    hash = hash_key(key)
    sets = sets_of(half_of(hash, False), at, start, last, begins, first, count, only, TABLES, PADDED)
    slot = find_in_set(index_keys, sets, key, valid)
    left = valid & (slot < 0)
    if tl.max(left.to(tl.int32), axis=0) > 0:
        sets = sets_of(half_of(hash, True), at, start, last, begins, first, count, only, TABLES, PADDED)
        slot = tl.where(left, find_in_set(index_keys, sets, key, left), slot)
    return at, valid, slot


@cached_launch
@triton.jit(do_not_specialize=["n", "only", "batch"])
def find_kernel(
    index_keys, pins_and_scores, first, count, keys, begins, slots, missing, n, only, batch, now,
    TABLES: tl.constexpr, PADDED: tl.constexpr, PIN: tl.constexpr, MISSING: tl.constexpr, ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if ON_DEVICE:
        now = tl.load(batch + SCORE).to(tl.int32).to(tl.float32, bitcast=True)
    batch = argument(batch, BATCH, ON_DEVICE)
    at, valid, slot = find_block(index_keys, first, count, keys, begins, n, only, TABLES, PADDED, BLOCK)
    tl.store(slots + at, slot, mask=valid)
    found = slot >= 0
    if PIN > 0:
        word = tl.load(pins_and_scores + slot, mask=found, other=0)
        score = (word >> 32).to(tl.int32)
        if PIN > 1:
            score = score_after_use(score.to(tl.float32, bitcast=True), now, PIN == 3).to(tl.int32, bitcast=True)
        pinned = (score.to(tl.int64) << 32) | batch
        tl.store(pins_and_scores + slot, pinned, mask=found & (word.to(tl.int32) < batch))
    if MISSING:
        absent = tl.sum((valid & (slot < 0)).to(tl.int32), axis=0)
        if absent > 0:
            tl.atomic_add(missing, absent, sem="relaxed")


def find(
    index: SetIndex,
    keys: torch.Tensor,
    begins: torch.Tensor,
    batch: int | torch.Tensor = 0,
    missing: torch.Tensor | None = None,
    scoring: ScorePolicy | None = None,
) -> torch.Tensor:
    """Slots of keys, int32 [n], -1 where absent. Table t's keys are at positions begins[t] to begins[t + 1].

    With batch > 0 the found slots are pinned for that batch, and with `scoring` their scores rise, unless this or a
    later batch has pinned them already. The number of absent keys is added to `missing`, int32 [1]. `batch` may be a
    number or the batch's arguments on the device (launch_arguments.py), which hold the score too.
    """
    check_tensor("keys", keys, torch.int64, None, index.device)
    check_tensor("begins", begins, torch.int32, index.tables + 1, index.device)
    if missing is not None:
        check_tensor("missing", missing, torch.int32, 1, index.device)
    n = keys.numel()
    slots = torch.empty(n, dtype=torch.int32, device=index.device)
    if n == 0:
        return slots
    on_device = isinstance(batch, torch.Tensor)
    pin, now = int(on_device or batch > 0), 0.0
    if pin and scoring is not None:
        pin = 2 + (scoring.policy == "lfu")
        now = 0.0 if isinstance(batch, torch.Tensor) else initial_score(batch, scoring.policy, scoring.half_life)
    find_kernel[(cdiv(n, BLOCK),)](
        index.keys, index.pins_and_scores, index.first, index.count, keys, begins, slots,
        slots if missing is None else missing, n, index.counts[0], batch, now,
        TABLES=index.tables, PADDED=power_of_2(index.tables), PIN=pin, MISSING=missing is not None,
        ON_DEVICE=on_device, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return slots
