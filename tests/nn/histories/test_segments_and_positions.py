"""Users, events and rows against loops; places count from the newest event, so truncation keeps them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.nn.histories.positions import LearnedPositions, RelativeBias
from hotrow.nn.histories.segments import (
    first_events,
    group_rows,
    last_events,
    mean_events,
    places_from_newest,
    users_of_events,
)

LENGTHS = st.lists(st.integers(0, 5), max_size=5)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, padding=st.integers(0, 3))
def test_events_know_their_users_and_places(lengths: list[int], padding: int) -> None:
    its, events = torch.tensor(lengths, dtype=torch.int64), sum(lengths) + padding
    users = [user for user, length in enumerate(lengths) for _ in range(length)]
    places = [length - 1 - place for length in lengths for place in range(length)]
    assert users_of_events(its, events).tolist() == users + [len(lengths)] * padding
    assert places_from_newest(its, events).tolist() == places + [0] * padding
    assert first_events(its).tolist() == [sum(lengths[:user]) for user in range(len(lengths))]


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, padding=st.integers(0, 3))
def test_last_and_mean_of_each_user_and_their_gradients(lengths: list[int], padding: int) -> None:
    its = torch.tensor(lengths, dtype=torch.int64)
    x = torch.randn(sum(lengths) + padding, 3, dtype=torch.float64, requires_grad=True)
    pieces = x[: sum(lengths)].split(lengths) if lengths else ()
    nothing = torch.zeros(3, dtype=torch.float64)
    last = [piece[-1] if len(piece) else nothing for piece in pieces]
    mean = [piece.mean(0) if len(piece) else nothing for piece in pieces]
    for ours, plain in ((last_events(x, its), last), (mean_events(x, its), mean)):
        expected = torch.stack(plain) if plain else x.new_zeros(0, 3)
        torch.testing.assert_close(ours, expected)
        if expected.requires_grad:
            weights = torch.randn_like(expected)
            (one,) = torch.autograd.grad((ours * weights).sum(), x)
            (other,) = torch.autograd.grad((expected * weights).sum(), x)
            torch.testing.assert_close(one, other)


@settings(max_examples=60, deadline=None)
@given(user_of=st.lists(st.integers(0, 4), max_size=8))
def test_rows_are_grouped_by_user_and_restored(user_of: list[int]) -> None:
    rows = torch.tensor(user_of, dtype=torch.int64)
    groups = group_rows(rows, 5)
    assert groups.lengths.tolist() == [user_of.count(user) for user in range(5)]
    assert groups.order.tolist() == sorted(range(len(user_of)), key=lambda row: user_of[row])
    assert torch.equal(groups.users, rows.sort().values)
    assert torch.equal(groups.restore(groups.sort(rows)), rows)


def test_truncation_to_the_newest_events_keeps_their_positions() -> None:
    positions = LearnedPositions(4, 3)
    whole = positions(torch.zeros(6, 3), torch.tensor([4, 2]))
    cut = positions(torch.zeros(4, 3), torch.tensor([2, 2]))
    assert torch.equal(cut, whole[[2, 3, 4, 5]])
    assert torch.equal(whole[:4], positions.table.flip(0)) and torch.equal(whole[4:], positions.table[:2].flip(0))


def test_places_beyond_the_longest_share_a_position() -> None:
    positions = LearnedPositions(2, 3)
    out: Tensor = positions(torch.zeros(4, 3), torch.tensor([4]))
    assert torch.equal(out, positions.table[[1, 1, 1, 0]])


@pytest.mark.parametrize(("positions", "times"), [(0, False), (5, False), (0, True), (5, True)])
def test_biases_that_are_left_out_have_no_weights(positions: int, times: bool) -> None:
    bias = RelativeBias(2, positions, times)
    assert len(list(bias.parameters())) == (positions > 0) + times


def test_helpers_export_with_free_sizes() -> None:
    class Helpers(torch.nn.Module):
        def forward(self, x: Tensor, lengths: Tensor, user_of: Tensor) -> tuple[Tensor, ...]:
            groups = group_rows(user_of, lengths.shape[0])
            places = places_from_newest(lengths, x.shape[0])
            return last_events(x, lengths), mean_events(x, lengths), places, groups.order, groups.lengths

    events, users, rows = (torch.export.Dim(name) for name in ("events", "users", "rows"))
    example = (torch.randn(6, 3), torch.tensor([4, 2]), torch.tensor([1, 0, 1]))
    exported = torch.export.export(Helpers(), example, dynamic_shapes=({0: events}, {0: users}, {0: rows})).module()
    for lengths, user_of in (([1], [0]), ([0, 3, 2], [2, 2, 0, 1]), ([0, 1], [1])):
        inputs = (torch.randn(sum(lengths) + 2, 3), torch.tensor(lengths), torch.tensor(user_of))
        for ours, plain in zip(exported(*inputs), Helpers()(*inputs), strict=True):
            torch.testing.assert_close(ours, plain)
