"""Sequence: any number of ids per example, such as the items a user saw last.

The column is lists, or text with a separator between the items. A null example has no ids. Null items and empty texts
are dropped before the list is cut to `max_length`. Cutting keeps the last items (logs are written oldest first) or the
first ones, in order.

Only the items that remain are hashed. There is no loop over rows: cutting is one gather on Arrow's flattened values.

A sequence may be a column of a history: `aligned` names the history's first feature. histories.py drops, sorts and cuts
the events of all columns of a history together, with the methods of this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hotrow.batch import Jagged
from hotrow.features.columns import Column, unwrap_array
from hotrow.features.hashing import BoolArray, IntArray
from hotrow.features.keys import column_keys, is_string, offsets_of
from hotrow.features.options import check_hash, check_history, check_separator
from hotrow.features.row_error import RowError, refuse_rows


@dataclass(frozen=True)
class Sequence:
    """Ids out of a list column, or out of text such as "12|7|9" with separator="|".

    Items become keys as in `Key`; with a separator, hash="none" and hash="int" read the items as decimal integers.
    max_length: 50 unless given. keep: "last" (default) or "first". aligned: the feature whose history this is a column
    of; the columns of one history are cut at the same events, by that feature's max_length and keep.

    >>> column = Column("seen", pa.array([[1, 2, 3], None, [4]]))
    >>> Sequence("seen", max_length=2).ids(column)
    Jagged(values=tensor([2, 3, 4]), offsets=tensor([0, 2, 2, 3]), weights=None)
    """

    name: str
    column: str | None = None
    max_length: int | None = None
    keep: str | None = None
    separator: str | None = None
    hash: str = "auto"
    seed: int = 0
    aligned: str | None = None

    def __post_init__(self) -> None:
        check_history(self)
        check_hash(self.name, self.hash, self.seed)
        check_separator(self.name, self.separator)

    single = False

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def ids(self, column: Column) -> Jagged:
        """The ids of every example, cut to max_length."""
        assert self.max_length is not None and self.keep is not None, "a FeatureSpec sets them"
        items, lengths = self.items(column)
        present = self.present(items)
        if present is not None:
            owners = owners_of(lengths)
            items = items.filter(pa.array(present))
            lengths = np.bincount(owners[present], minlength=len(lengths)).astype(np.int64)
        kept, cut = cut_lengths(lengths, self.max_length, self.keep)
        items = items if kept is None else items.take(pa.array(kept))
        return Jagged(torch.from_numpy(self.values(column.name, items, cut)), torch.from_numpy(offsets_of(cut)))

    def items(self, column: Column) -> tuple[pa.Array, IntArray]:
        """All items of all examples, and how many each example has."""
        return list_items(column, self.name, self.separator)

    def present(self, items: pa.Array) -> BoolArray | None:
        """Which items are neither null nor empty text; None if all are."""
        return present_items(items)

    def values(self, column: str, items: pa.Array, lengths: IntArray) -> IntArray:
        """The key of every item. Requires: every item is present."""
        if self.separator is not None and self.hash in ("none", "int"):
            items = parse_integers(column, items, lengths, '; use hash="string" for other text')
        try:
            return column_keys(Column(column, items), self.hash, self.seed)[0]
        except RowError as error:
            raise RowError(column, np.unique(owners_of(lengths)[error.rows]), error.fact) from error


def list_items(column: Column, name: str, separator: str | None) -> tuple[pa.Array, IntArray]:
    """All items of a list column (or of text to split), and how many each example has. A null list has none."""
    array, kind, t = column.array, column.array.type, pa.types
    if t.is_null(kind):
        return pa.array([], pa.null()), np.zeros(len(column), np.int64)
    listed = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    if separator is None and not listed:
        cure = "pass separator= to split text" if is_string(kind) else "use Key for one value per example"
        raise column.wrong_type(f"feature {name!r} needs lists", cure)
    if separator is not None:
        if not is_string(kind):
            cure = "leave separator= out for lists" if listed else "pass text, or lists without separator="
            raise column.wrong_type(f"feature {name!r} splits text at {separator!r}", cure)
        empty = pc.equal(pc.binary_length(array), 0)
        array = pc.split_pattern(pc.if_else(empty, pa.scalar(None, kind), array), separator)
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return unwrap_array(array.flatten()), lengths


def present_items(items: pa.Array) -> BoolArray | None:
    """Which items are neither null nor empty text; None if all are."""
    present = items.is_valid()
    if is_string(items.type):
        present = pc.and_kleene(present, pc.greater(pc.binary_length(items), 0))
    if pc.all(present, min_count=0).as_py():
        return None
    mask: BoolArray = present.to_numpy(zero_copy_only=False).astype(np.bool_)
    return mask


def cut_lengths(lengths: IntArray, limit: int, keep: str) -> tuple[IntArray | None, IntArray]:
    """The positions of at most `limit` items of each example (None if all are kept), and how many each one keeps.

    >>> cut_lengths(np.array([3, 1]), 2, "last")
    (array([1, 2, 3]), array([2, 1]))
    """
    kept = np.minimum(lengths, limit)
    if int(lengths.sum()) == int(kept.sum()):
        return None, lengths
    starts = offsets_of(lengths)[:-1] + (lengths - kept if keep == "last" else 0)
    shift = np.repeat(starts - offsets_of(kept)[:-1], kept)
    positions: IntArray = shift + np.arange(len(shift))
    return positions, kept


def owners_of(lengths: IntArray) -> IntArray:
    """Which row each item belongs to."""
    return np.repeat(np.arange(len(lengths)), lengths)


def refuse_items(column: str, bad: BoolArray, items: pa.Array, lengths: IntArray, fact: str) -> None:
    """Like refuse_rows, for the rows that the bad items belong to."""
    try:
        refuse_rows(column, bad, items, fact)
    except RowError as error:
        raise RowError(column, np.unique(owners_of(lengths)[error.rows]), error.fact) from error


def parse_integers(column: str, items: pa.Array, lengths: IntArray, cure: str = "") -> pa.Array:
    """Decimal text as int64: a minus sign or none, then digits."""
    text = items.cast(pa.large_string())
    digits = pc.match_substring_regex(text, "^-?[0-9]{1,19}$").to_numpy(zero_copy_only=False).astype(np.bool_)
    fact = "{} is not an integer of 64 bits" + cure
    try:
        refuse_items(column, ~digits, text, lengths, fact)
        return text.cast(pa.int64())
    except pa.ArrowInvalid:
        beyond = np.array([not -(1 << 63) <= int(item) < 1 << 63 for item in text.to_pylist()])
        refuse_items(column, beyond, text, lengths, fact)
        raise
