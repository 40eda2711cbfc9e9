"""Admission and expiry: which keys get a row, and when a row is removed. A table takes both as options.

Both are functions of the batches committed so far, and the same in every tier. A sweep runs after every `every`-th
update and removes rows from all tiers at once. It does not read rows on SSD: an expired row there reads as new at its
next lookup. Time is the largest event time in the batches so far, never the clock; a row's time is that of the update
that last touched it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hotrow.config import check_options
from hotrow.errors import OptionError
from hotrow.units import parse_milliseconds, parse_size

LEAST_MAX_ROWS = 16_384


@dataclass(frozen=True)
class Admission:
    """When a key gets a row: after `after` sightings (occurrences in batches), or with `probability` in each batch.

    Until then the key reads its initial values and gradients to it are dropped. Sightings are counted in a sketch of
    `sketch` bytes, per shard. The sketch errs only upwards: it may admit a key early, never late.

    >>> Admission(after=3).after
    3
    """

    after: int = 1
    probability: float = 1.0
    sketch: str | int = "16MiB"

    def __post_init__(self) -> None:
        if not isinstance(self.after, int) or not 1 <= self.after <= 255:
            raise OptionError(f"admission after={self.after!r}: give a number of sightings from 1 to 255")
        if not 0 < self.probability <= 1:
            raise OptionError(f"admission probability={self.probability!r}: give a number above 0, at most 1")
        parse_size(self.sketch, "sketch")

    @property
    def sketch_bytes(self) -> int:
        """The sketch's size."""
        return parse_size(self.sketch, "sketch")

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Admission:
        """From plain values, such as a job file's."""
        check_options("admission", dict(values), list(Admission.__dataclass_fields__))
        return Admission(**values)


@dataclass(frozen=True)
class Expiry:
    """Which rows a sweep removes; a row goes if any rule applies.

    - `steps`, `time`: rows not updated for more than `steps` updates, or for `time` of event time (precise to a 256th).
    - `min_count`, `min_norm`: rows seen less than `min_count` times, or with a norm below `min_norm`, once they have
      not been updated for more than `grace` updates (default: `every`).
    - `max_rows`: the oldest rows beyond `max_rows` (each of the 1,024 shards has an equal part of this limit).

    >>> Expiry(steps=100_000, every=1000).every
    1000
    """

    steps: int | None = None
    time: str | None = None
    min_count: int | None = None
    min_norm: float | None = None
    grace: int | None = None
    max_rows: int | None = None
    every: int = 1000

    def __post_init__(self) -> None:
        for name in ("steps", "min_count", "grace", "max_rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise OptionError(f"expiry {name}={value!r}: give a whole number, 1 or more")
        if not isinstance(self.every, int) or self.every < 1:
            raise OptionError(f"expiry every={self.every!r}: give a whole number of updates, 1 or more")
        if self.time is not None:
            parse_milliseconds(self.time)
        if self.min_norm is not None and not self.min_norm > 0:
            raise OptionError(f"expiry min_norm={self.min_norm!r}: give a number above 0")
        if self.max_rows is not None and self.max_rows < LEAST_MAX_ROWS:
            raise OptionError(f"expiry max_rows={self.max_rows}: give at least {LEAST_MAX_ROWS:,} (16 for every shard)")
        if all(value is None for value in (self.steps, self.time, self.min_count, self.min_norm, self.max_rows)):
            raise OptionError("expiry without a rule: give steps=, time=, min_count=, min_norm= or max_rows=")

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Expiry:
        """From plain values, such as a job file's."""
        check_options("expiry", dict(values), list(Expiry.__dataclass_fields__))
        return Expiry(**values)


class Clock:
    """Maps event time to updates, for an expiry after `span` milliseconds.

    A mark is (update, largest event time so far); one is added when event time has advanced by a 256th of the span. An
    update between two marks has the time of the later one, so a row may expire a little late, never early.
    """

    PARTS = 256

    def __init__(self, span: int = 0) -> None:
        self.span = span
        self.marks: list[tuple[int, int]] = []

    def note(self, step: int, watermark: int | None) -> bool:
        """Record that update `step` has run, with events up to `watermark`. Returns whether that advanced the clock."""
        if watermark is None or (self.marks and watermark < self.marks[-1][1] + max(1, self.span // self.PARTS)):
            return False
        self.marks.append((step, watermark))
        while len(self.marks) > 1 and self.marks[1][1] <= watermark - self.span:
            del self.marks[0]
        return True

    def to_json(self) -> str:
        """For the checkpoint."""
        return json.dumps(self.marks)

    @staticmethod
    def from_json(text: str, span: int = 0) -> Clock:
        """A clock from `to_json`."""
        clock = Clock(span)
        clock.marks = [(int(step), int(time)) for step, time in json.loads(text or "[]")]
        return clock

    def last_before(self) -> int:
        """The last marked update whose events are all at least `span` old; 0 if there is none."""
        limit = self.marks[-1][1] - self.span if self.marks else 0
        return max((step for step, watermark in self.marks if watermark <= limit), default=0)
