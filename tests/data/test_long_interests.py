"""The log with planted long-range interests: the same in any batch size, and decided by events of long ago."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hotrow import data
from hotrow.batch import KeyedBatch
from hotrow.data.rebatch import join_batches, slice_batch
from hotrow.data.synthetic_log.world import auc_of
from hotrow.errors import DataError, OptionError


def whole(**options: int) -> KeyedBatch:
    return join_batches([batch for batch, _ in data.long_interests(**options).batches()])


@pytest.mark.parametrize("candidates", [1, 3])
def test_any_range_and_batch_size_gives_the_same_examples(
    candidates: int, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    options = {"history_length": 200, "candidates": candidates, "interests": 4, "recent": 20}
    one = whole(examples=100, batch_size=100, **options)
    assert same_batch(one, whole(examples=100, batch_size=7, **options))
    part = whole(examples=40, offset=31, batch_size=11, **options)
    assert same_batch(part, slice_batch(one, 31, 71))


def test_cursors_resume_and_fit_their_options(check_every_cut: Callable[[object], int]) -> None:
    assert check_every_cut(lambda: data.long_interests(examples=50, batch_size=9, history_length=300)) == 6
    _, cursor = next(data.long_interests(examples=50, history_length=300).batches())
    with pytest.raises(DataError, match="pass the same options as before"):
        data.long_interests(examples=50, history_length=400).batches(cursor)


def test_columns_are_aligned_times_rise_and_candidates_share_a_history() -> None:
    batch = whole(examples=60, history_length=400, candidates=3)
    lengths = batch.ids["seen_item"].lengths()
    assert int(lengths.min()) >= 200 and int(lengths.max()) <= 400 and len(lengths.unique()) > 5
    for column in (batch.ids["seen_category"], batch.ids["seen_action"], batch.numbers["seen_time"]):
        assert torch.equal(column.lengths(), lengths)
    times, offsets = batch.numbers["seen_time"].values, batch.numbers["seen_time"].offsets
    assert batch.time is not None and offsets is not None
    for i in range(batch.size):
        mine = times[offsets[i] : offsets[i + 1]]
        assert bool((mine.diff() > 0).all()) and int(mine[-1]) < int(batch.time[i])
    assert torch.equal(lengths[0::3], lengths[1::3]) and torch.equal(lengths[0::3], lengths[2::3])
    category = dict(
        zip(batch.ids["seen_item"].values.tolist(), batch.ids["seen_category"].values.tolist(), strict=True)
    )
    shown = zip(batch.ids["item"].values.tolist(), batch.ids["category"].values.tolist(), strict=True)
    assert all(category.get(item, found) == found for item, found in shown)


def test_the_signal_is_long_ago_and_its_best_auc_is_known() -> None:
    source = data.long_interests(examples=2000, history_length=300, interests=4, recent=50)
    batch = join_batches([batch for batch, _ in source.batches()])
    offsets, category = batch.ids["seen_item"].offsets, batch.ids["category"].values
    seen, action = batch.ids["seen_category"].values, batch.ids["seen_action"].values
    assert offsets is not None and batch.labels is not None

    def bought(lo: torch.Tensor, hi: torch.Tensor) -> np.ndarray:
        """Whether the candidate's category is bought among events lo to hi."""
        rows = zip(lo.tolist(), hi.tolist(), category.tolist(), strict=True)
        return np.array([bool(((seen[a:b] == c) & (action[a:b] == 2)).any()) for a, b, c in rows])

    clicks = batch.labels.numpy() > 0
    best = source.best_auc(2000, start=0)
    assert not bought(offsets[1:] - 50, offsets[1:]).any()
    long_ago = auc_of(bought(offsets[:-1], offsets[1:]).astype(np.float64), clicks)
    assert best > 0.8 and best - 0.06 < long_ago < best
    recent = np.array(
        [
            float(((seen[b - 50 : b] == c) & (action[b - 50 : b] == 1)).any())
            for b, c in zip(offsets[1:].tolist(), category.tolist(), strict=True)
        ]
    )
    assert auc_of(recent, clicks) < best - 0.15
    assert 0.2 < clicks.mean() < 0.6


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"history_length": 20_000}, "history_length=20000; give 164 to 10000 for these options"),
        ({"history_length": 100}, "history_length=100; give 164"),
        ({"categories": 10}, "give a multiple of interests"),
        ({"items": 100}, "items=100; give a multiple of categories=64"),
        ({"candidates": 0}, "candidates=0; give a whole number, 1 or more"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, int], fact: str) -> None:
    with pytest.raises(OptionError, match=fact):
        data.long_interests(**options)
