"""Keys to slots: one 64-byte load of the set, eight compares, and the same for the second choice where that fails.

Keys are laid out table by table; a block of keys mostly lies in one table, which it finds by counting the tables that
begin before it, and it visits the others only where it crosses into them. The search loads nothing but the keys and
their sets: 72 bytes a key in, 4 out. Of a batch in flight, found slots are pinned in the same pass, and warmed
(touch.py): one word of eight bytes, which every writer makes of the same old one, so no order matters. The number of
absent keys is added up on the device, from which the host learns whether there is anything to fetch.

find_rows copies the rows in the same kernel, for lookups that end there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hotrow.errors import BatchError
from hotrow.kernels.index.key_hash import half_of, hash_key, set_of
from hotrow.kernels.index.launch_arguments import BATCH, SCORE, term
from hotrow.kernels.index.sets import SetIndex, check
from hotrow.kernels.index.touch import first_score, warmed
from hotrow.kernels.launch import cdiv, fast, power_of_2

BLOCK, WARPS = 256, 4
ROWS_ELEMENTS, ROWS_WARPS = 4096, 4  # of a block in find_rows: keys * padded dim


class Warmth(NamedTuple):
    """How scores rise: the policy of touch()."""

    policy: str
    half_life: float


@triton.jit
def table_at(begins, position, TABLES: tl.constexpr, PADDED: tl.constexpr):
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
        table = table_at(begins, start, TABLES, PADDED)
        until = table_at(begins, last, TABLES, PADDED)
        sets = set_of(halves, tl.load(first + table), tl.load(count + table))
        while table < until:  # a range() of loaded numbers fails in the interpreter with numpy 2.4
            table += 1
            inside = at >= tl.load(begins + table)
            sets = tl.where(inside, set_of(halves, tl.load(first + table), tl.load(count + table)), sets)
    return sets


@triton.jit
def way_of(index_keys, sets, keys, valid):
    """The slot that holds each key in its set, or -1."""
    ways = tl.arange(0, 8)
    held = tl.load(index_keys + sets[:, None] * 8 + ways[None, :], mask=valid[:, None], other=0)
    way = tl.max(tl.where(held == keys[:, None], ways[None, :], -1), axis=1)
    return tl.where(valid & (way >= 0), sets * 8 + way, -1)


@fast
@triton.jit(do_not_specialize=["n", "only", "batch"])
def find_kernel(
    index_keys, held, first, count, keys, begins, slots, missing, rows, out, n, only, batch, now,
    TABLES: tl.constexpr, PADDED: tl.constexpr, PIN: tl.constexpr, MISSING: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if TERMS:
        now = tl.load(batch + SCORE).to(tl.int32).to(tl.float32, bitcast=True)
    batch = term(batch, BATCH, TERMS)
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    valid = at < n
    key = tl.load(keys + at, mask=valid, other=0)
    last = tl.minimum(start + BLOCK, n) - 1
    hash = hash_key(key)
    sets = sets_of(half_of(hash, False), at, start, last, begins, first, count, only, TABLES, PADDED)
    slot = way_of(index_keys, sets, key, valid)
    left = valid & (slot < 0)
    if tl.max(left.to(tl.int32), axis=0) > 0:
        sets = sets_of(half_of(hash, True), at, start, last, begins, first, count, only, TABLES, PADDED)
        slot = tl.where(left, way_of(index_keys, sets, key, left), slot)
    tl.store(slots + at, slot, mask=valid)
    found = slot >= 0
    if PIN > 0:
        word = tl.load(held + slot, mask=found, other=0)
        score = (word >> 32).to(tl.int32)
        if PIN > 1:
            score = warmed(score.to(tl.float32, bitcast=True), now, PIN == 3).to(tl.int32, bitcast=True)
        pinned = (score.to(tl.int64) << 32) | batch
        tl.store(held + slot, pinned, mask=found & (word.to(tl.int32) < batch))
    if MISSING:
        absent = tl.sum((valid & (slot < 0)).to(tl.int32), axis=0)
        if absent > 0:
            tl.atomic_add(missing, absent, sem="relaxed")
    if DIM > 0:
        column = tl.arange(0, DIM_PADDED)
        wanted = column[None, :] < DIM
        row = tl.load(
            rows + slot.to(tl.int64)[:, None] * STRIDE + column[None, :], mask=found[:, None] & wanted, other=0.0
        )
        tl.store(out + at.to(tl.int64)[:, None] * DIM + column[None, :], row, mask=valid[:, None] & wanted)


def find(
    index: SetIndex,
    keys: torch.Tensor,
    begins: torch.Tensor,
    batch: int | torch.Tensor = 0,
    missing: torch.Tensor | None = None,
    warmth: Warmth | None = None,
) -> torch.Tensor:
    """Slots of keys, int32 [n], -1 where absent. Table t's keys are at positions begins[t] to begins[t + 1].

    With batch > 0 the found slots are pinned for that batch, and with `warmth` their scores rise, unless the batch or
    a later one has pinned them already. The number of absent keys is added to `missing`, int32 [1]. In place of a
    number `batch` may be terms (kernels/index/launch_arguments.py), which say the score too.
    """
    return _launch(index, keys, begins, batch, missing, None, 0, None, warmth)


def find_rows(
    index: SetIndex,
    rows: torch.Tensor,
    dim: int,
    keys: torch.Tensor,
    out: torch.Tensor,
    begins: torch.Tensor,
    batch: int = 0,
    missing: torch.Tensor | None = None,
) -> torch.Tensor:
    """find, and the first `dim` columns of the rows [capacity, stride] into out [n, dim]; zeros where absent."""
    if rows.dim() != 2 or rows.shape[0] != index.capacity or rows.stride(1) != 1 or not 0 < dim <= rows.shape[1]:
        raise BatchError(f"rows is {list(rows.shape)}; it must be [{index.capacity}, {dim} or more], rows contiguous")
    if out.shape != (keys.numel(), dim) or out.dtype != rows.dtype or not out.is_contiguous():
        raise BatchError(f"out is {out.dtype} {list(out.shape)}; it must be {rows.dtype} [{keys.numel()}, {dim}]")
    return _launch(index, keys, begins, batch, missing, rows, dim, out)


def _launch(
    index: SetIndex,
    keys: torch.Tensor,
    begins: torch.Tensor,
    batch: int | torch.Tensor,
    missing: torch.Tensor | None,
    rows: torch.Tensor | None,
    dim: int,
    out: torch.Tensor | None,
    warmth: Warmth | None = None,
) -> torch.Tensor:
    check("keys", keys, torch.int64, None, index.device)
    check("begins", begins, torch.int32, index.tables + 1, index.device)
    if missing is not None:
        check("missing", missing, torch.int32, 1, index.device)
    n = keys.numel()
    slots = torch.empty(n, dtype=torch.int32, device=index.device)
    if n == 0:
        return slots
    padded = power_of_2(dim) if dim else 1
    block, warps = (BLOCK, WARPS) if not dim else (min(BLOCK, max(16, ROWS_ELEMENTS // padded)), ROWS_WARPS)
    terms = isinstance(batch, torch.Tensor)
    pin, now = int(terms or batch > 0), 0.0
    if pin and warmth is not None:
        pin = 2 + (warmth.policy == "lfu")
        now = 0.0 if isinstance(batch, torch.Tensor) else first_score(batch, warmth.policy, warmth.half_life)
    find_kernel[(cdiv(n, block),)](
        index.keys, index.held, index.first, index.count, keys, begins, slots, slots if missing is None else missing,
        slots if rows is None else rows, slots if out is None else out, n, index.counts[0], batch, now,
        TABLES=index.tables, PADDED=power_of_2(index.tables), PIN=pin, MISSING=missing is not None,
        DIM=dim, DIM_PADDED=padded, STRIDE=rows.stride(0) if rows is not None else 0, TERMS=terms, BLOCK=block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return slots
