"""The two ends of a batch's way to the rows below: what the host must know of its missing keys, and what is written
when their rows have come.

`brief` puts keys, tables, sightings, chosen slots and what lies in those now into one buffer, so that one copy brings
it down. `admit` takes what came up: keys go into the index, and slot below, step and count beside the row; then the
positions that had missed learn their slots. Bytes a key: 36 out, 12 back, some 60 written at random; all of it is
microseconds for a hundred thousand keys, and each call is one or two launches instead of a dozen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.index.dedup import Unique
from hotrow.kernels.index.insert import Chosen
from hotrow.kernels.index.launch_arguments import CLEAN, real_of, term
from hotrow.kernels.index.sets import SetIndex, held_by
from hotrow.kernels.launch import cdiv, fast

BLOCK = 256
FIELDS = 9  # int32 words a key: two of the key, then table, sightings, slot, and host, step, count of who is in it


@fast
@triton.jit(do_not_specialize=["n", "clean"])
def _brief_kernel(
    keys, tables, seen, chosen, order, number, hosts, steps, counts, out, out_keys, going, ranks, n, clean,
    STRIDE: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    clean = term(clean, CLEAN, TERMS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    place = tl.load(order + at, mask=inside, other=0)
    slot = tl.load(chosen + place, mask=inside, other=-1)
    there = slot >= 0
    tl.store(ranks + place, at, mask=inside)
    tl.store(out_keys + at, tl.load(keys + place, mask=inside, other=0), mask=inside)
    tl.store(out + 2 * n + at, tl.load(tables + place, mask=inside, other=0), mask=inside)
    tl.store(out + 3 * n + at, tl.load(seen + place, mask=inside, other=0), mask=inside)
    tl.store(out + 4 * n + at, slot, mask=inside)
    host, step = tl.load(hosts + slot, mask=there, other=-1), tl.load(steps + STRIDE * slot, mask=there, other=-1)
    tl.store(out + 5 * n + at, host, mask=inside)
    tl.store(out + 6 * n + at, step, mask=inside)
    tl.store(going + at, tl.where((host >= 0) & (step > clean), slot, -1), mask=inside)
    tl.store(out + 7 * n + at, tl.load(counts + STRIDE * slot, mask=there, other=0), mask=inside)
    tl.store(out + 8 * n + at, tl.load(number) + at * 0, mask=inside)


@fast
@triton.jit(do_not_specialize=["n", "capacity", "word"])
def _admit_kernel(
    index_keys, held, hosts, steps, counts, keys, slots, places, n, capacity, word,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slot = tl.load(slots + at, mask=inside, other=-1)
    mask = (slot >= 0) & (slot < capacity)
    tl.store(index_keys + slot, tl.load(keys + at, mask=mask, other=0), mask=mask)
    tl.store(held + slot, tl.full([BLOCK], word, tl.int64), mask=mask)
    tl.store(hosts + slot, tl.load(places + at, mask=mask, other=0), mask=mask)
    tl.store(steps + STRIDE * slot, tl.load(places + n + at, mask=mask, other=0), mask=mask)
    tl.store(counts + STRIDE * slot, tl.load(places + 2 * n + at, mask=mask, other=0), mask=mask)


@fast
@triton.jit(do_not_specialize=["n"])
def _answer_kernel(positions, inverse, ranks, slots, out, count, n, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    n = real_of(n, count, COUNTED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    rank = tl.load(ranks + tl.load(inverse + at, mask=inside, other=0), mask=inside, other=0)
    slot = tl.load(slots + rank, mask=inside, other=0)
    tl.store(out + tl.load(positions + at, mask=inside, other=0), slot, mask=inside)


class Brief(NamedTuple):
    """Missing keys, all in one order: by table, then by set. What `told` holds after the number of keys is undefined.

    told   int32 [FIELDS * n]  keys (int64 [n]), tables, sightings, chosen slots, their hosts, steps, counts, the number
    going  int32 [n]           the chosen slots whose rows must go down, because they changed; -1 for the others
    ranks  int32 [n]           where in that order each unique key of dedup() is
    """

    told: Tensor
    going: Tensor
    ranks: Tensor

    @property
    def keys(self) -> Tensor:
        """int64 [n]."""
        return self.told[: 2 * self.going.numel()].view(torch.int64)

    def field(self, number: int) -> Tensor:
        """Tables are field 2, slots field 4."""
        n = self.going.numel()
        return self.told[number * n : (number + 1) * n]


TABLES, SLOTS = 2, 4


def brief(unique: Unique, chosen: Chosen, hosts: Tensor, steps: Tensor, counts: Tensor, clean: int | Tensor) -> Brief:
    """What the host must know of missing keys. Rows of chosen slots changed if their step is after `clean`, a
    number or terms."""
    n = chosen.slots.numel()
    told = torch.empty(FIELDS * n, dtype=torch.int32, device=chosen.slots.device)
    found = Brief(told, torch.empty_like(chosen.slots), torch.empty_like(chosen.slots))
    if n:
        _brief_kernel[(cdiv(n, BLOCK),)](
            unique.keys, unique.tables, unique.counts, chosen.slots, chosen.order, unique.number, hosts, steps, counts,
            told, found.keys, found.going, found.ranks, n, clean, STRIDE=steps.stride(0),
            TERMS=isinstance(clean, Tensor), BLOCK=BLOCK,
        )  # fmt: skip
    return found


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
            index.keys, index.held, *beside, keys, slots, places, n, index.capacity, held_by(batch, score),
            STRIDE=beside[1].stride(0), BLOCK=BLOCK,
        )  # fmt: skip


def answer(
    positions: Tensor, inverse: Tensor, ranks: Tensor, slots: Tensor, out: Tensor, count: Tensor | None = None
) -> None:
    """out[positions[i]] = slots[ranks[inverse[i]]], for all or the first `count`."""
    n = positions.numel()
    if n:
        _answer_kernel[(cdiv(n, BLOCK),)](
            positions, inverse, ranks, slots, out, positions if count is None else count, n,
            COUNTED=count is not None, BLOCK=BLOCK,
        )  # fmt: skip
