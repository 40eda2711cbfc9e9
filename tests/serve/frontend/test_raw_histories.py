"""Raw columns of one user with a history and many candidates: the user's features are computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotrow import features as kinds
from hotrow.features import FeatureSpec
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.raw_columns import RawColumns
from hotrow.serve.protocol.request import RefusedError, Signature
from hotrow.serve.protocol.tensors import DeclaredTensor, declare

SPEC = FeatureSpec(
    [
        kinds.Sequence("seen_item", column="items", max_length=4),
        kinds.Sequence("seen_action", column="actions", aligned="seen_item"),
        kinds.EventTimes("seen_time", column="times", aligned="seen_item"),
        kinds.Key("country"),
        kinds.Key("item"),
        kinds.Cross("pair", of=["country", "item"]),
        kinds.Dense("price"),
    ]
)
SIGNATURE = Signature(
    ("seen_item", "seen_action", "country", "item", "pair"),
    frozenset({"seen_item", "seen_action"}),
    1,
    user=frozenset({"seen_item", "seen_action", "seen_time", "country"}),
    numbers=("seen_time",),
    jagged=True,
)


def request(history: list[int], times: list[int], candidates: list[int]) -> tuple[list[DeclaredTensor], list[Any]]:
    columns = {
        "items": (np.array(history), [1, len(history)]),
        "actions": (np.array(history) % 3, [1, len(history)]),
        "times": (np.array(times), [1, len(history)]),
        "country": (np.array([7]), [1]),
        "item": (np.array(candidates), [len(candidates)]),
        "price": (np.arange(len(candidates), dtype=np.float32), [len(candidates)]),
    }
    tensors = [declare(name, "FP32" if name == "price" else "INT64", shape) for name, (_, shape) in columns.items()]
    return tensors, [values for values, _ in columns.values()]


def test_a_shared_history_is_computed_once_and_equals_that_of_repeated_columns() -> None:
    raw = RawColumns(SPEC, SIGNATURE, Limits())
    rows, ids, dense, _ = raw.columns(*request([5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [10, 11, 12]))
    assert rows == 3
    by_name = dict(zip(SIGNATURE.columns, ids, strict=True))
    expected = SPEC.apply(
        {
            "items": [[5, 6, 7, 8, 9]] * 3,
            "actions": [[2, 0, 1, 2, 0]] * 3,
            "times": [[1, 2, 3, 4, 5]] * 3,
            "country": [7] * 3,
            "item": [10, 11, 12],
            "price": [0.0, 1.0, 2.0],
        },
        labels=False,
    )
    for name in ("seen_item", "seen_action", "seen_time", "country"):
        assert by_name[name].shared
        first = expected.column(name)
        end = 1 if first.offsets is None else int(first.offsets[1])
        assert by_name[name].values.tolist() == first.values[:end].tolist()
    assert len(by_name["seen_item"].values) == 4  # the newest
    for name in ("item", "pair"):
        assert not by_name[name].shared
        assert by_name[name].values.tolist() == expected.ids[name].values.tolist()
    assert dense is not None
    assert dense.tolist() == [[0.0], [1.0], [2.0]]


def test_a_history_of_one_event_is_a_list() -> None:
    raw = RawColumns(SPEC, SIGNATURE, Limits())
    _, ids, _, _ = raw.columns(*request([5], [1], [10, 11]))
    assert dict(zip(SIGNATURE.columns, ids, strict=True))["seen_time"].values.tolist() == [1]


def test_times_that_run_backwards_are_refused_with_the_cure() -> None:
    raw = RawColumns(SPEC, SIGNATURE, Limits())
    with pytest.raises(RefusedError, match="sort") as refused:
        raw.columns(*request([5, 6], [2, 1], [10, 11]))
    assert refused.value.status == 400
