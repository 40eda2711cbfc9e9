"""Checks of the sizes that a layer or a tower is built with.

A job file may contain `top = "512"` or `widths = [64, 0]`. Each function takes an option's name and value. It returns
the value with a known type, or raises an OptionError that names the option, the value and the cure.
"""

from __future__ import annotations

from collections.abc import Iterable

from hotrow.errors import OptionError


def positive(name: str, value: object) -> int:
    """A whole number of at least 1.

    >>> positive("dim", 16)
    16
    """
    return at_least(1, name, value)


def at_least(smallest: int, name: str, value: object) -> int:
    """A whole number of at least `smallest`. True and False are refused.

    >>> at_least(0, "dense_features", 13)
    13
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise OptionError(f"{name} is {value!r}; give a whole number of at least {smallest}")
    return value


def widths(name: str, values: object) -> tuple[int, ...]:
    """Widths of the layers of an MLP, possibly none.

    >>> widths("top", [512, 256])
    (512, 256)
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise OptionError(f"{name} is {values!r}; give the widths of its layers as a list, for instance [512, 256]")
    return tuple(positive(f"{name}[{place}]", value) for place, value in enumerate(values))


def fraction(name: str, value: object) -> float:
    """A number of at least 0 and below 1.

    >>> fraction("dropout", 0.1)
    0.1
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise OptionError(f"{name} is {value!r}; give a number from 0 up to, not including, 1")
    return float(value)


def head_width(width: int, heads: int) -> int:
    """The width of one head.

    >>> head_width(64, 4)
    16
    """
    if positive("width", width) % positive("heads", heads):
        raise OptionError(f"width={width} cannot be divided into heads={heads}; give a multiple, such as {8 * heads}")
    return width // heads
