"""Counter RNG: random numbers by counter, without state.

Number i of a stream is a hash of (seed, stream, i), so a synthetic log can be read from any example on, in any batch
size, by any number of readers. A stream has a name; its own seed is XXH64 of the name and the seed. Counters are
multiplied by the golden ratio first, which makes the core's integer hash exactly splitmix64 started at that seed.

Everything is integer arithmetic, or float64 additions and multiplications that IEEE 754 defines to the bit, so the
numbers are the same on every machine. That is why a normal number here is a sum of four uniform ones instead of
Box-Muller, which needs a logarithm and a cosine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hotrow.features.hashing import IntArray, hash_bytes, hash_ints

FloatArray = npt.NDArray[np.float64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NORMAL_STD = math.sqrt((65536**2 - 1) / 3)
"""The standard deviation of `normals`: the sum of four uniform 16-bit integers."""

_PAIR = np.uint64(0x0000FFFF0000FFFF)
_LOW = np.uint64(0xFFFFFFFF)


def stream(seed: int, *name: object) -> int:
    """The seed of the stream of this name."""
    return hash_bytes("/".join(map(str, name)).encode(), seed) % (1 << 64)


def counters(start: int, count: int) -> IntArray:
    """The counters start to start + count, spread for hashing."""
    return spread(np.arange(start, start + count, dtype=np.int64))


def spread(indices: IntArray) -> IntArray:
    """Counters times the golden ratio, modulo 2**64."""
    product: IntArray = (indices.view(np.uint64) * GOLDEN).view(np.int64)
    return product


def bits(indices: IntArray, stream_seed: int) -> IntArray:
    """64 random bits for every counter. Requires: counters come from `counters`, or are hashes."""
    return hash_ints(indices, stream_seed)


def uniforms(random: IntArray) -> FloatArray:
    """Uniform numbers in [0, 1), from the upper 53 bits.

    >>> uniforms(np.array([0, -1]))
    array([0., 1.])
    """
    fractions: FloatArray = (random.view(np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def normals(random: IntArray) -> IntArray:
    """Nearly normal integers with mean 0 and standard deviation NORMAL_STD, between -131,070 and 131,070.

    >>> normals(np.array([0, -1]))
    array([-131070,  131070])
    """
    wide = random.view(np.uint64)
    pairs = (wide & _PAIR) + ((wide >> np.uint64(16)) & _PAIR)
    sums: IntArray = ((pairs & _LOW) + (pairs >> np.uint64(32))).view(np.int64) - 131_070
    return sums
