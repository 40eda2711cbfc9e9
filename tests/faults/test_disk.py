"""A disk that is full or fails one call: training raises an error, and no committed state is lost.

The scenario: six steps over SSD, a save, three more steps, a save. Every row is evicted from DRAM before every batch,
so each step reads and each save writes. The core's disk calls fail through _core.install_faults(), those of
durable_files.py through its own `os`, `open` and `shutil`. With one call failing at a time, the scenario succeeds or
raises an error of HotRow, and the checkpoints load, bit for bit, to a state that was saved.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run import Options, clicks, digest, over_ssd, small_segments
from runs import bits, make_trainer
from runs import clicks as few_clicks

import hotrow as hr
from hotrow import _core
from hotrow.data import Cursor
from hotrow.tiers.host.core_errors import core_errors
from hotrow.train.checkpoint import durable_files
from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint

SMALL = 16 << 10  # segments of so many bytes: a scenario of milliseconds seals, drops and compacts them


class Evicting:
    """A source that sends every row to SSD before each batch."""

    def __init__(self, trainer: hr.Trainer, compact: bool = False) -> None:
        self.source, self.trainer, self.compact = few_clicks(), trainer, compact
        self.examples = self.source.examples

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for item in self.source.batches(cursor):
            for rows in self.trainer.model.embeddings.tables:
                with core_errors():
                    rows.store.core.evict(1 << 30)
                    if self.compact:
                        rows.store.core.compact()
            yield item

    def describe(self) -> str:
        return "a source that evicts"


def open_trainer(folder: Path, **options: Any) -> hr.Trainer:
    return make_trainer(folder / "checkpoints", dim=32, memory=hr.Memory(dram="16MiB", ssd=folder / "ssd"), **options)


def scenario(folder: Path, saved: dict[int, Any] | None = None) -> Iterator[int]:
    """Yields the step of each save that succeeded; `saved` gets the bits at each of them."""
    trainer = open_trainer(folder)
    for steps in (6, 3):
        trainer.fit(Evicting(trainer, compact=True), steps=steps, cursor=trainer.cursor, progress=False)
        trainer.save()
        if saved is not None:
            saved[trainer.steps] = bits(trainer)
        yield trainer.steps


def play(folder: Path) -> tuple[int, str]:
    """Run the scenario to its end or to an error; returns the last saved step and the error's text."""
    last, words = 0, ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is saved, but what it replaces is still there")
        try:
            for step in scenario(folder):
                last = step
        except hr.HotRowError as error:
            words = str(error)
    gc.collect()  # the error's traceback referenced the trainer, which holds the folder's lock
    return last, words


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The states that the scenario saves."""
    saved: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        small_segments(patch.setattr, SMALL)
        list(scenario(tmp_path_factory.mktemp("committed"), saved))
    return saved


def check_left(folder: Path, last: int, committed: dict[int, Any]) -> None:
    """What is left on the disk is a saved state, at least the last one whose save returned."""
    found = list_checkpoints(folder / "checkpoints") if (folder / "checkpoints").exists() else []
    if not found:
        assert last == 0
        return
    assert (newest := open_checkpoint(found[0]).step) >= last
    again = open_trainer(folder, torch_seed=7)  # the same SSD folder: left files do not matter
    again.load(folder / "checkpoints")
    assert bits(again) == committed[newest]


def sample(count: int, request: pytest.FixtureRequest, some: int = 25) -> list[int]:
    """Call numbers to fail: all of them in the soak, else some, with the first and the last."""
    numbers = range(1, count + 1)
    if request.node.get_closest_marker("soak") or count <= some:
        return list(numbers)
    return sorted({1, count, *random.Random(count).sample(numbers, some)})


def sweep_core(folder: Path, request: pytest.FixtureRequest, committed: dict[int, Any]) -> None:
    faults = _core.install_faults()
    assert play(folder / "clean") == (9, "")
    count, failed = faults.calls, 0
    assert count > 100
    for number in sample(count, request):
        home = folder / str(number)
        faults.fail(number, errno.EIO)
        last, words = play(home)
        faults.heal()
        failed += bool(words)
        assert os.strerror(errno.EIO) in words if words else last == 9, f"call {number}: {words}"
        check_left(home, last, committed)
        shutil.rmtree(home, ignore_errors=True)
    assert failed > 5


def test_a_disk_that_fails_while_loading_is_an_error_and_loading_again_works(
    tmp_path: Path, committed: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch.setattr, SMALL)
    faults = _core.install_faults()
    assert play(tmp_path) == (9, "")
    trainer = open_trainer(tmp_path)
    for number in itertools.count(1, 3):
        faults.fail(number, errno.EIO)
        before = faults.calls
        try:
            trainer.load(tmp_path / "checkpoints")
            break
        except hr.HotRowError as error:
            assert os.strerror(errno.EIO) in str(error)
        finally:
            faults.heal()
        if number % 25 == 0:
            trainer.load(tmp_path / "checkpoints")
            assert bits(trainer) == committed[9]
    assert number > faults.calls - before > 20
    assert bits(trainer) == committed[9]
    assert all(rows.store.core.evicts for rows in trainer.model.embeddings.tables)


def fail_durable(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Make the n-th system call of durable_files.py fail; returns the names of the calls that were made."""
    calls: list[str] = []

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **options)

        return call

    names = {name: failing(name, getattr(os, name)) for name in ("fsync", "rename", "open")}
    patch.setattr(durable_files, "os", SimpleNamespace(**{**vars(os), **names}))
    patch.setattr(durable_files, "shutil", SimpleNamespace(rmtree=failing("rmtree", shutil.rmtree)))
    patch.setattr(durable_files, "open", failing("create", open), raising=False)
    return calls


def sweep_durable(folder: Path, request: pytest.FixtureRequest, committed: dict[int, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        calls = fail_durable(patch, 0)
        assert play(folder / "clean") == (9, "")
    assert set(calls) == {"fsync", "rename", "open", "create"}
    for number in sample(len(calls), request, some=12):
        home = folder / str(number)
        with pytest.MonkeyPatch.context() as patch:
            made = fail_durable(patch, number)
            last, words = play(home)
        assert os.strerror(errno.EIO) in words if words else last == 9, f"{made[number - 1]}: {words}"
        check_left(home, last, committed)
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("sweep", [sweep_core, sweep_durable])
@pytest.mark.parametrize("calls", ["some", pytest.param("all", marks=pytest.mark.soak)])
def test_a_call_that_fails_once_costs_nothing_that_was_saved(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    committed: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
    sweep: Callable[..., None],
    calls: str,
) -> None:
    small_segments(monkeypatch.setattr, SMALL)
    sweep(tmp_path, request, committed)


@pytest.mark.parametrize("seed", range(3))
def test_a_full_disk_stops_training_and_costs_nothing_that_was_saved(
    tmp_path: Path, uninterrupted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The disk is full from a random call on, in evictions, compaction or saves. A new trainer or the same resumes."""
    small_segments(monkeypatch.setattr)
    _core.set_compaction_rate(1 << 40)
    faults = _core.install_faults()
    trainer = over_ssd(tmp_path, Options(ssd=True))
    faults.fail(random.Random(seed).randint(50, 1500), errno.ENOSPC, repeat=True)
    with pytest.raises(hr.StorageError, match="No space left on device; free some space") as caught:
        trainer.fit(clicks(), progress=False)
    assert 0 < trainer.steps < 60
    earlier = [open_checkpoint(path) for path in list_checkpoints(tmp_path / "checkpoints")]
    for checkpoint in earlier:
        checkpoint.verify()
    faults.heal()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the checkpoint of step .* was not written")
        trainer.saver.settle()
        if seed % 2 == 0:  # otherwise with the trainer that the error still references
            del caught, trainer
            gc.collect()
            trainer = over_ssd(tmp_path, Options(ssd=True), torch_seed=4)
        report = trainer.fit(clicks(), resume=True, progress=False)
    assert report.resumed_from == (earlier[0].step if earlier else None)
    assert report.losses == uninterrupted["losses"][60 - len(report.losses) :]
    assert digest(trainer) == uninterrupted["digest"]


@pytest.mark.parametrize("when", ["save", "fit"])
def test_a_full_disk_during_a_background_save_is_raised_at_the_next_save_or_at_the_end(
    tmp_path: Path, when: str
) -> None:
    faults = _core.install_faults()
    trainer = open_trainer(tmp_path)
    trainer.fit(Evicting(trainer), steps=3, progress=False)
    trainer.save()
    faults.fail(1, errno.ENOSPC, repeat=True)
    trainer.save(wait=False)
    trainer.saver._thread.join()  # type: ignore[union-attr]
    told = pytest.raises(hr.StorageError, match=r"step 3 was not written: .*No space left on device; free some space")
    if when == "save":
        with told:
            trainer.save()
    else:
        with told:
            trainer.fit(few_clicks(), steps=2, cursor=trainer.cursor, progress=False)
        assert trainer.steps == 5  # nothing has stopped it: its rows were in DRAM
    expected = bits(trainer)
    faults.heal()
    trainer.save()
    trainer.load(tmp_path / "checkpoints")
    assert bits(trainer) == expected


def test_an_unreadable_disk_is_an_error_of_the_call_that_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch.setattr, SMALL)
    faults = _core.install_faults()
    trainer = open_trainer(tmp_path)
    trainer.fit(Evicting(trainer), steps=3, progress=False)
    rows, batch = trainer.model.embeddings.tables[0], next(few_clicks().batches())[0]
    keys = batch.ids["user"].values
    rows.store.core.evict(1 << 30)
    expected = trainer.predict(batch)
    reads = {
        "predict": lambda: trainer.predict(batch),
        "evaluate": lambda: trainer.evaluate(few_clicks(), progress=False),
        "read": lambda: rows.read(keys),
        "prefetch": lambda: rows.prefetch(keys).wait(),
        "scan": lambda: list(rows.scan()),
        "erase": lambda: rows.erase(keys),
    }
    for name, read in reads.items():
        faults.fail(1, errno.EIO, repeat=True)  # a single failure could hit the compaction thread instead
        with pytest.raises(hr.StorageError, match=r"cannot read '.*segment-.*': Input/output error; the disk may be"):
            read()
        faults.heal()
        assert torch.equal(trainer.predict(batch), expected), name


def test_a_batch_can_be_released_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Releasing a batch's rows may evict others, which may write; it must not raise."""
    small_segments(monkeypatch.setattr, SMALL)
    faults = _core.install_faults()
    trainer = over_ssd(tmp_path, Options(ssd=True, checkpoints=False))
    tables, budget, wrote = trainer.model.embeddings.tables, trainer.model.embeddings.budget, 0
    for number, (batch, _) in enumerate(clicks(14).batches()):
        lookup = trainer.model.embeddings.route(batch).fetch()
        if number < 9:
            continue
        calls, left = faults.calls, budget.limit - budget.used
        faults.fail(1, errno.ENOSPC, repeat=True)
        budget.core.take(left)
        del lookup
        wrote += faults.calls > calls  # or a background thread does
        faults.heal()
        budget.core.give_back(left)
    assert wrote
    assert sum(len(chunk.keys) for chunk in tables[0].scan()) == len(tables[0])


@pytest.mark.parametrize("ssd", [True, False])
def test_a_background_save_outlives_its_trainer(tmp_path: Path, ssd: bool) -> None:
    trainer = open_trainer(tmp_path) if ssd else make_trainer(tmp_path / "checkpoints")
    trainer.fit(few_clicks(), steps=3, progress=False)
    trainer.save(wait=False)
    thread = trainer.saver._thread
    del trainer
    gc.collect()
    thread.join()  # type: ignore[union-attr]
    assert [open_checkpoint(path).step for path in list_checkpoints(tmp_path / "checkpoints")] == [3]
    assert not list((tmp_path / "checkpoints").glob(".rows-*"))  # the rows' log went with the save


def test_a_batch_that_an_error_left_half_done_does_not_disturb_what_is_loaded(tmp_path: Path) -> None:
    """Its slots are pinned until it is released, and belong to rows that loading has replaced."""
    trainer = open_trainer(tmp_path)
    trainer.fit(few_clicks(), steps=3, progress=False)
    trainer.save()
    expected = bits(trainer)
    left = trainer.model.embeddings.route(next(few_clicks().batches())[0]).fetch()
    trainer.load(tmp_path / "checkpoints")
    del left
    assert bits(trainer) == expected
    store = trainer.model.embeddings.tables[0].store
    store.core.evict(1 << 30)
    assert store.tier()["cold_rows"] == len(store)


def test_a_full_disk_does_not_stop_what_needs_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction that finds the disk full is counted and tried again; rows and results stay the same."""
    small_segments(monkeypatch.setattr, SMALL)
    faults = _core.install_faults()
    trainer = open_trainer(tmp_path)
    trainer.lookahead = 0  # the records left to compact must not depend on what a batch in flight prefetched
    trainer.fit(Evicting(trainer), steps=12, progress=False)
    expected = bits(trainer)
    faults.fail(1, errno.ENOSPC, repeat=True)
    store = trainer.model.embeddings.tables[0].store
    with pytest.raises(hr.StorageError, match="No space left"), core_errors():
        while store.core.compact():
            pass
    _core.set_compaction_rate(1 << 40)
    for _ in range(100):
        if store.tier()["compaction_errors"]:
            break
        time.sleep(0.02)
    assert store.tier()["compaction_errors"]
    assert bits(trainer) == expected
    faults.heal()
    before = store.tier()["disk_bytes"]
    while store.core.compact():
        pass
    assert store.tier()["disk_bytes"] < before
    assert bits(trainer) == expected
