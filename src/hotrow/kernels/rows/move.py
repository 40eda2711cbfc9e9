"""Rows between slots, staging buffers and host memory.

`collect` copies rows out of slots into a buffer (write-back gather), `deliver` copies a buffer into slots. A Puller
reads rows straight from host memory that the GPU can address, a Lander finishes what came of a batch. On an H200 with
16 cores, 133,000 random rows of 20 GB are read in 4.5 ms at 528 bytes (29 million rows/s, whatever tile, warps and
pages are: each row is a miss of the host's IOMMU; 2.4 ms of 2 GB, 1.5 of 256 MB; 3.6 in the order of their addresses,
but sorting them first gained nothing) and 4.8 ms at 1,552; writing them the same way takes as long, and both at once
the sum, so rows go down by way of a buffer. All cores gather the same rows into pinned memory in 1.5 and 5.1 ms, and
the copy engine moves it at 55 GB/s meanwhile.

A row is `width` floats. Slots at or beyond `capacity` are rows of the batch's own `extra`; negative ones are passed
over.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.config import format_size
from hotrow.errors import StorageError
from hotrow.kernels.launch import cdiv, fast, power_of_2
from hotrow.kernels.rows.layout import Source
from hotrow.undocumented import describe

ORDER_BLOCK, ORDERERS = 1024, 64
NOTE_BLOCK, NOTERS = 1024, 132
TELL_BLOCK = 2048
PULLERS = 528  # programs that read host rows: enough for what the wire takes (16 of 32 rows each were no better)


@triton.jit
def _slot_rows(rows, extra, capacity, stride, slots):
    slots = slots.to(tl.int64)
    return tl.where(slots < capacity, rows + slots * stride, extra + (slots - capacity) * stride)


@fast
@triton.jit
def _buffer_kernel(
    rows, extra, capacity, stride, slots, count, buffer, buffer_stride, width,
    OUT: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * R + tl.arange(0, R)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    column = tl.arange(0, W)
    mask = (slot >= 0)[:, None] & (column < width)[None, :]
    place = _slot_rows(rows, extra, capacity, stride, slot)[:, None] + column[None, :]
    staged = buffer + at.to(tl.int64)[:, None] * buffer_stride + column[None, :]
    if OUT:
        tl.store(staged, tl.load(place, mask=mask), mask=mask)
    else:
        tl.store(place, tl.load(staged, mask=mask), mask=mask)


@fast
@triton.jit(do_not_specialize=["cell"])
def _order_kernel(order, hosts, cell, BLOCK: tl.constexpr):
    """What the host wants read: four numbers, and the rows' slots there."""
    cell = cell.to(tl.pointer_type(tl.int64))
    number = tl.arange(0, 4)
    tl.store(order + number, tl.load(cell + number), mask=tl.program_id(0) + number * 0 == 0)
    source, count = tl.load(cell + 2).to(tl.pointer_type(tl.int32)), tl.load(cell + 3)
    begin = tl.program_id(0) * BLOCK
    while begin < count:
        at = begin + tl.arange(0, BLOCK)
        tl.store(hosts + at, tl.load(source + at, mask=at < count), mask=at < count)
        begin += tl.num_programs(0) * BLOCK


@fast
@triton.jit
def _pull_kernel(rows, stride, order, bases, hosts, host_stride, width, W: tl.constexpr):
    column = tl.arange(0, W)
    slots = tl.load(order).to(tl.pointer_type(tl.int32))
    tables = tl.load(order + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(order + 3)
    at = tl.program_id(0).to(tl.int64)
    while at < count:
        slot = tl.load(slots + at).to(tl.int64)
        base = tl.load(bases + tl.load(tables + at)).to(tl.pointer_type(tl.float32))
        host = tl.load(hosts + at).to(tl.int64)
        mask = (slot >= 0) & (host >= 0) & (column < width)
        arriving = tl.load(base + host * host_stride + column, mask=mask)
        tl.store(rows + slot * stride + column, arriving, mask=mask)
        at += tl.num_programs(0)


def collect(source: Source, slots: Tensor, width: int, out: Tensor) -> None:
    """out[i] = the row of slots[i]."""
    _buffer(source, slots, width, out, True)


def deliver(source: Source, slots: Tensor, width: int, incoming: Tensor) -> None:
    """The row of slots[i] = incoming[i]. Requires: slots are unique."""
    _buffer(source, slots, width, incoming, False)


class Puller:
    """Reads host rows into slots, up to `room` of them, as its cell says: a pinned int64 [4] of the address of their
    slots here, of their tables, of their slots in host memory (pinned too), and how many they are.

    The cell is read when the launch runs, so that a captured launch serves every batch.
    """

    def __init__(self, rows: Tensor, bases: Tensor, width: int, host_stride: int, room: int) -> None:
        self.rows, self.bases, self.width, self.host_stride, self.room = rows, bases, width, host_stride, room
        self.cell = torch.zeros(4, dtype=torch.int64, pin_memory=rows.device.type == "cuda")
        self._order = torch.zeros(4, dtype=torch.int64, device=rows.device)
        self._hosts = torch.zeros(room, dtype=torch.int32, device=rows.device)

    def __call__(self) -> None:
        """The row of slots[i] = row hosts[i] of table tables[i], whose `bases` the GPU can reach; below 0: none."""
        _order_kernel[(min(ORDERERS, cdiv(self.room, ORDER_BLOCK)),)](
            self._order, self._hosts, self.cell.data_ptr(), BLOCK=ORDER_BLOCK,
        )  # fmt: skip
        tile = power_of_2(self.width)
        _pull_kernel[(min(self.room, PULLERS),)](
            self.rows, self.rows.stride(0), self._order, self.bases, self._hosts, self.host_stride, self.width,
            W=tile, num_warps=1 if tile <= 1024 else 4,
        )  # fmt: skip

    def ask(self, slots: Tensor, tables: Tensor, hosts: Tensor) -> None:
        """What to read. Requires: none of it changes until it has been read."""
        self.cell.copy_(torch.tensor([slots.data_ptr(), tables.data_ptr(), hosts.data_ptr(), slots.numel()]))


@fast
@triton.jit(do_not_specialize=["cell_address"])
def _note_kernel(order, hosts, steps, counts, cell_address, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    cell = cell_address.to(tl.pointer_type(tl.int64))
    number = tl.arange(0, 8)
    tl.store(order + number, tl.load(cell + number), mask=tl.program_id(0) + number * 0 == 0)
    slots, places = tl.load(cell).to(tl.pointer_type(tl.int32)), tl.load(cell + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(cell + 2)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        at = begin + tl.arange(0, BLOCK)
        slot = tl.load(slots + at, mask=at < count, other=-1)
        mask = slot >= 0
        tl.store(hosts + slot, tl.load(places + at, mask=mask, other=0), mask=mask)
        tl.store(steps + STRIDE * slot, tl.load(places + count + at, mask=mask, other=0), mask=mask)
        tl.store(counts + STRIDE * slot, tl.load(places + 2 * count + at, mask=mask, other=0), mask=mask)
        begin += tl.num_programs(0) * BLOCK


@fast
@triton.jit
def _land_kernel(rows, stride, order, width, W: tl.constexpr):
    column = tl.arange(0, W)
    slots, incoming = tl.load(order).to(tl.pointer_type(tl.int32)), tl.load(order + 4).to(tl.pointer_type(tl.float32))
    count, first = tl.load(order + 2), tl.load(order + 3)
    at = first + tl.program_id(0)
    while at < count:
        slot = tl.load(slots + at).to(tl.int64)
        mask = (slot >= 0) & (column < width)
        tl.store(rows + slot * stride + column, tl.load(incoming + (at - first) * width + column, mask=mask), mask=mask)
        at += tl.num_programs(0)


class Lander:
    """What is left to do when a batch's rows have come, as its cell says: a pinned int64 [8] of the addresses of their
    slots here and of places (pinned int32 [3, count]), the count, how many were read in place, and the address of the
    others' rows. Places go into `beside` (hosts, steps and counts of the slots), gathered rows into their slots.

    As a Puller's, one captured launch serves every batch.
    """

    def __init__(self, rows: Tensor, beside: tuple[Tensor, Tensor, Tensor], width: int) -> None:
        self.rows, self.beside, self.width = rows, beside, width
        self.cell = torch.zeros(8, dtype=torch.int64, pin_memory=rows.device.type == "cuda")
        self._order = torch.zeros(8, dtype=torch.int64, device=rows.device)

    def __call__(self) -> None:
        """Slots below 0 are passed over."""
        _note_kernel[(NOTERS,)](
            self._order, *self.beside, self.cell.data_ptr(), STRIDE=self.beside[1].stride(0), BLOCK=NOTE_BLOCK,
        )  # fmt: skip
        tile = power_of_2(self.width)
        _land_kernel[(PULLERS,)](
            self.rows, self.rows.stride(0), self._order, self.width, W=tile, num_warps=1 if tile <= 1024 else 4
        )

    def ask(self, slots: Tensor, places: Tensor, first: int, incoming: Tensor) -> None:
        """What has come. Requires: none of it changes until it has been read."""
        numbers = [slots.data_ptr(), places.data_ptr(), slots.numel(), first, incoming.data_ptr()]
        self.cell[:5] = torch.tensor(numbers)


def _buffer(source: Source, slots: Tensor, width: int, buffer: Tensor, out: bool) -> None:
    count = slots.numel()
    if count == 0:
        return
    tile = power_of_2(width)
    per = max(1, 1024 // tile)
    _buffer_kernel[(cdiv(count, per),)](
        source.rows, _extra(source), source.capacity, source.rows.stride(0), slots, count, buffer, buffer.stride(0),
        width, OUT=out, R=per, W=tile, num_warps=4,
    )  # fmt: skip


def _extra(source: Source) -> Tensor:
    return source.rows if source.extra is None else source.extra


@fast
@triton.jit(do_not_specialize=["address", "n"])
def _tell_kernel(numbers, address, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(numbers + at, mask=at < n, other=0)
    tl.store(address.to(tl.pointer_type(tl.int32)) + at, value, mask=at < n)


def tell(numbers: Tensor, pinned: Tensor) -> None:
    """int32 numbers into pinned host memory; by a kernel, because the copy engine may be busy for long."""
    block = min(TELL_BLOCK, power_of_2(numbers.numel()))
    _tell_kernel[(cdiv(numbers.numel(), block),)](numbers, pinned.data_ptr(), numbers.numel(), BLOCK=block)


def reachable(address: int, size: int, device: torch.device) -> None:
    """Make so many bytes of host memory readable and writable for the GPU, until `unreachable`."""
    if device.type == "cuda":
        register = getattr(torch.cuda.cudart(), "cudaHostRegister", None)
        if register is None:
            raise StorageError(describe("torch", "has no torch.cuda.cudart().cudaHostRegister"))
        error = int(register(address, size, 0))
        if error:
            with suppress(RuntimeError):  # CUDA keeps it until somebody asks, and torch asks behind each launch
                torch.ones(1, device=device)
            raise StorageError(
                f"the GPU cannot reach {format_size(size)} of DRAM rows (cudaHostRegister gave error {error}); lower "
                "dram= or the number of rows, so that they fit into memory that can be pinned"
            )


def unreachable(address: int, device: torch.device) -> None:
    """Undo `reachable`."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(address)
