"""Dense: a number per example that goes to the tower as it is, or scaled.

The dense features of a spec, in order, are the columns of `batch.dense`. A value goes through four steps in float64,
always in this order: clip, transform, missing, round to float32. So the tower sees `missing` as it is, without the
transform. An infinite result is an error, because one of them turns every weight of the tower into NaN within a step.

log1p is sign(x) * log(1 + |x|), so that negative counts (Criteo has some) keep their order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrow.errors import OptionError
from hotrow.features.columns import Column
from hotrow.features.numbers import FloatArray, numbers
from hotrow.features.options import check_choice, set_default_column
from hotrow.features.row_error import refuse_rows

TRANSFORMS = ("none", "log1p", "standardize")


@dataclass(frozen=True)
class Dense:
    """One column of `batch.dense`.

    transform: "none", "log1p" or "standardize", which is (x - mean) / std and needs both. clip: (low, high), or None.

    >>> import pyarrow as pa
    >>> Dense("count", transform="log1p").values(Column("count", pa.array([0, None, -1])))
    array([ 0.       ,  0.       , -0.6931472], dtype=float32)
    """

    name: str
    column: str | None = None
    transform: str = "none"
    missing: float = 0.0
    mean: float | None = None
    std: float | None = None
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        set_default_column(self)
        check_choice(self.name, "transform", self.transform, TRANSFORMS)
        self._check_number("missing", self.missing)
        if self.transform == "standardize":
            self._check_number("mean", self.mean)
            self._check_number("std", self.std)
            if float(self.std or 0) <= 0:
                raise OptionError(
                    f"feature {self.name!r}: std={self.std!r}; give the column's standard deviation, above 0"
                )
        elif self.mean is not None or self.std is not None:
            raise OptionError(
                f"feature {self.name!r}: mean and std belong to transform='standardize' but transform="
                f"{self.transform!r}; leave them out or change the transform"
            )
        if self.clip is not None:
            self._check_clip()

    def inputs(self) -> tuple[str, ...]:
        """The raw column it reads."""
        return (str(self.column),)

    def values(self, column: Column) -> npt.NDArray[np.float32]:
        """The transformed values, one per example."""
        x, missing = numbers(column, f"feature {self.name!r}")
        if self.clip is not None:
            np.clip(x, *self.clip, out=x)
        x = self._transform(x)
        x[missing] = self.missing
        with np.errstate(over="ignore"):
            result = x.astype(np.float32)
        refuse_rows(
            column.name,
            ~np.isfinite(result),
            column.array,
            "{} does not fit a float32; pass clip=(low, high) to bound it",
        )
        return result

    def _transform(self, x: FloatArray) -> FloatArray:
        if self.transform == "log1p":
            return np.copysign(np.log1p(np.abs(x)), x)
        if self.transform == "standardize":
            assert self.mean is not None and self.std is not None
            return (x - self.mean) / self.std
        return x

    def _check_number(self, option: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise OptionError(f"feature {self.name!r}: {option}={value!r}; give a finite number")

    def _check_clip(self) -> None:
        clip = self.clip
        if not isinstance(clip, (tuple, list)) or len(clip) != 2:
            raise OptionError(f"feature {self.name!r}: clip={clip!r}; give (low, high)")
        for value in clip:
            self._check_number("clip", value)
        if clip[0] >= clip[1]:
            raise OptionError(f"feature {self.name!r}: clip={clip!r}; give (low, high) with low below high")
        object.__setattr__(self, "clip", (float(clip[0]), float(clip[1])))
