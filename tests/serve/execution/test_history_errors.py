"""Batches that do not fit a tower over histories: the trainer and hr.Engine name the fault, the value and the cure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import history_models as histories
import pytest
import torch

import hotrow as hr
from hotrow.errors import BatchError, OptionError

pytestmark = pytest.mark.usefixtures("one_thread")


class Both(NamedTuple):
    trainer: hr.Trainer
    engine: hr.Engine

    def refuse(self, batch: hr.KeyedBatch, trainer: str, engine: str | None = None) -> None:
        for one, match in ((self.trainer, trainer), (self.engine, engine or trainer)):
            with pytest.raises(BatchError, match=match):
                one.predict(batch)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("errors") / "ctr"
    trainer = histories.trainer_of(histories.model("hstu"))
    hr.export(trainer.model, folder)
    with hr.Engine(folder) as engine:
        yield Both(trainer, engine)


BATCH = histories.batch("hstu", 5, rows=6)


def with_numbers(**numbers: Any) -> hr.KeyedBatch:
    kept = {**BATCH.numbers, **numbers}
    return replace(BATCH, numbers={name: one for name, one in kept.items() if one is not None})


@pytest.mark.parametrize(("values", "count"), [([[1], [2, 3], *[[1]] * 4], 2), ([[1], [], *[[1]] * 4], 0)])
def test_the_time_of_an_example_is_one_number(both: Both, values: list[list[int]], count: int) -> None:
    batch = with_numbers(now=hr.Jagged.from_lists(values))
    both.refuse(
        batch,
        rf"example 1 has {count} values of 'now'; give each example one",
        rf"'now' has {count} entries in row 1; give each row one",
    )


@pytest.mark.parametrize("name", ["now", "seen_time"])
def test_a_missing_number_is_named(both: Both, name: str) -> None:
    both.refuse(with_numbers(**{name: None}), rf"no number '{name}', which the tower reads; .* numbers=.*hr.Jagged")


def test_a_history_beyond_the_limit_or_unaligned_is_named(both: Both) -> None:
    long = hr.Jagged.from_lists([[1] * (histories.MOST + 1)] * BATCH.size)
    short = hr.Jagged.from_lists([[1], *[[]] * (BATCH.size - 1)])
    ids = {**BATCH.ids, "seen_item": long, "seen_action": long}
    too_long = replace(BATCH, ids=ids, numbers={**BATCH.numbers, "seen_time": long})
    both.refuse(too_long, r"has 13 events, but max_length=12; keep the newest 12", r"13 entries in row 0.*newest 12")
    both.refuse(replace(BATCH, ids={**BATCH.ids, "seen_action": short}), "are columns of one history, but")


def test_times_that_run_backwards_are_named(both: Both) -> None:
    seen = hr.Jagged.from_lists([[5, 6, 7]] * BATCH.size)
    times = hr.Jagged.from_lists([[100, 200, 300], [100, 300, 200], *[[1, 1, 1]] * 4])
    batch = replace(BATCH, ids={**BATCH.ids, "seen_item": seen, "seen_action": seen}, labels=None)
    batch = replace(batch, numbers={**BATCH.numbers, "seen_time": times})
    with pytest.raises(BatchError, match=r"'seen_time' of .* run backwards: entry 1 has 300 and then 200; sort"):
        both.trainer.predict(batch)
    in_order = replace(batch, numbers={**batch.numbers, "seen_time": hr.Jagged.from_lists([[1, 1, 2]] * 6)})
    assert bool(both.trainer.predict(in_order).isfinite().all())


def test_users_with_other_features_than_the_towers_are_refused(both: Both) -> None:
    user_of = torch.zeros(BATCH.size, dtype=torch.int64)
    plain = {name: jagged for name, jagged in BATCH.ids.items() if name != "age"}
    part = replace(
        BATCH,
        ids={**plain, "age": hr.Jagged(torch.tensor([7]))},
        user_of=user_of,
        user_features=frozenset(["age"]),
    )
    both.refuse(part, r"users have the features age, but the tower's user part reads age, seen_action,.*share_users\(")
    both.refuse(replace(BATCH, user_of=user_of), r"users have the features none, but the tower's user part reads age")


def test_users_and_events_out_of_range_are_refused() -> None:
    shared = BATCH.share_users(["seen_item", "seen_action", "seen_time", "age"])
    assert shared.user_of is not None
    with pytest.raises(BatchError, match=r"user_of has users from 1 to \d+, but the user features have \d+ entries"):
        replace(shared, user_of=shared.user_of + 1)
    lengths = shared.ids["seen_item"].lengths()[shared.user_of]
    for wrong, match in (
        (lengths + 1, r"is 1?\d for example 0, whose user has \d+ events; give 0 to"),
        (lengths * 0 - 1, "is -1"),
    ):
        with pytest.raises(BatchError, match=match):
            replace(shared, visible={"seen_item": wrong})
    with pytest.raises(BatchError, match="visible has 'item', which is no user feature of the batch"):
        replace(shared, visible={"item": lengths})


def test_an_export_beyond_the_towers_length_is_refused(both: Both, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"max_lengths\['seen_item'\]=50, but the tower was built for 12 events"):
        hr.export(both.trainer.model, tmp_path / "ctr", max_lengths={"seen_item": 50})
