"""Rows between slots, staging buffers and host memory.

`collect` copies rows out of slots into a buffer (for write-back), `deliver` copies a buffer into slots. A HostRowReader
reads rows straight from registered host memory; a FetchedRowWriter finishes a batch's fetch. A row is `width` floats.
Slots at or beyond `capacity` are the batch's own `extra` rows; negative slots are skipped.

Why fetched rows are partly read by the GPU and partly gathered by the CPU, on an H200 with 16 cores, 133,000 random
rows:
- The GPU reads them from 20 GB of host memory in 4.5 ms at 528 bytes (29 million rows/s, whatever tile, warps and page
  size: each row is a miss of the host's IOMMU; 2.4 ms from 2 GB, 1.5 from 256 MB) and in 4.8 ms at 1,552 bytes. In the
  order of their addresses it takes 3.6 ms, but sorting them first gained nothing.
- Writing them takes as long, and both at once the sum; so evicted rows go through a buffer.
- All cores gather the same rows into pinned memory in 1.5 and 5.1 ms, and the copy engine moves it at 55 GB/s
  meanwhile.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.errors import StorageError
from hotrow.kernels.launch import cached_launch, cdiv, power_of_2
from hotrow.kernels.rows.layout import Source
from hotrow.undocumented import describe
from hotrow.units import format_size

REQUEST_BLOCK, REQUEST_PROGRAMS = 1024, 64
METADATA_BLOCK, METADATA_PROGRAMS = 1024, 132
COPY_BLOCK = 2048
ROW_PROGRAMS = 528  # programs that read host rows: enough to saturate PCIe (tiles of 16 or 32 rows were no faster)


@triton.jit
def _slot_rows(rows, extra, capacity, stride, slots):
    slots = slots.to(tl.int64)
    return tl.where(slots < capacity, rows + slots * stride, extra + (slots - capacity) * stride)


@cached_launch
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
    buffered = buffer + at.to(tl.int64)[:, None] * buffer_stride + column[None, :]
    if OUT:
        tl.store(buffered, tl.load(place, mask=mask), mask=mask)
    else:
        tl.store(place, tl.load(buffered, mask=mask), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["request"])
def _load_request_kernel(loaded, host_slots, request, BLOCK: tl.constexpr):
    """Copy the request to the device: four numbers, and the slots in host memory."""
    request = request.to(tl.pointer_type(tl.int64))
    number = tl.arange(0, 4)
    tl.store(loaded + number, tl.load(request + number), mask=tl.program_id(0) + number * 0 == 0)
    source, count = tl.load(request + 2).to(tl.pointer_type(tl.int32)), tl.load(request + 3)
    begin = tl.program_id(0) * BLOCK
    while begin < count:
        at = begin + tl.arange(0, BLOCK)
        tl.store(host_slots + at, tl.load(source + at, mask=at < count), mask=at < count)
        begin += tl.num_programs(0) * BLOCK


@cached_launch
@triton.jit
def _read_host_rows_kernel(rows, stride, request, bases, host_slots, host_stride, width, W: tl.constexpr):
    column = tl.arange(0, W)
    slots = tl.load(request).to(tl.pointer_type(tl.int32))
    tables = tl.load(request + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(request + 3)
    at = tl.program_id(0).to(tl.int64)
    while at < count:
        slot = tl.load(slots + at).to(tl.int64)
        base = tl.load(bases + tl.load(tables + at)).to(tl.pointer_type(tl.float32))
        host = tl.load(host_slots + at).to(tl.int64)
        # One comparison of a block: Triton 3.9's interpreter gives `scalar & block` of booleans as an integer.
        mask = column < tl.where((slot >= 0) & (host >= 0), width, 0)
        row = tl.load(base + host * host_stride + column, mask=mask)
        tl.store(rows + slot * stride + column, row, mask=mask)
        at += tl.num_programs(0)


def collect(source: Source, slots: Tensor, width: int, out: Tensor) -> None:
    """out[i] = the row of slots[i]."""
    _buffer(source, slots, width, out, True)


def deliver(source: Source, slots: Tensor, width: int, incoming: Tensor) -> None:
    """The row of slots[i] = incoming[i]. Requires: slots are unique."""
    _buffer(source, slots, width, incoming, False)


class HostRowReader:
    """Reads up to `capacity` rows of host memory into slots. Its `request` is a pinned int64 [4]: the addresses of the
    slots, of the rows' tables and of their slots in host memory (pinned too), and the number of rows.

    The device reads the request when the launch runs, so one captured launch serves every batch.
    """

    def __init__(self, rows: Tensor, bases: Tensor, width: int, host_stride: int, capacity: int) -> None:
        self.rows, self.bases, self.width, self.host_stride, self.capacity = rows, bases, width, host_stride, capacity
        self.request = torch.zeros(4, dtype=torch.int64, pin_memory=rows.device.type == "cuda")
        self._on_device = torch.zeros(4, dtype=torch.int64, device=rows.device)
        self._host_slots = torch.zeros(capacity, dtype=torch.int32, device=rows.device)

    def __call__(self) -> None:
        """The row of slots[i] = row host_slots[i] of table tables[i], whose memory at `bases` is registered; below 0:
        skipped."""
        _load_request_kernel[(min(REQUEST_PROGRAMS, cdiv(self.capacity, REQUEST_BLOCK)),)](
            self._on_device, self._host_slots, self.request.data_ptr(), BLOCK=REQUEST_BLOCK,
        )  # fmt: skip
        tile = power_of_2(self.width)
        _read_host_rows_kernel[(min(self.capacity, ROW_PROGRAMS),)](
            self.rows, self.rows.stride(0), self._on_device, self.bases, self._host_slots, self.host_stride, self.width,
            W=tile, num_warps=1 if tile <= 1024 else 4,
        )  # fmt: skip

    def set_request(self, slots: Tensor, tables: Tensor, host_slots: Tensor) -> None:
        """Set what the next launch reads. Requires: the tensors do not change before the launch is over."""
        self.request.copy_(torch.tensor([slots.data_ptr(), tables.data_ptr(), host_slots.data_ptr(), slots.numel()]))


@cached_launch
@triton.jit(do_not_specialize=["request_address"])
def _write_metadata_kernel(loaded, hosts, steps, counts, request_address, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    request = request_address.to(tl.pointer_type(tl.int64))
    number = tl.arange(0, 8)
    tl.store(loaded + number, tl.load(request + number), mask=tl.program_id(0) + number * 0 == 0)
    slots, metadata = tl.load(request).to(tl.pointer_type(tl.int32)), tl.load(request + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(request + 2)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    while begin < count:
        at = begin + tl.arange(0, BLOCK)
        slot = tl.load(slots + at, mask=at < count, other=-1)
        mask = slot >= 0
        tl.store(hosts + slot, tl.load(metadata + at, mask=mask, other=0), mask=mask)
        tl.store(steps + STRIDE * slot, tl.load(metadata + count + at, mask=mask, other=0), mask=mask)
        tl.store(counts + STRIDE * slot, tl.load(metadata + 2 * count + at, mask=mask, other=0), mask=mask)
        begin += tl.num_programs(0) * BLOCK


@cached_launch
@triton.jit
def _write_rows_kernel(rows, stride, request, width, W: tl.constexpr):
    column = tl.arange(0, W)
    slots, incoming = (
        tl.load(request).to(tl.pointer_type(tl.int32)),
        tl.load(request + 4).to(tl.pointer_type(tl.float32)),
    )
    count, first = tl.load(request + 2), tl.load(request + 3)
    at = first + tl.program_id(0)
    while at < count:
        slot = tl.load(slots + at).to(tl.int64)
        mask = column < tl.where(slot >= 0, width, 0)
        tl.store(rows + slot * stride + column, tl.load(incoming + (at - first) * width + column, mask=mask), mask=mask)
        at += tl.num_programs(0)


class FetchedRowWriter:
    """Finishes a fetch: writes the metadata of a batch's fetched rows, and the rows that the CPU gathered, to their
    slots.

    Its `request` is a pinned int64 [8]: the addresses of the slots and of the metadata (pinned int32 [3, count]: DRAM
    slots, steps and counts, for the three tensors of `metadata`), the count, how many rows a HostRowReader has read
    already, and the address of the gathered rows. As with a HostRowReader, one captured launch serves every batch.
    """

    def __init__(self, rows: Tensor, metadata: tuple[Tensor, Tensor, Tensor], width: int) -> None:
        self.rows, self.metadata, self.width = rows, metadata, width
        self.request = torch.zeros(8, dtype=torch.int64, pin_memory=rows.device.type == "cuda")
        self._on_device = torch.zeros(8, dtype=torch.int64, device=rows.device)

    def __call__(self) -> None:
        """Slots below 0 are skipped."""
        _write_metadata_kernel[(METADATA_PROGRAMS,)](
            self._on_device, *self.metadata, self.request.data_ptr(), STRIDE=self.metadata[1].stride(0),
            BLOCK=METADATA_BLOCK,
        )  # fmt: skip
        tile = power_of_2(self.width)
        _write_rows_kernel[(ROW_PROGRAMS,)](
            self.rows, self.rows.stride(0), self._on_device, self.width, W=tile, num_warps=1 if tile <= 1024 else 4
        )

    def set_request(self, slots: Tensor, metadata: Tensor, first: int, incoming: Tensor) -> None:
        """Set what the next launch writes. Requires: the tensors do not change before the launch is over."""
        numbers = [slots.data_ptr(), metadata.data_ptr(), slots.numel(), first, incoming.data_ptr()]
        self.request[:5] = torch.tensor(numbers)


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


@cached_launch
@triton.jit(do_not_specialize=["address", "n"])
def _copy_to_pinned_kernel(numbers, address, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(numbers + at, mask=at < n, other=0)
    tl.store(address.to(tl.pointer_type(tl.int32)) + at, value, mask=at < n)


def copy_to_pinned(numbers: Tensor, pinned: Tensor) -> None:
    """Copy int32 numbers into pinned host memory; by a kernel, because the copy engine may be busy for long."""
    block = min(COPY_BLOCK, power_of_2(numbers.numel()))
    _copy_to_pinned_kernel[(cdiv(numbers.numel(), block),)](numbers, pinned.data_ptr(), numbers.numel(), BLOCK=block)


def register_host_memory(address: int, size: int, device: torch.device) -> None:
    """Pin `size` bytes of host memory, so that kernels can read and write them, until `unregister_host_memory`."""
    if device.type == "cuda":
        register = getattr(torch.cuda.cudart(), "cudaHostRegister", None)
        if register is None:
            raise StorageError(describe("torch", "has no torch.cuda.cudart().cudaHostRegister"))
        error = int(register(address, size, 0))
        if error:
            with suppress(
                RuntimeError
            ):  # CUDA keeps the error until it is queried, and torch queries it after every launch
                torch.ones(1, device=device)
            raise StorageError(
                f"the GPU cannot reach {format_size(size)} of DRAM rows (cudaHostRegister gave error {error}); lower "
                "dram= or the number of rows, so that they fit into memory that can be pinned"
            )


def unregister_host_memory(address: int, device: torch.device) -> None:
    """Undo `register_host_memory`."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(address)
