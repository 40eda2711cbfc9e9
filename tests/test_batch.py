"""A batch is checked once, when it is made; the error names the wrong field."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError, HotRowError

int64s = st.integers(-(1 << 63), (1 << 63) - 1)


@given(rows=st.lists(st.lists(int64s, max_size=4), max_size=5))
def test_lists_come_back_from_a_jagged(rows: list[list[int]]) -> None:
    jagged = Jagged.from_lists(rows)
    assert jagged.size == len(rows)
    assert jagged.lengths().tolist() == [len(row) for row in rows]
    assert [part.tolist() for part in jagged.values.split(jagged.lengths().tolist())] == (rows or [[]][: len(rows)])


def test_without_offsets_there_is_one_id_per_example() -> None:
    jagged = Jagged(torch.tensor([7, 8]))
    assert jagged.size == 2 and jagged.lengths().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1, 2], "values is list, not a torch tensor"),
        (torch.tensor([1.0]), r"values is torch.float32 of shape \[1\], not 1-d torch.int64; pass ids.to"),
        (torch.tensor([1], dtype=torch.int32), "torch.int32"),
        (torch.tensor([[1]]), r"shape \[1, 1\]"),
        (torch.tensor(1), r"shape \[\]"),
    ],
)
def test_ids_that_are_no_vector_of_int64_are_refused(values: Any, why: str) -> None:
    with pytest.raises(BatchError, match=why):
        Jagged(values)


@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2], [0, 4], [0, 2, 1, 3], [0, -1, 3], [3], [0]])
def test_offsets_that_do_not_fit_are_refused_and_shown(offsets: list[int]) -> None:
    with pytest.raises(BatchError, match=r"must start at 0, never fall, and end at the number of ids \(3\); got \["):
        Jagged(torch.tensor([1, 2, 3]), torch.tensor(offsets, dtype=torch.int64))


def test_long_offsets_are_shown_in_part() -> None:
    with pytest.raises(BatchError, match=r"got \[0, 1, 2, 3, '\.\.\.', 97, 98, 99\]"):
        Jagged(torch.arange(5), torch.arange(100))


def test_offsets_of_another_type_are_refused() -> None:
    with pytest.raises(BatchError, match=r"offsets is torch\.int32"):
        Jagged(torch.arange(3), torch.tensor([0, 3], dtype=torch.int32))


def test_weights_must_be_one_float_for_each_id() -> None:
    with pytest.raises(BatchError, match="2 weights for 3 ids"):
        Jagged(torch.arange(3), weights=torch.ones(2))
    with pytest.raises(BatchError, match=r"weights is torch.float64.*weights.float\(\)"):
        Jagged(torch.arange(3), weights=torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    """They would make rows NaN after the check of gradients: 0 times infinity."""
    with pytest.raises(BatchError, match="weights"):
        Jagged(torch.arange(2), weights=torch.tensor([1.0, bad]))


def test_parts_of_different_sizes_are_named() -> None:
    with pytest.raises(BatchError, match="feature 'a' 2, feature 'b' 3, dense 4, labels 5"):
        KeyedBatch(
            {"a": Jagged(torch.arange(2)), "b": Jagged(torch.arange(3))}, dense=torch.zeros(4, 1), labels=torch.zeros(5)
        )


def test_a_batch_knows_its_size_and_its_ids() -> None:
    ids = {"a": Jagged(torch.arange(2)), "b": Jagged.from_lists([[1, 2, 3], []])}
    batch = KeyedBatch(ids, torch.zeros(2, 3), torch.zeros(2), torch.arange(2))
    assert (batch.size, batch.id_count()) == (2, 5)
    assert KeyedBatch({}, dense=torch.zeros(4, 1)).size == 4
    assert KeyedBatch({"a": Jagged.from_lists([])}).size == 0


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(BatchError, match="an empty batch: give ids, dense features or labels"):
        KeyedBatch({})


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), [1, 2]], ids=["tensor", "list"])
def test_ids_that_are_no_jagged_are_refused_by_name(ids: Any) -> None:
    with pytest.raises(BatchError, match=r"feature 'user'.*Jagged"):
        KeyedBatch({"user": ids})


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("dense", torch.zeros(2)),
        ("dense", torch.zeros(2, 1, dtype=torch.float64)),
        ("dense", [[1.0], [2.0]]),
        ("labels", torch.tensor([1, 0])),
        ("labels", torch.zeros(2, 1, 1)),
        ("labels", [1.0, 0.0]),
        ("time", torch.zeros(2)),
    ],
)
def test_parts_of_another_type_or_shape_are_refused_by_name(part: str, value: Any) -> None:
    with pytest.raises(BatchError, match=part):
        KeyedBatch({"a": Jagged(torch.arange(2))}, **{part: value})


def test_batch_errors_are_hotrows_and_pythons() -> None:
    assert issubclass(BatchError, HotRowError) and issubclass(BatchError, ValueError)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=3), st.integers(0, 1)), min_size=0, max_size=12),
    st.booleans(),
)
def test_share_users_gives_equal_examples_one_user(examples: list[tuple[list[int], int]], weighted: bool) -> None:
    seen = Jagged.from_lists([list(history) for history, _ in examples])
    if weighted:
        seen = Jagged(seen.values, seen.offsets, seen.values.float() / 2)
    country = Jagged(torch.tensor([c for _, c in examples], dtype=torch.int64))
    item = Jagged(torch.arange(len(examples)))
    batch = KeyedBatch({"seen": seen, "country": country, "item": item}, numbers={"time": seen})
    shared = batch.share_users(["country", "seen", "time"])
    users = list(dict.fromkeys((tuple(history), c) for history, c in examples))
    assert shared.users == len(users)
    assert shared.user_of is not None
    assert shared.user_of.tolist() == [users.index((tuple(history), c)) for history, c in examples]
    pieces = shared.ids["seen"].values.split(shared.ids["seen"].lengths().tolist())
    assert [(tuple(p.tolist()), c) for p, c in zip(pieces, shared.ids["country"].values.tolist(), strict=True)] == users
    assert shared.numbers["time"].values.equal(shared.ids["seen"].values)
    assert shared.size == batch.size
    assert shared.ids["item"] is item
    assert shared.share_users(["seen"]) is shared


def test_examples_that_differ_in_weights_or_order_alone_are_different_users() -> None:
    ids, offsets = torch.tensor([1, 2, 2, 1, 1, 2]), torch.tensor([0, 2, 4, 6])
    assert KeyedBatch({"seen": Jagged(ids, offsets)}).share_users(["seen"]).user_of.tolist() == [0, 1, 0]
    weights = torch.tensor([1.0, 1, 1, 1, 1, 2])
    assert KeyedBatch({"seen": Jagged(ids, offsets, weights)}).share_users(["seen"]).user_of.tolist() == [0, 1, 2]


def test_users_that_do_not_fit_are_refused() -> None:
    seen, item = Jagged.from_lists([[1], [2]]), Jagged(torch.arange(3))
    users = frozenset({"seen"})
    with pytest.raises(BatchError, match="user_of has users from 0 to 2, but the user features have 2 entries"):
        KeyedBatch({"seen": seen, "item": item}, user_of=torch.arange(3), user_features=users)
    with pytest.raises(BatchError, match="without user_of"):
        KeyedBatch({"seen": seen}, user_features=users)
    with pytest.raises(BatchError, match="different numbers of users"):
        KeyedBatch({"seen": seen, "item": item}, user_of=torch.zeros(3, dtype=torch.int64),
                   user_features=frozenset({"seen", "item"}))  # fmt: skip
    with pytest.raises(BatchError, match="among ids and numbers"):
        KeyedBatch({"seen": seen}, numbers={"seen": seen})


histories = st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=10)


@settings(deadline=None)
@given(histories, st.lists(st.integers(0, 1), min_size=10, max_size=10), st.booleans())
def test_share_users_with_prefixes_shows_each_example_its_own_history(
    seen: list[list[int]], countries: list[int], two: bool
) -> None:
    size = len(seen)
    other = [[*events[:-1], 1] if events else [] for events in seen]  # aligned, and not always a beginning
    batch = KeyedBatch(
        {"seen": Jagged.from_lists(seen), "country": Jagged(torch.tensor(countries[:size], dtype=torch.int64))},
        numbers={"action": Jagged.from_lists(other)},
    )
    groups = [["seen"], ["action"]] if two else [["seen", "action"]]
    shared = batch.share_users(["seen", "action", "country"], prefixes=groups)
    assert shared.user_of is not None
    for name, rows in (("seen", seen), ("action", other)):
        column = shared.column(name)
        pieces = column.values.split(column.lengths().tolist())
        for example, (user, length) in enumerate(
            zip(shared.user_of.tolist(), shared.visible[name].tolist(), strict=True)
        ):
            assert pieces[user][:length].tolist() == rows[example]
    assert shared.ids["country"].values[shared.user_of].tolist() == countries[:size]
    assert shared.users <= len({(tuple(s), tuple(o), c) for s, o, c in zip(seen, other, countries, strict=False)})


def test_a_growing_history_is_one_user() -> None:
    events = list(range(50))
    seen = Jagged.from_lists([events[:n] for n in (3, 50, 0, 17, 50)] + [[9, 1]])
    shared = KeyedBatch({"seen": seen}).share_users(["seen"], prefixes=[["seen"]])
    assert shared.user_of is not None
    assert shared.user_of.tolist() == [0, 0, 0, 0, 0, 1]
    assert shared.ids["seen"].lengths().tolist() == [50, 2]
    assert shared.visible["seen"].tolist() == [3, 50, 0, 17, 50, 2]
