"""Columns of one history: dropped, sorted and cut together, against a loop over plain lists."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import DataError, OptionError
from hotrow.features import (
    Cross,
    Dense,
    EventTimes,
    FeatureSpec,
    Key,
    Numbers,
    RowError,
    Sequence,
    TimeGap,
)
from hotrow.features.event_numbers import FIRST_EVENT, gap_buckets

EVENT = pa.struct([("item", pa.int64()), ("action", pa.string()), ("dwell", pa.int64()), ("time", pa.int64())])


def spec(max_length: int = 3, keep: str = "last", sort: bool = False, nested: bool = False) -> FeatureSpec:
    at = "events." if nested else ""
    return FeatureSpec(
        [
            Sequence("items", column=f"{at}item", max_length=max_length, keep=keep),
            Sequence("actions", column=f"{at}action", aligned="items"),
            Numbers("dwells", column=f"{at}dwell", missing=-1, aligned="items"),
            EventTimes("times", column=f"{at}time", sort=sort, aligned="items"),
            TimeGap("gaps", column=f"{at}time", aligned="items"),
            TimeGap("ages", column=f"{at}time", since="example", aligned="items"),
        ],
        time="now",
    )


def bucket(milliseconds: int) -> int:
    """The obvious loop: how often 1 s can be doubled within 1 s + the gap."""
    found = 0
    while 1000 << (found + 1) <= max(0, milliseconds) + 1000:
        found += 1
    return found


def check(batch: Any, rows: list[list[dict[str, Any] | None] | None], now: list[int], limit: int, keep: str) -> None:
    want: dict[str, list[list[int]]] = {name: [] for name in ("items", "dwells", "times", "gaps", "ages")}
    actions = []
    for row, at in zip(rows, now, strict=True):
        kept = [e for e in row or [] if e and e["item"] is not None and e["action"] and e["time"] is not None]
        kept.sort(key=lambda event: event["time"])
        kept = kept[-limit:] if keep == "last" else kept[:limit]
        want["items"].append([e["item"] for e in kept])
        want["dwells"].append([-1 if e["dwell"] is None else e["dwell"] for e in kept])
        times = [e["time"] for e in kept]
        want["times"].append(times)
        want["gaps"].append([FIRST_EVENT if i == 0 else bucket(t - times[i - 1]) for i, t in enumerate(times)])
        want["ages"].append([bucket(at - t) for t in times])
        actions.append([e["action"] for e in kept])
    for name, lists in want.items():
        jagged = batch.numbers[name] if name in ("dwells", "times") else batch.ids[name]
        assert jagged.values.tolist() == [value for one in lists for value in one], name
        assert jagged.lengths().tolist() == [len(one) for one in lists]
    plain = FeatureSpec([Sequence("a", max_length=10_000)]).apply({"a": actions}).ids["a"]
    assert torch.equal(batch.ids["actions"].values, plain.values)


def draw_rows(seed: int, sort: bool) -> list[list[dict[str, Any] | None] | None]:
    draw = random.Random(seed)
    rows: list[list[dict[str, Any] | None] | None] = []
    for _ in range(draw.randrange(1, 9)):
        row: list[dict[str, Any] | None] = []
        time = 0
        for _ in range(draw.choice([0, 0, 1, 2, 7])):
            time = draw.randrange(5000) if sort else time + draw.choice([0, 1, 999, 1000, 10**7])
            row.append(
                draw.choice([None] + [1] * 6)
                and {
                    "item": draw.choice([None, *range(9)]),
                    "action": draw.choice([None, "", "a", "b"]),
                    "dwell": draw.choice([None, 0, 5]),
                    "time": draw.choice([None, *[time] * 8]),
                }
            )
        rows.append(draw.choice([None, row, row, row]))
    return rows


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(["last", "first"]), st.booleans())
def test_aligned_columns_of_nested_lists_are_those_of_a_loop(seed: int, limit: int, keep: str, sort: bool) -> None:
    rows = draw_rows(seed, sort)
    now = [random.Random(seed).randrange(10**7)] * len(rows)
    kind = random.Random(seed).choice([pa.list_(EVENT), pa.large_list(EVENT)])
    table = pa.table({"events": pa.array(rows, kind), "now": now})
    batch = spec(limit, keep, sort, nested=True).apply(table)
    check(batch, rows, now, limit, keep)
    part = spec(limit, keep, sort, nested=True).apply(table.slice(1))
    check(part, rows[1:], now[1:], limit, keep)


def test_aligned_lists_and_fixed_size_lists_give_the_same_batch() -> None:
    columns = {
        "item": [[1, 2], [3, 4], [5, 6]],
        "action": [["a", "b"], ["c", None], ["e", "f"]],
        "dwell": [[1, None], [2, 3], [4, 5]],
        "time": [[0, 1000], [5, 6], [7, 10**6]],
        "now": [2000, 2000, 10**9],
    }
    kinds = {"item": pa.int32(), "action": pa.string(), "dwell": pa.int64(), "time": pa.int64()}
    fixed = {name: pa.array(columns[name], pa.list_(kind, 2)) for name, kind in kinds.items()}
    numpy = {**columns, "item": np.array(columns["item"]), "time": np.array(columns["time"])}
    batches = [spec().apply(given) for given in (columns, pa.table({**fixed, "now": columns["now"]}), numpy)]
    rows = [
        [dict(zip(("item", "action", "dwell", "time"), event, strict=True)) for event in zip(*row, strict=True)]
        for row in zip(*(columns[name] for name in kinds), strict=True)
    ]
    for batch in batches:
        check(batch, rows, columns["now"], 3, "last")
    wide = pa.table({"events": pa.FixedSizeListArray.from_arrays(pa.array([e for r in rows for e in r], EVENT), 2)})
    nested = spec(nested=True)
    check(nested.apply(wide.slice(1).append_column("now", pa.array([7, 8]))), rows[1:], [7, 8], 3, "last")


def test_ten_thousand_events_are_kept() -> None:
    columns = {name: [list(range(12_000)), [], [7]] for name in ("item", "dwell", "time")}
    columns |= {"action": [["x"] * 12_000, [], ["y"]], "now": [1, 2, 3]}
    batch = spec(max_length=10_000).apply(columns)
    assert batch.ids["items"].lengths().tolist() == [10_000, 0, 1] == batch.numbers["times"].lengths().tolist()
    assert batch.ids["items"].values[:2].tolist() == [2000, 2001]
    assert batch.ids["gaps"].values[:2].tolist() == [FIRST_EVENT, 0]


def test_columns_of_unequal_lengths_name_row_columns_and_lengths() -> None:
    columns = {"item": [[1], [1, 2]], "action": [["a"], ["a"]], "dwell": [[1], [1, 2]], "time": [[1], [1, 2]]}
    with pytest.raises(
        RowError, match=r"row 1.*2 events in column 'item' and 1 in column 'action'; write one"
    ) as caught:
        spec().apply(columns | {"now": [1, 1]})
    assert caught.value.rows.tolist() == [1]


def test_times_that_run_backwards_name_the_row_and_the_cure() -> None:
    columns = {"item": [[1, 2], [1, 2]], "action": [["a", "b"]] * 2, "dwell": [[1, 2]] * 2, "time": [[1, 1], [9, 3]]}
    with pytest.raises(
        RowError, match=r"row 1, column 'time'.*event 1 is at 3 ms and the one before it at 9; write"
    ) as e:
        spec().apply(columns | {"now": [1, 1]})
    assert e.value.rows.tolist() == [1] and "sort=True on 'times'" in str(e.value)
    assert spec(sort=True).apply(columns | {"now": [1, 1]}).ids["items"].values.tolist() == [1, 2, 2, 1]


def test_numbers_are_read_as_they_are() -> None:
    spec = FeatureSpec([Key("user"), Numbers("n"), Numbers("text", separator="|"), EventTimes("when")])
    big = -(1 << 63)
    batch = spec.apply({"user": [1, 2], "n": [big, 5], "text": ["1|-2||9", ""], "when": [3, 4]})
    assert batch.numbers["n"].values.tolist() == [big, 5] and batch.numbers["n"].offsets is None
    assert batch.numbers["text"].values.tolist() == [1, -2, 9] and batch.numbers["text"].lengths().tolist() == [3, 0]
    assert spec.id_names == ("user",) and spec.number_names == ("n", "text", "when")
    with pytest.raises(DataError, match="needs integers of 64 bits; round and cast it"):
        spec.apply({"user": [1], "n": [[0.5]], "text": ["1"], "when": [3]})
    with pytest.raises(RowError, match="row 1, column 'text': 'x' is not an integer"):
        spec.apply({"user": [1, 2], "n": [1, 2], "text": ["1", "2|x"], "when": [3, 4]})


def test_gap_buckets_are_those_of_a_loop_at_every_edge() -> None:
    edges = [1000 * ((1 << k) - 1) for k in range(50)]
    gaps = [edge + by for edge in edges for by in (-1, 0, 1)] + [-(10**9), 0]
    assert gap_buckets(np.array(gaps)).tolist() == [bucket(gap) for gap in gaps]


@pytest.mark.parametrize(
    ("features", "fact"),
    [
        ([Sequence("a"), Sequence("b", aligned="c")], "'b': aligned='c' is no feature of a history.*: a"),
        ([Key("a"), Sequence("b", aligned="a")], "the spec has no such feature; add Sequence\\('a'\\)"),
        ([Sequence("a"), Sequence("b", aligned="a"), Numbers("c", aligned="b")], "itself aligned to 'a'; name that"),
        ([Sequence("a"), Sequence("b", aligned="a", max_length=7)], "max_length=7 and its history 'a' has 50"),
        (
            [Sequence("a"), TimeGap("g", since="example", aligned="a")],
            "needs the time of the example; give the spec time=",
        ),
        ([Numbers("a"), Cross("x", of=["a", "b"])], "'a' is a Numbers; cross features with one id per example"),
    ],
)
def test_histories_that_do_not_fit_are_refused(features: list[Any], fact: str) -> None:
    with pytest.raises(OptionError, match=fact):
        FeatureSpec(features)


def test_a_missing_field_is_named_with_the_choices() -> None:
    spec = FeatureSpec([Sequence("a", column="events.itm"), Dense("x", column="user.age")])
    events = pa.array([[{"item": 1}]], pa.list_(pa.struct([("item", pa.int64())])))
    with pytest.raises(DataError, match="column 'events' has no 'itm'; did you mean 'item'"):
        spec.apply(pa.table({"events": events, "user": pa.array([{"age": 3}])}))
    with pytest.raises(DataError, match="column 'user' holds int64 values and no fields, so it has no 'age'"):
        spec.apply(pa.table({"events.itm": pa.array([[3]]), "user": pa.array([3])}))
    good = spec.apply(pa.table({"events.itm": pa.array([[3], None]), "user": pa.array([{"age": 3}, None])}))
    assert good.dense is not None and good.dense.tolist() == [[3.0], [0.0]]


def test_aligned_names_and_lengths_are_listed() -> None:
    names = ("items", "actions", "dwells", "times", "gaps", "ages")
    assert spec(7).aligned == (names,) and spec(7).max_lengths == dict.fromkeys(names, 7)
