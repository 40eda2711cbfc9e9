"""Nested arguments of a model: tensors in tuples, lists and dicts, in the order in which torch.export flattens them.

>>> leaves(((1, [2]), {"a": 3}))
[1, 2, 3]
>>> structure(((1, [2]), {"a": 3}))
"((*,[*]),{'a':*})"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def leaves(value: Any) -> list[Any]:
    """The values that are no tuple, list or dict, in order."""
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [value]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nesting with `function` of each leaf."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(function, part) for part in value)
    if isinstance(value, Mapping):
        return {name: map_leaves(function, part) for name, part in value.items()}
    return function(value)


def structure(value: Any) -> str:
    """The nesting as text; `*` is a leaf."""
    if isinstance(value, tuple):
        return "(" + ",".join(map(structure, value)) + ")"
    if isinstance(value, list):
        return "[" + ",".join(map(structure, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name!r}:{structure(part)}" for name, part in value.items()) + "}"
    return "*"
