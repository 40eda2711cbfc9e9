"""How hot a slot is after a batch used it.

lru: the score is the number of the batch. lfu: every use counts 1 and halves every `half_life` batches. Instead of
decaying all counts, a use at batch t weighs 2^(t / half_life) and nothing ever shrinks (forward decay). The score is
the log2 of the sum, so it stays small: log2(2^score + 2^now), now = t / half_life, computed as the larger plus log2(1 +
2^-difference). A key seen once has the score `now` (`initial_score`), so all scores compare.

float32 holds a score to 1/1000 while now is below 8,192: with half_life 1,000, eight million batches. Past that, uses
that add less than the last bit are lost, and hot rows count as slightly less hot than they are.

Slots are unique, so each is written by one thread and the order of threads does not matter. log2 and exp2 are the GPU's
approximations, the same on every run of one GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hotrow.errors import OptionError, choices
from hotrow.kernels.index.sets import POLICIES, SetIndex, check_tensor
from hotrow.kernels.launch import cached_launch, cdiv

BLOCK, WARPS = 512, 4


@triton.jit
def score_after_use(old, now, LFU: tl.constexpr):
    """The score after a use, of a row that had the score `old`."""
    score = tl.zeros_like(old) + now
    if LFU:
        high = tl.maximum(old, score)
        score = high + tl.log2(1.0 + tl.exp2(tl.minimum(old, score) - high))
    return score


@cached_launch
@triton.jit(do_not_specialize=["n", "capacity"])
def touch_kernel(scores, slots, number, n, capacity, now, LFU: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = n
    if NUMBER:
        real = tl.minimum(n, tl.load(number))
    slot = tl.load(slots + at, mask=at < real, other=-1)
    mask = (slot >= 0) & (slot < capacity)
    score = score_after_use(tl.load(scores + 2 * slot, mask=mask, other=0.0), now, LFU)
    tl.store(scores + 2 * slot, score, mask=mask)


def initial_score(batch: int, policy: str, half_life: float) -> float:
    """The score of a row that is new in a batch.

    >>> initial_score(30, "lru", 10.0), initial_score(30, "lfu", 10.0)
    (30.0, 3.0)
    """
    if policy not in POLICIES:
        raise OptionError(f"there is no policy {policy!r}; {choices(policy, POLICIES)}")
    return batch / half_life if policy == "lfu" else float(batch)


def touch(
    index: SetIndex, slots: torch.Tensor, number: torch.Tensor | None, batch: int, policy: str, half_life: float
) -> None:
    """Raise the scores of the first `number` (None: all) slots, which a batch used; slots outside the index are
    skipped.

    Requires: slots are unique, and not those of rows inserted in the same batch, whose initial score counts this use;
    unless they were inserted with score=-inf, and get their initial score here.
    """
    check_tensor("slots", slots, torch.int32, None, index.device)
    if number is not None:
        check_tensor("number", number, torch.int32, 1, index.device)
    now = initial_score(batch, policy, half_life)
    n = slots.numel()
    if n:
        touch_kernel[(cdiv(n, BLOCK),)](
            index.scores, slots, slots if number is None else number, n, index.capacity, now,
            LFU=policy == "lfu", NUMBER=number is not None, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
