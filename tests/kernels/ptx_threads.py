"""PTX instructions on registers, which are numpy arrays with a number for each thread (for ptx.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter

Array = np.ndarray[Any, Any]


class Threads:
    """The threads of a program, their lanes in warps of 32, and their shared memory."""

    def __init__(self, number: int, shared: int) -> None:
        self.number = number
        self.tid = np.arange(number, dtype=np.uint32)
        self.warp, self.lane = self.tid & ~np.uint32(31), self.tid & np.uint32(31)
        self.everyone = np.ones(number, bool)
        self.shared = np.zeros(shared, np.uint8)

    def zeros(self, kind: str) -> Array:
        """A register."""
        return np.zeros(self.number, kind)

    def whole(self, value: Array, kind: str) -> Array:
        """A value as a register: the bits of floats, whole numbers extended as their type says, or cut."""
        sized = value.view(kind) if value.dtype.kind == "f" else value.astype(kind)
        return np.ascontiguousarray(np.broadcast_to(sized, self.number))

    def alike(self, guard: Array) -> bool:
        """Whether the threads branch; all or none."""
        assert guard.all() or not guard.any(), "threads of a program branch differently"
        return bool(guard.all())

    # --- memory: addresses are bytes, and a wide access is aligned to all of it ---

    def _aligned(self, at: Array, guard: Array, size: int) -> None:
        assert not (at[guard] % size).any(), f"an access of {size} bytes is not aligned"

    def load(self, at: Array, guard: Array, kind: str, count: int) -> list[Array]:
        """`count` numbers that lie side by side in global memory."""
        size = np.dtype(kind).itemsize
        self._aligned(at, guard, size * count)
        none = np.zeros(self.number, kind)
        return [interpreter.load((at + i * size).view("uint64"), guard, none, np.dtype(kind)) for i in range(count)]

    def store(self, at: Array, guard: Array, kind: str, values: Sequence[Array]) -> None:
        size = np.dtype(kind).itemsize
        self._aligned(at, guard, size * len(values))
        for i, value in enumerate(values):
            interpreter.store((at + i * size).view("uint64"), value, guard)

    def load_shared(self, at: Array, guard: Array, kind: str, count: int) -> list[Array]:
        size = np.dtype(kind).itemsize
        self._aligned(at, guard, size * count)
        places = np.where(guard, at, 0)[:, None] + np.arange(size * count)
        return list(self.shared[places].view(kind).T)

    def store_shared(self, at: Array, guard: Array, kind: str, values: Sequence[Array]) -> None:
        size = np.dtype(kind).itemsize
        self._aligned(at, guard, size * len(values))
        places = at[guard, None] + np.arange(size * len(values))
        self.shared[places] = np.stack(values, axis=1).view(np.uint8)[guard]

    def add_global(self, at: Array, guard: Array, values: Array) -> Array:
        """The values before, with threads in turn."""
        before = self.zeros("uint32")
        for thread in np.flatnonzero(guard):
            one, mine = slice(thread, thread + 1), np.ones(1, bool)
            place = at[one].view("uint64")
            before[one] = interpreter.load(place, mine, before[one], np.dtype("uint32"))
            interpreter.store(place, before[one] + np.broadcast_to(values, self.number)[one], mine)
        return before

    def load_matrix(self, at: Array, number: int, turned: bool) -> Array:
        """8 x 8 numbers of 16 bits. Eight lanes have the addresses of its rows; each lane gets two numbers."""
        found = self.shared[self._rows(at, number)].view("uint16")
        return np.ascontiguousarray(found.swapaxes(1, 2) if turned else found).view("uint32").reshape(-1)

    def store_matrix(self, at: Array, number: int, turned: bool, values: Array) -> None:
        given = values.view("uint16").reshape(-1, 8, 8)
        rows = np.ascontiguousarray(given.swapaxes(1, 2) if turned else given)
        self.shared[self._rows(at, number)] = rows.view("uint8")

    def _rows(self, at: Array, number: int) -> Array:
        rows = at.reshape(-1, 32)[:, 8 * number : 8 * number + 8, None]
        self._aligned(rows, np.ones(rows.shape, bool), 16)
        return rows + np.arange(16)

    # --- between the lanes of a warp ---

    def bfly(self, values: Array, by: Array) -> Array:
        return values[self.tid ^ by]

    def up(self, values: Array, by: Array) -> Array:
        return values[np.where(self.lane >= by, self.tid - by, self.tid)]

    def idx(self, values: Array, lane: Array) -> Array:
        return values[self.warp | (lane & np.uint32(31))]

    def reduce(self, values: Array, what: str) -> Array:
        function = {"add": np.add, "max": np.maximum, "min": np.minimum}[what]
        return np.repeat(function.reduce(values.reshape(-1, 32), axis=1, dtype=values.dtype), 32)


# --- of each thread alone ---


def shift_left(value: Array, by: Array) -> Array:
    """A shift by the width or more gives 0."""
    return np.where(by < 8 * value.itemsize, value << by.astype(value.dtype), 0).astype(value.dtype)


def shift_right(value: Array, by: Array) -> Array:
    """A shift by the width or more gives the sign, or 0."""
    most = 8 * value.itemsize - 1
    shifted = value >> np.minimum(by, most).astype(value.dtype)
    return shifted if value.dtype.kind == "i" else np.where(by <= most, shifted, 0).astype(value.dtype)


def repartition(left: Array, right: Array) -> Array:
    if left.dtype.kind == "f":
        return left / right
    return (np.sign(left) * np.sign(right) * (np.abs(left) // np.abs(right))).astype(left.dtype)


def fma(x: Array, y: Array, z: Array) -> Array:
    """Rounded twice, which is once for nearly all."""
    return (x.astype("float64") * y + z).astype("float32")


def permute(low: Array, high: Array, selector: Array) -> Array:
    """Four of the eight bytes of two numbers; a selector's fourth bit asks for a byte of the chosen one's sign."""
    both = (high.astype("uint64") << np.uint64(32)) | low
    found = np.zeros(np.broadcast_shapes(both.shape, selector.shape), "uint32")
    for i in range(4):
        which = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (8 * (which & np.uint32(7))).astype("uint64")) & np.uint64(255)
        byte = np.where(which >= 8, np.where(byte >= 128, 255, 0), byte)
        found |= byte.astype("uint32") << np.uint32(8 * i)
    return found


def count_ones(value: Array) -> Array:
    return np.array([int(one).bit_count() for one in value], "uint32")


def saturate(value: Array, kind: str) -> Array:
    """Floats without a fraction as whole numbers; NaN is 0."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(value.astype("float64"), nan=0.0), float(limits.min), float(limits.max)).astype(kind)


def to_f16(value: Array) -> Array:
    return value.astype("float16").view("uint16")


def to_bf16(value: Array) -> Array:
    """To the nearest, to the even one of two."""
    bits = value.view("uint32")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), 0x7FFF, rounded).astype("uint16")
