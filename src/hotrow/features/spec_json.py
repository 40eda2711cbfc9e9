"""A feature spec as JSON, and back. docs/formats/features.md describes the format.

Every field is written, also those with default values, so that a later change of a default cannot change an old model.
An unknown kind or field is an error that names it: a reader that ignored it would make other keys than the writer. An
absent field takes its default, so a spec can be written by hand.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hotrow.errors import DataError, OptionError, choices
from hotrow.features.kinds import KINDS, Feature
from hotrow.features.labels import Label

FORMAT = "hotrow.features"
VERSIONS = (1, 2)

SINCE_2 = ("numbers", "event_times", "time_gap")
"""The kinds of version 2. A spec without them, and without aligned sequences, is written as version 1."""

_TOP = ("format", "version", "label", "time", "features")


class Parts(NamedTuple):
    """The parts of a spec."""

    features: list[Feature]
    label: Any
    time: Any


def dump(features: Iterable[Feature], label: object, time: str | None) -> str:
    """The spec as JSON text, two spaces deep, fields in the order of their definition."""
    names = {kind: name for name, kind in KINDS.items()}
    entries = [{"kind": names[type(feature)], **dataclasses.asdict(feature)} for feature in features]
    version = 2 if any(entry["kind"] in SINCE_2 or entry.get("aligned") is not None for entry in entries) else 1
    if version == 1:
        entries = [{name: value for name, value in entry.items() if name != "aligned"} for entry in entries]
    document = {
        "format": FORMAT,
        "version": version,
        "label": [dataclasses.asdict(one) for one in label] if isinstance(label, tuple) else label,
        "time": time,
        "features": entries,
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read(path: str | os.PathLike[str]) -> str:
    """The text of a spec file, or a clear error."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"there is no feature spec at {os.fspath(path)}; FeatureSpec.save writes one") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{os.fspath(path)} is not UTF-8 text ({error.reason}), so it is no feature spec") from error


def parse(text: str, where: str = "") -> Parts:
    """The parts of the spec in this JSON text; `where` begins every error message."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}a feature spec is JSON, but line {error.lineno}: {error.msg}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f'{where}this JSON is no feature spec; it must be an object with "format": "{FORMAT}"')
    version = document.get("version")
    if version not in VERSIONS or isinstance(version, bool):
        raise DataError(
            f"{where}the feature spec has version {version!r} and this HotRow reads 1 and 2; upgrade HotRow"
        )
    _check_fields(where, "the feature spec", document, _TOP)
    features = document.get("features")
    if not isinstance(features, list):
        raise DataError(f'{where}"features" is {features!r}; it must be a list of features')
    return Parts(
        [_feature(where, entry) for entry in features], _label(where, document.get("label")), document.get("time")
    )


def _label(where: str, value: object) -> object:
    """A list of labels from their fields; anything else as it is."""
    if not isinstance(value, list):
        return value
    names = [field.name for field in dataclasses.fields(Label)]
    labels = []
    for entry in value:
        if not isinstance(entry, dict) or "name" not in entry:
            raise DataError(f'{where}a label is {entry!r}; it must be an object with "name"')
        _check_fields(where, f"label {entry['name']!r}", entry, names)
        labels.append(Label(**entry))
    return labels


def _feature(where: str, entry: object) -> Feature:
    if not isinstance(entry, dict):
        raise DataError(f'{where}a feature is {entry!r}; it must be an object with "kind" and "name"')
    fields = {name: value for name, value in entry.items() if name != "kind"}
    kind = entry.get("kind")
    subject = f"feature {entry.get('name')!r}"
    if not isinstance(kind, str) or kind not in KINDS:
        raise OptionError(f"{where}{subject} has the unknown kind {kind!r}; {choices(kind, KINDS)}")
    names = [field.name for field in dataclasses.fields(KINDS[kind])]
    _check_fields(where, f"{subject} of kind {kind!r}", fields, names)
    if "name" not in fields:
        raise OptionError(f'{where}a feature of kind {kind!r} has no name; add "name"')
    feature: Feature = KINDS[kind](**fields)
    return feature


def _check_fields(where: str, subject: str, fields: dict[str, Any], known: list[str] | tuple[str, ...]) -> None:
    for name in fields:
        if name not in known:
            raise OptionError(f"{where}{subject} has the unknown field {name!r}; {choices(name, known)}")
