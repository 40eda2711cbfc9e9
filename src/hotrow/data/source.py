"""Source: a stream of batches that can be resumed at any batch.

A source yields batches, each with a cursor: a small JSON dict that means "after this batch". The trainer saves the
cursor in the checkpoint beside the rows. A resumed run gets exactly the batches that were not committed: the batches
before any cursor and the batches after it are together the uninterrupted stream.

A source that remembers more than a position (the histories of users) yields cursors that carry its state.

A cursor identifies its source (file names and sizes, batch size, or the seed and shape of a synthetic stream), and a
source refuses a cursor of another one. `batches` may be called repeatedly and from several threads; each call is a
separate pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec

Cursor: TypeAlias = dict[str, int | str]

States: TypeAlias = Mapping[str, Tensor]


class StatefulCursor(Cursor):
    """A cursor of a source that remembers more than a position: `state()` has what it remembers after the batch, as
    tensors that nobody changes. A checkpoint saves both, and a resumed pass is given both.

    >>> StatefulCursor({"row": 7}, dict)
    {'row': 7}
    """

    def __init__(self, fields: Cursor, state: Callable[[], States]) -> None:
        super().__init__(fields)
        self.state = state


class Source(Protocol):
    """Anything that streams batches with a resumable cursor."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """Batches from the start, or after the batch that came with `cursor`."""

    def describe(self) -> str:
        """One line for a log: what is read."""

    @property
    def examples(self) -> int | None:
        """How many examples a whole pass has, or None if that is not known before reading."""


def check_batch_size(batch_size: object) -> int:
    """The option batch_size: one example or more."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise OptionError(f"batch_size={batch_size!r}; give an integer of 1 or more")
    return batch_size


def check_features(features: object) -> FeatureSpec:
    """The option features."""
    if not isinstance(features, FeatureSpec):
        raise OptionError(f"features={features!r}; pass a hotrow.features.FeatureSpec")
    return features


def match_cursor(cursor: Cursor, expected: Cursor, cures: dict[str, str]) -> None:
    """Refuse a cursor whose fields differ from what this source would write; `cures` has a cure for each field."""
    for name, value in expected.items():
        found = cursor.get(name)
        if found != value:
            raise DataError(
                f"the cursor does not fit this source: its {name} is {found!r} and the source has {value!r}; "
                f"{cures[name]}"
            )


def cursor_number(cursor: Cursor, name: str) -> int:
    """A whole number, 0 or more, out of a cursor."""
    value = cursor.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DataError(
            f"the cursor is damaged: its {name} is {value!r}, not a whole number; pass a cursor as `batches` gave it"
        )
    return value
