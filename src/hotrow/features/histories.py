"""Histories: the features that are columns of one list of events, dropped, sorted and cut together.

A history is a feature (Sequence, Numbers, EventTimes or TimeGap) and the features whose `aligned` names it. Event
number k of an example is item k of every column. So all columns have equal lengths in an example, before and after:

    1. unequal lengths are an error that names the row
    2. an event without a value in one column is dropped from all columns
    3. times that run backwards are an error, or with sort=True the events are sorted by time
    4. the newest `max_length` events are kept (keep="last"), the same ones in all columns
    5. keys, numbers and gaps are made of the events that remain

A feature spec reads lists (`from_lists`). A source that builds histories out of an event log (data/event_log/) keeps
the values of single events and calls `features_of`, so both make the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from hotrow.batch import Jagged
from hotrow.errors import OptionError, choices
from hotrow.features.columns import Column
from hotrow.features.event_numbers import EventTimes, Numbers, TimeGap
from hotrow.features.hashing import BoolArray, IntArray
from hotrow.features.keys import offsets_of
from hotrow.features.row_error import RowError
from hotrow.features.sequences import Sequence, cut_lengths, owners_of

HistoryFeature: TypeAlias = Sequence | Numbers | EventTimes | TimeGap
HISTORY_KINDS = (Sequence, Numbers, EventTimes, TimeGap)
NUMBER_KINDS = (Numbers, EventTimes)

Made: TypeAlias = dict[str, Jagged]


@dataclass(frozen=True)
class History:
    """The features of one history; the first one is the one that the others name."""

    features: tuple[HistoryFeature, ...]

    @property
    def name(self) -> str:
        """The name of its first feature."""
        return self.features[0].name

    @property
    def max_length(self) -> int:
        """How many events are kept."""
        limit = self.features[0].max_length
        assert limit is not None
        return limit

    @property
    def keep(self) -> str:
        """Which events are kept: "last" or "first"."""
        return str(self.features[0].keep)

    @property
    def needs_time(self) -> bool:
        """Whether a feature needs the time of the example."""
        return any(isinstance(feature, TimeGap) and feature.since == "example" for feature in self.features)

    @property
    def times(self) -> tuple[EventTimes | TimeGap, ...]:
        """The features that read the times of events."""
        return tuple(feature for feature in self.features if isinstance(feature, (EventTimes, TimeGap)))

    def from_lists(self, raw: Mapping[str, Column], example: IntArray | None) -> Made:
        """Every feature by name, from columns of lists; `example` is the time of each example, if it is known."""
        columns = [raw[feature.inputs()[0]] for feature in self.features]
        items = [feature.items(column) for feature, column in zip(self.features, columns, strict=True)]
        lengths = items[0][1]
        for column, (_, found) in zip(columns[1:], items[1:], strict=True):
            self._check_lengths(columns[0].name, lengths, column.name, found)
        parts = [part for part, _ in items]
        kept, lengths = self._keep(parts, lengths)
        values = {}
        for feature, column, part in zip(self.features, columns, parts, strict=True):
            chosen = part if kept is None else part.take(pa.array(kept))
            values[feature.name] = feature.values(column.name, chosen, lengths)
        return self.features_of(values, lengths, example)

    def features_of(self, values: Mapping[str, IntArray], lengths: IntArray, example: IntArray | None) -> Made:
        """Every feature by name, from the values of its events. Requires: cut to max_length, and times do not fall."""
        offsets = torch.from_numpy(offsets_of(lengths))
        made = {}
        for feature in self.features:
            found = values[feature.name]
            if isinstance(feature, TimeGap):
                found = feature.gaps(found, lengths, example)
            plain = isinstance(feature, NUMBER_KINDS) and len(self.features) == 1 and bool((lengths == 1).all())
            made[feature.name] = Jagged(torch.from_numpy(found), None if plain else offsets)
        return made

    def _check_lengths(self, first: str, lengths: IntArray, other: str, found: IntArray) -> None:
        rows = np.flatnonzero(lengths != found)
        if rows.size:
            row = int(rows[0])
            raise RowError(
                other,
                rows,
                f"history {self.name!r} has {lengths[row]} events in column {first!r} and {found[row]} in column "
                f"{other!r}; write one value for every event in both (null where it is unknown), or leave aligned= out",
            )

    def _keep(self, parts: list[pa.Array], lengths: IntArray) -> tuple[IntArray | None, IntArray]:
        """The positions of the events that stay, in order (None if all do), and how many each example has."""
        positions: IntArray | None = None
        present = self._present(parts)
        if present is not None:
            owners = owners_of(lengths)[present]
            positions, lengths = np.flatnonzero(present), np.bincount(owners, minlength=len(lengths)).astype(np.int64)
        order = self._order(parts, positions, lengths)
        if order is not None:
            positions = order if positions is None else positions[order]
        cut, lengths = cut_lengths(lengths, self.max_length, self.keep)
        if cut is not None:
            positions = cut if positions is None else positions[cut]
        return positions, lengths

    def _present(self, parts: list[pa.Array]) -> BoolArray | None:
        present: BoolArray | None = None
        for feature, part in zip(self.features, parts, strict=True):
            found = feature.present(part)
            if found is not None:
                present = found if present is None else present & found
        return present

    def _order(self, parts: list[pa.Array], positions: IntArray | None, lengths: IntArray) -> IntArray | None:
        """The order of the events by time, or None if it is theirs. An error where it may not be changed."""
        times = {}
        for feature, part in zip(self.features, parts, strict=True):
            if isinstance(feature, (EventTimes, TimeGap)):
                chosen = part if positions is None else part.take(pa.array(positions))
                times[feature] = feature.values(feature.inputs()[0], chosen, lengths)
        order: IntArray | None = None
        sorting = [feature for feature in times if feature.sort]
        if sorting and _backwards(times[sorting[0]], lengths).size:
            order = np.lexsort((times[sorting[0]], owners_of(lengths)))
        for feature, found in times.items():
            found = found if order is None else found[order]
            bad = _backwards(found, lengths)
            if bad.size:
                owners, at = owners_of(lengths), int(bad[0])
                place = at - int(offsets_of(lengths)[owners[at]])
                raise RowError(
                    feature.inputs()[0],
                    np.unique(owners[bad]),
                    f"the times of history {self.name!r} run backwards: event {place} is at {found[at]} ms and the one "
                    f"before it at {found[at - 1]}; write events oldest first, or set sort=True on {feature.name!r}",
                )
        return order


def _backwards(times: IntArray, lengths: IntArray) -> IntArray:
    """The positions of events that are earlier than the event before them in the same history."""
    earlier = np.zeros(len(times), np.bool_)
    earlier[1:] = times[1:] < times[:-1]
    starts = offsets_of(lengths)[:-1]
    earlier[starts[starts < len(times)]] = False
    return np.flatnonzero(earlier)


def resolve_histories(features: Many[Any]) -> tuple[Any, ...]:
    """The features, where each aligned one has the max_length and keep of its history; checks that they fit."""
    named = {feature.name: feature for feature in features}
    histories = [f.name for f in features if isinstance(f, HISTORY_KINDS) and f.aligned is None]
    return tuple(
        _resolve(feature, named, histories)
        if isinstance(feature, HISTORY_KINDS) and feature.aligned is not None
        else feature
        for feature in features
    )


def _resolve(feature: HistoryFeature, named: Mapping[str, Any], histories: list[str]) -> HistoryFeature:
    name = str(feature.aligned)
    if name not in histories:
        first = named.get(name)
        if isinstance(first, HISTORY_KINDS):
            raise OptionError(
                f"feature {feature.name!r}: aligned={name!r}, which is itself aligned to {first.aligned!r}; name that"
            )
        raise OptionError(
            f"feature {feature.name!r}: aligned={name!r} is no feature of a history; {choices(name, histories)}"
            if histories
            else f"feature {feature.name!r}: aligned={name!r}, and the spec has no such feature; add Sequence({name!r})"
        )
    first = named[name]
    for option in ("max_length", "keep"):
        mine, its = getattr(feature, option), getattr(first, option)
        if mine is not None and mine != its:
            raise OptionError(
                f"feature {feature.name!r}: {option}={mine!r} and its history {name!r} has {its!r}; the columns of one "
                f"history are cut together, so set {option} on {name!r} alone"
            )
    return replace(feature, max_length=first.max_length, keep=first.keep)


def histories_of(features: Many[Any]) -> tuple[History, ...]:
    """The histories of a spec's features, in order. Requires: resolved."""
    groups: dict[str, list[HistoryFeature]] = {
        f.name: [f] for f in features if isinstance(f, HISTORY_KINDS) and f.aligned is None
    }
    for feature in features:
        if isinstance(feature, HISTORY_KINDS) and feature.aligned is not None:
            groups[feature.aligned].append(feature)
    return tuple(History(tuple(group)) for group in groups.values())
