"""Tensors as sent by clients: a name, a datatype, a shape, and elements as bytes, JSON or protobuf fields.

`declare` checks a tensor's name, datatype and shape before any element is read, so that a shape of 2^60 elements is an
error and not an allocation. `from_bytes` and `from_list` then return one flat array (for BYTES, a list of strings) with
exactly the elements of the shape.

Arrays from bytes are views of the body if they are aligned: they must not be written to, and they keep the body in
memory. Everything here is a pure function; any thread may call it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hotrow.errors import choices
from hotrow.serve.protocol.request import Array, RefusedError

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
BYTES = "BYTES"
_DATATYPES = (*DTYPES, BYTES)
_MAX_ELEMENTS = 1 << 31
_MAX_NAME = 1024

Elements = Array | list[str | None]


class DeclaredTensor(NamedTuple):
    """A tensor's declaration. `size` is its number of elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int


def invalid(message: str, status: int = 400) -> RefusedError:
    """The error of an invalid request."""
    return RefusedError(status, message)


def declare(name: object, datatype: object, shape: object) -> DeclaredTensor:
    """A tensor's declaration, checked.

    >>> declare("item", "INT64", [50, 1]).size
    50
    >>> declare("item", "INT46", [50])
    Traceback (most recent call last):
    hotrow.serve.protocol.request.RefusedError: input 'item' has the datatype 'INT46'; did you mean 'INT64'? ...
    """
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME:
        raise invalid(f"an input has the name {shown(name)}; give every input a name of 1 to {_MAX_NAME} characters")
    if not isinstance(datatype, str) or (datatype not in DTYPES and datatype != BYTES):
        raise invalid(f"input {shown(name)} has the datatype {shown(datatype)}; {choices(datatype, _DATATYPES)}")
    if not isinstance(shape, (list, tuple)) or not 1 <= len(shape) <= 2:
        raise invalid(
            f"input {shown(name)} has the shape {shown(shape)}; give a list of one or two sizes, such as [50]"
        )
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise invalid(f"input {shown(name)} has the shape {shown(shape)}; sizes are whole numbers from 0")
        count *= size
    if count > _MAX_ELEMENTS:
        raise invalid(
            f"input {shown(name)} has {count} elements; send at most {_MAX_ELEMENTS}, in smaller requests", 413
        )
    return DeclaredTensor(name, datatype, tuple(shape), count)


def from_bytes(tensor: DeclaredTensor, data: bytes | memoryview, offset: int, size: int) -> Elements:
    """The elements in `size` bytes at `offset`, flat.

    Requires: `data` has those bytes.
    """
    if tensor.datatype == BYTES:
        return _strings(tensor, data[offset : offset + size])
    dtype = DTYPES[tensor.datatype]
    if size != tensor.size * dtype.itemsize:
        raise wrong_size(tensor, size)
    array = np.frombuffer(data, dtype, tensor.size, offset)
    return array if array.flags.aligned else array.copy()


def wrong_size(tensor: DeclaredTensor, size: int) -> RefusedError:
    """The error of a tensor whose bytes disagree with its shape."""
    wants = tensor.size * DTYPES[tensor.datatype].itemsize
    return invalid(
        f"input {shown(tensor.name)} has {size} bytes, but {tensor.datatype} of shape {list(tensor.shape)} "
        f"has {wants}; send every element of the shape, little-endian, and nothing else"
    )


def from_list(tensor: DeclaredTensor, data: object) -> Elements:
    """The elements of a JSON list, which is flat or nested like the shape.

    >>> from_list(declare("item", "INT64", [2, 1]), [[7], [8]])
    array([7, 8])
    """
    if not isinstance(data, (list, tuple)):
        raise invalid(f'input {shown(tensor.name)} has "data" of {type(data).__name__}; give a list of its elements')
    if tensor.datatype == BYTES:
        return _checked_strings(tensor, _flat(data))
    try:
        array = np.array(data)
    except (ValueError, OverflowError, RecursionError) as error:
        raise invalid(
            f"the data of input {shown(tensor.name)} is no {len(tensor.shape)}-d list of numbers; "
            "give as many elements in every list"
        ) from error
    return as_type(tensor, array.reshape(-1))


def as_type(tensor: DeclaredTensor, array: Array) -> Array:
    """Numbers converted to the tensor's type, if no value changes (floats may be rounded)."""
    dtype = DTYPES[tensor.datatype]
    if array.size != tensor.size:
        raise invalid(
            f"input {shown(tensor.name)} has {array.size} elements, but its shape {list(tensor.shape)} has "
            f"{tensor.size}; send every element and nothing else"
        )
    if array.dtype == dtype:
        return array
    if array.size == 0:
        return array.astype(dtype)
    allowed = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]
    if array.dtype.kind not in allowed:
        raise invalid(
            f"the data of input {shown(tensor.name)} cannot be read as {tensor.datatype}: its elements are "
            f"{_kind(array)}; send numbers of that type, or declare another datatype"
        )
    if dtype.kind in "iu":
        range_: Any = np.iinfo(dtype.str)  # type: ignore[call-overload]
        low, high = int(range_.min), int(range_.max)
        if int(array.min()) < low or int(array.max()) > high:
            raise invalid(
                f"the data of input {shown(tensor.name)} leaves {tensor.datatype}'s range {low} to {high}; "
                "fold larger ids into int64 (the same 64 bits, signed)"
            )
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def shown(value: object) -> str:
    """A client's value for an error message: ASCII, on one line, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _kind(array: Array) -> str:
    kinds = {"b": "booleans", "f": "floats", "U": "strings", "i": "integers", "u": "integers"}
    return kinds.get(array.dtype.kind, "of several kinds, or integers beyond 64 bits")


def _strings(tensor: DeclaredTensor, data: bytes | memoryview) -> list[str | None]:
    """BYTES elements: each a length of 4 bytes, little-endian, and that many bytes of UTF-8."""
    size = len(data)
    found: list[str | None] = []
    if tensor.size * 4 > size:
        raise invalid(
            f"input {shown(tensor.name)} has {tensor.size} strings in {size} bytes; each has 4 bytes of length"
        )
    view, at = bytes(data), 0
    for number in range(tensor.size):
        end = at + 4 + int.from_bytes(view[at : at + 4], "little") if at + 4 <= size else size + 1
        if end > size:
            raise invalid(
                f"string {number} of input {shown(tensor.name)} ends after the tensor's {size} bytes; send it whole"
            )
        found.append(_decoded(tensor, number, view[at + 4 : end]))
        at = end
    if at != size:
        raise invalid(
            f"input {shown(tensor.name)} has {size - at} bytes after its {tensor.size} strings; "
            "make its shape and binary_data_size agree"
        )
    return found


def decoded(tensor: DeclaredTensor, elements: Sequence[bytes]) -> list[str | None]:
    """The strings of BYTES elements that are already separate."""
    if len(elements) != tensor.size:
        raise invalid(
            f"input {shown(tensor.name)} has {len(elements)} elements, but its shape has {tensor.size}; "
            "send every element and nothing else"
        )
    return [_decoded(tensor, number, element) for number, element in enumerate(elements)]


def _decoded(tensor: DeclaredTensor, number: int, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise invalid(
            f"string {number} of input {shown(tensor.name)} is not UTF-8 ({error.reason}); encode it"
        ) from error


def _checked_strings(tensor: DeclaredTensor, elements: list[Any]) -> list[str | None]:
    if len(elements) != tensor.size:
        raise invalid(
            f"input {shown(tensor.name)} has {len(elements)} elements, but its shape {list(tensor.shape)} has "
            f"{tensor.size}; send every element and nothing else"
        )
    for element in elements:
        if element is not None and type(element) is not str:
            raise invalid(
                f"input {shown(tensor.name)} is BYTES and has {shown(element)}; give strings, null where missing"
            )
        if element is not None and not element.isascii() and not _encodes(element):
            raise invalid(
                f"input {shown(tensor.name)} has {shown(element)}, which is no Unicode text; send whole characters"
            )
    return elements


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flat(data: Any) -> list[Any]:
    """The elements of a list or of a list of lists: shapes have at most two dimensions."""
    if data and all(isinstance(part, (list, tuple)) for part in data):
        return [element for part in data for element in part]
    return list(data)


def finite_number(value: object) -> bool:
    """Whether a parameter is a number that a float can hold. Integers in JSON have any length.

    >>> [finite_number(value) for value in (1.5, 10**400, float("nan"), True)]
    [True, False, False, False]
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
