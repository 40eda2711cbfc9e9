"""The report of a batch's missing keys to the host, and the index entries of their rows after the fetch.

`report_misses` packs keys, tables, occurrences, chosen slots and the rows in those slots into one buffer, so that one
copy moves it to the host. `insert_fetched` writes the fetched rows' keys into the index, and DRAM slot, step and count
beside each row. `scatter_slots` writes the new slots to the positions that had missed.

Bytes a key: 36 to the host, 12 back, some 60 written at random: microseconds for a hundred thousand keys. Each function
is one launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.index.dedup import Unique
from hotrow.kernels.index.insert import Chosen
from hotrow.kernels.index.launch_arguments import CLEAN, argument, valid_count
from hotrow.kernels.index.sets import SetIndex, pack_pin_and_score
from hotrow.kernels.launch import cached_launch, cdiv

BLOCK = 256
FIELDS = 9  # int32 words a key: two of the key, table, count, chosen slot; DRAM slot, step, count of the row there


@cached_launch
@triton.jit(do_not_specialize=["n", "clean"])
def _report_kernel(
    keys, tables, seen, chosen, order, number, hosts, steps, counts, out, out_keys, write_back, ranks, n, clean,
    STRIDE: tl.constexpr, ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    clean = argument(clean, CLEAN, ON_DEVICE)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    source = tl.load(order + at, mask=inside, other=0)
    slot = tl.load(chosen + source, mask=inside, other=-1)
    has_slot = slot >= 0
    tl.store(ranks + source, at, mask=inside)
    tl.store(out_keys + at, tl.load(keys + source, mask=inside, other=0), mask=inside)
    tl.store(out + 2 * n + at, tl.load(tables + source, mask=inside, other=0), mask=inside)
    tl.store(out + 3 * n + at, tl.load(seen + source, mask=inside, other=0), mask=inside)
    tl.store(out + 4 * n + at, slot, mask=inside)
    host, step = tl.load(hosts + slot, mask=has_slot, other=-1), tl.load(steps + STRIDE * slot, mask=has_slot, other=-1)
    tl.store(out + 5 * n + at, host, mask=inside)
    tl.store(out + 6 * n + at, step, mask=inside)
    tl.store(write_back + at, tl.where((host >= 0) & (step > clean), slot, -1), mask=inside)
    tl.store(out + 7 * n + at, tl.load(counts + STRIDE * slot, mask=has_slot, other=0), mask=inside)
    tl.store(out + 8 * n + at, tl.load(number) + at * 0, mask=inside)


@cached_launch
@triton.jit(do_not_specialize=["n", "capacity", "word"])
def _insert_fetched_kernel(
    index_keys, pins_and_scores, hosts, steps, counts, keys, slots, metadata, n, capacity, word,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    slot = tl.load(slots + at, mask=inside, other=-1)
    mask = (slot >= 0) & (slot < capacity)
    tl.store(index_keys + slot, tl.load(keys + at, mask=mask, other=0), mask=mask)
    tl.store(pins_and_scores + slot, tl.full([BLOCK], word, tl.int64), mask=mask)
    tl.store(hosts + slot, tl.load(metadata + at, mask=mask, other=0), mask=mask)
    tl.store(steps + STRIDE * slot, tl.load(metadata + n + at, mask=mask, other=0), mask=mask)
    tl.store(counts + STRIDE * slot, tl.load(metadata + 2 * n + at, mask=mask, other=0), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["n"])
def _scatter_slots_kernel(positions, inverse, ranks, slots, out, count, n, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    n = valid_count(n, count, COUNTED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    rank = tl.load(ranks + tl.load(inverse + at, mask=inside, other=0), mask=inside, other=0)
    slot = tl.load(slots + rank, mask=inside, other=0)
    tl.store(out + tl.load(positions + at, mask=inside, other=0), slot, mask=inside)


class MissReport(NamedTuple):
    """Missing keys, all in one order: by table, then by set. Entries after the number of keys are undefined.

    packed      int32 [FIELDS * n]  keys (int64 [n]), tables, occurrences, chosen slots, the DRAM slots, steps and
                                    counts of the rows there, the number of keys
    write_back  int32 [n]           the chosen slots whose rows changed and must be written back; -1 for the others
    ranks       int32 [n]           the rank of each unique key of dedup() in that order
    """

    packed: Tensor
    write_back: Tensor
    ranks: Tensor

    @property
    def keys(self) -> Tensor:
        """int64 [n]."""
        return self.packed[: 2 * self.write_back.numel()].view(torch.int64)

    def field(self, number: int) -> Tensor:
        """Tables are field 2, slots field 4."""
        n = self.write_back.numel()
        return self.packed[number * n : (number + 1) * n]


TABLES, SLOTS = 2, 4


def report_misses(
    unique: Unique, chosen: Chosen, hosts: Tensor, steps: Tensor, counts: Tensor, clean: int | Tensor
) -> MissReport:
    """The report of missing keys. A row in a chosen slot changed if its step is after `clean`: a number, or the batch's
    arguments on the device."""
    n = chosen.slots.numel()
    packed = torch.empty(FIELDS * n, dtype=torch.int32, device=chosen.slots.device)
    report = MissReport(packed, torch.empty_like(chosen.slots), torch.empty_like(chosen.slots))
    if n:
        _report_kernel[(cdiv(n, BLOCK),)](
            unique.keys, unique.tables, unique.counts, chosen.slots, chosen.order, unique.number, hosts, steps, counts,
            packed, report.keys, report.write_back, report.ranks, n, clean, STRIDE=steps.stride(0),
            ON_DEVICE=isinstance(clean, Tensor), BLOCK=BLOCK,
        )  # fmt: skip
    return report


def insert_fetched(
    index: SetIndex,
    metadata: tuple[Tensor, Tensor, Tensor],
    keys: Tensor,
    slots: Tensor,
    values: Tensor,
    batch: int,
    score: float,
) -> None:
    """Write keys to their slots of the index, and values int32 [3, n] into `metadata` (DRAM slots, steps, counts).

    Slots of -1 and those at or beyond the index's capacity are skipped.
    """
    n = slots.numel()
    if n:
        _insert_fetched_kernel[(cdiv(n, BLOCK),)](
            index.keys, index.pins_and_scores, *metadata, keys, slots, values, n, index.capacity,
            pack_pin_and_score(batch, score), STRIDE=metadata[1].stride(0), BLOCK=BLOCK,
        )  # fmt: skip


def scatter_slots(
    positions: Tensor, inverse: Tensor, ranks: Tensor, slots: Tensor, out: Tensor, count: Tensor | None = None
) -> None:
    """Write the slots of the positions that missed: out[positions[i]] = slots[ranks[inverse[i]]], for all or the first
    `count`."""
    n = positions.numel()
    if n:
        _scatter_slots_kernel[(cdiv(n, BLOCK),)](
            positions, inverse, ranks, slots, out, positions if count is None else count, n,
            COUNTED=count is not None, BLOCK=BLOCK,
        )  # fmt: skip
