"""FeatureSpec: raw columns into a KeyedBatch, the same in training and in serving.

The spec is a value: a list of features, the label's column and the event time's column. It is saved beside the model as
JSON (spec_json.py). Both the trainer's sources and the server's requests go through `apply`, so there is no second
implementation that could diverge.

A spec is checked when it is made: names are unique, a Cross uses features with one id per example and no cycle, and no
feature reads the label. `apply` keeps no state; any thread may call it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import OptionError
from hotrow.features import spec_json
from hotrow.features.columns import Column, read_columns
from hotrow.features.dense import Dense
from hotrow.features.histories import HISTORY_KINDS, NUMBER_KINDS, History, histories_of, resolve_histories
from hotrow.features.keys import Cross, Key
from hotrow.features.kinds import KINDS, Feature
from hotrow.features.labels import Label, LabelOption, check_label_option, read_labels
from hotrow.features.times import event_time


@dataclass(frozen=True)
class FeatureSpec:
    """How raw columns become a batch.

    `label` is the column of a label that is 0 or 1. For several tasks it is a list of Label (or of columns with labels
    that are 0 or 1), or a mapping from task to column. Then `labels` of a batch are `[batch, tasks]`, NaN where
    missing.

    >>> spec = FeatureSpec([Key("user"), Dense("price", transform="log1p")], label="click")
    >>> batch = spec.apply({"user": ["ann", None], "price": [0, 9], "click": [1, 0]})
    >>> batch.size, list(batch.ids), batch.labels
    (2, ['user'], tensor([1., 0.]))
    """

    features: Many[Feature]
    label: LabelOption | None = None
    time: str | None = None

    def __post_init__(self) -> None:
        features = self.features
        if not isinstance(features, (list, tuple)) or not features:
            raise OptionError(f"features={features!r}; give a list of one or more features, for example [Key('user')]")
        object.__setattr__(self, "features", tuple(features))
        for feature in features:
            if not isinstance(feature, tuple(KINDS.values())):
                names = ", ".join(kind.__name__ for kind in KINDS.values())
                raise OptionError(f"features holds {feature!r}; every one must be a feature: {names}")
        object.__setattr__(self, "label", check_label_option(self.label))
        if self.time is not None and (not isinstance(self.time, str) or not self.time):
            raise OptionError(f"time={self.time!r}; give the name of a column, or None")
        _check_names(self.features)
        object.__setattr__(self, "features", resolve_histories(self.features))
        _check_crosses(self.features)
        self._check_times()
        self._check_leak()

    @property
    def id_names(self) -> tuple[str, ...]:
        """The names of the features that give ids, in order: the keys of `batch.ids`."""
        return tuple(f.name for f in self.features if not isinstance(f, (Dense, *NUMBER_KINDS)))

    @property
    def number_names(self) -> tuple[str, ...]:
        """The names of the features that give integers as they are, in order: the keys of `batch.numbers`."""
        return tuple(feature.name for feature in self.features if isinstance(feature, NUMBER_KINDS))

    @property
    def histories(self) -> tuple[History, ...]:
        """The histories, each with its features."""
        return histories_of(self.features)

    @property
    def aligned(self) -> tuple[tuple[str, ...], ...]:
        """The names of the features of every history that has several.

        >>> from hotrow.features import Sequence
        >>> FeatureSpec([Sequence("seen"), Sequence("action", aligned="seen")]).aligned
        (('seen', 'action'),)
        """
        groups = (tuple(feature.name for feature in history.features) for history in self.histories)
        return tuple(group for group in groups if len(group) > 1)

    @property
    def max_lengths(self) -> dict[str, int]:
        """The most values that an example can have, of every feature of a history."""
        return {feature.name: history.max_length for history in self.histories for feature in history.features}

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The names of the dense features, in order: the columns of `batch.dense`."""
        return tuple(feature.name for feature in self.features if isinstance(feature, Dense))

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels by task, in order: the columns of `batch.labels`. Empty with one plain column, and without any."""
        return self.label if isinstance(self.label, tuple) else ()

    def columns(self, labels: bool = True) -> tuple[str, ...]:
        """The raw columns that `apply` needs.

        >>> FeatureSpec([Key("user"), Cross("pair", of=["user", "item"])], label="click").columns()
        ('user', 'item', 'click')
        """
        return tuple(self._needed(labels))

    def sources(self, name: str) -> frozenset[str]:
        """The raw columns that a feature's value depends on. Every column of a history decides which events stay.

        >>> FeatureSpec([Key("user"), Cross("pair", of=["user", "item"])]).sources("pair") == {"user", "item"}
        True
        """
        feature = next((feature for feature in self.features if feature.name == name), None)
        if feature is None:
            return frozenset([name])
        if isinstance(feature, Cross):
            return frozenset().union(*(self.sources(part) for part in feature.of))
        found = set(feature.inputs())
        for history in self.histories:
            if feature in history.features:
                found |= {column for other in history.features for column in other.inputs()}
                found |= {self.time} if history.needs_time and self.time is not None else set()
        return frozenset(found)

    def part(self, names: Iterable[str]) -> FeatureSpec | None:
        """The spec of these features, of the whole histories that they belong to, and of those that a Cross is made of;
        None if there are none. It reads no label."""
        by_name = {feature.name: feature for feature in self.features}
        needed: set[str] = set()
        waiting = list(names)
        while waiting:
            feature = by_name.get(waiting.pop())
            if feature is not None and feature.name not in needed:
                needed.add(feature.name)
                waiting += feature.of if isinstance(feature, Cross) else ()
                for history in self.histories:
                    if feature in history.features:
                        waiting += [other.name for other in history.features]
        features = [feature for feature in self.features if feature.name in needed]
        return FeatureSpec(features, time=self.time) if features else None

    def apply(self, columns: object, labels: bool = True) -> KeyedBatch:
        """The batch of these raw columns: a pyarrow Table or RecordBatch, or a dict of name to values.

        With labels=False, as in serving, the label is not read and the time only if its column is there.
        """
        needed = self._needed(labels)
        if not labels and self.time is not None and self.time in _names(columns):
            needed.setdefault(self.time, "the event time")
        return self.apply_columns(read_columns(columns, needed), labels)

    def apply_columns(
        self, raw: Mapping[str, Column], labels: bool = True, histories: Mapping[str, Jagged] | None = None
    ) -> KeyedBatch:
        """The batch of columns that have been read. `histories` has the features of histories that are made already;
        their columns are not needed."""
        time = event_time(raw[self.time]) if self.time is not None and self.time in raw else None
        made = dict(histories or {})
        for history in self.histories:
            if history.name not in made:
                made |= history.from_lists(raw, time)
        return KeyedBatch(
            ids=self._ids(raw, made),
            dense=self._dense(raw),
            labels=torch.from_numpy(read_labels(self.labels or str(self.label), raw))
            if labels and self.label is not None
            else None,
            time=None if time is None else torch.from_numpy(time),
            numbers={name: made[name] for name in self.number_names},
        )

    def to_json(self) -> str:
        """The spec as JSON text; docs/formats/features.md has the format."""
        return spec_json.dump(self.features, self.labels or self.label, self.time)

    @staticmethod
    def from_json(text: str) -> FeatureSpec:
        """The spec that `to_json` wrote.

        >>> spec = FeatureSpec([Key("user")])
        >>> FeatureSpec.from_json(spec.to_json()) == spec
        True
        """
        return FeatureSpec(*spec_json.parse(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON to a file, atomically: a crash leaves the old file or the new one."""
        target = Path(path)
        draft = target.with_name(f"{target.name}.draft-{os.getpid()}")
        try:
            with open(draft, "w", encoding="utf-8") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FeatureSpec:
        """Read a file that `save` wrote."""
        return FeatureSpec(*spec_json.parse(spec_json.read(path), where=f"{os.fspath(path)}: "))

    def _needed(self, labels: bool) -> dict[str, str]:
        """Every raw column that is needed, with the feature that needs it."""
        names = {feature.name for feature in self.features}
        needed: dict[str, str] = {}
        for feature in self.features:
            inputs = [n for n in feature.of if n not in names] if isinstance(feature, Cross) else feature.inputs()
            for name in inputs:
                needed.setdefault(name, f"feature {feature.name!r}")
        for column, user in self._label_columns().items() if labels else ():
            needed.setdefault(column, user)
        gaps = [feature for history in self.histories if history.needs_time for feature in history.times]
        if self.time is not None and (labels or gaps):
            needed.setdefault(self.time, f"feature {gaps[0].name!r}" if gaps else "the event time")
        return needed

    def _ids(self, raw: Mapping[str, Column], made: dict[str, Jagged]) -> dict[str, Jagged]:
        features = {feature.name: feature for feature in self.features}

        def ids(name: str) -> Jagged:
            if name not in made:
                feature = features.get(name) or Key(name)
                assert not isinstance(feature, (Dense, *HISTORY_KINDS))
                if isinstance(feature, Cross):
                    made[name] = feature.ids([ids(part).values for part in feature.of])
                else:
                    made[name] = feature.ids(raw[feature.inputs()[0]])
            return made[name]

        return {name: ids(name) for name in self.id_names}

    def _dense(self, raw: Mapping[str, Column]) -> torch.Tensor | None:
        dense = [feature for feature in self.features if isinstance(feature, Dense)]
        if not dense:
            return None
        columns = [feature.values(raw[feature.inputs()[0]]) for feature in dense]
        return torch.from_numpy(np.stack(columns, axis=1))

    def _check_times(self) -> None:
        for history in self.histories:
            if history.needs_time and self.time is None:
                name = next(feature.name for feature in history.times)
                raise OptionError(
                    f"feature {name!r}: since='example' needs the time of the example; give the spec time='...', the "
                    "name of its column"
                )

    def _check_leak(self) -> None:
        inputs = self._needed(labels=False)
        for column in self._label_columns():
            if column in inputs:
                raise OptionError(
                    f"the label {column!r} is also an input of {inputs[column]}; a model must not see its label"
                )

    def _label_columns(self) -> dict[str, str]:
        """Every column of labels, with the label that needs it."""
        if isinstance(self.label, str):
            return {self.label: "the label"}
        return {label.column: f"the label of task {label.name!r}" for label in self.labels}


def _names(columns: object) -> set[str]:
    schema = getattr(columns, "schema", None)
    return set(schema.names) if schema is not None else set(columns) if isinstance(columns, Mapping) else set()


def _check_names(features: Many[Feature]) -> None:
    seen: set[str] = set()
    for feature in features:
        if feature.name in seen:
            raise OptionError(
                f"two features are named {feature.name!r}; give each its own name (column= may be the same)"
            )
        seen.add(feature.name)


def _check_crosses(features: Many[Feature]) -> None:
    """Check that every Cross uses features with one id per example, and that there is no cycle."""
    named = {feature.name: feature for feature in features}

    def visit(feature: Feature, above: tuple[str, ...]) -> None:
        if feature.name in above:
            raise OptionError(f"crosses form a cycle: {' of '.join([*above, feature.name])}; break it")
        if isinstance(feature, Cross):
            for part in feature.of:
                if part in named:
                    _check_part(feature, named[part])
                    visit(named[part], (*above, feature.name))

    for feature in features:
        visit(feature, ())


def _check_part(cross: Cross, part: Feature) -> None:
    if isinstance(part, Dense):
        raise OptionError(
            f"cross {cross.name!r}: {part.name!r} is Dense and has no key; cross a Bucketize of its column"
        )
    if isinstance(part, HISTORY_KINDS):
        kind = type(part).__name__
        raise OptionError(f"cross {cross.name!r}: {part.name!r} is a {kind}; cross features with one id per example")
    if not part.single:
        raise OptionError(
            f"cross {cross.name!r}: {part.name!r} has missing='drop', so an example may have no id; use missing='key'"
        )
