"""The synthetic log: random access, the same bits for ever, and a truth with the promised properties."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from hotrow import data
from hotrow.batch import KeyedBatch
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.data.synthetic_log.world import START_MS
from hotrow.data.synthetic_log.world import auc_of as auc
from hotrow.data.synthetic_log.zipf import Zipf, _tables
from hotrow.errors import DataError, OptionError
from hotrow.features.times import DAY_MS


def digest(batch: KeyedBatch) -> str:
    state = hashlib.sha256()
    for name, jagged in batch.ids.items():
        state.update(name.encode() + jagged.values.numpy().tobytes() + jagged.lengths().numpy().tobytes())
    for part in (batch.dense, batch.labels, batch.time):
        state.update(part.numpy().tobytes())
    return state.hexdigest()[:16]


# The stream.


def test_the_same_options_give_the_same_bits_for_ever() -> None:
    found = {
        "clicks": digest(data.synthetic(seed=1).batch(0, 1000)),
        "drift": digest(data.synthetic(seed=1, drift=0.5).batch(10**9, 1000)),
        "criteo": digest(data.synthetic.criteo_like(keys=10**9).batch(5, 1000)),
    }
    assert found == {"clicks": "3008e63c41f1699e", "drift": "ec301a4a5e8a84d5", "criteo": "9ab0b012c19e548a"}


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_batches_of_any_size_are_cut_from_one_stream(batch_size: int, same_batch: Callable[..., bool]) -> None:
    source = data.synthetic(examples=130, batch_size=batch_size, offset=40)
    batches = [batch for batch, _ in source.batches()]
    assert sum(batch.size for batch in batches) == 130 == source.examples
    start = 40
    for batch in batches:
        assert same_batch(batch, source.batch(start, batch.size))
        start += batch.size
    whole = source.batch(40, 130)
    assert torch.equal(torch.cat([batch.ids["history"].values for batch in batches]), whole.ids["history"].values)
    assert torch.equal(torch.cat([batch.labels for batch in batches]), whole.labels)


@pytest.mark.parametrize("examples", [0, 64, 100])
def test_resuming_at_every_cut_gives_exactly_the_rest(examples: int, check_every_cut: Callable[..., int]) -> None:
    count = check_every_cut(lambda: data.synthetic(examples=examples, batch_size=16, offset=5, keys=10**12))
    assert count == -(-examples // 16)


def test_a_cursor_survives_json() -> None:
    source = data.synthetic(examples=64, batch_size=16)
    _, cursor = next(source.batches())
    assert next(source.batches(json.loads(json.dumps(cursor))))[1]["next"] == 32


def test_a_longer_range_may_continue_at_the_end_of_a_shorter_one() -> None:
    *_, (_, cursor) = data.synthetic(examples=32, batch_size=16).batches()
    assert [batch.size for batch, _ in data.synthetic(examples=40, batch_size=16).batches(cursor)] == [8]


def test_train_and_test_ranges_share_the_world_but_no_example() -> None:
    train, test = data.synthetic(examples=500), data.synthetic(examples=500, offset=500)
    a, b = train.batch(0, 500), next(test.batches())[0]
    assert a.time.max() < b.time.min()
    assert not torch.equal(a.ids["user"].values, b.ids["user"].values)
    assert set(a.ids["slot"].values.tolist()) == set(b.ids["slot"].values.tolist())


def test_the_criteo_shape_has_13_dense_and_26_sparse_features() -> None:
    batch = data.synthetic.criteo_like(examples=100, keys=10**9).batch(0, 100)
    assert batch.dense.shape == (100, 13) and list(batch.ids) == [f"C{i}" for i in range(1, 27)]
    assert all(jagged.offsets is None for jagged in batch.ids.values())


def test_a_shape_of_ones_own_is_followed() -> None:
    shape = data.Shape({"reader": None, "paper": None}, dense=0, history_length=0, per_day=10)
    batch = data.synthetic(shape=shape, keys=100).batch(0, 20)
    assert list(batch.ids) == ["reader", "paper"] and batch.dense is None
    assert batch.time.diff().unique().tolist() == [DAY_MS // 10]


def test_event_times_advance_with_the_example() -> None:
    time = data.synthetic().batch(0, 3000).time
    assert time[0] == START_MS and bool((time.diff() >= 0).all())
    assert data.synthetic().batch(1_000_000, 1).time.item() == START_MS + DAY_MS


def test_histories_are_items_of_the_same_user_shifted_by_the_hour() -> None:
    shape = data.Shape(per_day=50_000)
    source = data.synthetic(shape=shape, keys=7000, examples=1)
    batch = source.batch(0, 12_000)
    history, user = batch.ids["history"], batch.ids["user"].values
    lengths = history.lengths()
    assert int(lengths.max()) == 20
    busy = user[lengths == 20].mode().values
    rows = torch.nonzero(user == busy).flatten().tolist()
    lists = [history.values[history.offsets[row] : history.offsets[row + 1]].tolist() for row in rows]
    seen = [lists[0]]
    for items in lists:
        if items != seen[-1]:
            seen.append(items)
    assert len(seen) >= 4
    assert all(after[:-1] == before[1:] for before, after in pairwise(seen))
    assert set(lists[0]) <= set(source.batch(0, 200_000).ids["item"].values.tolist())


# The truth.


def test_a_billion_keys_take_no_memory_and_the_tail_is_seen() -> None:
    source = data.synthetic.criteo_like(examples=0, keys=5 * 10**9)
    keys = torch.cat([source.batch(at, 20_000).ids["C3"].values for at in (0, 20_000)])
    values, counts = keys.unique(return_counts=True)
    assert len(values) > 15_000 and int(counts.max()) > 2000


@pytest.mark.parametrize("make", [data.synthetic, data.synthetic.criteo_like])
def test_distinct_keys_are_as_many_as_foretold(make: Callable[..., SyntheticClicks]) -> None:
    source = make(keys=10**7, examples=20_000)
    ids = source.batch(0, 20_000).ids
    distinct = sum(len(np.unique(jagged.values.numpy())) for name, jagged in ids.items() if name != "history")
    assert distinct == pytest.approx(source.distinct_keys(), rel=0.05)


def test_a_million_distinct_keys_appear_in_a_short_run() -> None:
    assert data.synthetic.criteo_like().distinct_keys(1_500_000) > 1_000_000
    assert data.synthetic(shape=data.Shape(zipf=0.9)).distinct_keys(1_500_000) > 1_000_000


@pytest.mark.parametrize(("keys", "exponent"), [(3, 1.0), (700, 1.2), (10**6, 1.05), (10**10, 0.8)])
def test_ranks_follow_zipfs_law(keys: int, exponent: float) -> None:
    table = _tables(keys, exponent)
    assert int(table.width.sum()) == keys and table.share.sum() == pytest.approx(1)
    if keys <= 10**6:
        exact = np.arange(1, keys + 1, dtype=np.float64) ** -exponent
        shares = np.add.reduceat(exact, table.first) / exact.sum()
        assert table.share == pytest.approx(shares, rel=1e-3)
    ranks = Zipf(keys, exponent).ranks(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 400_000))
    assert ranks.min() == 0 and ranks.max() < keys
    segments = np.searchsorted(table.first, ranks, side="right") - 1
    found = np.bincount(segments, minlength=len(table.share)) / len(ranks)
    noise = np.sqrt(table.share * (1 - table.share) / len(ranks))
    assert (np.abs(found - table.share) < 5.5 * noise + 1e-5).all()


def test_clicks_are_drawn_with_the_probability_of_the_logit() -> None:
    examples = data.synthetic().world.examples(0, 200_000)
    probability = 1 / (1 + np.exp(-examples.logit))
    for low, high in ((0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1)):
        rows = (probability >= low) & (probability < high)
        spread = 5 * np.sqrt(0.25 / rows.sum())
        assert examples.clicks[rows].mean() == pytest.approx(probability[rows].mean(), abs=spread)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_auc_is_near_080(seed: int) -> None:
    assert data.synthetic(seed=seed).best_auc(50_000) == pytest.approx(0.8, abs=0.03)
    assert data.synthetic.criteo_like(seed=seed, keys=10**9).best_auc(50_000) == pytest.approx(0.8, abs=0.03)


def test_the_best_auc_is_of_the_examples_after_the_range() -> None:
    source = data.synthetic(examples=1000, offset=500, batch_size=300)
    world = source.world.examples(1500, 2000)
    assert source.best_auc(2000) == auc(world.logit, world.clicks) == source.best_auc(2000, start=1500)


def test_hot_keys_can_be_learned_from_counts_alone() -> None:
    source = data.synthetic(examples=0)
    train, test = source.batch(0, 100_000), source.batch(100_000, 20_000)
    score = np.zeros(20_000)
    base = train.labels.mean().item()
    for name in ("user", "item", "site", "device", "country", "slot"):
        keys, inverse = train.ids[name].values.unique(return_inverse=True)
        clicks = torch.zeros(len(keys)).index_add_(0, inverse, train.labels)
        rate = (clicks + 20 * base) / (inverse.bincount() + 20)
        at = torch.searchsorted(keys, test.ids[name].values).clamp(max=len(keys) - 1)
        known = keys[at] == test.ids[name].values
        score += torch.where(known, torch.logit(rate[at]), torch.logit(torch.tensor(base))).numpy()
    assert auc(score, test.labels.numpy() > 0) > 0.70


def test_without_drift_an_items_effect_stays_and_with_drift_it_moves() -> None:
    def correlation(drift: float, days: float) -> float:
        world = data.synthetic(drift=drift, keys=20_000).world
        ranks = np.arange(2000)
        now = world._item_effects(ranks, np.full(2000, START_MS))
        later = world._item_effects(ranks, np.full(2000, START_MS + int(days * DAY_MS)))
        return float(np.corrcoef(now, later)[0, 1])

    assert correlation(0.0, 100) == pytest.approx(1)
    assert correlation(1.0, 0.01) > 0.99
    assert 0.5 < correlation(1.0, 0.5) < 0.9
    assert abs(correlation(1.0, 1)) < 0.1 and abs(correlation(1.0, 30)) < 0.1
    assert 0.4 < correlation(0.7, 30) < 0.6


def test_tastes_move_and_new_items_come_as_days_pass() -> None:
    drift = data.Drift(items=0.9, tastes=0.9, new_items=0.25)
    log = data.synthetic(drift=drift, keys=20_000, shape=data.Shape(per_day=10_000))
    days = [set(log.batch(day * 10_000, 10_000).ids["item"].values.tolist()) for day in (0, 1, 8)]
    known = [len(days[0] & later) / len(later) for later in days[1:]]
    assert known[0] > 0.3 > 0.1 > known[1]  # eight days on, every rank has been given to another item
    still = data.synthetic(keys=20_000, shape=data.Shape(per_day=10_000))
    assert len(set(still.batch(0, 10_000).ids["item"].values.tolist()) & days[0]) > 0.3 * len(days[0])
    users = np.zeros(1000, np.int64) + np.arange(1000)
    ranks, items = np.zeros(1000, np.int64), np.zeros(1000, np.int64)
    moments = [np.full(1000, START_MS + day * DAY_MS) for day in (0, 0.01, 3)]
    today, soon, later = (log.world._taste(users, ranks, items, moment.astype(np.int64)) for moment in moments)
    assert np.corrcoef(today, soon)[0, 1] > 0.95
    assert np.corrcoef(today, later)[0, 1] < 0.5


def test_a_number_is_drift_of_the_items_alone() -> None:
    one, other = (data.synthetic(drift=drift) for drift in (0.5, data.Drift(items=0.5)))
    assert torch.equal(one.batch(10**7, 500).labels, other.batch(10**7, 500).labels)
    for wrong in ({"items": 2}, {"tastes": -1}, {"new_items": True}):
        with pytest.raises(OptionError, match="give a number from 0"):
            data.Drift(**wrong)


def test_drift_leaves_the_best_auc() -> None:
    full = data.Drift(items=1.0, tastes=1.0, new_items=0.5)
    assert data.synthetic(drift=full).best_auc(50_000, start=3_000_000) == pytest.approx(0.8, abs=0.03)
    assert data.synthetic(drift=1.0).best_auc(50_000) == pytest.approx(0.8, abs=0.03)


def test_seeds_make_different_worlds() -> None:
    a, b = data.synthetic(seed=1).batch(0, 50), data.synthetic(seed=2).batch(0, 50)
    assert not set(a.ids["item"].values.tolist()) & set(b.ids["item"].values.tolist())


def test_auc_equals_the_plain_definition() -> None:
    draw = np.random.default_rng(1)
    scores, clicks = draw.integers(0, 9, 80).astype(np.float64), draw.random(80) < 0.4
    pairs = scores[clicks][:, None] - scores[~clicks][None, :]
    assert auc(scores, clicks) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    with pytest.raises(DataError, match="no AUC: 0 clicks among 3 examples"):
        auc(np.zeros(3), np.zeros(3, np.bool_))


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 8}, "its batch_size is 16 and the source has 8; pass batch_size=16"),
        ({"seed": 1}, "its world is .* pass the same seed, keys, drift and shape"),
        ({"keys": 10**8}, "pass the same seed, keys"),
        ({"drift": 0.5}, "pass the same seed, keys"),
        ({"offset": 16}, "its offset is 0 and the source has 16; pass offset=0"),
        ({"examples": 8}, "stands before example 16, where no batch of this source begins .examples 0 to 8"),
    ],
)
def test_a_cursor_of_another_source_is_refused(changes: dict, message: str) -> None:
    _, cursor = next(data.synthetic(examples=64, batch_size=16).batches())
    with pytest.raises(DataError, match=message):
        data.synthetic(**{"examples": 64, "batch_size": 16, **changes}).batches(cursor)


def test_a_cursor_inside_a_batch_is_refused() -> None:
    *_, (_, cursor) = data.synthetic(examples=20, batch_size=16).batches()
    with pytest.raises(DataError, match="stands before example 20, where no batch of this source begins"):
        data.synthetic(examples=64, batch_size=16).batches(cursor)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data.synthetic(examples=-1), "examples=-1; give a whole number"),
        (lambda: data.synthetic(offset=0.5), "offset=0.5; give a whole number"),
        (lambda: data.synthetic(batch_size=0), "batch_size=0; give an integer of 1 or more"),
        (lambda: data.synthetic(seed=-1), "seed=-1; give an integer from 0"),
        (lambda: data.synthetic(keys=100), "keys=100; this shape needs 5250 or more"),
        (lambda: data.synthetic(keys=1 << 53), "give an integer below"),
        (lambda: data.synthetic(drift=2), "drift=2; give a number from 0"),
        (lambda: data.synthetic(shape={}), "shape={}; give a"),
        (lambda: data.Shape({"user": None}), "give at least two features, user and item, the size None"),
        (lambda: data.Shape(["user"]), r"sparse=\['user'\]; give a dict"),
        (lambda: data.Shape({"user": None, "item": None, "history": 3}), "named 'history'.*rename it"),
        (lambda: data.Shape({"user": None, "item": None, "x": 0}), r"sparse\['x'\]=0; give an integer of 1 or more"),
        (lambda: data.Shape(dense=-1), "dense=-1; give an integer of 0 or more"),
        (lambda: data.Shape(zipf=9), "zipf=9; give an exponent"),
    ],
)
def test_a_wrong_option_is_refused_with_the_cure(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_describe_says_what_is_made() -> None:
    assert data.synthetic(examples=1000, offset=500).describe().startswith("synthetic: examples 500 to 1,500 of seed 0")
