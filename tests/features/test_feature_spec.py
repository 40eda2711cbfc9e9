"""A spec: what it checks, what it makes of labels and times, and that it equals a plain row by row oracle."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.errors import DataError, OptionError
from hotrow.features import Bucketize, Cross, Dense, FeatureSpec, Key, LogBucket, RowError, Sequence, TimePart
from hotrow.features.hashing import cross, hash_bytes, missing_key

CLICKS = FeatureSpec([Key("user")], label="click", time="when")


def test_labels_and_times_come_with_the_batch() -> None:
    batch = CLICKS.apply({"user": [1, 2], "click": [0, 1], "when": [10, 20]})
    assert batch.labels.tolist() == [0.0, 1.0] and batch.labels.dtype == torch.float32
    assert batch.time.tolist() == [10, 20] and batch.time.dtype == torch.int64


@pytest.mark.parametrize("labels", [[True, False], [1.0, 0.0], np.array([1, 0], np.int8), pa.array([1, 0], pa.uint8())])
def test_a_label_may_be_any_zero_or_one(labels: object) -> None:
    assert CLICKS.apply({"user": [1, 2], "click": labels, "when": [0, 0]}).labels.tolist() == [1.0, 0.0]


def test_serving_needs_no_label_and_no_time() -> None:
    batch = CLICKS.apply({"user": [1]}, labels=False)
    assert batch.labels is None and batch.time is None
    assert CLICKS.apply({"user": [1], "when": [5]}, labels=False).time.tolist() == [5]
    assert CLICKS.columns(labels=False) == ("user",) and CLICKS.columns() == ("user", "click", "when")


def test_training_and_serving_make_the_same_ids() -> None:
    spec = FeatureSpec([Key("user"), Sequence("seen"), Dense("price", transform="log1p")], label="click")
    table = pa.table({"user": ["a", None], "seen": [["x", "y"], None], "price": [1.5, None], "click": [1, 0]})
    trained, served = spec.apply(table), spec.apply(table.drop(["click"]).to_pydict(), labels=False)
    assert torch.equal(trained.dense, served.dense)
    for name in spec.id_names:
        assert torch.equal(trained.ids[name].values, served.ids[name].values)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"user": [1], "when": [0]}, DataError, "no column 'click', which the label needs"),
        ({"user": [1], "click": [1]}, DataError, "no column 'when', which the event time needs"),
        ({"user": [1], "click": ["1"], "when": [0]}, DataError, "column 'click' holds string values but the label"),
        (
            {"user": [1], "click": [2], "when": [0]},
            RowError,
            "row 0, column 'click': the label is 2; a label is 0 or 1",
        ),
        ({"user": [1], "click": [None], "when": [0]}, RowError, "row 0, column 'click': the label is missing; drop"),
        (
            {"user": [1], "click": [0], "when": [0.5]},
            DataError,
            "column 'when' holds double .* a time is integer milli",
        ),
        ({"user": [1], "click": [0], "when": [None]}, RowError, "row 0, column 'when': the event time is missing"),
    ],
)
def test_a_wrong_label_or_time_is_a_clear_error(columns: dict[str, object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        CLICKS.apply(columns)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureSpec([]), "give a list of one or more features"),
        (lambda: FeatureSpec(Key("a")), "give a list of one or more features"),
        (lambda: FeatureSpec(["a"]), "features holds 'a'; every one must be a feature: Key, Bucketize"),
        (lambda: FeatureSpec([Key("a"), Dense("a")]), "two features are named 'a'; give each its own name"),
        (lambda: FeatureSpec([Key("a")], label=""), "label=''; give the name of a column"),
        (lambda: FeatureSpec([Key("a")], time=3), "time=3; give the name of a column"),
        (lambda: FeatureSpec([Key("a")], label="a"), "the label 'a' is also an input of feature 'a'"),
        (lambda: FeatureSpec([Cross("c", of=["c", "a"])]), "crosses form a cycle: c of c"),
        (lambda: FeatureSpec([Cross("c", of=["d", "a"]), Cross("d", of=["c", "b"])]), "form a cycle: c of d of c"),
        (lambda: FeatureSpec([Cross("c", of=["a", "b"]), Dense("a")]), "cross 'c': 'a' is Dense and has no key"),
        (lambda: FeatureSpec([Cross("c", of=["a", "b"]), Sequence("a")]), "cross 'c': 'a' is a Sequence"),
        (lambda: FeatureSpec([Cross("c", of=["a", "b"]), Key("a", missing="drop")]), "use missing='key'"),
    ],
)
def test_a_wrong_spec_is_refused_when_it_is_made(make: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


# The oracle: every kind in plain Python, one row at a time.

EVERYTHING = FeatureSpec(
    [
        Key("number", seed=3),
        Key("text", seed=4),
        Key("text_or_nothing", column="text", missing="drop"),
        Bucketize("age", boundaries=[-1.0, 0.5, 3.0]),
        LogBucket("count"),
        TimePart("hour", "when", "hour"),
        TimePart("weekday", "when", "weekday"),
        Cross("pair", of=["number", "text", "age"]),
        Sequence("seen", max_length=3),
        Sequence("words", max_length=2, keep="first", separator="|", seed=5),
        Dense("plain", column="age", clip=(-2.0, 2.0)),
        Dense("scaled", column="count", transform="standardize", mean=3.0, std=2.0, missing=-7.0),
    ],
    label="click",
    time="when",
)


def oracle(row: dict) -> dict:
    number = missing_key(3) if row["number"] is None else row["number"]
    text = missing_key(4) if row["text"] is None else hash_bytes(row["text"].encode(), 4)
    gone = row["age"] is None or math.isnan(row["age"])
    age = 4 if gone else sum(bound <= row["age"] for bound in (-1.0, 0.5, 3.0))
    count, bucket = row["count"], 1907
    if count is not None:
        bucket = math.floor(math.log(1 + abs(count)) ** 2)
        bucket = -1 - bucket if count < 0 else bucket
    words = [word for word in (row["words"] or "").split("|") if word][:2]
    pair = cross(cross(np.array([number]), np.array([text])), np.array([age]))[0]
    return {
        "number": [number],
        "text": [text],
        "text_or_nothing": [] if row["text"] is None else [hash_bytes(row["text"].encode())],
        "age": [age],
        "count": [bucket],
        "hour": [row["when"] // 3_600_000 % 24],
        "weekday": [(row["when"] // 86_400_000 + 3) % 7],
        "pair": [int(pair)],
        "seen": [item for item in row["seen"] or [] if item is not None][-3:],
        "words": [hash_bytes(word.encode(), 5) for word in words],
        "dense": [0.0 if gone else min(max(row["age"], -2.0), 2.0), -7.0 if count is None else (count - 3.0) / 2.0],
        "label": float(row["click"]),
        "time": row["when"],
    }


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.none(), strategy)


int64 = st.integers(-(1 << 63), (1 << 63) - 1)
TYPES = {
    "number": (pa.int64(), maybe(int64)),
    "text": (pa.string(), maybe(st.text(max_size=5))),
    "age": (pa.float64(), maybe(st.one_of(st.sampled_from([math.nan, -1.0, 0.5, 3.0]), st.floats(-9, 9)))),
    "count": (pa.int64(), maybe(st.integers(-(1 << 20), 1 << 20))),
    "when": (pa.int64(), st.integers(-(1 << 45), 1 << 45)),
    "seen": (pa.list_(pa.int64()), maybe(st.lists(maybe(int64), max_size=6))),
    "words": (pa.string(), maybe(st.text("ab|", max_size=8))),
    "click": (pa.bool_(), st.booleans()),
}
ROWS = st.lists(st.fixed_dictionaries({name: strategy for name, (_, strategy) in TYPES.items()}), max_size=12)


def unpack(batch, i: int) -> dict:
    row = {}
    for name, jagged in batch.ids.items():
        begin, end = (i, i + 1) if jagged.offsets is None else (int(jagged.offsets[i]), int(jagged.offsets[i + 1]))
        row[name] = jagged.values[begin:end].tolist()
    return {**row, "dense": batch.dense[i].tolist(), "label": batch.labels[i].item(), "time": batch.time[i].item()}


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 3), st.booleans())
def test_apply_equals_the_row_by_row_oracle(rows: list[dict], start: int, chunked: bool) -> None:
    table = pa.Table.from_pylist(rows, pa.schema([(name, kind) for name, (kind, _) in TYPES.items()]))
    table = pa.concat_tables([table.slice(0, 5), table.slice(5)]) if chunked else table
    batch = EVERYTHING.apply(table.slice(start))
    assert batch.size == len(rows[start:])
    for i, row in enumerate(rows[start:]):
        expected = oracle(row)
        expected["dense"] = torch.tensor(expected["dense"], dtype=torch.float32).tolist()
        assert unpack(batch, i) == expected
