"""How often a row was seen, in the 16-bit code of core/rows/row_header.h: 12 bits of mantissa, 4 of exponent.

Counts are exact up to 4,095, then within about 1%. What the mantissa cannot hold is rounded by a random draw keyed by
(seed, table, key, step), so the code is the same whether the GPU, DRAM or SSD counted.
"""

from __future__ import annotations

import triton
import triton.language as tl

MANTISSA = tl.constexpr(4095)
MAX_EXPONENT = tl.constexpr(15)


@triton.jit
def total_count(code, seen):
    """decode_count(code) + seen, uint32, of int32 numbers. Up to MANTISSA this is also the new code."""
    return ((code & MANTISSA) << (code >> 12)).to(tl.uint32) + seen.to(tl.uint32)


@triton.jit
def add_count(code, seen, stream, key, step):
    """The int32 code of decode_count(code) + seen. stream and key are int64, the rest int32; seen is 0 or more."""
    total = total_count(code, seen)
    exponent = tl.zeros_like(total)
    for _ in tl.static_range(MAX_EXPONENT):
        exponent += ((total >> exponent) > MANTISSA).to(tl.uint32)
    mantissa = total >> exponent
    rest = total - (mantissa << exponent)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits, _, _, _ = tl.philox(stream, low, high, (low * 0 + step).to(tl.uint32), low * 0)
    up = (rest != 0) & ((bits >> (32 - tl.maximum(exponent, 1))) < rest)
    mantissa += up.to(tl.uint32)
    full = mantissa > MANTISSA
    over = full & (exponent == MAX_EXPONENT)
    shifted = (exponent + full.to(tl.uint32)) << 12 | (mantissa >> full.to(tl.uint32))
    return tl.where(over, MAX_EXPONENT << 12 | MANTISSA, shifted.to(tl.int32))
