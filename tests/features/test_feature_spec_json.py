"""The JSON format of a spec: what is written is read back, what is not known is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotrow.errors import DataError, HotRowError, OptionError
from hotrow.features import (
    Bucketize,
    Cross,
    Dense,
    EventTimes,
    FeatureSpec,
    Key,
    LogBucket,
    Numbers,
    Sequence,
    TimeGap,
    TimePart,
)
from hotrow.features.kinds import KINDS

GOLDEN = Path(__file__).parent / "golden" / "spec_v1.json"
GOLDEN_2 = Path(__file__).parent / "golden" / "spec_v2.json"

SPEC = FeatureSpec(
    [
        Key("user", column="uid", hash="hex", seed=2**63, missing="drop"),
        Key("item"),
        Bucketize("age", boundaries=[18, 65.5]),
        LogBucket("count", column="views"),
        TimePart("weekday", column="when", part="weekday"),
        Cross("pair", of=["item", "age"]),
        Sequence("seen", max_length=7, keep="first", separator="|", hash="none"),
        Dense("price", transform="standardize", mean=1.5, std=0.25, missing=-1.0, clip=(0, 99)),
    ],
    label="clïck",
    time="when",
)

SPEC_2 = FeatureSpec(
    [
        *SPEC.features,
        Sequence("items", column="events.item", max_length=1000, hash="none"),
        Sequence("actions", column="events.action", hash="string", aligned="items"),
        Numbers("dwell", column="events.dwell", missing=0, aligned="items"),
        EventTimes("times", column="events.time", sort=True, aligned="items"),
        TimeGap("gaps", column="events.time", aligned="items"),
        TimeGap("ages", column="events.time", since="example", aligned="items"),
    ],
    label="clïck",
    time="when",
)


@pytest.mark.parametrize("spec", [SPEC, SPEC_2])
def test_a_spec_survives_json(spec: FeatureSpec) -> None:
    assert FeatureSpec.from_json(spec.to_json()) == spec


def test_the_golden_file_is_written_and_read_to_the_byte() -> None:
    text = GOLDEN.read_text(encoding="utf-8")
    assert SPEC.to_json() == text
    assert FeatureSpec.from_json(text) == SPEC == FeatureSpec.load(GOLDEN)
    text = GOLDEN_2.read_text(encoding="utf-8")
    assert SPEC_2.to_json() == text
    assert FeatureSpec.from_json(text) == SPEC_2 == FeatureSpec.load(GOLDEN_2)


def test_the_golden_file_has_every_kind() -> None:
    assert {entry["kind"] for entry in json.loads(GOLDEN_2.read_text(encoding="utf-8"))["features"]} == set(KINDS)


def test_a_spec_without_aligned_columns_is_still_of_version_1() -> None:
    assert json.loads(SPEC.to_json())["version"] == 1
    aligned = FeatureSpec([Sequence("a"), Sequence("b", aligned="a")])
    assert json.loads(aligned.to_json())["version"] == 2


def test_a_spec_survives_a_file(tmp_path: Path) -> None:
    SPEC.save(tmp_path / "spec.json")
    SPEC.save(tmp_path / "spec.json")
    assert FeatureSpec.load(str(tmp_path / "spec.json")) == SPEC
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


def test_fields_that_are_absent_take_their_defaults() -> None:
    text = '{"format": "hotrow.features", "version": 1, "features": [{"kind": "key", "name": "user"}]}'
    assert FeatureSpec.from_json(text) == FeatureSpec([Key("user")])


def document(**changes: object) -> str:
    base = {"format": "hotrow.features", "version": 1, "features": [{"kind": "key", "name": "user"}]}
    return json.dumps({**base, **changes})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", DataError, "a feature spec is JSON, but line 1"),
        ("[]", DataError, 'no feature spec; it must be an object with "format": "hotrow.features"'),
        (document(format="x"), DataError, "no feature spec"),
        (document(version=3), DataError, "has version 3 and this HotRow reads 1 and 2; upgrade"),
        (document(lable="click"), OptionError, "the feature spec has the unknown field 'lable'; did you mean 'label'"),
        (document(features={}), DataError, '"features" is {}; it must be a list'),
        (document(features=[3]), DataError, 'a feature is 3; it must be an object with "kind"'),
        (
            document(features=[{"kind": "keys", "name": "a"}]),
            OptionError,
            "feature 'a' has the unknown kind 'keys'; did you mean 'key'",
        ),
        (document(features=[{"name": "a"}]), OptionError, "feature 'a' has the unknown kind None; Choose one of: key"),
        (
            document(features=[{"kind": "key", "name": "a", "sead": 1}]),
            OptionError,
            "feature 'a' of kind 'key' has the unknown field 'sead'; did you mean 'seed'",
        ),
        (document(features=[{"kind": "key"}]), OptionError, "a feature of kind 'key' has no name"),
        (document(features=[{"kind": "key", "name": "a", "seed": "1"}]), OptionError, "feature 'a': seed='1'; give an"),
        (document(features=[]), OptionError, "give a list of one or more features"),
        (document(label=7), OptionError, "label=7; give the name of a column"),
    ],
)
def test_a_wrong_document_is_refused_with_the_cure(text: str, error: type[HotRowError], message: str) -> None:
    with pytest.raises(error) as caught:
        FeatureSpec.from_json(text)
    assert message in str(caught.value)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no feature spec at .*absent\.json; FeatureSpec\.save writes one"):
        FeatureSpec.load(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match=r"broken\.json: a feature spec is JSON"):
        FeatureSpec.load(tmp_path / "broken.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"bytes\.json is not UTF-8"):
        FeatureSpec.load(tmp_path / "bytes.json")
