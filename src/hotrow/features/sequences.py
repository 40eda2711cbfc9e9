"""Sequence: any number of ids per example, such as the items a user saw last.

The column is lists, or text with a separator between the items. A null example has no ids. Null items and empty texts
are dropped before the list is cut to `max_length`. Cutting keeps the last items (logs are written oldest first) or the
first ones, in order.

Only the items that remain are hashed. There is no loop over rows: cutting is one gather on Arrow's flattened values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hotrow.batch import Jagged
from hotrow.errors import OptionError
from hotrow.features.columns import Column, unwrap_array
from hotrow.features.hashing import BoolArray, IntArray
from hotrow.features.keys import column_keys, is_string, offsets_of
from hotrow.features.options import check_choice, check_hash, set_default_column
from hotrow.features.row_error import RowError, refuse_rows

KEEP = ("last", "first")


@dataclass(frozen=True)
class Sequence:
    """Ids out of a list column, or out of text such as "12|7|9" with separator="|".

    Items become keys as in `Key`; with a separator, hash="none" and hash="int" read the items as decimal integers.

    >>> column = Column("seen", pa.array([[1, 2, 3], None, [4]]))
    >>> Sequence("seen", max_length=2).ids(column)
    Jagged(values=tensor([2, 3, 4]), offsets=tensor([0, 2, 2, 3]), weights=None)
    """

    name: str
    column: str | None = None
    max_length: int = 50
    keep: str = "last"
    separator: str | None = None
    hash: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        set_default_column(self)
        check_hash(self.name, self.hash, self.seed)
        check_choice(self.name, "keep", self.keep, KEEP)
        if not isinstance(self.max_length, int) or isinstance(self.max_length, bool) or self.max_length < 1:
            raise OptionError(f"feature {self.name!r}: max_length={self.max_length!r}; give an integer of 1 or more")
        if self.separator is not None and (not isinstance(self.separator, str) or not self.separator):
            raise OptionError(
                f"feature {self.name!r}: separator={self.separator!r}; give a text such as '|', or leave it out"
            )

    single = False

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def ids(self, column: Column) -> Jagged:
        """The ids of every example, cut to max_length."""
        if pa.types.is_null(column.array.type):
            return Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(len(column) + 1, dtype=torch.int64))
        items, lengths = self._items(column)
        items, lengths = _present(items, lengths)
        items, lengths = _cut(items, lengths, self.max_length, self.keep)
        if self.separator is not None and self.hash in ("none", "int"):
            items = _parse_integers(column, items, lengths)
        keys = self._keys(column, items, lengths)
        return Jagged(torch.from_numpy(keys), torch.from_numpy(offsets_of(lengths)))

    def _items(self, column: Column) -> tuple[pa.Array, IntArray]:
        """All items of all examples, and how many each example has."""
        array, kind, t = column.array, column.array.type, pa.types
        listed = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
        if self.separator is None and not listed:
            cure = "pass separator= to split text" if is_string(kind) else "use Key for one value per example"
            raise column.wrong_type(f"feature {self.name!r} needs lists", cure)
        if self.separator is not None:
            if not is_string(kind):
                cure = "leave separator= out for lists" if listed else "pass text, or lists without separator="
                raise column.wrong_type(f"feature {self.name!r} splits text at {self.separator!r}", cure)
            array = pc.split_pattern(array, self.separator)
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return unwrap_array(array.flatten()), lengths

    def _keys(self, column: Column, items: pa.Array, lengths: IntArray) -> IntArray:
        try:
            return column_keys(Column(column.name, items), self.hash, self.seed)[0]
        except RowError as error:
            raise RowError(column.name, np.unique(_owners(lengths)[error.rows]), error.fact) from error


def _present(items: pa.Array, lengths: IntArray) -> tuple[pa.Array, IntArray]:
    """Without items that are null or empty text."""
    present = items.is_valid()
    if is_string(items.type):
        present = pc.and_kleene(present, pc.greater(pc.binary_length(items), 0))
    if pc.all(present, min_count=0).as_py():
        return items, lengths
    mask = present.to_numpy(zero_copy_only=False).astype(np.bool_)
    return items.filter(pa.array(mask)), np.bincount(_owners(lengths)[mask], minlength=len(lengths)).astype(np.int64)


def _cut(items: pa.Array, lengths: IntArray, limit: int, keep: str) -> tuple[pa.Array, IntArray]:
    """At most `limit` items of each example."""
    kept = np.minimum(lengths, limit)
    if len(items) == int(kept.sum()):
        return items, lengths
    starts = offsets_of(lengths)[:-1] + (lengths - kept if keep == "last" else 0)
    shift = np.repeat(starts - offsets_of(kept)[:-1], kept)
    return items.take(pa.array(shift + np.arange(len(shift)))), kept


def _parse_integers(column: Column, items: pa.Array, lengths: IntArray) -> pa.Array:
    """Decimal text as int64: a minus sign or none, then digits."""
    text = items.cast(pa.large_string())
    digits = pc.match_substring_regex(text, "^-?[0-9]{1,19}$").to_numpy(zero_copy_only=False).astype(np.bool_)
    fact = '{} is not an integer of 64 bits; use hash="string" for other text'
    try:
        _refuse_items(column, ~digits, text, lengths, fact)
        return text.cast(pa.int64())
    except pa.ArrowInvalid:
        beyond = np.array([not -(1 << 63) <= int(item) < 1 << 63 for item in text.to_pylist()])
        _refuse_items(column, beyond, text, lengths, fact)
        raise


def _refuse_items(column: Column, bad: BoolArray, items: pa.Array, lengths: IntArray, fact: str) -> None:
    """Like refuse_rows, for the rows that the bad items belong to."""
    try:
        refuse_rows(column.name, bad, items, fact)
    except RowError as error:
        raise RowError(column.name, np.unique(_owners(lengths)[error.rows]), error.fact) from error


def _owners(lengths: IntArray) -> IntArray:
    """Which row each item belongs to."""
    return np.repeat(np.arange(len(lengths)), lengths)
