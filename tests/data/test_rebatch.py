"""Cutting a stream of batches into batches of one size loses, repeats and reorders nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.batch import Jagged, KeyedBatch
from hotrow.data.rebatch import join_batches, rebatch, slice_batch


def numbered(start: int, size: int) -> KeyedBatch:
    """Examples start, start + 1, ... with as many ids in 'many' as the example's number modulo 3, weights too."""
    numbers = torch.arange(start, start + size)
    many = Jagged.from_lists([[int(n)] * (int(n) % 3) for n in numbers])
    weighted = Jagged(many.values, many.offsets, many.values.float() / 2)
    dense = numbers.float().unsqueeze(1).expand(-1, 2)
    times = {"when": Jagged(many.values * 100, many.offsets), "now": Jagged(numbers + 7)}
    return KeyedBatch({"one": Jagged(numbers), "many": weighted}, dense, numbers.float(), numbers * 10, numbers=times)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
def test_batches_of_one_size_hold_all_examples_in_order(sizes: list[int], size: int) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = [numbered(start, count) for start, count in zip(starts, sizes, strict=True)]
    made = list(rebatch(pieces, size))
    total = sum(sizes)
    assert [batch.size for batch, _ in made] == [size] * (total // size) + ([total % size] if total % size else [])
    done = 0
    for batch, cut in made:
        expected = numbered(done, batch.size)
        for name, jagged in expected.ids.items():
            assert torch.equal(batch.ids[name].values, jagged.values)
            assert torch.equal(batch.ids[name].lengths(), jagged.lengths())
        assert torch.equal(batch.ids["many"].weights, expected.ids["many"].weights)
        assert torch.equal(batch.dense, expected.dense) and torch.equal(batch.labels, expected.labels)
        assert torch.equal(batch.time, expected.time)
        for name, jagged in expected.numbers.items():
            assert torch.equal(batch.numbers[name].values, jagged.values)
            assert torch.equal(batch.numbers[name].lengths(), jagged.lengths())
        done += batch.size
        assert starts[cut.piece] + cut.row == done - 1


def test_a_slice_is_a_view() -> None:
    batch = numbered(0, 10)
    part = slice_batch(batch, 2, 5)
    assert part.ids["one"].values.data_ptr() == batch.ids["one"].values[2:].data_ptr()
    assert slice_batch(batch, 0, 10) is batch


def test_joining_one_id_features_with_jagged_ones_gives_offsets(same_batch: Callable[..., bool]) -> None:
    one = KeyedBatch({"a": Jagged(torch.tensor([1, 2]))})
    many = KeyedBatch({"a": Jagged.from_lists([[], [3, 4]])})
    joined = join_batches([one, many])
    assert same_batch(joined, KeyedBatch({"a": Jagged.from_lists([[1], [2], [], [3, 4]])}))


def test_batches_without_dense_labels_or_time_work() -> None:
    pieces = [KeyedBatch({"a": Jagged(torch.arange(3))}) for _ in range(3)]
    assert [batch.size for batch, _ in rebatch(pieces, 4)] == [4, 4, 1]


def test_joining_batches_of_different_parts_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        join_batches([numbered(0, 1), KeyedBatch({"one": Jagged(torch.arange(1)), "many": numbered(0, 1).ids["many"]})])
