"""The update rules on a tile of rows: values w [R, D], summed gradient g [R, D], state, and coefficients c[i] [R].

The same operations in the same order as core/optim/rules.h, with correctly rounded square roots and divisions, launched
with enable_fp_fusion=False: given the same summed gradient, the bits are those of the core and of optim.py's rules.
Columns beyond the dim are zero on input and never stored.

sum_of_squares keeps the core's order too: eight lanes, each in rising order. Here that order crosses threads, and
transposing the tile through shared memory costs ten instructions a row of 128 more than a shuffle tree would.
"""

from __future__ import annotations

import triton
import triton.language as tl

# RuleKind in core/optim/rule_kind.h, `code` in optim.py.
SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM, ADAMW, FTRL = (tl.constexpr(code) for code in range(6))
COEFFICIENTS = 8


def state_parts(rule: int) -> int:
    """The number of state parts as wide as the row; row-wise Adagrad's single number does not count."""
    return (0, 1, 0, 2, 2, 2)[rule]


@triton.jit
def _chunks(x, N: tl.constexpr, C: tl.constexpr):
    """The C columns of x [N, C], in order, each [N]."""
    if C == 1:
        return (tl.reshape(x, (N,)),)
    else:
        even, odd = tl.split(tl.reshape(x, (N, C // 2, 2)))
        evens = _chunks(even, N, C // 2)
        odds = _chunks(odd, N, C // 2)
        all = ()
        for i in tl.static_range(C // 2):
            all = all + (evens[i], odds[i])  # noqa: RUF005
        return all


@triton.jit
def sum_of_squares(g, R: tl.constexpr, D: tl.constexpr):
    """Squares summed over lanes i % 8, each in rising order, then lanes as a tree: ((0+4)+(2+6)) + ((1+5)+(3+7))."""
    x = tl.permute(tl.reshape(g * g, (R, D // 8, 8)), (0, 2, 1))
    chunks = _chunks(tl.reshape(x, (R * 8, D // 8)), R * 8, D // 8)
    lanes = chunks[0]
    for i in tl.static_range(1, D // 8):
        lanes = lanes + chunks[i]
    lanes = tl.reshape(lanes, (R, 8))
    # A gather that changes no value. It fixes the layout: without it the compiler repeats these sums in every thread.
    lanes = tl.gather(lanes, tl.broadcast_to(tl.arange(0, 8)[None, :], (R, 8)), 1)
    low, high = tl.split(tl.permute(tl.reshape(lanes, (R, 2, 4)), (0, 2, 1)))
    low, high = tl.split(tl.permute(tl.reshape(low + high, (R, 2, 2)), (0, 2, 1)))
    low, high = tl.split(low + high)
    return low + high


@triton.jit
def clip(g, clip_value, clip_norm, R: tl.constexpr, D: tl.constexpr):
    """Elements first, then each row's norm. A limit of 0 is none."""
    bound = clip_value[:, None]
    g = tl.where((bound > 0) & (g < -bound), -bound, tl.where((bound > 0) & (g > bound), bound, g))
    if tl.max(clip_norm, axis=0) > 0:
        norm = tl.sqrt_rn(sum_of_squares(g, R, D))
        over = (clip_norm > 0) & (norm > clip_norm)
        shrink = tl.div_rn(clip_norm, tl.where(over, norm, 1.0))
        g = tl.where(over[:, None], g * shrink[:, None], g)
    return g


@triton.jit
def sgd(w, g, c):
    return w - c[0][:, None] * g


@triton.jit
def adagrad(w, g, sum, c):
    sum = sum + g * g
    return w - tl.div_rn(c[0][:, None] * g, tl.sqrt_rn(sum) + c[1][:, None]), sum


@triton.jit
def row_wise_adagrad(w, g, sum, c, DIM: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """sum is [R]: the running sum of the mean square."""
    sum = sum + tl.div_rn(sum_of_squares(g, R, D), tl.full([R], DIM, tl.float32))
    step = tl.div_rn(c[0], tl.sqrt_rn(sum) + c[1])
    return w - step[:, None] * g, sum


@triton.jit
def adam(w, g, m, v, c, DECAY: tl.constexpr):
    """c: step size, 1 / sqrt(second bias), eps, b1, 1 - b1, b2, 1 - b2, the kept part of w."""
    m = c[3][:, None] * m + c[4][:, None] * g
    v = c[5][:, None] * v + c[6][:, None] * g * g
    if DECAY:
        w = c[7][:, None] * w
    return w - tl.div_rn(c[0][:, None] * m, tl.sqrt_rn(v) * c[1][:, None] + c[2][:, None]), m, v


@triton.jit
def ftrl(w, g, z, n, c):
    """c: 1 / lr, beta, l1, l2."""
    rate, beta, l1, l2 = c[0][:, None], c[1][:, None], c[2][:, None], c[3][:, None]
    old_root = tl.sqrt_rn(n)
    n = n + g * g
    root = tl.sqrt_rn(n)
    z = z + (g - (root - old_root) * rate * w)
    shrunk = tl.where(z > 0, z - l1, z + l1)
    # Columns beyond the dim may divide by 0; they are never stored.
    value = tl.div_rn(shrunk * -1.0, (beta + root) * rate + l2)
    return tl.where(tl.abs(z) <= l1, 0.0, value), z, n
