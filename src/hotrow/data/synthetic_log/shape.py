"""Shape: the features of a synthetic example, their sizes, and how many examples a day has.

The first two features without a size are the user and the item. All features without a size share the world's keys, so
one number scales a log from thousands to billions of keys. All other features are contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotrow.errors import OptionError


@dataclass(frozen=True)
class Shape:
    """What an example looks like.

    sparse: the name of each feature with one id per example, and how many keys it has; the features with None share
    the world's keys, and the first two of them are the user and the item. dense: how many dense features.
    history_length: at most so many items in the feature "history"; 0 leaves it out. zipf: the exponent. per_day:
    examples in a day.
    """

    sparse: Mapping[str, int | None] = field(
        default_factory=lambda: {"user": None, "item": None, "site": 5000, "device": 40, "country": 200, "slot": 6}
    )
    dense: int = 4
    history_length: int = 20
    zipf: float = 1.05
    per_day: int = 1_000_000

    def __post_init__(self) -> None:
        if not isinstance(self.sparse, Mapping):
            raise OptionError(f"sparse={self.sparse!r}; give a dict of feature name to number of keys or None")
        shared = [name for name, size in self.sparse.items() if size is None]
        if len(shared) < 2:
            raise OptionError(f"sparse={dict(self.sparse)!r}; give at least two features, user and item, the size None")
        if "history" in self.sparse:
            raise OptionError("a sparse feature is named 'history', the name of the items seen lately; rename it")
        for name, value, least in (
            *((f"sparse[{name!r}]", size, 1) for name, size in self.sparse.items() if size is not None),
            ("dense", self.dense, 0),
            ("history_length", self.history_length, 0),
            ("per_day", self.per_day, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise OptionError(f"{name}={value!r}; give an integer of {least} or more")
        if not isinstance(self.zipf, (int, float)) or not 0.5 <= self.zipf <= 3:
            raise OptionError(f"zipf={self.zipf!r}; give an exponent from 0.5 (flat) to 3 (steep)")
        object.__setattr__(self, "sparse", dict(self.sparse))

    @property
    def roles(self) -> tuple[str, str]:
        """The names of the user and the item feature."""
        user, item, *_ = (name for name, size in self.sparse.items() if size is None)
        return user, item

    def sizes(self, keys: int) -> dict[str, int]:
        """How many keys each feature has in a world of so many.

        >>> Shape({"user": None, "item": None, "slot": 6}).sizes(1_000_006)
        {'user': 500000, 'item': 500000, 'slot': 6}
        """
        fixed = sum(size for size in self.sparse.values() if size is not None)
        shared = sum(size is None for size in self.sparse.values())
        if keys < fixed + 2 * shared:
            raise OptionError(f"keys={keys}; this shape needs {fixed + 2 * shared} or more")
        return {name: (keys - fixed) // shared if size is None else size for name, size in self.sparse.items()}


_KAGGLE = (
    *(1460, 583, None, None, 305, 24, 12517, 633, 3, 93145, 5683, None, 3194),
    *(27, 14992, None, 10, 5652, 2173, 4, None, 18, 15, 286181, 105, 142572),
)
CRITEO_SHAPE = Shape(sparse={f"C{i}": size for i, size in enumerate(_KAGGLE, 1)}, dense=13, history_length=0)
"""13 dense and 26 sparse features; the small ones as large as in Criteo's Kaggle data, the five largest share the
keys."""
