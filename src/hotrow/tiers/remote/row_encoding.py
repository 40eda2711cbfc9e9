"""Row values as bytes: fp32, fp16 or int8.

fp32 is exact. fp16 rounds to nearest even; a value beyond its range is an error, not an infinity. int8 is the
quantization of kernels/rows/quantize.py: codes 0 to 255, then the row's scale and bias as float32; value = code * scale
+ bias, in float32. Everything is little-endian. Decoding a stored row and encoding it again gives the same bytes for
fp32 and fp16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.errors import BatchError

VALUES = ("fp32", "fp16", "int8")
Bytes = NDArray[np.uint8]


def row_bytes(dim: int, value: str) -> int:
    """Bytes of a row.

    >>> [row_bytes(16, value) for value in VALUES]
    [64, 32, 24]
    """
    return {"fp32": 4 * dim, "fp16": 2 * dim, "int8": dim + 8}[value]


def encode(rows: NDArray[np.float32], value: str) -> Bytes:
    """Rows [n, dim] as bytes [n, row_bytes]."""
    if value == "fp32":
        return rows.astype("<f4", copy=False).view(np.uint8)
    if value == "fp16":
        with np.errstate(over="ignore"):
            half = rows.astype("<f2")
        if not np.isfinite(half).all():
            raise BatchError("a value is beyond fp16's 65504; no row was written. Keep this table as fp32")
        return half.view(np.uint8)
    if value != "int8":
        raise AssertionError(value)
    out: Bytes = np.empty((len(rows), row_bytes(rows.shape[1], value)), np.uint8)
    if len(rows):
        bias = rows.min(axis=1)
        scale = (rows.max(axis=1) - bias) / np.float32(255)
        share = (rows - bias[:, None]) / np.where(scale > 0, scale, np.float32(1))[:, None]
        out[:, :-8] = np.clip(share + np.float32(0.5), 0, 255).astype(np.uint8)
        out[:, -8:] = np.stack([scale, bias], axis=1).astype("<f4").view(np.uint8)
    return out


def decode(raw: Bytes, value: str) -> NDArray[np.float32]:
    """Bytes [n, row_bytes] as rows [n, dim]; for fp32 the same memory."""
    if value == "fp32":
        return raw.view("<f4")
    if value == "fp16":
        return raw.view("<f2").astype(np.float32)
    tail: Any = np.ascontiguousarray(raw[:, -8:]).view("<f4")
    rows: NDArray[np.float32] = raw[:, :-8].astype(np.float32) * tail[:, :1] + tail[:, 1:]
    return rows
