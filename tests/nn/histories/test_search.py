"""Two-stage search against loops over events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import _core
from hotrow.errors import BatchError
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


@pytest.mark.skipif(not _core.has_similar_events(), reason="this processor has no AVX-512 VNNI")
@pytest.mark.parametrize("width, keep, events", [(64, 100, 3000), (1, 3, 100), (33, 7, 500), (16, 1, 17), (8, 40, 41)])
def test_the_core_finds_what_torch_finds(monkeypatch: pytest.MonkeyPatch, width: int, keep: int, events: int) -> None:
    torch.manual_seed(events)
    rows, lengths = torch.tensor([11, 0, 5]), torch.tensor([events, 4, events // 2])
    history = torch.randn(int(lengths.sum()), width + 2) * torch.rand(int(lengths.sum()), 1) ** 3  # of many lengths
    candidates = torch.randn(16, width) * 1e3
    for visible in (None, torch.randint(0, events // 2 + 1, (16,))):
        inputs = (candidates, history[:, :width], rows, lengths, keep, visible)
        index, counts = most_similar(*inputs)
        with monkeypatch.context() as patch:
            patch.setattr(_core, "has_similar_events", lambda: False)
            other, same = most_similar(*inputs)
        real = torch.arange(keep) < counts.unsqueeze(1)  # behind them is any place
        assert torch.equal(counts, same) and torch.equal(index[real], other[real])


@pytest.mark.skipif(not _core.has_similar_events(), reason="this processor has no AVX-512 VNNI")
def test_the_core_chooses_the_oldest_of_equal_events_and_survives_zeros_and_infinity() -> None:
    rows, lengths = torch.tensor([1]), torch.tensor([100])
    for history in (torch.ones(100, 5), torch.zeros(100, 5)):
        index, counts = most_similar(torch.ones(1, 5), history, rows, lengths, 3)
        assert index.tolist() == [[0, 1, 2]] and counts.tolist() == [3]
    for bad in (torch.inf, torch.nan):
        index, counts = most_similar(torch.full((1, 5), bad), torch.randn(100, 5), rows, lengths, 3)
        assert bool(((index >= 0) & (index < 100)).all()) and counts.tolist() == [3]


def test_soft_search_refuses_lengths_of_other_events() -> None:
    with pytest.raises(BatchError, match=r"1 candidates and 3 events, but users have 1 and 4"):
        most_similar(torch.ones(1, 2), torch.ones(3, 2), torch.tensor([1]), torch.tensor([4]), 2)


def test_soft_search_in_pieces_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "has_similar_events", lambda: False)
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
