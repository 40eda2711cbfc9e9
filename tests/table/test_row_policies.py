"""Admission and expiry: options, and what they do to rows, against plain dicts, in DRAM and over SSD alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from two_tiers import TwoTiers, rows_of, shard_of

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import OptionError
from hotrow.nn import EmbeddingCollection
from hotrow.optim import SGD, Adam
from hotrow.row_policies import Clock
from hotrow.table import Admission, Expiry, Table
from hotrow.units import parse_milliseconds

DIM = 64


# --- options


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"after": 0}, "after=0: give a number of sightings from 1 to 255"),
        ({"after": 256}, "after=256"),
        ({"after": 2.0}, r"after=2\.0"),
        ({"probability": 0.0}, r"probability=0\.0: give a number above 0, at most 1"),
        ({"probability": 1.5}, r"probability=1\.5"),
        ({"probability": float("nan")}, "probability=nan"),
        ({"sketch": "many"}, "sketch='many' is not a size"),
        ({"often": 3}, "admission has no option 'often'"),
    ],
)
def test_an_admission_that_makes_no_sense_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        Admission.from_dict(options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "expiry without a rule: give steps=, time="),
        ({"every": 10}, "expiry without a rule"),
        ({"grace": 10}, "expiry without a rule"),
        ({"steps": 0}, "steps=0: give a whole number, 1 or more"),
        ({"steps": 1.5}, r"steps=1\.5"),
        ({"min_count": -1}, "min_count=-1"),
        ({"steps": 3, "every": 0}, "every=0: give a whole number of updates"),
        ({"time": "soon"}, "time='soon' is not a span of time"),
        ({"min_norm": 0.0}, r"min_norm=0\.0: give a number above 0"),
        ({"max_rows": 1000}, "max_rows=1000: give at least 16,384"),
        ({"step": 5}, "expiry has no option 'step'; did you mean 'steps'"),
    ],
)
def test_an_expiry_that_makes_no_sense_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        Expiry.from_dict(options)


def test_policies_go_through_json_with_their_table() -> None:
    admission = Admission(after=3, probability=0.5, sketch="1MiB")
    expiry = Expiry(steps=10, time="2d", min_count=2, min_norm=0.1, grace=5, max_rows=20_000, every=7)
    assert Admission.from_dict(admission.to_dict()) == admission
    assert Expiry.from_dict(expiry.to_dict()) == expiry
    assert Expiry(steps=5).to_dict() == {"steps": 5, "every": 1000}
    table = Table("t", dim=4, admission=admission, expiry=expiry)
    assert Table.from_dict(table.to_dict()).to_dict() == table.to_dict()


# --- the clock


@given(
    steps=st.lists(st.integers(0, 400) | st.none(), max_size=60),
    span=st.integers(1, 500),
)
def test_the_clock_never_calls_an_update_old_too_early(steps: list[int | None], span: int) -> None:
    """A row may expire late only because an update between two marks counts for the later mark."""
    clock = Clock(span)
    highest = [-1]  # event time by update
    marks: list[tuple[int, int]] = []
    for step, watermark in enumerate(steps, start=1):
        clock.note(step, watermark)
        highest.append(max(highest[-1], -1 if watermark is None else watermark))
        if watermark is not None and (not marks or watermark - marks[-1][1] >= max(1, span // 256)):
            marks.append((step, watermark))
        old = clock.last_before()
        assert all(time <= highest[-1] - span for time in highest[1 : old + 1])
        assert old == max((at for at, time in marks if time <= marks[-1][1] - span), default=0)
        assert Clock.from_json(clock.to_json(), span).last_before() == old


def test_the_clock_stays_small_however_long_training_goes_on() -> None:
    clock = Clock(parse_milliseconds("30d"))
    for step in range(1, 50_000):
        clock.note(step, step * 60_000)
    assert len(clock.marks) <= 258 and len(clock.to_json()) < 10_000


# --- expiry


class Seen:
    """Which keys have a row: their count and last step."""

    def __init__(self) -> None:
        self.count: Counter[int] = Counter()
        self.last: dict[int, int] = {}
        self.step = 0

    def train(self, keys: Tensor) -> None:
        self.step += 1
        for key in keys.tolist():
            self.count[key] += 1
            self.last[key] = self.step

    def remove(self, keys: set[int]) -> None:
        for key in keys:
            del self.count[key], self.last[key]

    def assert_are(self, rows: dict[int, tuple[int, int]]) -> None:
        assert rows == {key: (self.count[key], self.last[key]) for key in self.last}


def test_rows_expire_that_were_not_updated_for_so_many_steps(tmp_path: Path) -> None:
    table = Table("t", DIM, expiry=Expiry(steps=20, every=5))
    two, seen = TwoTiers(table, SGD(lr=0.1), tmp_path), Seen()
    for step in range(1, 61):
        keys = two.draw(600, keys=30_000)
        two.train(keys)
        seen.train(keys)
        if step % 5 == 0:
            seen.remove({key for key, last in seen.last.items() if last < step - 20})
        if step % 30 == 0:
            seen.assert_are(two.same_rows())
    assert two.ssd.tables[0].store.tier()["cold_rows"] > 3000
    gone = torch.tensor(sorted(set(range(-1000, 7919 * 30_000 - 1000, 7919)) - set(seen.last)))
    assert not two.ssd.tables[0].contains(gone).any()
    assert torch.equal(two.ssd.tables[0].read(gone), two.dram.tables[0].read(gone))


def test_rows_expire_that_were_seen_too_seldom(tmp_path: Path) -> None:
    table = Table("t", DIM, expiry=Expiry(min_count=3, grace=6, every=5))
    two, seen = TwoTiers(table, Adam(lr=0.1), tmp_path), Seen()
    for step in range(1, 61):
        keys = two.draw(500, keys=20_000)
        two.train(keys)
        seen.train(keys)
        if step % 5 == 0:
            seen.remove({key for key, last in seen.last.items() if last < step - 6 and seen.count[key] < 3})
    seen.assert_are(two.same_rows())
    assert 1 in seen.count.values() and max(seen.count.values()) > 3


def test_rows_expire_that_have_become_small(tmp_path: Path) -> None:
    table = Table("t", DIM, expiry=Expiry(min_norm=0.2, every=4))
    two, seen = TwoTiers(table, SGD(lr=0.05), tmp_path), Seen()
    for step in range(1, 49):
        keys = two.draw(500, keys=20_000)
        known = torch.tensor(list(seen.last), dtype=torch.int64)
        norms = dict(zip(known.tolist(), two.dram.tables[0].read(known).double().norm(dim=1).tolist(), strict=True))
        two.train(keys, decay=1.0)
        seen.train(keys)
        if step % 4 == 0:
            seen.remove({key for key, last in seen.last.items() if last < step - 4 and norms[key] < 0.2})
    rows = two.same_rows()
    seen.assert_are(rows)
    assert 3000 < len(rows) < len(norms)


def test_rows_expire_by_the_event_time_of_their_last_update(tmp_path: Path) -> None:
    """Times are shuffled inside batches; one batch in five is late and does not advance the clock."""
    table = Table("t", DIM, expiry=Expiry(time="10m", every=4))
    two, seen = TwoTiers(table, SGD(lr=0.1), tmp_path), Seen()
    watermarks = [0]
    for step in range(1, 61):
        keys = two.draw(500, keys=20_000)
        at = step * 60_000 - (1_000_000 if step % 5 == 3 else 0)
        time = at - torch.randint(0, 50_000, (500,), generator=two.random)
        time[int(torch.randint(0, 500, (), generator=two.random))] = at
        two.train(keys, time)
        seen.train(keys)
        watermarks.append(max(watermarks[-1], at))
        if step % 4 == 0:
            # What a late batch touched counts from the next mark of the clock.
            marks = [watermarks[s] for s in range(step + 1)]
            for s in range(step - 1, 0, -1):
                if s % 5 == 3:
                    marks[s] = marks[s + 1]
            seen.remove({key for key, last in seen.last.items() if marks[last] <= watermarks[step] - 600_000})
    rows = two.same_rows()
    seen.assert_are(rows)
    assert 2000 < len(rows) < 10_000


def test_batches_without_a_time_move_no_clock(tmp_path: Path) -> None:
    two = TwoTiers(Table("t", DIM, expiry=Expiry(time="1s", every=1)), SGD(lr=0.1), tmp_path)
    two.train(torch.tensor([1]), time=torch.tensor([0]))
    two.train(torch.tensor([2]))
    two.train(torch.tensor([], dtype=torch.int64), time=torch.tensor([], dtype=torch.int64))
    assert set(two.same_rows()) == {1, 2}
    two.train(torch.tensor([3]), time=torch.tensor([5000]))
    assert set(two.same_rows()) == {2, 3}  # 2 has no event time: it counts as the next one's


def test_rows_that_were_imported_expire_when_the_first_updates_do(tmp_path: Path) -> None:
    two = TwoTiers(Table("t", DIM, expiry=Expiry(time="10s", every=1)), SGD(lr=0.1), tmp_path)
    for collection in two.both:
        collection.tables[0].assign(torch.arange(10), torch.ones(10, DIM))
    for second, key, left in ((0, 100, 11), (9, 101, 12), (11, 101, 1)):
        two.train(torch.tensor([key]), time=torch.tensor([second * 1000]))
        assert len(two.same_rows()) == left


def test_a_table_keeps_its_newest_rows_shard_by_shard(tmp_path: Path) -> None:
    table = Table("t", DIM, expiry=Expiry(max_rows=16_384, steps=40, every=6))
    two, seen = TwoTiers(table, SGD(lr=0.1), tmp_path), Seen()
    for step in range(1, 61):
        keys = two.draw(700 if step < 50 else 300, keys=60_000)
        two.train(keys)
        seen.train(keys)
        if step % 6:
            continue
        seen.remove({key for key, last in seen.last.items() if last < step - 40})
        if len(seen.last) > 16_384:
            seen.remove(beyond(seen.last, share=16))
        assert len(seen.last) <= 16_384
        if step in (30, 42, 60):
            seen.assert_are(two.same_rows())
    assert len(seen.last) > 8000


def beyond(last: dict[int, int], share: int) -> set[int]:
    """Keys of each shard that are not among its `share` newest; of those that tie at the edge none stays."""
    shards: dict[int, list[int]] = defaultdict(list)
    for key in last:
        shards[shard_of(key)].append(key)
    gone: set[int] = set()
    for keys in shards.values():
        steps = sorted((last[key] for key in keys), reverse=True)
        if len(steps) > share:
            gone |= {key for key in keys if last[key] <= steps[share]}
    return gone


def test_an_expired_row_reads_as_new_even_when_it_was_fetched_ahead(tmp_path: Path) -> None:
    table = Table("t", DIM, expiry=Expiry(steps=2, every=1))
    two = TwoTiers(table, SGD(lr=0.1), tmp_path)
    initial = two.dram.tables[0].read(torch.tensor([7]))
    two.train(torch.tensor([7]))
    assert not torch.equal(two.dram.tables[0].read(torch.tensor([7])), initial)
    for _ in range(2):
        two.train(torch.tensor([8]))
    ahead = [collection.route(KeyedBatch({"t": Jagged(torch.tensor([7]))})).fetch() for collection in two.both]
    two.train(torch.tensor([8]))  # the sweep after this one takes 7
    for collection, lookup in zip(two.both, ahead, strict=True):
        vectors = collection(lookup)["t"]
        assert torch.equal(vectors, initial)
        vectors.sum().backward()
        collection.step()
    assert two.same_rows() == {7: (1, 5), 8: (3, 4)}


def test_rows_made_or_set_between_sweeps_live_until_the_next_one(tmp_path: Path) -> None:
    """On SSD too, where only the record tells whether a row has expired."""
    table = Table("t", DIM, expiry=Expiry(steps=3, min_count=2, min_norm=1e-3, every=10))
    two = TwoTiers(table, SGD(lr=0.1), tmp_path)
    for _ in range(10):
        two.train(torch.arange(5))
    for collection in two.both:
        rows = collection.tables[0]
        rows.create(torch.arange(10, 20))
        rows.assign(torch.arange(20, 30), torch.full((10, DIM), 0.5))
        rows.assign(torch.arange(30, 40), torch.full((10, DIM), 0.5), last_steps=torch.ones(10, dtype=torch.int64))
        rows.assign(torch.arange(1), torch.zeros(1, DIM), counts=torch.tensor([1]))
    two.ssd.tables[0].store.core.evict(1000)
    assert set(two.same_rows()) == {*range(5), *range(10, 40)}
    assert two.ssd.tables[0].contains(torch.arange(10, 40)).all()
    assert torch.equal(two.ssd.tables[0].read(torch.arange(20, 40)), torch.full((20, DIM), 0.5))
    for _ in range(10):
        two.train(torch.arange(1, 5))
    assert set(two.same_rows()) == {1, 2, 3, 4}


def test_erasing_a_row_that_has_expired_on_ssd_finds_nothing(tmp_path: Path) -> None:
    two = TwoTiers(Table("t", DIM, expiry=Expiry(steps=1, every=1)), SGD(lr=0.1), tmp_path)
    two.train(torch.arange(100))
    two.ssd.tables[0].store.core.evict(1000)
    for _ in range(2):
        two.train(torch.tensor([1000]))
    for collection in two.both:
        assert collection.tables[0].erase(torch.arange(50)) == 0
    assert set(two.same_rows()) == {1000}
    two.ssd.tables[0].create(torch.arange(50, 100))  # meets the rest
    two.dram.tables[0].create(torch.arange(50, 100))
    assert len(two.ssd.tables[0]) == len(two.dram.tables[0]) == 51


# --- admission


def test_a_key_is_admitted_at_its_third_sighting_and_learns_nothing_before(tmp_path: Path) -> None:
    table = Table("t", DIM, admission=Admission(after=3, sketch="1MiB"))
    two = TwoTiers(table, SGD(lr=0.1), tmp_path)
    initial = two.dram.tables[0].read(torch.arange(4))
    two.train(torch.tensor([0, 1, 1, 2, 2, 2]))
    assert set(two.same_rows()) == {2}  # three occurrences in one batch count as three
    two.train(torch.tensor([0, 1]))
    assert two.same_rows() == {1: (1, 2), 2: (3, 1)}
    for collection in two.both:
        values = collection.tables[0].read(torch.arange(4))
        assert torch.equal(values[[0, 3]], initial[[0, 3]])
        assert not torch.equal(values[1], initial[1])
        with torch.no_grad():
            collection(KeyedBatch({"t": Jagged(torch.tensor([0, 0, 0]))}))  # evaluation does not count occurrences
    assert 0 not in two.same_rows()


@pytest.mark.parametrize(("sketch", "most_early"), [("1MiB", 0.002), ("64KiB", 0.2)])
def test_no_key_is_admitted_late_and_few_early(sketch: str, most_early: float, tmp_path: Path) -> None:
    table = Table("t", DIM, admission=Admission(after=3, sketch=sketch))
    two = TwoTiers(table, SGD(lr=0.1), tmp_path)
    sightings: Counter[int] = Counter()
    for _ in range(20):
        keys = two.draw(1000, keys=20_000)
        two.train(keys)
        sightings.update(keys.tolist())
    rows = two.same_rows()
    due = {key for key, count in sightings.items() if count >= 3}
    assert due <= set(rows)
    early = set(rows) - due
    assert len(early) <= most_early * len(sightings)
    assert all(rows[key][0] <= sightings[key] for key in due)  # counts begin with the row
    memory = two.ssd.tables[0].memory()
    assert memory["sketch_bytes"] == {"1MiB": 1 << 20, "64KiB": 64 << 10}[sketch]
    assert memory["total_bytes"] > memory["sketch_bytes"]


def test_gradient_accumulation_counts_each_sighting_once(tmp_path: Path) -> None:
    two = TwoTiers(Table("t", DIM, admission=Admission(after=4, sketch="1MiB")), SGD(lr=0.1), tmp_path)
    for collection in two.both:
        for expected in (False, True):
            for _ in range(2):
                collection(KeyedBatch({"t": Jagged(torch.tensor([5]))}))["t"].sum().backward()
            collection.step()
            assert bool(collection.tables[0].contains(torch.tensor([5]))) == expected
    assert two.same_rows() == {5: (2, 2)}


def test_a_batch_that_was_never_committed_is_no_sighting(tmp_path: Path) -> None:
    two = TwoTiers(Table("t", DIM, admission=Admission(after=2, sketch="1MiB")), SGD(lr=0.1), tmp_path)
    for collection in two.both:
        for _ in range(3):
            collection(KeyedBatch({"t": Jagged(torch.tensor([5]))}))["t"].sum().backward()
            collection.discard()
    two.train(torch.tensor([5]))
    assert not two.same_rows()
    two.train(torch.tensor([5]))
    assert set(two.same_rows()) == {5}


def test_the_share_of_keys_admitted_is_the_probability_and_the_same_again(tmp_path: Path) -> None:
    table = Table("t", DIM, admission=Admission(probability=0.3))
    two, again = TwoTiers(table, SGD(lr=0.1), tmp_path / "a"), TwoTiers(table, SGD(lr=0.1), tmp_path / "b")
    for run in (two, again):
        for at in range(0, 10_000, 1000):
            run.train(torch.arange(at, at + 1000))
    rows = two.same_rows()
    assert again.same_rows() == rows
    assert len(rows) == pytest.approx(3000, abs=4 * (10_000 * 0.3 * 0.7) ** 0.5)
    two.train(torch.arange(10_000))  # a second chance, another draw
    assert len(two.same_rows()) == pytest.approx(5100, abs=200)


def test_another_seed_admits_other_keys() -> None:
    kept = []
    for seed in (1, 2):
        collection = EmbeddingCollection([Table("t", dim=2, admission=Admission(probability=0.5))], seed=seed)
        collection(KeyedBatch({"t": Jagged(torch.arange(1000))}))["t"].sum().backward()
        collection.step()
        kept.append(set(rows_of(collection.tables[0]).keys.tolist()))
    assert 100 < len(kept[0] & kept[1]) < 400


def test_admission_and_expiry_work_together(tmp_path: Path) -> None:
    """A row that expired must be admitted again; its earlier occurrences still count."""
    table = Table("t", DIM, admission=Admission(after=2, sketch="1MiB"), expiry=Expiry(steps=1, every=1))
    two = TwoTiers(table, SGD(lr=0.1), tmp_path)
    two.train(torch.tensor([5]))
    two.train(torch.tensor([5]))
    assert set(two.same_rows()) == {5}
    for _ in range(2):
        two.train(torch.tensor([], dtype=torch.int64))
    assert not two.same_rows()
    two.train(torch.tensor([5]))
    assert set(two.same_rows()) == {5}
