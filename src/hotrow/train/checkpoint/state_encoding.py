"""Nested state to plain JSON and named tensors, and back: how an optimizer's state is saved without pickle.

Tensors go into a safetensors file, and `{"$tensor": name}` takes their place. Numbers, text, None, lists and dicts with
text keys stay as they are; values that JSON lacks get a tag: `{"$tuple": [...]}`, `{"$items": [[key, value],
...]}` for a dict with other keys, `{"$float": "nan"}`. Any other type is an error that names it, because loading it
would mean running code from the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hotrow.errors import CheckpointError


def pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """`value` as JSON; its tensors are copied into `tensors` under names that begin with `name`.

    >>> pack({"betas": (0.9, 0.99), "state": {0: 1}}, {}, "adam")
    {'betas': {'$tuple': [0.9, 0.99]}, 'state': {'$items': [[0, 1]]}}
    """
    if isinstance(value, Tensor):
        name = name if name not in tensors else f"{name}#{len(tensors)}"  # the keys 0 and "0" in one dict
        tensors[name] = copy(value)
        return {"$tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [pack(item, tensors, f"{name}.{number}") for number, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [pack(item, tensors, f"{name}.{number}") for number, item in enumerate(value)]}
    if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        packed = {key: pack(item, tensors, f"{name}.{key}") for key, item in value.items()}
        only_text_keys = all(isinstance(key, str) and not key.startswith("$") for key in packed)
        return packed if only_text_keys else {"$items": [[key, item] for key, item in packed.items()]}
    raise CheckpointError(
        f"{name} is {type(value).__name__}, which cannot be saved without pickle; "
        "keep tensors, numbers, text, lists, tuples and dicts in that state"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of `pack`. Raises KeyError for a missing tensor.

    >>> unpack({"betas": {"$tuple": [0.9, 0.99]}, "state": {"$items": [[0, 1]]}}, {})
    {'betas': (0.9, 0.99), 'state': {0: 1}}
    """
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(unpack(item, tensors) for item in value["$tuple"])
    if "$items" in value:
        return {key: unpack(item, tensors) for key, item in value["$items"]}
    return {key: unpack(item, tensors) for key, item in value.items()}


def copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory."""
    return tensor.detach().cpu().contiguous().clone()


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file."""
    data: bytes = save(dict(tensors))
    return data


def from_bytes(data: bytes, where: object) -> dict[str, Tensor]:
    """The tensors of a safetensors file; `where` is its name, for the error."""
    try:
        tensors: dict[str, Tensor] = load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{where} is corrupt: {error}") from None
    return tensors
