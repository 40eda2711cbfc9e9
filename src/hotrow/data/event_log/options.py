"""Histories: how a source builds each example's history out of the log that it reads.

A row of the log is an event of a user at a time. It may be an example, an event that enters the user's history, or
both. An example gets the user's events that are strictly earlier than itself: never its own, never one of the same
millisecond, never a later one. So a label cannot leak into its own history.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotrow.errors import DataError, OptionError, choices
from hotrow.features import FeatureSpec
from hotrow.features.columns import Column
from hotrow.features.hashing import BoolArray
from hotrow.features.histories import History
from hotrow.features.spec_json import dump
from hotrow.units import parse_size

Filter = Mapping[str, Many[int | str]]


@dataclass(frozen=True)
class Histories:
    """How to build histories from an event log, for the option `histories=` of a source.

    user: the column that names the user. columns: for each list column that the spec's sequences read, the column that
    has one event's value. events: which rows enter a history, as the values that columns must have (None: all).
    examples: which rows are examples, likewise. memory: for the events of all users. Beyond half of it (the other half
    is for copies), the users whose newest event is oldest are dropped. before: files of the log before the source's
    first, whose events are in the histories (a test on the last day gives the days before it).

    >>> Histories(user="user", columns={"seen": "item"}, events={"action": ["click"]}).events["action"]
    ('click',)
    """

    user: str
    columns: Mapping[str, str]
    events: Filter | None = None
    examples: Filter | None = None
    memory: str | int = "1GiB"
    before: str | Many[str] | None = None
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.user, str) or not self.user:
            raise OptionError(f"histories: user={self.user!r}; give the name of the column that names the user")
        pairs = self.columns.items() if isinstance(self.columns, Mapping) else []
        if not pairs or not all(isinstance(name, str) and name for pair in pairs for name in pair):
            raise OptionError(
                f"histories: columns={self.columns!r}; give {{list column: column of one event}}, for example "
                "{'seen_item': 'item'}"
            )
        object.__setattr__(self, "columns", MappingProxyType(dict(pairs)))
        for option in ("events", "examples"):
            object.__setattr__(self, option, _check_filter(option, getattr(self, option)))
        object.__setattr__(self, "bytes", parse_size(self.memory, "memory"))

    def built(self, features: FeatureSpec) -> tuple[History, ...]:
        """The histories of the spec that are built; raises unless the options fit the spec."""
        if features.time is None:
            raise OptionError("histories are built in event time: give the spec time='...', the name of its column")
        columns = {name for history in features.histories for f in history.features for name in f.inputs()}
        for name in self.columns:
            if name not in columns:
                raise OptionError(
                    f"histories: columns={dict(self.columns)} names {name!r}, which no sequence of the spec reads; "
                    f"{choices(name, columns)}"
                )
        found = tuple(h for h in features.histories if any(f.inputs()[0] in self.columns for f in h.features))
        for history in found:
            self._check(history, features)
        return found

    def needed(self, features: FeatureSpec) -> tuple[str, ...]:
        """The raw columns that the log must have."""
        made = {name for history in self.built(features) for f in history.features for name in f.inputs()}
        names = [name for name in features.columns() if name not in made]
        names += [self.user, *self.columns.values(), *(self.events or ()), *(self.examples or ())]
        return tuple(dict.fromkeys(names))

    def stamp(self, features: FeatureSpec, block: int) -> str:
        """What the state of a pass depends on, in a few characters, for the cursor."""
        options = [self.user, dict(self.columns), _plain(self.events), _plain(self.examples), self.bytes, block]
        kinds = [feature for history in self.built(features) for feature in history.features]
        text = json.dumps(options) + dump(kinds, None, features.time)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _check(self, history: History, features: FeatureSpec) -> None:
        if history.keep != "last":
            raise OptionError(
                f"histories: {history.name!r} has keep={history.keep!r}; a history that is built keeps the newest "
                "events, so leave keep= out"
            )
        for feature in history.features:
            if (column := feature.inputs()[0]) not in self.columns:
                raise OptionError(
                    f"histories: columns={dict(self.columns)} lacks {column!r}, which {feature.name!r} reads; the "
                    f"columns of history {history.name!r} are built together, so add {column!r}: the event's column"
                )
        for feature in history.times:
            event = self.columns[feature.inputs()[0]]
            if event != features.time:
                raise OptionError(
                    f"histories: the times of {history.name!r} come from column {event!r} and the log is in the order "
                    f"of {features.time!r}; map {feature.inputs()[0]!r} to {features.time!r}"
                )


def selected(option: str, chosen: Filter | None, columns: Mapping[str, Column], rows: int) -> BoolArray:
    """Which rows a filter chooses; all of them if there is none."""
    keep = np.ones(rows, np.bool_)
    for name, values in (chosen or {}).items():
        array = columns[name].array
        try:
            wanted = pa.array(list(values)).cast(array.type) if not pa.types.is_null(array.type) else None
        except (pa.ArrowException, TypeError) as error:
            raise DataError(
                f"histories: {option}={{{name!r}: {list(values)}}} and the column holds {array.type} values; give "
                "values of that type"
            ) from error
        found = pc.is_in(array, value_set=wanted, skip_nulls=True) if wanted is not None else pc.is_valid(array)
        keep &= found.to_numpy(zero_copy_only=False)
    return keep


def _check_filter(option: str, chosen: object) -> Filter | None:
    if chosen is None:
        return None
    good = isinstance(chosen, Mapping) and all(isinstance(name, str) for name in chosen)
    for values in chosen.values() if isinstance(chosen, Mapping) else ():
        good = good and isinstance(values, (list, tuple)) and bool(values)
        good = good and len({type(value) for value in values}) == 1 and isinstance(values[0], (int, str))
    if not good or not isinstance(chosen, Mapping):
        raise OptionError(
            f"histories: {option}={chosen!r}; give {{column: [values]}} with integers or text, for example "
            "{'action': ['click', 'buy']}, or None for all rows"
        )
    return MappingProxyType({str(name): tuple(values) for name, values in chosen.items()})


def _plain(chosen: Filter | None) -> dict[str, list[int | str]] | None:
    return None if chosen is None else {name: list(values) for name, values in chosen.items()}
