"""Files that are truncated, changed or unreadable: an error that names the file, or identical rows.

fit(resume=True) skips a checkpoint that cannot be read, with a warning. Folders that cannot be written to,
and an SSD folder that another process uses, are refused with the cure.
"""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run import Options, Run, as_nobody, over_ssd, small_segments
from runs import bits, clicks, make_trainer

import hotrow as hr
from hotrow.train.checkpoint.manifest import list_checkpoints

SMALL = 16 << 10


def saved_run(folder: Path) -> hr.Trainer:
    """Checkpoints of steps 4 and 8, over SSD."""
    memory = hr.Memory(dram="16MiB", ssd=folder / "ssd")
    trainer = make_trainer(folder / "checkpoints", memory=memory, checkpoint_every=4, keep=2)
    trainer.fit(clicks(), steps=8, progress=False)
    return trainer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        small_segments(patch.setattr, SMALL)
        trainer = saved_run(folder)
    yield folder / "checkpoints", bits(trainer)


def damages(newest: Path, seed: int, each: int) -> Iterator[tuple[Path, str, Callable[[bytes], bytes]]]:
    """Truncates every file at random offsets (also to nothing, and by one byte), and flips bits at random places."""
    draw = random.Random(seed)
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        size = path.stat().st_size
        for at in (0, size - 1, *(draw.randrange(size) for _ in range(each))):
            yield path, f"cut at {at} of {size}", lambda data, at=at: data[:at]
        for bit in (draw.randrange(8 * size) for _ in range(2 * each)):
            yield path, f"bit {bit} of {8 * size}", lambda data, bit=bit: _flip(data, bit)


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def sweep_damages(original: tuple[Path, Any], tmp_path: Path, seed: int, each: int) -> None:
    source, expected = original
    checkpoint = list_checkpoints(source)[0]
    trainer = make_trainer(memory=hr.Memory(dram="16MiB", ssd=tmp_path / "ssd"))
    untouched = bits(trainer)
    work = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, work)
    noticed = harmless = 0
    for path, what, damage in damages(work, seed, each):
        good = path.read_bytes()
        path.write_bytes(damage(good))
        try:
            trainer.load(work)
        except hr.CheckpointError as error:
            # A manifest of an unknown version may be a valid one of another release: then the error names its folder.
            named = "this release reads" in str(error) and path.name == "manifest.json"
            assert named or path.name in str(error), f"{path.name} {what}: {error}"
            assert bits(trainer) == untouched, f"{path.name} {what}: loading failed and changed the model"
            noticed += 1
        else:  # the byte is not in a live record
            assert bits(trainer) == expected, f"{path.name} {what}: other rows"
            trainer = make_trainer(memory=hr.Memory(dram="16MiB", ssd=tmp_path / f"ssd-{harmless}"))
            harmless += 1
        path.write_bytes(good)
    trainer.load(work)
    assert bits(trainer) == expected
    assert noticed > 10 * harmless


def test_a_damaged_file_is_named_and_nothing_has_changed(original: tuple[Path, Any], tmp_path: Path) -> None:
    sweep_damages(original, tmp_path, seed=1, each=2)


@pytest.mark.soak
def test_many_damaged_files_are_named_and_nothing_has_changed(original: tuple[Path, Any], tmp_path: Path) -> None:
    sweep_damages(original, tmp_path, seed=2, each=60)


def test_a_missing_file_is_named(original: tuple[Path, Any], tmp_path: Path) -> None:
    work = shutil.copytree(list_checkpoints(original[0])[0], tmp_path / "work")
    trainer = make_trainer(memory=hr.Memory(dram="16MiB", ssd=tmp_path / "ssd"))
    for path in sorted(path for path in work.rglob("*") if path.is_file()):
        path.rename(tmp_path / "away")
        with pytest.raises(hr.CheckpointError, match=path.name):
            trainer.load(work)
        (tmp_path / "away").rename(path)


def test_resume_passes_over_any_damaged_checkpoint(
    original: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch.setattr, SMALL)
    source, expected = original
    newest, draw = list_checkpoints(source)[0].name, random.Random(3)
    files = sorted(path.relative_to(source) for path in (source / newest).rglob("*") if path.is_file())
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder / "checkpoints", ignore=shutil.ignore_patterns(".rows-*"))
        path = folder / "checkpoints" / file
        data = path.read_bytes()
        path.write_bytes(data[: draw.randrange(len(data))])
        memory = hr.Memory(dram="16MiB", ssd=folder / "ssd")
        trainer = make_trainer(folder / "checkpoints", memory=memory, checkpoint_every=4, keep=2, torch_seed=2)
        with pytest.warns(UserWarning, match=f"passing over the checkpoint .*{newest}: .*{path.name}"):
            report = trainer.fit(clicks(), steps=8, resume=True, progress=False)
        assert report.resumed_from == 4
        assert bits(trainer) == expected


@pytest.mark.parametrize("kind", ["ssd", "checkpoints"])
def test_a_folder_that_cannot_be_written_to_is_named_with_the_cure(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    for above in (tmp_path, *tmp_path.parents[:3]):  # pytest's own folder: so that the other user cannot get that far
        above.chmod(above.stat().st_mode | 0o111)
    words = as_nobody(folder, kind)
    assert words.startswith("StorageError: "), words
    assert str(folder) in words
    assert "Permission denied; give this user the right" in words
    assert list(folder.iterdir()) == []


def test_one_ssd_folder_belongs_to_one_process(tmp_path: Path) -> None:
    refusal = rf"cannot lock '{tmp_path}/ssd': .*another process uses this folder; stop it or use another folder"
    with Run(tmp_path, Options(ssd=True)) as first:
        assert first.reach("step", 3)
        with pytest.raises(hr.StorageError, match=refusal):
            over_ssd(tmp_path, Options(ssd=True))
    # The first one is dead. It held the lock, and the system has taken it back.
    third = over_ssd(tmp_path, Options(ssd=True, checkpoints=False))
    third.fit(clicks(), steps=1, progress=False)


def test_the_folder_is_held_until_the_last_user_of_its_rows_has_gone(tmp_path: Path) -> None:
    """Otherwise the compaction of a table that a batch or a save keeps alive would remove the next table's files."""
    trainer = over_ssd(tmp_path, Options(ssd=True))
    left = trainer.model.embeddings.route(next(clicks().batches())[0]).fetch()
    del trainer
    gc.collect()
    with pytest.raises(hr.StorageError, match="cannot lock"):
        over_ssd(tmp_path, Options(ssd=True))
    del left
    gc.collect()
    over_ssd(tmp_path, Options(ssd=True))


def test_one_folder_of_checkpoints_belongs_to_one_run_that_saves(tmp_path: Path) -> None:
    """A second run is not refused until it saves while the first one does; but it does not begin in a used folder."""
    with Run(tmp_path, Options(ssd=False)) as first:
        assert first.reach("save", 3)
        with pytest.raises(hr.OptionError, match="has checkpoints of an earlier run"):
            over_ssd(tmp_path, Options(ssd=False)).fit(clicks(), steps=1, progress=False)
