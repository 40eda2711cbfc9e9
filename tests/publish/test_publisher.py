"""From a trainer to a reader: in the end the reader's rows equal the trainer's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from readers import Reader, assert_same, publishing, rows_of
from runs import Crash, CrashAfter, clicks, make_trainer

import hotrow as hr
from hotrow.publish.bus import open_bus
from hotrow.publish.history import commits_after
from hotrow.publish.publication import HEARTBEAT, SNAPSHOT
from hotrow.tiers.host.stored_table import smallest_dram_bytes


@pytest.mark.parametrize("values", ["fp16", "fp32"])
def test_a_reader_has_the_trainers_rows(address: str, values: str) -> None:
    trainer = publishing(address, publish_values=values)
    trainer.fit(clicks(), steps=7, progress=False)
    assert trainer.publisher is not None
    reader = Reader(address)
    reader.catch_up(4)
    assert [one.step for one in reader.read] == [2, 4, 6, 7]  # the last one is what was left
    assert [one.previous for one in reader.read] == [0, 1, 2, 3]
    assert_same(reader, trainer, values)
    trainer.publisher.close()


def test_only_changed_rows_are_published(folder_bus: str) -> None:
    trainer = publishing(folder_bus, every=1)
    trainer.fit(clicks(), steps=6, progress=False)
    reader = Reader(folder_bus)
    reader.catch_up(6)
    batches = [batch for _, (batch, _) in zip(range(6), clicks().batches(), strict=False)]
    for publication, batch in zip(reader.read, batches, strict=True):
        for name, change in publication.tables.items():
            assert change.keys.tolist() == sorted(set(batch.ids[name].values.tolist()))
    assert_same(reader, trainer)


@pytest.mark.parametrize("memory", ["ssd", "hbm", "admission"])
def test_rows_of_every_tier_are_published(folder_bus: str, tmp_path: Path, memory: str) -> None:
    tables = [hr.Table(name, dim=4, features=[name]) for name in ("user", "item")]
    options: dict[str, Any] = {}
    if memory == "ssd":
        options["memory"] = hr.Memory(dram="3MiB", ssd=str(tmp_path / "rows"))
    elif memory == "hbm":
        options = {"memory": hr.Memory(hbm="64KiB"), "device": "cpu"}
    else:
        tables = [hr.Table(n, dim=4, features=[n], admission=hr.Admission(after=3)) for n in ("user", "item")]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), seed=3, **options)
    plain = make_trainer()
    publish = hr.Publish(folder_bus, every_steps=2)
    trainer = hr.Trainer(hr.Recommender(embeddings, plain.model.tower), publish=publish, lookahead=0)
    steps = 4 if memory == "hbm" else 12
    for _ in range(2):
        source = clicks(640, 8 if memory == "hbm" else 32)
        trainer.fit(source, steps=steps // 2, cursor=trainer.cursor, progress=False)
        for rows in embeddings.tables:
            assert rows.store.core.evict(10_000) > 0 or memory != "ssd"
    reader = Reader(folder_bus)
    reader.catch_up(steps // 2)
    assert_same(reader, trainer)
    assert sum(len(rows) for rows in rows_of(trainer).values()) > 10


def test_expired_and_erased_rows_are_deleted(folder_bus: str, tmp_path: Path) -> None:
    def build(**options: Any) -> hr.Trainer:
        expiry = hr.Expiry(steps=3, every=4)
        tables = [hr.Table(name, dim=4, features=[name], expiry=expiry) for name in ("user", "item")]
        embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.SGD(lr=0.1), seed=3, **options)
        torch.manual_seed(0)
        return hr.Trainer(
            hr.Recommender(embeddings, make_trainer().model.tower), publish=hr.Publish(folder_bus, every_steps=3)
        )

    trainer = build(memory=hr.Memory(dram="3MiB", ssd=str(tmp_path / "rows")))
    trainer.fit(clicks(), steps=5, progress=False)
    for rows in trainer.model.embeddings.tables:
        assert rows.store.core.evict(10_000) > 0
    trainer.fit(clicks(), steps=4, cursor=trainer.cursor, progress=False)
    some = next(iter(rows_of(trainer)["user"]))
    trainer.model.embeddings.table("user").erase(torch.tensor([some]))
    trainer.fit(clicks(), steps=2, progress=False)
    reader = Reader(folder_bus)
    assert trainer.publisher is not None
    trainer.publisher.delivery.flush(20)
    reader.catch_up(trainer.publisher.counters.committed)
    assert sum(change.deleted.numel() for one in reader.read for change in one.tables.values()) > 10
    assert_same(reader, trainer)


def test_what_was_trained_before_is_published_first(folder_bus: str, tmp_path: Path) -> None:
    before = make_trainer(tmp_path / "a")
    before.fit(clicks(), steps=5, progress=False)
    before.save()
    trainer = publishing(folder_bus)
    trainer.load(tmp_path / "a")
    trainer.fit(clicks(), steps=2, progress=False)
    reader = Reader(folder_bus)
    reader.catch_up(1)
    assert_same(reader, trainer)


def run_until_crash(bus: str, folder: Path, batches: int, **options: Any) -> None:
    trainer = publishing(bus, folder, checkpoint_every=4, **options)
    with pytest.raises(Crash):
        trainer.fit(CrashAfter(clicks(), batches), resume=True, progress=False)
    trainer.wait()
    assert trainer.publisher is not None
    trainer.publisher.delivery.flush(20)
    trainer.publisher.close()


@pytest.mark.parametrize("crash", [3, 7, 11])
def test_a_resumed_run_publishes_the_same_and_nothing_twice(folder_bus: str, tmp_path: Path, crash: int) -> None:
    whole = f"dir:{tmp_path / 'whole'}"
    straight = publishing(whole, tmp_path / "b", checkpoint_every=4)
    straight.fit(clicks(), steps=14, progress=False)
    run_until_crash(folder_bus, tmp_path / "a", crash)
    head = len(commits_after(open_bus(folder_bus), 0))
    resumed = publishing(folder_bus, tmp_path / "a", checkpoint_every=4)
    resumed.fit(clicks(), steps=14, resume=True, progress=False)
    assert resumed.publisher is not None and straight.publisher is not None
    resumed.publisher.delivery.flush(20)
    counters = resumed.publisher.counters
    assert counters.differed == 0
    mine, theirs = commits_after(open_bus(folder_bus), 0), commits_after(open_bus(whole), 0)
    assert {n: (c.step, c.fields["checksum"]) for n, c in mine.items()} == {
        n: (c.step, c.fields["checksum"]) for n, c in theirs.items()
    }
    assert counters.published + head == len(mine)
    reader = Reader(folder_bus)
    reader.catch_up(max(mine))
    assert reader.subscriber.counters.duplicates == 0
    assert_same(reader, straight)


def test_cuts_by_the_clock_are_repeated_at_the_same_steps(folder_bus: str, tmp_path: Path) -> None:
    run_until_crash(folder_bus, tmp_path / "a", 11, every=None, publish_every_steps=None, publish_every_seconds=1e-9)
    before = {n: c.step for n, c in commits_after(open_bus(folder_bus), 0).items()}
    resumed = publishing(
        folder_bus, tmp_path / "a", checkpoint_every=4, publish_every_steps=None, publish_every_seconds=1000.0
    )
    resumed.fit(clicks(), steps=14, resume=True, progress=False)
    after = {n: c.step for n, c in commits_after(open_bus(folder_bus), 0).items()}
    assert before.items() <= after.items() and len(after) > len(before)
    assert resumed.publisher is not None
    assert resumed.publisher.counters.replayed == len(before) - 8
    reader = Reader(folder_bus)
    reader.catch_up(max(after))
    assert_same(reader, resumed)


def test_a_run_that_died_before_its_first_checkpoint_begins_again(folder_bus: str, tmp_path: Path) -> None:
    run_until_crash(folder_bus, tmp_path / "a", 3)
    trainer = publishing(folder_bus, tmp_path / "a")
    trainer.fit(clicks(), steps=5, resume=True, progress=False)
    reader = Reader(folder_bus)
    reader.catch_up(3)
    assert [one.step for one in reader.read] == [2, 4, 5]
    assert_same(reader, trainer)


def test_a_replay_that_differs_is_published_again(folder_bus: str, tmp_path: Path) -> None:
    run_until_crash(folder_bus, tmp_path / "a", 7)
    resumed = publishing(folder_bus, tmp_path / "a", checkpoint_every=4)
    resumed.fit(clicks(), steps=4, resume=True, progress=False)  # at the checkpoint: nothing is done
    with torch.no_grad():  # as a GPU that rounds otherwise would
        for rows in resumed.model.embeddings.tables:
            keys = next(iter(rows.scan())).keys[:5]
            rows.assign(keys, torch.ones(keys.numel(), 4))
    resumed.fit(clicks(), steps=8, cursor=resumed.cursor, progress=False)
    assert resumed.publisher is not None
    resumed.publisher.delivery.flush(20)
    reader = Reader(folder_bus)
    reader.catch_up(resumed.publisher.counters.committed)
    assert resumed.publisher.counters.differed == 1
    assert_same(reader, resumed)


def test_another_runs_bus_is_refused(folder_bus: str) -> None:
    publishing(folder_bus).fit(clicks(), steps=2, progress=False)
    with pytest.raises(hr.OptionError, match="another run"):
        publishing(folder_bus).fit(clicks(), steps=2, progress=False)


def test_heartbeats_carry_the_watermark_and_snapshots_are_announced(folder_bus: str) -> None:
    trainer = publishing(
        folder_bus, publish_heartbeat=0.05, publish_snapshot=lambda n: f"/exports/{n}", publish_snapshot_every=2
    )
    trainer.fit(clicks(), steps=6, progress=False)
    assert trainer.publisher is not None
    later = (trainer.publisher.watermark or 0) + 5_000
    trainer.publisher.idle(later)
    reader, end = Reader(folder_bus), time.monotonic() + 60
    while not any(one.kind == HEARTBEAT and one.watermark == later for one in reader.read):
        assert time.monotonic() < end
        reader.take(wait=1.0)
    pointer = next(one for one in reader.read if one.kind == SNAPSHOT)
    assert pointer.snapshot is not None and pointer.snapshot.path == "/exports/2"
    assert reader.subscriber.snapshot is not None and reader.subscriber.snapshot.number == 2
    assert {one.number for one in reader.read if one.kind == HEARTBEAT} <= {1, 2, 3}
    trainer.publisher.close()


@pytest.mark.parametrize("trained", [False, True])
def test_a_budget_too_small_to_publish_names_one_that_works(folder_bus: str, tmp_path: Path, trained: bool) -> None:
    tables = [hr.Table(name, dim=4, features=[name]) for name in ("user", "item")]

    def trainer(dram: str | int) -> hr.Trainer:
        memory = hr.Memory(dram=dram, ssd=str(tmp_path / f"rows-{dram}"))
        embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), seed=3, memory=memory)
        if trained:  # rows that the bus has never seen: all of them are published first
            for rows in embeddings.tables:
                rows.create(torch.arange(100_000))
        publish = hr.Publish(folder_bus, every_steps=2)
        return hr.Trainer(hr.Recommender(embeddings, make_trainer().model.tower), publish=publish)

    plain = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01))
    small = smallest_dram_bytes(plain.tables) if not trained else "5MiB"
    with pytest.raises(hr.MemoryBudgetError, match="too small to note what changes in 2 tables") as refused:
        trainer(small).fit(clicks(), steps=4, progress=False)
    named = str(refused.value).partition("give at least ")[2].partition(",")[0]
    works = trainer(named)
    works.fit(clicks(), steps=4, progress=False)
    reader = Reader(folder_bus)
    reader.catch_up(2)
    assert_same(reader, works)


def test_wrong_options_are_errors_with_a_cure(folder_bus: str) -> None:
    for options, fields in (
        ({}, "give one of the two"),
        ({"every_steps": 0}, "1 or more"),
        ({"every_seconds": 0.0}, "above 0"),
        ({"every_steps": 1, "values": "bf16"}, "fp32, fp16"),
        ({"every_steps": 1, "snapshot_every": 3}, "what writes a snapshot"),
    ):
        with pytest.raises(hr.OptionError, match=fields):
            hr.Publish(folder_bus, **options)
