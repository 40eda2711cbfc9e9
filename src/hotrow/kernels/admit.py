"""The two ends of a batch's way to the rows below: what the host must know of its missing keys, and what is written
when their rows have come.

`brief` puts keys, tables, sightings, chosen slots and what lies in those now into one buffer, so that one copy brings
it down. `admit` takes what came up: keys go into the index, and slot below, step and count beside the row; then the
positions that had missed learn their slots. Bytes a key: 36 out, 12 back, some 60 written at random; all of it is
microseconds for a hundred thousand keys, and each call is one or two launches instead of a dozen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.dedup import Unique
from hotrow.kernels.launch import cdiv, fast
from hotrow.kernels.sets import SetIndex

BLOCK = 256
FIELDS = 9  # int32 words a key: two of the key, then table, sightings, slot, and host, step, count of who is in it


@fast
@triton.jit(do_not_specialize=["n", "clean"])
def _brief_kernel(
    keys, tables, seen, chosen, number, hosts, steps, counts, out, out_keys, going, n, clean, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slot = tl.load(chosen + at, mask=inside, other=-1)
    there = slot >= 0
    tl.store(out_keys + at, tl.load(keys + at, mask=inside, other=0), mask=inside)
    tl.store(out + 2 * n + at, tl.load(tables + at, mask=inside, other=0), mask=inside)
    tl.store(out + 3 * n + at, tl.load(seen + at, mask=inside, other=0), mask=inside)
    tl.store(out + 4 * n + at, slot, mask=inside)
    host, step = tl.load(hosts + slot, mask=there, other=-1), tl.load(steps + STRIDE * slot, mask=there, other=-1)
    tl.store(out + 5 * n + at, host, mask=inside)
    tl.store(out + 6 * n + at, step, mask=inside)
    tl.store(going + at, tl.where((host >= 0) & (step > clean), slot, -1), mask=inside)
    tl.store(out + 7 * n + at, tl.load(counts + STRIDE * slot, mask=there, other=0), mask=inside)
    tl.store(out + 8 * n + at, tl.load(number) + at * 0, mask=inside)


@fast
@triton.jit(do_not_specialize=["n", "capacity", "batch"])
def _admit_kernel(
    index_keys, pins, scores, hosts, steps, counts, keys, slots, places, n, capacity, batch, score,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slot = tl.load(slots + at, mask=inside, other=-1)
    mask = (slot >= 0) & (slot < capacity)
    tl.store(index_keys + slot, tl.load(keys + at, mask=mask, other=0), mask=mask)
    tl.store(pins + 2 * slot, tl.full([BLOCK], batch, tl.int32), mask=mask)
    tl.store(scores + 2 * slot, tl.full([BLOCK], score, tl.float32), mask=mask)
    tl.store(hosts + slot, tl.load(places + at, mask=mask, other=0), mask=mask)
    tl.store(steps + STRIDE * slot, tl.load(places + n + at, mask=mask, other=0), mask=mask)
    tl.store(counts + STRIDE * slot, tl.load(places + 2 * n + at, mask=mask, other=0), mask=mask)


@fast
@triton.jit(do_not_specialize=["n"])
def _answer_kernel(positions, inverse, slots, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slot = tl.load(slots + tl.load(inverse + at, mask=inside, other=0), mask=inside, other=0)
    tl.store(out + tl.load(positions + at, mask=inside, other=0), slot, mask=inside)


def brief(
    unique: Unique, chosen: Tensor, hosts: Tensor, steps: Tensor, counts: Tensor, clean: int
) -> tuple[Tensor, Tensor]:
    """int32 [FIELDS * n]: keys (int64 [n]), tables, sightings, chosen slots, their hosts, steps, counts, the number.

    And the chosen slots whose rows must go down, because they changed after step `clean`; -1 for the others.
    """
    n = chosen.numel()
    out = torch.empty(FIELDS * n, dtype=torch.int32, device=chosen.device)
    going = torch.empty_like(chosen)
    if n:
        _brief_kernel[(cdiv(n, BLOCK),)](
            unique.keys, unique.tables, unique.counts, chosen, unique.number, hosts, steps, counts, out,
            out[: 2 * n].view(torch.int64), going, n, clean, STRIDE=steps.stride(0), BLOCK=BLOCK,
        )  # fmt: skip
    return out, going


def admit(
    index: SetIndex,
    beside: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    slots: Tensor,
    places: Tensor,
    batch: int,
    score: float,
) -> None:
    """Keys into their slots of the index, and places int32 [3, n] into `beside` (hosts, steps, counts).

    Slots of -1 and those at or beyond the index's capacity are passed over.
    """
    n = slots.numel()
    if n:
        _admit_kernel[(cdiv(n, BLOCK),)](
            index.keys, index.pins, index.scores, *beside, keys, slots, places, n, index.capacity, batch, score,
            STRIDE=beside[1].stride(0), BLOCK=BLOCK,
        )  # fmt: skip


def answer(positions: Tensor, inverse: Tensor, slots: Tensor, out: Tensor) -> None:
    """out[positions[i]] = slots[inverse[i]]."""
    n = positions.numel()
    if n:
        _answer_kernel[(cdiv(n, BLOCK),)](positions, inverse, slots, out, n, BLOCK=BLOCK)
