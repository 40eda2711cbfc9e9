"""Columns: any input as Arrow arrays of a few plain types.

Training reads Arrow tables; serving gets lists from JSON, numpy arrays or tensors. Both must give the same keys, so
both are normalized here: one chunk, no dictionary encoding, no views, fields of structs as columns (nested.py), and a
float NaN from Python or numpy counts as missing. After this, the origin of a column makes no difference.

Lists are typed by Arrow (`[1, None]` is int64, `["a"]` is string); a column of nothing but None has the type null,
which every feature takes as "all missing".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hotrow.errors import DataError, choices
from hotrow.features.hashing import BoolArray
from hotrow.features.nested import field_array, split_path

_SIMPLE_LISTS = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_VIEWS = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}


@dataclass(frozen=True)
class Column:
    """One named raw column as an Arrow array of a plain type."""

    name: str
    array: pa.Array

    def __len__(self) -> int:
        return len(self.array)

    def missing(self) -> BoolArray | None:
        """Which rows are null, or None when none is."""
        if self.array.null_count == 0:
            return None
        mask: BoolArray = self.array.is_null().to_numpy(zero_copy_only=False)
        return mask

    def wrong_type(self, wants: str, cure: str) -> DataError:
        """The error of a feature that cannot use this column's type."""
        return DataError(f"column {self.name!r} holds {self.array.type} values but {wants}; {cure}")


def read_columns(raw: object, needed: Mapping[str, str]) -> dict[str, Column]:
    """The needed columns, all of one length. `needed` maps each column name to the feature that needs it, for messages.

    >>> read_columns({"a": [1, None], "b": ["x", "y"]}, {"a": "feature 'a'"})["a"].array.type
    DataType(int64)
    """
    names, get = _open(raw)
    found = {}
    for name, user in needed.items():
        root, fields = split_path(name, names)
        if names.count(root) > 1:
            raise DataError(f"{names.count(root)} columns are named {root!r}, which {user} needs; rename all but one")
        if root not in names:
            raise DataError(f"there is no column {name!r}, which {user} needs; {choices(name, names)}")
        array = _to_arrow(root, get(root))
        found[name] = Column(name, unwrap_array(field_array(root, array, fields) if fields else array))
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(
            "columns have different lengths: "
            + ", ".join(f"{name} {length}" for name, length in lengths.items())
            + "; give every column one value per example (None where it is missing)"
        )
    return found


def _open(raw: object) -> tuple[list[str], Any]:
    if isinstance(raw, (pa.RecordBatch, pa.Table)):
        return list(raw.schema.names), raw.column
    if isinstance(raw, Mapping):
        return list(raw), raw.__getitem__
    raise DataError(
        f"columns are {type(raw).__name__}; pass a pyarrow Table or RecordBatch, or a dict of name to values "
        "(a pandas frame becomes one with pyarrow.Table.from_pandas(frame))"
    )


def _to_arrow(name: str, values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if isinstance(values, np.ndarray) and values.ndim == 2:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1), from_pandas=True)
        if values.shape[1] == 0:
            return pa.array([[]] * len(values), pa.list_(flat.type))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    try:
        return pa.array(values, _simple_list_type(values), from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} cannot be read as one type of value ({error}); give integers, strings or floats alone, "
            "None where a value is missing, and np.uint64 or strings for integers beyond int64"
        ) from error


def _simple_list_type(values: object) -> pa.DataType | None:
    """The Arrow type of a list of one simple Python type; None for anything else, which Arrow then infers.

    This is for small JSON columns in serving: Arrow 26 takes 128 µs to infer the type of 50 strings when pandas is not
    installed, and 8 µs to convert them (2 cores of an AMD EPYC).
    """
    kinds = set(map(type, values)) - {type(None)} if isinstance(values, (list, tuple)) else set()
    return _SIMPLE_LISTS.get(kinds.pop()) if len(kinds) == 1 else None


def unwrap_array(array: pa.Array) -> pa.Array:
    """The same values without dictionary, extension type or view.

    >>> unwrap_array(pa.array(["a", "a"]).dictionary_encode()).type
    DataType(string)
    """
    if isinstance(array, pa.ExtensionArray):
        return unwrap_array(array.storage)
    if pa.types.is_dictionary(array.type):
        return unwrap_array(array.dictionary_decode())
    if str(array.type) in _VIEWS:
        return array.cast(_VIEWS[str(array.type)])
    if pa.types.is_fixed_size_binary(array.type):
        return array.cast(pa.binary())
    return array
