"""Rows between slots, staging buffers and host memory.

`collect` copies rows out of slots into a buffer (write-back gather), `deliver` copies a buffer into slots. `exchange`
does both at once against host memory that the GPU can address: the row that leaves a slot is written to its own place
in host memory and the one that comes is read from there, in the same program, so that both directions of the wire are
busy. Reading host rows one by one reaches about 45 million rows/s on an H200 whatever their width (20 GB/s at 512
bytes, the wire's 55 at 1,536), so narrow rows are better gathered into a buffer by the CPU first (anchors: 23 to 31
GB/s with 16 threads).

A row is `width` floats. Slots at or beyond `capacity` are rows of the batch's own `extra`; negative ones are passed
over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.layout import Source


@triton.jit
def _slot_rows(rows, extra, capacity, stride, slots):
    slots = slots.to(tl.int64)
    return tl.where(slots < capacity, rows + slots * stride, extra + (slots - capacity) * stride)


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


@triton.jit
def _exchange_kernel(
    rows, extra, capacity, stride, slots, tables, bases, down, up, count, host_stride, width,
    DOWN: tl.constexpr, UP: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * R + tl.arange(0, R)
    real = at < count
    slot = tl.load(slots + at, mask=real, other=-1)
    table = tl.load(tables + at, mask=real, other=0)
    base = tl.load(bases + table).to(tl.pointer_type(tl.float32))
    column = tl.arange(0, W)
    inside = (slot >= 0)[:, None] & (column < width)[None, :]
    place = _slot_rows(rows, extra, capacity, stride, slot)[:, None] + column[None, :]
    if UP:
        source = tl.load(up + at, mask=real, other=-1).to(tl.int64)
        comes = inside & (source >= 0)[:, None]
        arriving = tl.load(base[:, None] + source[:, None] * host_stride + column[None, :], mask=comes)
    if DOWN:
        target = tl.load(down + at, mask=real, other=-1).to(tl.int64)
        goes = inside & (target >= 0)[:, None]
        leaving = tl.load(place, mask=goes)
        tl.store(base[:, None] + target[:, None] * host_stride + column[None, :], leaving, mask=goes)
    if UP:
        tl.store(place, arriving, mask=comes)


def collect(source: Source, slots: Tensor, width: int, out: Tensor) -> None:
    """out[i] = the row of slots[i]."""
    _buffer(source, slots, width, out, True)


def deliver(source: Source, slots: Tensor, width: int, incoming: Tensor) -> None:
    """The row of slots[i] = incoming[i]. Requires: slots are unique."""
    _buffer(source, slots, width, incoming, False)


def exchange(
    source: Source,
    slots: Tensor,
    tables: Tensor,
    bases: Tensor,
    width: int,
    host_stride: int,
    down: Tensor | None = None,
    up: Tensor | None = None,
) -> None:
    """For each i: the row of slots[i] goes to host slot down[i] of tables[i], then that of up[i] comes in its place.

    `bases` are the addresses of the tables' rows in host memory that the GPU can reach. -1 is passed over.
    """
    count = slots.numel()
    if count == 0:
        return
    tile = triton.next_power_of_2(width)
    per = max(1, 512 // tile)
    _exchange_kernel[(triton.cdiv(count, per),)](
        source.rows, _extra(source), source.capacity, source.rows.stride(0), slots, tables, bases,
        slots if down is None else down, slots if up is None else up, count, host_stride, width,
        DOWN=down is not None, UP=up is not None, R=per, W=tile, num_warps=4 if per * tile >= 512 else 1,
    )  # fmt: skip


def _buffer(source: Source, slots: Tensor, width: int, buffer: Tensor, out: bool) -> None:
    count = slots.numel()
    if count == 0:
        return
    tile = triton.next_power_of_2(width)
    per = max(1, 1024 // tile)
    _buffer_kernel[(triton.cdiv(count, per),)](
        source.rows, _extra(source), source.capacity, source.rows.stride(0), slots, count, buffer, buffer.stride(0),
        width, OUT=out, R=per, W=tile, num_warps=4,
    )  # fmt: skip


def _extra(source: Source) -> Tensor:
    return source.rows if source.extra is None else source.extra


def reachable(address: int, floats: int, device: torch.device) -> None:
    """Make host memory readable and writable for the GPU; it stays so until the process ends or `unreachable`."""
    if device.type == "cuda":
        error = torch.cuda.cudart().cudaHostRegister(address, floats * 4, 0)
        if int(error):
            raise RuntimeError(f"cudaHostRegister gave error {int(error)}")


def unreachable(address: int, device: torch.device) -> None:
    """Undo `reachable`."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(address)
