"""Labels of several tasks in a feature spec: read by kind, missing where null, saved in the spec's JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import hotrow as hr
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec, Key, Label, RowError

LABELS = [Label("click"), Label("dwell", "regression", column="dwell_ms"), Label("orders", "count")]
SPEC = FeatureSpec([Key("user")], label=LABELS, time="when")


def columns(**changed: Any) -> dict[str, Any]:
    own = {"user": [1, 2, 3], "click": [1, None, 0], "dwell_ms": [2.5, None, -1.0], "orders": [0, 3, None]}
    return {**own, "when": [1, 2, 3], **changed}


def test_labels_are_columns_in_order_and_nan_where_missing() -> None:
    batch = SPEC.apply(columns())
    assert batch.labels is not None and batch.labels.dtype == torch.float32
    expected = torch.tensor([[1.0, 2.5, 0.0], [math.nan, math.nan, 3.0], [0.0, -1.0, math.nan]])
    torch.testing.assert_close(batch.labels, expected, equal_nan=True)
    assert SPEC.columns() == ("user", "click", "dwell_ms", "orders", "when")
    assert SPEC.columns(labels=False) == ("user",)
    assert SPEC.apply({"user": [1]}, labels=False).labels is None


def test_a_list_of_columns_and_a_mapping_are_labels_too() -> None:
    assert FeatureSpec([Key("user")], label=["click", "like"]).labels == (Label("click"), Label("like"))
    spec = FeatureSpec([Key("user")], label={"click": "is_click", "orders": Label("orders", "count")})
    assert spec.labels == (Label("click", column="is_click"), Label("orders", "count"))
    alone = FeatureSpec([Key("user")], label=["click"]).apply({"user": [1, 2], "click": [True, None]})
    assert alone.labels is not None and alone.labels.shape == (2, 1)
    assert FeatureSpec([Key("user")], label="click").labels == ()


def test_labels_survive_json_and_old_json_reads_as_before() -> None:
    assert FeatureSpec.from_json(SPEC.to_json()) == SPEC
    document = json.loads(SPEC.to_json())
    assert document["label"][1] == {"name": "dwell", "kind": "regression", "column": "dwell_ms"}
    plain = FeatureSpec([Key("user")], label="click")
    assert json.loads(plain.to_json())["label"] == "click"
    assert FeatureSpec.from_json(plain.to_json()) == plain
    del document["label"][0]["kind"]  # a spec may be written by hand
    assert FeatureSpec.from_json(json.dumps(document)) == SPEC


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        (
            {"click": [1, 0.5, 0]},
            r"row 1, column 'click': the label is 0.5; a label of kind binary is 0 or 1, or ",
        ),
        ({"orders": [0, -1, 2]}, r"row 1, column 'orders': the label is -1; a label of kind count is a whole number"),
        ({"orders": [0, 1, 2.5]}, r"row 2, column 'orders': the label is 2.5; a label of kind count is a whole number"),
        ({"orders": [0, 1, 1 << 25]}, r"row 2, .*a whole number from 0 to 16777216"),
        ({"dwell_ms": [1.0, float("inf"), 1e300]}, r"row 1, column 'dwell_ms': .* \(and 1 more rows\)"),
    ],
)
def test_a_label_that_its_kind_cannot_have_is_named_with_its_row(changed: dict[str, Any], fact: str) -> None:
    with pytest.raises(RowError, match=fact):
        SPEC.apply(columns(**changed))


def test_labels_of_the_wrong_type_or_without_a_column_are_named() -> None:
    with pytest.raises(DataError, match="label 'click' needs numbers"):
        SPEC.apply(columns(click=["a", "b", "c"]))
    without = columns()
    del without["dwell_ms"]
    with pytest.raises(DataError, match=r"no column 'dwell_ms', which the label of task 'dwell' needs"):
        SPEC.apply(without)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ([], r"label=\[\]; give the name of a column, a list"),
        ("", r"label=''; give the name of a column"),
        (3, "label=3; give the name of a column"),
        (["click", "click"], "task 'click' has 2 labels"),
        ({"a": "x", "b": "x"}, "column 'x' has 2 labels"),
        ({"a": 3}, r"label=\{'a': 3\}; map the name of a task to a column"),
        ({"a": Label("b")}, "map the name of a task"),
        (["user"], "the label 'user' is also an input of feature 'user'"),
    ],
)
def test_wrong_labels_of_a_spec_are_refused(label: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FeatureSpec([Key("user")], label=label)


def test_wrong_labels_in_json_are_refused() -> None:
    document = json.loads(SPEC.to_json())
    for entry, message in (({"name": "x", "kin": "count"}, "unknown field 'kin'"), ("x", 'an object with "name"')):
        with pytest.raises((OptionError, DataError), match=message):
            FeatureSpec.from_json(json.dumps({**document, "label": [entry]}))


def test_bad_rows_of_any_label_are_skipped_where_a_source_is_told_to(tmp_path: Path) -> None:
    bad = columns(click=[1, 7, 0], orders=[0, 1, -2])
    parquet.write_table(pa.table(bad), tmp_path / "log.parquet")
    source = hr.data.parquet(tmp_path / "log.parquet", features=SPEC, batch_size=8, on_error="skip")
    batches = [batch for batch, _ in source.batches()]
    assert [batch.size for batch in batches] == [1]
    assert batches[0].labels is not None and batches[0].labels.tolist() == [[1.0, 2.5, 0.0]]
