"""What each kernel must compute, in plain torch and Python: slow, and short enough to be believed."""

from __future__ import annotations

import math

import torch

from hotrow.kernels.mixing import GOLDEN, MULTIPLIERS
from hotrow.kernels.sets import WAYS, SetIndex

# --- the index: mixing, find, dedup, insert, touch ------------------------------------------------------------------


def _int64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash_key(keys: torch.Tensor) -> torch.Tensor:
    """hash_key of core/hash/hash.h; the 64 bits as int64."""
    x = keys + _int64(GOLDEN)
    x = (x ^ _shift(x, 30)) * _int64(MULTIPLIERS[0])
    x = (x ^ _shift(x, 27)) * _int64(MULTIPLIERS[1])
    return x ^ _shift(x, 31)


def unsigned_order(hashes: torch.Tensor) -> torch.Tensor:
    """int64 values that compare as the hashes do when unsigned."""
    return hashes ^ _int64(1 << 63)


def set_of(hashes: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The set of each hash in a table that owns `count` sets from `first` on. Requires: count < 2^31."""
    return first + (_shift(hashes, 32) * count >> 32)


def tables_at(begins: torch.Tensor, n: int) -> torch.Tensor:
    """The table of each of n positions."""
    return torch.bucketize(torch.arange(n, device=begins.device), begins[1:-1].long(), right=True)


def find(index: SetIndex, keys: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Slots of keys, -1 where absent."""
    sets = set_of(hash_key(keys), index.first[tables], index.count[tables])
    match = index.keys[sets] == keys[:, None]
    slots = sets * WAYS + match.int().argmax(dim=1)
    return torch.where(match.any(dim=1), slots, -1).int()


def find_rows(slots: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows at slots, zeros where the slot is -1."""
    return torch.where(slots[:, None] >= 0, rows[slots.clamp(min=0).long(), :dim], 0)


def compact(slots: torch.Tensor) -> torch.Tensor:
    """Rising positions of the slots below 0."""
    return (slots < 0).nonzero().flatten().int()


def dedup(keys: torch.Tensor, tables: torch.Tensor | None) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Unique (table, key) pairs by table, then by unsigned hash; how often each occurs; the place of each input."""
    of = [0] * len(keys) if tables is None else tables.tolist()
    order = unsigned_order(hash_key(keys)).tolist()
    entries = list(zip(of, order, keys.tolist(), strict=True))
    unique = sorted(set(entries))
    place = {entry: i for i, entry in enumerate(unique)}
    inverse = [place[entry] for entry in entries]
    counts = [0] * len(unique)
    for i in inverse:
        counts[i] += 1
    return [(table, key) for table, _, key in unique], counts, inverse


def choose(index: SetIndex, keys: torch.Tensor, tables: torch.Tensor, settled: int) -> list[int]:
    """The slot of each new key: the r-th of a set takes the r-th best way, and -1 when no way is left."""
    occupied = index.occupied().tolist()
    pins, scores = index.pins.tolist(), index.scores.tolist()
    sets = set_of(hash_key(keys), index.first[tables], index.count[tables]).tolist()
    free: dict[int, list[int]] = {}
    slots = []
    for s in sets:
        if s not in free:
            ways = range(s * WAYS, s * WAYS + WAYS)
            empty = [slot for slot in ways if not occupied[slot]]
            cold = sorted((scores[slot], slot) for slot in ways if occupied[slot] and pins[slot] <= settled)
            free[s] = empty + [slot for _, slot in cold]
        slots.append(free[s].pop(0) if free[s] else -1)
    return slots


def touch(score: float, batch: int, policy: str, half_life: float) -> float:
    """A slot's score after a batch that used it."""
    if policy == "lru":
        return float(batch)
    now = batch / half_life
    high, low = max(score, now), min(score, now)
    return high + math.log2(1 + 2 ** (low - high))
