"""Numbers: a raw column as float64, and a mask of missing values.

Dense features, buckets and labels all use it, so they agree on what a number is. Integers, floats, decimals and
booleans are numbers. Text is not, because how to read "1,5" depends on the locale. A null and a NaN both count as
missing. Integers beyond 2**53 are rounded to the nearest float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hotrow.features.columns import Column
from hotrow.features.hashing import BoolArray
from hotrow.features.row_error import refuse_rows

FloatArray = npt.NDArray[np.float64]


def numbers(column: Column, user: str) -> tuple[FloatArray, BoolArray]:
    """The values in a new array, NaN where missing, and the mask of missing rows. `user` names the feature in errors.

    >>> numbers(Column("x", pa.array([1, None])), "feature 'x'")
    (array([ 1., nan]), array([False,  True]))
    """
    array, kind = column.array, column.array.type
    t = pa.types
    if t.is_null(kind):
        values = np.full(len(array), np.nan)
    elif t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind):
        plain = array.cast(pa.int64()) if t.is_boolean(kind) else array
        values = np.array(plain.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
    else:
        raise column.wrong_type(f"{user} needs numbers", "cast it, for example column.cast(pyarrow.float64())")
    return values, np.isnan(values)


def labels_of(column: Column) -> npt.NDArray[np.float32]:
    """Labels as float32: every one is 0 or 1.

    >>> labels_of(Column("click", pa.array([True, False])))
    array([1., 0.], dtype=float32)
    """
    values, missing = numbers(column, "the label")
    refuse_rows(
        column.name, missing, column.array, "the label is missing; drop the row, or pass labels=False to score it"
    )
    refuse_rows(column.name, (values != 0) & (values != 1), column.array, "the label is {}; a label is 0 or 1")
    return values.astype(np.float32)
