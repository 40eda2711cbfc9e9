"""Request, Answer, and the Signature of a model's inputs: the values that the server's parts pass to each other.

A Request has the columns of its model's signature as numpy arrays. The front end has checked their lengths, offsets and
types. `rows` is the number of candidates. A feature is one of

    one id per row          values [rows],  offsets None
    any number per row      values [n],     offsets [rows + 1]
    shared by all rows      values [n],     offsets None or [2], shared=True: the user's features, sent once

and the dense features are [rows, width], or [1, width] with `dense_shared`. If every feature has one id per row, a
request may have them as one matrix (`matrix`, with `ids` empty), which is copied at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hotrow.errors import HotRowError

Array = NDArray[Any]

POLICIES = ("wait", "initial", "default")  # for rows that would arrive after the deadline


@dataclass(frozen=True)
class Signature:
    """A model's inputs: key features in order (`sequences` are those with pooling "none"), and dense columns.

    A model over histories has more: `numbers` are jagged integers without rows (times), which a request sends after the
    key features. `user` are the features of a two-part tower's user part. `aligned` features have equal lengths in each
    row. A feature of `max_lengths` has at most so many entries in a row. `jagged` says how the tower reads histories.

    >>> plain = Signature(("user", "item"), frozenset(), 0)
    >>> plain.columns, Signature(("item", "seen"), frozenset({"seen"}), 0, numbers=("seen_at",)).columns
    (('user', 'item'), ('item', 'seen', 'seen_at'))
    """

    features: tuple[str, ...]
    sequences: frozenset[str]
    dense: int
    tasks: int = 1  # logits of a row
    named_tasks: tuple[tuple[str, str], ...] = ()  # name and kind of each, if the model was trained on named tasks
    user: frozenset[str] = frozenset()
    numbers: tuple[str, ...] = ()
    jagged: bool = False
    aligned: tuple[tuple[str, ...], ...] = ()
    max_lengths: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the named tasks (task.py), which choose the link from a logit to a prediction."""
        return tuple(kind for _, kind in self.named_tasks)

    @property
    def columns(self) -> tuple[str, ...]:
        """The int64 columns of a request, in order: key features, then numbers."""
        return (*self.features, *self.numbers) if self.numbers else self.features

    @property
    def fingerprint(self) -> int:
        """32 bits that differ when the layout does."""
        parts = [*self.features, "\1", *sorted(self.sequences), str(self.dense), str(self.tasks)]
        if self.user or self.numbers or self.aligned or self.max_lengths:
            parts += ["\2", *sorted(self.user), "\3", *self.numbers]
            parts += ["\4" + "\5".join(group) for group in self.aligned]
            parts += [f"\6{name}={most}" for name, most in sorted(self.max_lengths.items())]
        return zlib.crc32("\0".join(parts).encode())

    def as_json(self) -> dict[str, Any]:
        """The fields that JSON can hold, without those of named tasks and of histories if there are none."""
        found: dict[str, Any] = {
            "features": list(self.features),
            "sequences": sorted(self.sequences),
            "dense": self.dense,
            "tasks": self.tasks,
        }
        more: dict[str, Any] = {
            "named_tasks": [{"name": name, "kind": kind} for name, kind in self.named_tasks],
            "user": sorted(self.user),
            "numbers": list(self.numbers),
            "jagged": self.jagged,
            "aligned": [list(group) for group in self.aligned],
            "max_lengths": dict(self.max_lengths),
        }
        return {**found, **{name: value for name, value in more.items() if value}}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Signature:
        """From the fields of `as_json`; other keys of `saved` are ignored.

        >>> Signature.from_json({"features": ["item"], "sequences": [], "dense": 0, "tasks": 1}).columns
        ('item',)
        """
        return Signature(
            tuple(map(str, saved["features"])),
            frozenset(map(str, saved["sequences"])),
            int(saved["dense"]),
            int(saved["tasks"]),
            tuple((str(task["name"]), str(task["kind"])) for task in saved.get("named_tasks", ())),
            frozenset(map(str, saved.get("user", ()))),
            tuple(map(str, saved.get("numbers", ()))),
            bool(saved.get("jagged", False)),
            tuple(tuple(map(str, group)) for group in saved.get("aligned", ())),
            {str(name): int(most) for name, most in saved.get("max_lengths", {}).items()},
        )


class Ids(NamedTuple):
    """One feature's ids in a request. A NamedTuple, because each request creates one per feature: 0.3 µs against 1."""

    values: Array  # int64
    offsets: Array | None = None  # int64
    weights: Array | None = None  # float32
    shared: bool = False


class PackedIds(Sequence[Ids]):
    """The ids of a request whose features all have one id per row: a contiguous matrix [features, rows].

    A sequence of Ids like any other. Code that takes `matrix` instead saves one object for each feature.
    """

    __slots__ = ("matrix",)

    def __init__(self, matrix: Array) -> None:
        self.matrix = matrix  # int64

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, number: Any) -> Any:
        found = self.matrix[number]
        return tuple(map(Ids, found)) if isinstance(number, slice) else Ids(found)


class Wanted(NamedTuple):
    """The embedding outputs that a request asks for, by number (embedding_outputs.py)."""

    outputs: tuple[int, ...]
    logits: bool  # whether the tower runs too
    half: bool = False  # FP16 vectors
    bytes: int = 0  # of the vectors in the answer


@dataclass(frozen=True)
class Request:
    """Rows to score. `deadline` is on the clock of time.monotonic; None: the server's default."""

    model: str
    rows: int
    ids: Sequence[Ids]  # in the signature's order; a tuple or PackedIds
    dense: Array | None = None  # float32
    dense_shared: bool = False
    version: str | None = None  # None: the current version
    deadline: float | None = None
    policy: str | None = None  # one of POLICIES; None: the model's
    matrix: Array | None = None  # instead of ids: int64 [rows, features], one id per row in every feature
    wanted: Wanted | None = None  # embedding outputs


@dataclass(frozen=True)
class Answer:
    """Logits [rows] or [rows, tasks] float32, and the version and publication that they were computed from.

    A request that wants embedding outputs gets them in `vectors`, and logits only if it wants them too.
    """

    logits: Array
    model: str
    version: str
    publication: int = 0
    late_rows: int = 0  # ids whose rows missed the deadline and were answered by policy
    compiled: bool = False  # whether a compiled bucket ran, or the original graph
    parameters: dict[str, str | int | float] = field(default_factory=dict)
    vectors: tuple[Array, ...] = ()  # in the order of Wanted.outputs; float32, float16 or bool
    kinds: tuple[str, ...] = ()  # of the version's named tasks


class RefusedError(HotRowError):
    """A request is refused. `status` is HTTP's; `retry_after` is in seconds, for 429 and 503."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
