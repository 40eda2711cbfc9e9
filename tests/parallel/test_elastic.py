"""A checkpoint of N ranks, loaded by M ranks or by one process: every row once, and the run continues as before."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from test_rank_rows import put_together
from work import Case, Rows, rows_of, step_of

import hotrow as hr
from hotrow import _core
from hotrow.data.rebatch import join_batches
from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint

PARTS = 6  # of a step's examples; N ranks take PARTS / N each
CASE = Case(
    whole=True,
    admission={"after": 3, "sketch": "1MiB"},
    expiry={"steps": 4, "time": "5m", "min_count": 2, "every": 3, "grace": 2},
    sizes=(6, 3, 5),
    keys=150,
    replicate=True,
)


def make(ranks: hr.Ranks | None, ssd: Path | None = None) -> hr.Trainer:
    case = CASE if ssd is None else Case(**{**vars(CASE), "memory": {"dram": "8MiB"}})
    torch.manual_seed(0)
    return hr.Trainer(hr.Recommender(case.collection(ranks, ssd), torch.nn.Linear(4, 1)))


def go_on(ranks: hr.Ranks | None, trainer: hr.Trainer, until: int) -> None:
    rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
    mine = range(rank * PARTS // world, (rank + 1) * PARTS // world)
    embeddings = trainer.model.embeddings
    for step in range(trainer.steps, until):
        step_of(CASE, embeddings, [join_batches([CASE.batch(step, part) for part in mine])])


def train_and_save(ranks: hr.Ranks | None, folder: Path, until: int, ssd: Path | None = None) -> Rows:
    trainer = make(ranks, ssd)
    go_on(ranks, trainer, until)
    trainer.save(folder)
    return rows_of(trainer.model.embeddings)


def load_and_go_on(ranks: hr.Ranks | None, folder: Path, until: int, ssd: Path | None = None) -> tuple[Rows, Rows]:
    """Rows as loaded, and after some more steps."""
    trainer = make(ranks, ssd)
    trainer.load(folder)
    loaded = rows_of(trainer.model.embeddings)
    go_on(ranks, trainer, until)
    return loaded, rows_of(trainer.model.embeddings)


def everyones(crews: dict[int, Crew], world: int, function: Any, *arguments: Any) -> list[Any]:
    return [function(None, *arguments)] if world == 1 else crews[world].run(function, *arguments)


def whole_rows(parts: list[Rows]) -> Rows:
    return put_together(parts, ("place",))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, Rows]:
    """One process: rows after 10 steps and after 20."""
    trainer = make(None)
    go_on(None, trainer, 10)
    middle = rows_of(trainer.model.embeddings)
    go_on(None, trainer, 20)
    return middle, rows_of(trainer.model.embeddings)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 1), (1, 2), (3, 2), (2, 2)])
@pytest.mark.parametrize("ssd", [False, True])
def test_any_number_of_ranks_goes_on_from_any_other(
    crews: dict[int, Crew], tmp_path: Path, uninterrupted: Any, saved_by: int, loaded_by: int, ssd: bool
) -> None:
    """Whole numbers: bits do not depend on the number of ranks. Admission and expiry decide about rows all the time."""
    rows_at = (tmp_path / "from", tmp_path / "into") if ssd else (None, None)
    saved = everyones(crews, saved_by, train_and_save, tmp_path / "saved", 10, rows_at[0])
    assert whole_rows(saved) == uninterrupted[0]
    results = everyones(crews, loaded_by, load_and_go_on, tmp_path / "saved", 20, rows_at[1])
    assert whole_rows([loaded for loaded, _ in results]) == uninterrupted[0]
    assert whole_rows([after for _, after in results]) == uninterrupted[1]


def test_the_cases_rules_matter(uninterrupted: tuple[Rows, Rows]) -> None:
    """Otherwise the test above would prove nothing about sketches and cutoffs."""
    trainer = make(None)
    go_on(None, trainer, 10)
    fresh = make(None)
    for table, rows in zip(fresh.model.embeddings.tables, trainer.model.embeddings.tables, strict=True):
        for chunk in rows.scan():  # the rows alone, without sketch and cutoffs
            table.assign(chunk.keys, chunk.values, chunk.counts, chunk.last_steps)
    fresh.model.embeddings.steps = 10
    go_on(None, fresh, 20)
    assert rows_of(fresh.model.embeddings) != uninterrupted[1]


def test_a_checkpoint_of_ranks_is_one_checkpoint(crew: Crew, tmp_path: Path) -> None:
    parts = whole_rows(crew.run(train_and_save, tmp_path, 7))
    (path,) = list_checkpoints(tmp_path)
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    assert checkpoint.world == crew.world
    assert {name: saved["rows"] for name, saved in checkpoint.tables.items()} == {n: len(r) for n, r in parts.items()}
    folders = [part.folder.name for part in checkpoint.parts("item")]
    assert folders == [f"part-{rank:04d}" for rank in range(crew.world)]
    assert [part.folder.name for part in checkpoint.parts("place")] == ["place"]  # replicated: saved once


def save_twice(ranks: hr.Ranks, folder: Path) -> tuple[int, int]:
    trainer = make(ranks)
    go_on(ranks, trainer, 5)
    first = trainer.save(folder)
    go_on(ranks, trainer, 6)
    return first.rows_written, trainer.save(folder).rows_written


def test_a_second_save_writes_what_has_changed_and_links_the_rest(crew: Crew, tmp_path: Path) -> None:
    for first, second in crew.run(save_twice, tmp_path):
        assert 0 < second < first
    newest, oldest = (list(path.rglob("segment-*.hrs")) for path in list_checkpoints(tmp_path))
    assert {path.stat().st_ino for path in newest} & {path.stat().st_ino for path in oldest}


def save_with_a_full_disk(ranks: hr.Ranks, folder: Path) -> str:
    """The last rank's disk is full at the second save."""
    trainer = make(ranks)
    go_on(ranks, trainer, 3)
    trainer.save(folder)
    go_on(ranks, trainer, 4)
    faults = _core.install_faults() if ranks.rank == ranks.world - 1 else None
    try:
        if faults is not None:
            faults.fail(1, errno.ENOSPC, repeat=True)
        trainer.save(folder)
    except hr.StorageError as error:
        return str(error)
    finally:
        if faults is not None:
            faults.heal()
            _core.remove_faults()
    return ""


def test_a_save_that_fails_on_one_rank_fails_on_all_and_publishes_nothing(crew: Crew, tmp_path: Path) -> None:
    messages = crew.run(save_with_a_full_disk, tmp_path)
    assert all("No space left" in message for message in messages)
    assert all(f"failed on rank {crew.world - 1}" in message for message in messages[:-1])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000000003"]
    assert not list(tmp_path.glob(".step-*"))


def resume(ranks: hr.Ranks, folder: Path) -> tuple[int | None, list[str]]:
    import warnings

    trainer = make(ranks)
    trainer.checkpoints = folder
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from hotrow.train.checkpoint import loading

        checkpoint = loading.resume(trainer, folder, None)
    return None if checkpoint is None else checkpoint.step, [str(w.message) for w in caught]


def test_a_damaged_part_is_passed_over_by_all_ranks(crew: Crew, tmp_path: Path) -> None:
    crew.run(save_twice, tmp_path)
    newest, older = list_checkpoints(tmp_path)
    (newest / "rows" / "item" / "part-0001" / "STATE").write_bytes(b"damaged")
    for step, warned in crew.run(resume, tmp_path):
        assert step == open_checkpoint(older).step
        assert any("passing over" in words for words in warned)
    shutil.rmtree(older)
    for error in crew.errors(resume, tmp_path):
        assert isinstance(error, hr.CheckpointError)


def test_ranks_that_wrote_a_checkpoint_leave_no_logs_behind(crew: Crew, tmp_path: Path) -> None:
    crew.run(train_and_save, tmp_path, 3)
    crew.run(train_and_save, tmp_path / "other", 3)
    assert len(list(tmp_path.glob(".rows-*"))) <= crew.world
