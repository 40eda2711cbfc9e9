"""Two-stage search against loops over events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.nn.histories import search
from hotrow.nn.histories.search import most_similar, newest_in_category, sort_by_category

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=4)
EXTREMES = torch.tensor([-(2**63), 2**63 - 1, 0])


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, keep=st.integers(1, 7), padding=st.integers(0, 2), seed=st.integers(0, 999))
def test_hard_search_finds_the_newest_events_of_the_category(
    lengths: list[int], keep: int, padding: int, seed: int
) -> None:
    torch.manual_seed(seed)
    its = torch.tensor(lengths)
    categories = EXTREMES[torch.randint(0, 3, (sum(lengths) + padding,))]
    users = torch.randint(0, len(lengths), (5,))
    wanted = EXTREMES[torch.randint(0, 3, (5,))]
    order = sort_by_category(categories, its)
    index, counts = newest_in_category(categories[order], its, users, wanted, keep, 6)
    for row in range(5):
        first = sum(lengths[: int(users[row])])
        own = range(first, first + lengths[int(users[row])])
        expected = [event for event in own if categories[event] == wanted[row]][-keep:]
        found = order[index[row, : int(counts[row])]].tolist() if len(order) else []
        assert found == expected
        assert ((index[row] >= 0) & (index[row] < max(1, len(order)))).all()


def test_hard_search_spans_histories_of_ten_thousand_events() -> None:
    torch.manual_seed(0)
    categories = torch.randint(0, 40, (10_003,))
    its = torch.tensor([3, 10_000])
    order = sort_by_category(categories, its)
    users, wanted = torch.ones(40, dtype=torch.int64), torch.arange(40)
    index, counts = newest_in_category(categories[order], its, users, wanted, 100, 10_000)
    for category in range(40):
        expected = (categories[3:] == category).nonzero().flatten()[-100:] + 3
        assert torch.equal(order[index[category, : int(counts[category])]], expected)


@settings(max_examples=60, deadline=None)
@given(
    users=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=4),
    keep=st.integers(1, 7),
    padding=st.integers(0, 2),
    seed=st.integers(0, 999),
)
def test_soft_search_finds_the_largest_inner_products(
    users: list[tuple[int, int]], keep: int, padding: int, seed: int
) -> None:
    torch.manual_seed(seed)
    lengths, rows = [length for length, _ in users], [count for _, count in users]
    events = torch.randn(sum(lengths) + padding, 3)
    candidates = torch.randn(sum(rows), 3)
    row_counts, its = (torch.tensor(each, dtype=torch.int64) for each in (rows, lengths))
    visible = None
    if seed % 2:
        visible = torch.tensor([seed % (length + 1) for length, count in users for _ in range(count)]).long()
    index, counts = most_similar(candidates, events, row_counts, its, keep, visible)
    row = first = 0
    for length, count in users:
        for _ in range(count):
            end = first + (length if visible is None else int(visible[row]))
            own = sorted(range(first, end), key=lambda e, r=row: -float(events[e] @ candidates[r]))
            assert index[row, : int(counts[row])].tolist() == sorted(own[:keep])
            row += 1
        first += length


def test_soft_search_in_pieces_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(9, 4), torch.randn(50, 4), torch.tensor([6, 3]), torch.tensor([20, 30]), 5)
    whole = most_similar(*inputs)
    monkeypatch.setattr(search, "SCORES_AT_ONCE", 45)
    assert all(torch.equal(one, other) for one, other in zip(whole, most_similar(*inputs), strict=True))


def test_soft_search_passes_torchs_operator_checks() -> None:
    arguments = (
        torch.randn(3, 4),
        torch.randn(6, 4),
        torch.tensor([2, 1]),
        torch.tensor([4, 2]),
        3,
        torch.tensor([4, 2, 2]),
    )
    torch.library.opcheck(torch.ops.hotrow.most_similar.default, arguments)
