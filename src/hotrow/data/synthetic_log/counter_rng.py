"""Draws: random numbers that depend on a place, not on a sequence.

Number i of a stream is a hash of (seed, stream, i), so a synthetic log can be read from any example on, in any batch
size, by any number of readers, and nothing is stored. Streams are named; a name and a seed give the stream's own seed
through XXH64, and a counter times the golden ratio makes the core's integer hash exactly splitmix64, started there.

Everything is integer arithmetic, or float64 additions and multiplications that IEEE 754 defines to the bit: the same
numbers on every machine. That is why a bell-shaped number here is a sum of four uniform ones, not a logarithm and a
cosine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hotrow.features.hashing import IntArray, hash_bytes, hash_ints

FloatArray = npt.NDArray[np.float64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NORMAL_STD = math.sqrt((65536**2 - 1) / 3)
"""The standard deviation of `bells`: a sum of four uniform integers of 16 bits."""

_PAIR = np.uint64(0x0000FFFF0000FFFF)
_LOW = np.uint64(0xFFFFFFFF)


def stream(seed: int, *name: object) -> int:
    """The seed of the stream of this name."""
    return hash_bytes("/".join(map(str, name)).encode(), seed) % (1 << 64)


def counters(start: int, count: int) -> IntArray:
    """Places start to start + count, spread for hashing."""
    return spread(np.arange(start, start + count, dtype=np.int64))


def spread(places: IntArray) -> IntArray:
    """Places times the golden ratio, modulo 2**64."""
    product: IntArray = (places.view(np.uint64) * GOLDEN).view(np.int64)
    return product


def bits(places: IntArray, stream_seed: int) -> IntArray:
    """64 random bits for every place. Requires: places come from `counters` or are hashes themselves."""
    return hash_ints(places, stream_seed)


def uniforms(random: IntArray) -> FloatArray:
    """Uniform numbers from 0 to 1, without 1, out of the upper 53 bits.

    >>> units(np.array([0, -1]))
    array([0., 1.])
    """
    fractions: FloatArray = (random.view(np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def normals(random: IntArray) -> IntArray:
    """Integers with mean 0 and standard deviation BELL_STD, nearly normal, between -131,070 and 131,070.

    >>> bells(np.array([0, -1]))
    array([-131070,  131070])
    """
    wide = random.view(np.uint64)
    pairs = (wide & _PAIR) + ((wide >> np.uint64(16)) & _PAIR)
    sums: IntArray = ((pairs & _LOW) + (pairs >> np.uint64(32))).view(np.int64) - 131_070
    return sums
