"""Which set holds a key: the hash that DRAM's shards use too, and the two sets that it picks.

hash_key is that of core/hash/hash.h: mix64(key + golden), a bijection of the 64-bit integers, so distinct keys never
have one hash and `unhash` gives the key back. A table owns `count` sets from `first` on, and a key may be in two of
them. The high half of its hash, scaled to the number of sets, is its first choice; so keys sorted by unsigned hash read
the index front to back. The low half is its second choice.

A set is passed on as its *home*, set * 2 + (it is the first of its table): the key that marks an empty way (sets.py)
differs between a table's first set and the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
INVERSES = tuple(pow(m, -1, 1 << 64) for m in MULTIPLIERS)
MASK = (1 << 64) - 1


def signed(x: int) -> int:
    """64 bits as an int64."""
    return x - (1 << 64) if x >> 63 else x


def key_of(hash: int) -> int:
    """The int64 key whose hash is the given unsigned number.

    >>> key_of(0) == -0x9E3779B97F4A7C15 + 2**64
    True
    """
    x = hash ^ (hash >> 31) ^ (hash >> 62)
    x = x * INVERSES[1] & MASK
    x ^= (x >> 27) ^ (x >> 54)
    x = x * INVERSES[0] & MASK
    x ^= (x >> 30) ^ (x >> 60)
    return signed((x - GOLDEN) & MASK)


LOWEST = key_of(0)  # lives in its table's first set
HIGHEST = key_of(MASK)  # lives in its table's last set

_GOLDEN = tl.constexpr(GOLDEN)
_M1, _M2 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_I1, _I2 = tl.constexpr(INVERSES[0]), tl.constexpr(INVERSES[1])
_LOWEST, _HIGHEST = tl.constexpr(LOWEST), tl.constexpr(HIGHEST)


@triton.jit
def hash_key(keys):
    """int64 keys to uint64 hashes."""
    x = keys.to(tl.uint64, bitcast=True) + _GOLDEN
    x = (x ^ (x >> 30)) * _M1
    x = (x ^ (x >> 27)) * _M2
    return x ^ (x >> 31)


@triton.jit
def unhash(x):
    """uint64 hashes back to int64 keys."""
    x = (x ^ (x >> 31) ^ (x >> 62)) * _I2
    x = (x ^ (x >> 27) ^ (x >> 54)) * _I1
    x = x ^ (x >> 30) ^ (x >> 60)
    return (x - _GOLDEN).to(tl.int64, bitcast=True)


@triton.jit
def half_of(hash, SECOND: tl.constexpr):
    """The half of a hash that picks the key's first or second choice of set."""
    return hash & 0xFFFFFFFF if SECOND else hash >> 32


@triton.jit
def set_of(half, first, count):
    """The int32 set that half a hash picks in a table that owns `count` sets from `first` on."""
    scaled = (half * count.to(tl.uint64)) >> 32
    return scaled.to(tl.int32) + first.to(tl.int32)


@triton.jit
def home_of(half, first, count):
    """set * 2 + 1 for the first set of a table, set * 2 for the others."""
    set = set_of(half, first, count)
    return set * 2 + (set == first.to(tl.int32)).to(tl.int32)


@triton.jit
def empty_key(home):
    """The key that an empty way of a home holds."""
    return tl.where(home & 1 == 1, _HIGHEST, _LOWEST)
