"""When the disk fails, the last checkpoint is whole, nothing half-written is visible, and training continues."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import bits, clicks, make_trainer, names, trained

import hotrow as hr
from hotrow.tiers.host.store import HostStore
from hotrow.train.checkpoint import durable_files
from hotrow.train.checkpoint.manifest import list_checkpoints, list_drafts, open_checkpoint

CALLS = ("make", "write", "sync", "rename", "remove")


def fail_at(patch: pytest.MonkeyPatch, number: int, halfway: bool) -> Callable[[], list[str]]:
    """Make durable call number `number` fail, before it has done anything or halfway; returns the calls so far."""
    calls: list[str] = []

    def failing(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            calls.append(name)
            if len(calls) - 1 != number:
                return real(*args)
            if halfway:
                _half(name, real, *args)
            raise hr.StorageError(f"injected: {name}")

        return call

    for name in CALLS:
        patch.setattr(durable_files, name, failing(name, getattr(durable_files, name)))
    return lambda: calls


def _half(name: str, real: Callable[..., None], *args: Any) -> None:
    """What a crash in the middle of a call may leave."""
    if name == "write":
        args[0].write_bytes(args[1][: len(args[1]) // 2])
    elif name == "remove" and args[0].exists():
        for path in [path for path in args[0].rglob("*") if path.is_file()][::2]:
            path.unlink()
    elif name in ("rename", "make"):
        real(*args)


def save_or_fail(trainer: hr.Trainer) -> bool:
    """Whether it was published: what fails after that is a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.save()
        except hr.StorageError as error:
            assert "injected" in str(error)
            return False
    assert all("is saved, but what it replaces is still there: injected" in str(w.message) for w in caught)
    return True


@pytest.mark.parametrize("halfway", [False, True])
def test_whatever_call_fails_the_last_checkpoint_is_whole(tmp_path: Path, halfway: bool) -> None:
    trainer = make_trainer(tmp_path, keep=1)
    trainer.fit(clicks(), steps=2, progress=False)
    trainer.save()
    known = {2: bits(trainer)}
    number, done = 0, False
    while not done:
        trainer.fit(clicks(), steps=1, progress=False)
        known[trainer.steps] = bits(trainer)
        before = open_checkpoint(tmp_path).step
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(patch, number, halfway)
            published = save_or_fail(trainer)
            done = len(calls()) <= number
        for path in list_checkpoints(tmp_path):  # whatever is visible is whole
            open_checkpoint(path).verify()
        newest = open_checkpoint(tmp_path)
        assert newest.step in ((trainer.steps,) if published else (before, trainer.steps))
        other = make_trainer(torch_seed=1)
        other.load(tmp_path)
        assert bits(other) == known[newest.step]
        number += 1
    assert number > 12
    assert set(CALLS) == set(calls())
    assert list_drafts(tmp_path) == []
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize("halfway", [False, True])
def test_replacing_a_step_survives_any_failing_call(tmp_path: Path, halfway: bool) -> None:
    trainer = trained(tmp_path, steps=2)
    expected = bits(trainer)
    trainer.save()
    number, done = 0, False
    while not done:
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(patch, number, halfway)
            save_or_fail(trainer)
            done = len(calls()) <= number
        other = make_trainer(torch_seed=1)
        other.load(tmp_path)
        assert bits(other) == expected
        number += 1
    assert names(tmp_path) == ["step-000000000002"]


def test_an_error_of_a_background_save_is_raised_at_the_next_save_and_at_the_end(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    trainer.save()
    expected = bits(trainer)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 3, halfway=True)
        report = trainer.save(wait=False)
        trainer.saver._thread.join()  # type: ignore[union-attr]
    assert not report.done
    with pytest.raises(hr.StorageError, match=r"step 5 was not written: injected: .*call save\(\) again"):
        trainer.save()
    assert bits(trainer) == expected
    trainer.save()

    failing = make_trainer(tmp_path / "other", checkpoint_every=8)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 3, halfway=True)
        with pytest.raises(hr.StorageError, match="step 8 was not written"):
            failing.fit(clicks(), steps=10, progress=False)
    assert failing.steps == 10  # training continued, and the end of fit reported it
    often = make_trainer(tmp_path / "often", checkpoint_every=4)
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, 3, halfway=True)
        with pytest.raises(hr.StorageError, match="step 4 was not written"):
            often.fit(clicks(), progress=False)
    assert often.steps == 8  # the save after it reported it
    whole = trained(steps=10)
    expected = bits(whole)
    failing.save()
    failing.load(tmp_path / "other")
    assert bits(failing) == expected


def test_a_failed_snapshot_of_one_table_releases_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained()
    begin, begun, given_up = HostStore.begin_snapshot, [], []

    class Watched:
        def __init__(self, store: HostStore) -> None:
            if begun:
                raise hr.MemoryBudgetError("no room for a snapshot")
            begun.append(begin(store))

        def abandon(self) -> None:
            given_up.append(self)

    monkeypatch.setattr(HostStore, "begin_snapshot", lambda store: Watched(store))
    with pytest.raises(hr.MemoryBudgetError, match="no room"):
        trainer.save(tmp_path)
    assert len(given_up) == 1
    assert names(tmp_path) == []


def test_two_processes_do_not_save_into_one_folder_at_once(tmp_path: Path) -> None:
    trainer = trained()
    hold = f"import fcntl, os, sys; fcntl.flock(os.open({str(tmp_path)!r}, os.O_RDONLY), fcntl.LOCK_EX); "
    hold += "print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(hr.StorageError, match=r"another process is saving into .*; give each run"):
            trainer.save(tmp_path)
        other.communicate("")
    trainer.save(tmp_path)
