"""Stochastic rounding of fp32 to fp16 and bf16: a value is rounded up with the probability of the part that is cut off,
so that small updates count on average.

Element e of a row uses word e % 4 of philox block e / 4, counter (key low, key high, step, block), key = the table's
rounding stream. So the bits depend on (seed, table, key, step, element) alone, not on slots, tiles or other rows. The
low 16 random bits decide for bf16 and the low 13 for fp16; they are added below the last bit that stays. Below fp16's
smallest normal number the step is 2^-24.

A finite value stays finite: beyond the largest it becomes the largest. Infinities and NaN are unchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def draws(stream, key, step, R: tl.constexpr, D: tl.constexpr):
    """uint32 [R, D] of rows with int64 streams and keys [R]."""
    block = tl.zeros([R, D // 4], tl.uint32) + tl.arange(0, D // 4).to(tl.uint32)[None, :]
    low = block * 0 + (key & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = block * 0 + ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    a, b, c, d = tl.philox(stream[:, None], low, high, (block * 0 + step).to(tl.uint32), block)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (R, D))


@triton.jit
def stochastic_round(value, bits, TYPE: tl.constexpr):
    """The bit patterns, int16, of fp32 values rounded to TYPE (fp16 or bf16) with uint32 bits."""
    x = value.to(tl.uint32, bitcast=True)
    size = x & 0x7FFFFFFF
    if TYPE == tl.bfloat16:  # noqa: SIM300
        rounded = tl.minimum((size + (bits & 0xFFFF)) >> 16, 0x7F7F)
        special = tl.where(size == 0x7F800000, 0x7F80, 0x7FC0)
    else:
        small = size < 0x38800000  # 2^-14
        normal = ((size + (bits & 0x1FFF)) >> 13) - 0x1C000
        steps = (tl.where(small, tl.abs(value), 0.0) * 137438953472.0).to(tl.uint32)  # of 2^-37
        rounded = tl.minimum(tl.where(small, (steps + (bits & 0x1FFF)) >> 13, normal), 0x7BFF)
        special = tl.where(size == 0x7F800000, 0x7C00, 0x7E00)
    rounded = tl.where(size < 0x7F800000, rounded, special.to(tl.uint32))
    return (rounded | ((x >> 31) << 15)).to(tl.uint16).to(tl.int16, bitcast=True)
