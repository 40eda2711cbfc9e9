"""Key and Cross: one 64-bit key per example.

A key needs no vocabulary: an integer is its own key, a string is hashed. `hash="auto"` decides by the column's type, so
a column of integers in training must not arrive as strings in serving. With a named hash ("none", "string", "hex",
"int") a wrong type is an error instead of a different key. Floats are refused: 0.1 + 0.2 and 0.3 would be two keys.

A missing value becomes the reserved key `missing_key(seed)`, no id, or an error, as `missing=` says. `Cross` folds the
core's `cross` from the left over other single-id features; a raw column in it is read as a default `Key`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import torch

from hotrow.batch import Jagged
from hotrow.errors import DataError, OptionError
from hotrow.features import hashing
from hotrow.features.columns import Column
from hotrow.features.hashing import BoolArray, IntArray
from hotrow.features.options import check_choice, check_hash, check_name, set_default_column
from hotrow.features.row_error import refuse_rows

MISSING = ("key", "drop", "error")


@dataclass(frozen=True)
class Key:
    """One id per example, out of an integer or string column.

    hash: "auto" (integers as they are, strings through XXH64), "none" (integers as they are), "string" (XXH64), "hex"
    (strings of hex digits as the integer they spell) or "int" (integers through a seeded bijection).
    missing: "key" (one reserved key), "drop" (no id for that example) or "error".

    >>> Key("user").ids(Column("user", pa.array([7, 8]))).values
    tensor([7, 8])
    """

    name: str
    column: str | None = None
    hash: str = "auto"
    seed: int = 0
    missing: str = "key"

    def __post_init__(self) -> None:
        set_default_column(self)
        check_hash(self.name, self.hash, self.seed)
        check_choice(self.name, "missing", self.missing, MISSING)

    @property
    def single(self) -> bool:
        """Whether every example has exactly one id."""
        return self.missing != "drop"

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def ids(self, column: Column) -> Jagged:
        """The column's keys, one per example, or at most one with missing="drop"."""
        keys, missing = column_keys(column, self.hash, self.seed)
        if self.missing == "error" and missing is not None:
            refuse_rows(column.name, missing, column.array, f"a missing value, and feature {self.name!r} allows none")
        if self.missing == "key":
            return Jagged(torch.from_numpy(fill_missing(keys, missing, hashing.missing_key(self.seed))))
        if self.missing == "error":
            return Jagged(torch.from_numpy(keys))
        present = np.ones(len(keys), np.bool_) if missing is None else ~missing
        return Jagged(torch.from_numpy(keys[present]), torch.from_numpy(offsets_of(present)))


@dataclass(frozen=True)
class Cross:
    """One id per example for a combination of others: `Cross("user_x_item", of=["user", "item"])`.

    `of` names features that have one id per example, or raw columns, which are then read as `Key` reads them. The order
    matters: (user, item) is another key than (item, user).

    >>> Cross("pair", of=["a", "b"]).ids([torch.tensor([1]), torch.tensor([2])]).values
    tensor([-1314133548254513946])
    """

    name: str
    of: Many[str] = ()

    def __post_init__(self) -> None:
        check_name(self)
        if isinstance(self.of, str) or not all(isinstance(name, str) for name in self.of) or len(self.of) < 2:
            raise OptionError(
                f"feature {self.name!r}: of={self.of!r}; give a list of two or more names of features or columns"
            )
        object.__setattr__(self, "of", tuple(self.of))

    single = True

    def ids(self, keys: Many[torch.Tensor]) -> Jagged:
        """The crossed keys. Requires: one tensor of keys for each name in `of`."""
        return Jagged(torch.from_numpy(reduce(hashing.cross, [tensor.numpy() for tensor in keys])))


def column_keys(column: Column, method: str, seed: int) -> tuple[IntArray, BoolArray | None]:
    """A key for every row, and the mask of missing rows (None if there are none). A missing row's key is undefined."""
    array, kind = column.array, column.array.type
    missing = column.missing()
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64), missing
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        if method in ("string", "hex"):
            raise column.wrong_type(f"hash={method!r} needs strings", 'pass strings, or use hash="auto" or hash="none"')
        keys = _integers(array)
        return (hashing.hash_ints(keys, seed) if method == "int" else keys), missing
    if is_string(kind):
        if method in ("none", "int"):
            raise column.wrong_type(
                f"hash={method!r} needs integers", 'pass integers, or use hash="string" or hash="hex"'
            )
        if method != "hex":
            return hashing.hash_strings(array, seed), missing
        keys, bad = hashing.parse_hex(array)
        bad = bad if missing is None else bad & ~missing
        refuse_rows(column.name, bad, array, '{} is not 1 to 16 hex digits; use hash="string" for other text')
        return keys, missing
    raise _no_key(column)


def fill_missing(keys: IntArray, missing: BoolArray | None, key: int) -> IntArray:
    """The keys, with `key` where they are missing. Writes in place."""
    if missing is not None:
        keys[missing] = key
    return keys


def offsets_of(lengths: IntArray | BoolArray) -> IntArray:
    """Jagged offsets of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def is_string(kind: pa.DataType) -> bool:
    """Whether an Arrow type is text or bytes in a layout that the core hashes."""
    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind))


def _integers(array: pa.Array) -> IntArray:
    """The 64 bits of every integer, in a new array; a uint64 keeps its bits."""
    if pa.types.is_uint64(array.type):
        wrapped: IntArray = array.fill_null(0).to_numpy(zero_copy_only=False).astype(np.uint64).view(np.int64)
        return wrapped
    return np.array(array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def _no_key(column: Column) -> DataError:
    if pa.types.is_floating(column.array.type):
        return column.wrong_type(
            "a key is an integer or a string (two nearly equal floats would be two keys)",
            "use Bucketize or LogBucket, or cast the column to int64 if its values are whole (pandas makes floats of "
            'integers with gaps; its "Int64" does not)',
        )
    if pa.types.is_list(column.array.type) or pa.types.is_large_list(column.array.type):
        return column.wrong_type("a Key has one value per example", "use Sequence for lists")
    if pa.types.is_temporal(column.array.type):
        return column.wrong_type("a key is an integer or a string", "use TimePart for its hour or weekday")
    return column.wrong_type("a key is an integer or a string", "cast the column to int64 or string")
