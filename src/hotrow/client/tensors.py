"""Tensors of the protocol: Python values to tensors, and a server's outputs back to arrays.

A value is a number or a string (the same for all rows), a list or array [rows], a list or array [rows, n], or a list
of lists of any lengths, which is sent as its elements and `<name>.offsets`. Integers become INT64; floats FP64, but
`dense` and weights FP32; strings BYTES, which the server's feature spec converts to keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hotrow.client.answer import Array
from hotrow.errors import OptionError

DTYPES = {"BOOL": np.dtype(np.bool_), "INT64": np.dtype("<i8"), "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4")}
DTYPES["FP64"] = np.dtype("<f8")
_DATATYPES = {"i": "INT64", "u": "INT64", "b": "BOOL", "f": "FP64"}


class Tensor(NamedTuple):
    """An input as it is sent."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class InferCall(NamedTuple):
    """What a request has beside its outputs: the model, its version (None: the current one), inputs and parameters."""

    model: str
    version: str | None
    inputs: list[Tensor]
    parameters: dict[str, Any]


def tensors(inputs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of these inputs.

    >>> [(tensor.name, tensor.shape) for tensor in tensors({"user": 7, "seen": [[1, 2], [3]]})]
    [('user', (1,)), ('seen', (3,)), ('seen.offsets', (3,))]
    """
    if not inputs:
        raise OptionError("inputs={}; give at least one input, such as {'user': [7]}")
    return [tensor for name, value in inputs.items() for tensor in _tensors(name, value)]


def array(datatype: str, shape: list[int], data: bytes) -> Array:
    """An output's array. Its memory is the answer's and cannot be written to."""
    found: Array = np.frombuffer(data, DTYPES[datatype]).reshape(shape)
    return found


def _tensors(name: str, value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)) and value and all(isinstance(row, (list, tuple)) for row in value):
        lengths = [len(row) for row in value]
        if len(set(lengths)) > 1 or lengths[0] == 0:
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            flat = [element for row in value for element in row]
            return [_tensor(name, np.array(flat, None if flat else np.int64)), _tensor(f"{name}.offsets", offsets)]
    return [_tensor(name, np.asarray(value))]


def _tensor(name: str, values: Array) -> Tensor:
    values = np.atleast_1d(values)
    if values.ndim > 2:
        raise OptionError(f"input {name!r} has the shape {list(values.shape)}; give [rows] or [rows, n]")
    if values.dtype.kind in "OU":
        return Tensor(name, "BYTES", values.shape, b"".join(_text(name, one) for one in values.reshape(-1)))
    if values.dtype.kind not in _DATATYPES:
        raise OptionError(f"input {name!r} is {values.dtype}; give integers, floats, booleans or strings")
    datatype = _DATATYPES[values.dtype.kind]
    if datatype == "FP64" and (name == "dense" or name.endswith(".weights") or values.dtype == np.float32):
        datatype = "FP32"
    return Tensor(name, datatype, values.shape, np.ascontiguousarray(values, DTYPES[datatype]).tobytes())


def _text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise OptionError(f"input {name!r} has {value!r} among strings; give strings alone, and '' for a missing one")
    data = value.encode()
    return len(data).to_bytes(4, "little") + data
