"""Encodings are cut into users and joined again without knowing the tower."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.serve.execution import encodings


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_users_cut_and_joined_are_the_encoding_without_its_padding(lengths: list[int], padding: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    users, events = len(lengths), sum(lengths)
    whole = {
        "x": torch.randn(events + padding, 3, generator=draw),
        "x_lengths": torch.tensor([*lengths, *[0] * padding]),
        "mean": torch.randn(users + padding, 2, generator=draw),
        "long_lengths": torch.randn(users + padding, generator=draw),  # `long` is no tensor, so these are no lengths
    }
    parts = encodings.cut(whole, users)
    joined = encodings.join(parts)
    assert list(joined) == list(whole)
    for name, value in joined.items():
        assert torch.equal(value, whole[name][: events if name == "x" else users])
    order = torch.randperm(users, generator=draw).tolist()
    shuffled = encodings.join([parts[user] for user in order])
    assert shuffled["x_lengths"].tolist() == [lengths[user] for user in order]
    assert torch.equal(shuffled["mean"], whole["mean"][order])


def test_a_cut_user_keeps_no_other_users_memory() -> None:
    whole = {"x": torch.zeros(1000, 8), "x_lengths": torch.tensor([1, 999])}
    first = encodings.cut(whole, 2)[0]
    assert first["x"].untyped_storage().nbytes() == 32 and encodings.size_of(first) == 32 + 8


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
@settings(max_examples=40, deadline=None)
def test_ranges_of_rows_are_the_rows(lengths: list[int], data: st.DataObject) -> None:
    rows = len(lengths)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin, rows))
    offsets = [sum(lengths[:row]) for row in range(rows + 1)]
    vectors = {
        "item": torch.arange(rows),
        "tags": torch.arange(sum(lengths)),
        "tags_lengths": torch.tensor(lengths),
        "user_of": torch.arange(rows) // 2,
    }
    found = encodings.rows_between(vectors, begin, end)
    assert found["item"].tolist() == list(range(begin, end))
    assert found["tags"].tolist() == list(range(offsets[begin], offsets[end]))
    assert found["tags_lengths"].tolist() == lengths[begin:end]
    assert found["user_of"].tolist() == [row // 2 for row in range(begin, end)]
