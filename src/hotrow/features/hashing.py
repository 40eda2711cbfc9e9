"""Hashing: the core's hash functions over whole columns.

The functions are defined in docs/formats/hashing.md and never change. This file passes Arrow's buffers to the core
without a copy. A string column is bytes and offsets, in Arrow and in the core, so slices and nulls cost nothing: the
core also hashes the bytes under a null, and the caller overwrites the result.

A key is an int64 everywhere in Python; the core's hashes are the same 64 bits, unsigned.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrow import _core

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MISSING = b"\x00missing"
"""The text that represents a missing value. Real text does not begin with a zero byte."""

_NOT_HEX = 255
_HEX_DIGITS = 16


def _nibbles() -> npt.NDArray[np.uint8]:
    table = np.full(256, _NOT_HEX, np.uint8)
    for value, digits in enumerate(zip("0123456789abcdef", "0123456789ABCDEF", strict=True)):
        for digit in digits:
            table[ord(digit)] = value
    return table


_NIBBLE = _nibbles()


def hash_bytes(data: bytes, seed: int = 0) -> int:
    """XXH64 of the bytes, as a signed 64-bit key.

    >>> hash_bytes(b"abc") == 0x44BC2CF5AD770999
    True
    """
    return int(_core.hash_bytes(data, seed))


def missing_key(seed: int = 0) -> int:
    """The key of a missing value.

    >>> missing_key() == hash_bytes(bytes([0]) + b"missing")
    True
    """
    return hash_bytes(MISSING, seed)


def hash_strings(array: pa.Array, seed: int = 0) -> IntArray:
    """XXH64 of the bytes of every value. Requires: type string, binary, large_string or large_binary.

    The result at a null is not defined.

    >>> hex(hash_strings(pa.array(["abc"]))[0])
    '0x44bc2cf5ad770999'
    """
    out = np.empty(len(array), np.int64)
    if len(array):
        data, offsets = string_buffers(array)
        _core.hash_strings(data, offsets, seed, out)
    return out


def hash_ints(values: IntArray, seed: int = 0) -> IntArray:
    """A seeded bijection of the 64-bit integers.

    >>> hash_ints(np.array([0, 1])).tolist()
    [0, 6238072747940578789]
    """
    out = np.empty(len(values), np.int64)
    _core.hash_ints(np.ascontiguousarray(values, np.int64), seed, out)
    return out


def cross(first: IntArray, second: IntArray) -> IntArray:
    """Combine two keys into one, row by row. Not symmetric; for more than two keys, fold from the left.

    >>> bool(cross(np.array([1]), np.array([2])) == cross(np.array([2]), np.array([1])))
    False
    """
    out = np.empty(len(first), np.int64)
    _core.cross(np.ascontiguousarray(first, np.int64), np.ascontiguousarray(second, np.int64), out)
    return out


def shards(keys: IntArray) -> npt.NDArray[np.int32]:
    """The shard, 0 to 1,023, of every key.

    >>> shards(np.array([0]))
    array([904], dtype=int32)
    """
    out = np.empty(len(keys), np.int32)
    _core.shards(np.ascontiguousarray(keys, np.int64), out)
    return out


def parse_hex(array: pa.Array) -> tuple[IntArray, BoolArray]:
    """Strings of 1 to 16 hex digits as 64-bit integers, and a mask of the strings that are not hex. Nulls are not hex.

    Processes one digit position of all rows at a time, from the last digit on.

    >>> parse_hex(pa.array(["05db9164", "xyz"]))
    (array([98275684,        0]), array([False,  True]))
    """
    keys = np.zeros(len(array), np.uint64)
    if not len(array):
        return keys.view(np.int64), np.zeros(0, np.bool_)
    data, offsets = string_buffers(array)
    starts, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    lengths = ends - starts
    bad = (lengths < 1) | (lengths > _HEX_DIGITS)
    if array.null_count:
        bad |= array.is_null().to_numpy(zero_copy_only=False)
    for place in range(min(int(lengths.max()), _HEX_DIGITS)):
        rows = slice(None) if int(lengths.min()) > place else np.flatnonzero(lengths > place)
        nibbles = _NIBBLE[data[ends[rows] - 1 - place]]
        bad[rows] |= nibbles == _NOT_HEX
        keys[rows] |= nibbles.astype(np.uint64) << np.uint64(4 * place)
    keys[bad] = 0
    return keys.view(np.int64), bad


def string_buffers(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32] | IntArray]:
    """The bytes of a string column and its n + 1 offsets into them, both without a copy. Requires: not empty."""
    _, offsets, data = array.buffers()
    rows = slice(array.offset, array.offset + len(array) + 1)
    text = np.frombuffer(data if data is not None else b"", np.uint8)
    if pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type):
        return text, np.frombuffer(offsets, np.int64)[rows]
    return text, np.frombuffer(offsets, np.int32)[rows]
