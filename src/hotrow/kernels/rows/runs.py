"""Positions grouped by row: a stable sort of the slots, then the start of each row's run.

The update needs every unique row's positions in batch order. torch's stable sort of the int32 slots gives them (0.16 ms
for 1,048,570 on an H200). Two small kernels turn sorted slots into runs: one counts the runs that begin in each block,
the other numbers them, each block adding up the counts of the blocks before it. The number of runs stays on the device:
every output has N entries, and readers look at `number`. Slots of -1 sort first and make one run, which the update
skips.

A sort is a dozen launches. Where batches have one size, as with one id a feature, `Grouper` captures them once and
replays the graph: one launch for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.errors import BatchError
from hotrow.kernels.graph_capture import capture_graph
from hotrow.kernels.launch import cached_launch, cdiv
from hotrow.kernels.rows.layout import loop_range

BLOCK = 4096
COUNTS = 1024  # counts of earlier blocks read at once
CAPTURE_AFTER = 8  # batches of one size before the launches are captured


@dataclass(frozen=True)
class Runs:
    """Runs of equal slots, by rising slot. Entries after `number` runs are undefined.

    order    int64 [N]      positions, sorted by slot, within a slot in batch order
    starts   int32 [N + 1]  run r is order[starts[r] : starts[r + 1]]
    slots    int32 [N]      the slot of each run, rising
    run_of   int32 [N]      the run of each sorted position
    number   int32 [1]      how many runs there are
    """

    order: Tensor
    starts: Tensor
    slots: Tensor
    run_of: Tensor
    number: Tensor


@triton.jit
def _heads(sorted_slots, at, n):
    """Whether a run begins at each sorted position."""
    slot = tl.load(sorted_slots + at, mask=at < n, other=-1)
    before = tl.load(sorted_slots + at - 1, mask=(at > 0) & (at < n), other=-1)
    return slot, (at < n) & ((at == 0) | (slot != before))


@cached_launch
@triton.jit(do_not_specialize=["n"])
def _count_kernel(sorted_slots, counts, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, head = _heads(sorted_slots, at, n)
    tl.store(counts + tl.program_id(0), tl.sum(head.to(tl.int32), axis=0))


@cached_launch
@triton.jit(do_not_specialize=["n"])
def _number_kernel(
    sorted_slots, counts, starts, slots, run_of, number, n, BLOCK: tl.constexpr, COUNTS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    earlier = tl.zeros([COUNTS], tl.int32)
    for first in loop_range(0, block, COUNTS):
        other = first + tl.arange(0, COUNTS)
        earlier += tl.load(counts + other, mask=other < block, other=0)
    before = tl.sum(earlier, axis=0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    slot, head = _heads(sorted_slots, at, n)
    run = before + tl.cumsum(head.to(tl.int32), axis=0) - 1
    tl.store(run_of + at, run, mask=at < n)
    tl.store(starts + run, at, mask=head)
    tl.store(slots + run, slot, mask=head)
    if block == tl.num_programs(0) - 1:
        total = before + tl.sum(head.to(tl.int32), axis=0)
        tl.store(starts + total, n)
        tl.store(number, total)


def group(slots: Tensor) -> Runs:
    """Runs of int32 slots [N]."""
    if slots.dtype != torch.int32 or slots.dim() != 1:
        raise BatchError(f"slots are {slots.dtype} {list(slots.shape)}, they must be int32 of one dimension")
    n = slots.numel()
    packed = torch.empty(3 * n + 2, dtype=torch.int32, device=slots.device)
    starts, unique, run_of, number = packed[: n + 1], packed[n + 1 : 2 * n + 1], packed[2 * n + 1 : -1], packed[-1:]
    if n == 0:
        packed.zero_()
        return Runs(slots.long(), starts, unique, run_of, number)
    ordered, order = torch.sort(slots, stable=True)
    blocks = cdiv(n, BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=slots.device)
    _count_kernel[(blocks,)](ordered, counts, n, BLOCK=BLOCK, num_warps=8)
    _number_kernel[(blocks,)](
        ordered, counts, starts, unique, run_of, number, n, BLOCK=BLOCK, COUNTS=COUNTS, num_warps=8
    )  # fmt: skip
    return Runs(order, starts, unique, run_of, number)


class Grouper:
    """group() for batch after batch, captured once sizes repeat. A result is valid until the next call."""

    def __init__(self) -> None:
        self.repeats = 0  # calls in a row with one size
        self.slots = torch.empty(0, dtype=torch.int32)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.runs: Runs | None = None

    def __call__(self, slots: Tensor) -> Runs:
        """Runs of int32 slots [N]."""
        if slots.device.type != "cuda" or slots.numel() == 0:
            return group(slots)
        self.repeats = self.repeats + 1 if slots.shape == self.slots.shape else 0
        if self.repeats == 0:
            self.slots, self.graph = slots, None
        if self.repeats < CAPTURE_AFTER:
            return group(slots)
        if self.graph is None:
            self._capture(slots)
        else:
            self.slots.copy_(slots)
        assert self.graph is not None and self.runs is not None
        self.graph.replay()
        return self.runs

    def _capture(self, slots: Tensor) -> None:
        self.slots = slots.clone()
        with capture_graph(slots.device) as graph:
            self.runs = group(self.slots)
        self.graph = graph
