"""The layout of a row's floats, the addresses of rows, and how a batch's positions become outputs.

A row is one piece of memory: its values, then the optimizer's state in fp32, padded to a stride of 16 bytes (32 if it
is 256 bytes or longer, so that no row shares a sector of memory with another). fp16 and bf16 values are packed two,
int8 values four to a float; an int8 row has its scale and bias for state (quantize.py).

Slots below `capacity` are rows of the cache; slots from `capacity` on are the batch's own `extra` rows. Kernels take
both in one launch. Within a batch, equal keys have equal slots.

A batch's positions are its features one after another, and so are its *items*, the outputs: one a position, or one a
bag. Matrices of different features (outputs, gradients) may be anywhere; their addresses go to the device as one small
table. Tables are cached by value: allocators hand out the same addresses step after step, so mostly nothing is copied.
Otherwise it is one small copy from pinned memory, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.errors import BatchError, OptionError
from hotrow.kernels.current_stream import raw_stream
from hotrow.kernels.launch import INTERPRETED, power_of_2

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.uint8}
TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.uint8: tl.uint8}
CACHED_TABLES = 512  # tables of numbers kept on devices


@dataclass(frozen=True)
class RowLayout:
    """Floats of a row: `dim` values of a type, then the widths of the state's parts.

    >>> row = RowLayout(128, (1,))
    >>> row.width, row.stride
    (129, 136)
    >>> RowLayout(17, (17, 17), "bf16").state_offset
    9
    """

    dim: int
    state: tuple[int, ...] = ()
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise OptionError(f"row dtype {self.dtype!r}: choose one of {', '.join(ITEM_BYTES)}")
        if self.dim < 1:
            raise OptionError(f"dim={self.dim}: give 1 or more")

    @cached_property
    def value_floats(self) -> int:
        """Floats that the values fill."""
        return -(-self.dim * ITEM_BYTES[self.dtype] // 4)

    @property
    def state_offset(self) -> int:
        """Float at which the state begins."""
        return self.value_floats

    @cached_property
    def width(self) -> int:
        """Floats used."""
        return self.value_floats + sum(self.state)

    @cached_property
    def stride(self) -> int:
        """Floats from one row to the next."""
        unit = 8 if self.width * 4 >= 256 else 4
        return -(-self.width // unit) * unit

    @cached_property
    def block(self) -> int:
        """Columns of a kernel's tile: a power of two, at least the eight lanes of rules.sum_of_squares."""
        return max(8, power_of_2(self.dim))

    @cached_property
    def type(self) -> tl.dtype:
        """Triton's type of a value."""
        return TRITON[TORCH[self.dtype]]

    def values(self, rows: Tensor) -> Tensor:
        """The values in rows [n, stride], as a view of their own type."""
        return rows.view(TORCH[self.dtype])[:, : self.dim]


@dataclass(frozen=True)
class Source:
    """Rows [capacity, stride] of the cache, and `extra`: this batch's rows for which the cache had no slot.

    `extra_layout` is the layout of the extra rows where it differs: beside a cache of fp16 or int8 rows they may be
    fp32. Only `gather` takes such a source.
    """

    rows: Tensor
    extra: Tensor | None = None
    extra_layout: RowLayout | None = None

    @property
    def capacity(self) -> int:
        return self.rows.shape[0]

    def check(self, layout: RowLayout) -> None:
        """Requires: float32 rows of the layout's stride, contiguous, on one device."""
        beside = self.extra_layout or layout
        for name, rows, stride in (("rows", self.rows, layout.stride), ("extra", self.extra, beside.stride)):
            if rows is None:
                continue
            if rows.dtype != torch.float32 or rows.dim() != 2 or rows.shape[1] != stride:
                raise BatchError(f"{name} is {rows.dtype} {list(rows.shape)}, it must be float32 [n, {stride}]")
            if not rows.is_contiguous() or rows.device != self.rows.device:
                raise BatchError(f"{name} must be contiguous and on {self.rows.device}, it is on {rows.device}")


@dataclass(frozen=True)
class Items:
    """How positions become outputs. All on the device; `begins` and `offsets` never decrease.

    begins   int32 [F + 1]      first item of each feature
    tables   int32 [F]          the table of each feature
    offsets  int32 [items + 1]  positions of each item; None: item i is position i
    scales   float32 [N]        what each position is multiplied by (weights, 1 / length); None: 1
    item_of  int32 [N]          the item of each position (items_of_positions); needed by update where offsets are given
    """

    begins: Tensor
    tables: Tensor
    offsets: Tensor | None = None
    scales: Tensor | None = None
    item_of: Tensor | None = None

    def count(self, positions: int) -> int:
        """Number of items."""
        return positions if self.offsets is None else self.offsets.numel() - 1


def items_of_positions(offsets: Tensor, items: int, positions: int) -> Tensor:
    """The item of each position, int32 [positions], without waiting for the device.

    >>> items_of_positions(torch.tensor([0, 2, 2, 3], dtype=torch.int32), 3, 3).tolist()
    [0, 0, 2]
    """
    if offsets.numel() != items + 1:
        raise BatchError(f"{items} items need {items + 1} offsets, got {offsets.numel()}")
    at = torch.arange(positions, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets[1:], at, right=True, out_int32=True)


@dataclass(frozen=True)
class Matrices:
    """Addresses and row strides in bytes of some matrices, int64 [M, 2] on the device; address 0 where there is none.

    `aligned`: every row of every matrix begins at a multiple of 16 bytes, so that accesses may be that wide.
    """

    table: Tensor
    aligned: bool
    dtype: torch.dtype
    missing: int


def with_contiguous_columns(matrix: Tensor) -> Tensor:
    """The matrix, or a copy where its columns are not contiguous, as in a gradient that autograd expanded."""
    return matrix if matrix.shape[1] == 1 or matrix.stride(1) == 1 else matrix.contiguous()


def matrices(tensors: Sequence[Tensor | None], columns: int, device: torch.device) -> Matrices:
    """Describe matrices [any, columns] of one type, with contiguous columns and rows anywhere."""
    dtype = next((tensor.dtype for tensor in tensors if tensor is not None), torch.float32)
    size, missing, ends = dtype.itemsize, 0, 0
    numbers: list[int] = []
    for i, tensor in enumerate(tensors):
        if tensor is None:
            numbers += (0, 0)
            missing += 1
            continue
        shape, strides = tensor.shape, tensor.stride()
        if len(shape) != 2 or shape[1] != columns or (columns > 1 and strides[1] != 1):
            raise BatchError(
                f"matrix {i} has shape {list(shape)} and strides {strides}; "
                f"it must be [any, {columns}] with its columns side by side"
            )
        if tensor.dtype is not dtype or tensor.device != device:
            raise BatchError(f"matrix {i} is {tensor.dtype} on {tensor.device}; all must be {dtype} on {device}")
        address, stride = (tensor.data_ptr(), strides[0] * size) if shape[0] else (0, 0)
        numbers += (address, stride)
        ends |= address | stride
    return Matrices(cached_table(tuple(numbers), device).view(-1, 2), ends & 15 == 0, dtype, missing)


_tables: dict[tuple[str, int, torch.dtype, tuple[int, ...]], Tensor] = {}


def cached_table(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers as a tensor on the device; the same tensor again for the same numbers on the same stream."""
    key = (device.type, raw_stream(device), dtype, (device.index or 0, *numbers))
    table = _tables.get(key)
    if table is None:
        if len(_tables) >= CACHED_TABLES:
            _tables.clear()
        table = torch.tensor(numbers, dtype=dtype)
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        _tables[key] = table
    return table


# --- for kernels ----------------------------------------------------------------------------------------------------


def _interpreted_range(*bounds: Any) -> range:
    """range() of loaded numbers, which Triton 3.6's interpreter cannot do with numpy 2.4."""
    return range(*(int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else int(bound) for bound in bounds))


# A `while` would run in both, but the compiler chooses the layouts of a loop's variables only through a `for`.
loop_range = _interpreted_range if INTERPRETED else tl.range


@triton.jit
def row_pointers(rows, extra, slots, capacity, STRIDE: tl.constexpr, HAS_EXTRA: tl.constexpr):
    """Pointers to the rows of slots. A slot below 0 has none: mask it."""
    at = slots.to(tl.int64)
    place = rows + at * STRIDE
    if HAS_EXTRA:
        place = tl.where(at < capacity, place, extra + (at - capacity) * STRIDE)
    return place


@triton.jit
def read_values(place, column, mask, TYPE: tl.constexpr, STATE: tl.constexpr):
    """Values at rows [R] and columns [D], as fp32 [R, D]; 0 where masked out."""
    value = tl.load(place.to(tl.pointer_type(TYPE))[:, None] + column[None, :], mask=mask, other=0).to(tl.float32)
    if TYPE == tl.uint8:  # noqa: SIM300
        some = tl.max(mask.to(tl.int32), axis=1) > 0
        scale = tl.load(place + STATE, mask=some, other=0.0)
        bias = tl.load(place + STATE + 1, mask=some, other=0.0)
        value = value * scale[:, None] + bias[:, None]
    return value


@triton.jit
def read_slots(
    rows, extra, slot, capacity, column, wanted, STRIDE: tl.constexpr, STATE: tl.constexpr, TYPE: tl.constexpr,
    HAS_EXTRA: tl.constexpr, EXTRA_STRIDE: tl.constexpr,
):  # fmt: skip
    """Values of slots [R] as fp32 [R, D]; 0 where a slot is below 0. With EXTRA_STRIDE > 0, extra rows are fp32."""
    here = (slot >= 0)[:, None] & wanted[None, :]
    if EXTRA_STRIDE == 0:
        return read_values(row_pointers(rows, extra, slot, capacity, STRIDE, HAS_EXTRA), column, here, TYPE, STATE)
    extra_slot = slot.to(tl.int64) - capacity
    own = (extra_slot >= 0)[:, None]
    kept = read_values(rows + slot.to(tl.int64) * STRIDE, column, here & ~own, TYPE, STATE)
    other = read_values(extra + extra_slot * EXTRA_STRIDE, column, here & own, tl.float32, 0)
    return tl.where(own, other, kept)


@triton.jit
def matrix_rows(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers from int64 addresses; ALIGNED lets the compiler read and write 16 bytes at once."""
    place = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def negative_zeros(R: tl.constexpr, D: tl.constexpr):
    """The start of sums: -0.0 + x is x for every x, so a sum has the bits of one that starts at its first term."""
    return tl.full([R, D], -2147483648, tl.int32).to(tl.float32, bitcast=True)
