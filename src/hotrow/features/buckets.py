"""Bucketize and LogBucket: a number's bucket is its key.

Both compare float64 values with fixed boundaries and never take a logarithm of a value. Two machines whose math
libraries differ in the last bit would otherwise put the same count into two buckets, and so into two rows. LogBucket's
boundaries are computed once with Python's decimal arithmetic, which rounds correctly by definition, so they are the
same everywhere. (Dropped: `floor(log1p(x) ** 2)` in numpy, whose last bit depends on the math library.)

With n boundaries the buckets are 0 to n and a missing value gets n + 1.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from hotrow.batch import Jagged
from hotrow.errors import OptionError
from hotrow.features.columns import Column
from hotrow.features.keys import fill_missing
from hotrow.features.numbers import FloatArray, numbers
from hotrow.features.options import set_default_column

LOG_BUCKETS = 1906
"""The last bucket of LogBucket: floor(log(1 + 2**63) ** 2), so that every int64 has its own."""


@dataclass(frozen=True)
class Bucketize:
    """A number's key is how many boundaries are at or below it; a missing value gets `len(boundaries) + 1`.

    >>> import pyarrow as pa
    >>> Bucketize("age", boundaries=[18, 65]).ids(Column("age", pa.array([17, 18, 70, None]))).values
    tensor([0, 1, 2, 3])
    """

    name: str
    column: str | None = None
    boundaries: Many[float] = ()

    def __post_init__(self) -> None:
        set_default_column(self)
        try:
            bounds = tuple(float(value) for value in self.boundaries)
        except (TypeError, ValueError):
            bounds = ()
        rising = all(low < high for low, high in pairwise(bounds))
        if not bounds or not rising or not all(map(math.isfinite, bounds)):
            raise OptionError(
                f"feature {self.name!r}: boundaries={self.boundaries!r}; give one or more finite numbers, each greater "
                "than the one before"
            )
        object.__setattr__(self, "boundaries", bounds)

    single = True

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def ids(self, column: Column) -> Jagged:
        """The bucket of every value."""
        values, missing = numbers(column, f"feature {self.name!r}")
        keys = np.searchsorted(np.array(self.boundaries), values, side="right").astype(np.int64)
        return Jagged(torch.from_numpy(fill_missing(keys, missing, len(self.boundaries) + 1)))


@dataclass(frozen=True)
class LogBucket:
    """A count's key is floor(log(1 + x) ** 2): fine for small counts, coarse for large ones.

    A negative x has the bucket -1 - floor(log(1 - x) ** 2), so that its buckets are its own; a missing value has 1907.
    Values beyond 2**63 share the last bucket, 1906.

    >>> import pyarrow as pa
    >>> LogBucket("count").ids(Column("count", pa.array([0, 1, 2, 100, -1, -2, None]))).values
    tensor([   0,    0,    1,   21,   -1,   -2, 1907])
    """

    name: str
    column: str | None = None

    def __post_init__(self) -> None:
        set_default_column(self)

    single = True

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def ids(self, column: Column) -> Jagged:
        """The bucket of every value."""
        values, missing = numbers(column, f"feature {self.name!r}")
        buckets = np.searchsorted(log_boundaries(), np.abs(values), side="right").astype(np.int64)
        keys = np.where(values < 0, -1 - buckets, buckets)
        return Jagged(torch.from_numpy(fill_missing(keys, missing, LOG_BUCKETS + 1)))


@lru_cache(maxsize=1)
def log_boundaries() -> FloatArray:
    """The float64 nearest to exp(sqrt(k)) - 1 for k from 1 to 1906: bucket k begins there. About 0.1 s, once."""
    with decimal.localcontext(decimal.Context(prec=40)):
        return np.array([float(decimal.Decimal(k).sqrt().exp() - 1) for k in range(1, LOG_BUCKETS + 1)])
