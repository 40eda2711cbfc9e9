"""Rollback: an older state as a new publication, with the publisher held until it is released."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from readers import Reader, assert_same, publishing, rows_of
from runs import clicks
from typer.testing import CliRunner

import hotrow as hr
from hotrow.cli import app
from hotrow.publish import rollback as module
from hotrow.publish.publication import ROLLBACK
from hotrow.publish.rollback import default_snapshot_reader, release, rollback


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACKNOWLEDGES_WITHIN", 2.0)


def train(trainer: hr.Trainer, steps: int) -> None:
    trainer.fit(clicks(), steps=steps, cursor=trainer.cursor, progress=False)
    assert trainer.publisher is not None
    trainer.publisher.delivery.flush(20)


def test_an_older_state_is_put_back_and_training_is_published_after_release(address: str) -> None:
    trainer = publishing(address, every=1)
    train(trainer, 2)
    reader = Reader(address)
    reader.catch_up(2)
    assert_same(reader, trainer)
    then = rows_of(reader.trainer)
    train(trainer, 3)
    done = rollback(address, 2)
    assert (done.number, done.restores) == (6, 2) and done.deleted > 0
    reader.catch_up(6)
    assert reader.read[-1].kind == ROLLBACK and reader.read[-1].restores == 2
    assert rows_of(reader.trainer) == then
    train(trainer, 2)  # held: nothing comes
    reader.take(wait=0.5)
    assert reader.subscriber.number == 6
    assert release(address)
    assert trainer.publisher is not None
    end = time.monotonic() + 30
    while trainer.publisher.delivery.held and time.monotonic() < end:
        time.sleep(0.05)
    train(trainer, 1)
    reader.catch_up(7)
    assert reader.numbers == list(range(1, 8))
    assert_same(reader, trainer)
    trainer.publisher.close()


def test_a_trainer_that_comes_back_to_a_rolled_back_bus_sets_it_right(folder_bus: str, tmp_path: Path) -> None:
    trainer = publishing(folder_bus, tmp_path / "a", every=1, checkpoint_every=4)
    train(trainer, 6)
    trainer.wait()
    assert trainer.publisher is not None
    trainer.publisher.close()
    rollback(folder_bus, 1)
    assert release(folder_bus)
    again = publishing(folder_bus, tmp_path / "a", every=1, checkpoint_every=4)
    again.fit(clicks(), steps=8, resume=True, progress=False)
    assert again.publisher is not None and again.publisher.delivery.flush(20)
    reader = Reader(folder_bus)
    reader.catch_up(again.publisher.counters.committed)
    assert_same(reader, again)


def snapshot_of(trainer: hr.Trainer, folder: Path, kind: str) -> Path:
    if kind == "checkpoint":
        return Path(trainer.save(folder / "exports").path)
    return Path(hr.export(trainer.model, folder / "exports", values="fp16", dense_features=3).path)


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_a_snapshot_replaces_publications_that_retention_removed(folder_bus: str, tmp_path: Path, kind: str) -> None:
    trainer = publishing(folder_bus, tmp_path / "a", every=1)
    train(trainer, 3)
    then = rows_of(trainer, "fp16")
    assert trainer.publisher is not None
    trainer.publisher.options = hr.Publish(
        folder_bus, every_steps=1, snapshot=lambda _: str(snapshot_of(trainer, tmp_path, kind))
    )
    trainer.publisher.snapshot()
    train(trainer, 2)
    bus = tmp_path / "bus"
    keep = 3 * 2 + 1  # two messages a publication, and the snapshot's pointer
    for path in sorted(bus.glob("*.msg"))[:keep]:
        path.unlink()
    with pytest.raises(hr.PublishError, match="cannot be put back"):
        rollback(folder_bus, 2, default_snapshot_reader)
    assert not (bus / "marks" / "hold").exists()
    rollback(folder_bus, 3, default_snapshot_reader)
    reader = Reader(folder_bus, position=(5, 0))
    if kind == "checkpoint":
        reader.trainer.load(tmp_path / "exports")
    for name, table in rows_of(trainer, "fp16").items():  # as a reader that was at 5 has them
        import torch

        keys = torch.tensor(list(table))
        values = torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32) for row in table.values()])
        reader.trainer.model.embeddings.table(name).assign(keys, values)
    reader.catch_up(6)
    assert rows_of(reader.trainer) == then


def test_a_rollback_that_is_impossible_says_why(folder_bus: str, tmp_path: Path) -> None:
    with pytest.raises(hr.PublishError, match="nothing to go back to"):
        rollback(folder_bus, 1)
    trainer = publishing(folder_bus, every=1)
    train(trainer, 3)
    with pytest.raises(hr.PublishError, match="newest publication is 3"):
        rollback(folder_bus, 3)
    for path in sorted((tmp_path / "bus").glob("*.msg"))[:2]:
        path.unlink()
    with pytest.raises(hr.PublishError, match="no snapshot between"):
        rollback(folder_bus, 2)
    assert not (tmp_path / "bus" / "marks" / "hold").exists()


def test_the_command_line_rolls_back_and_releases(folder_bus: str) -> None:
    trainer = publishing(folder_bus, every=1)
    train(trainer, 3)
    said = CliRunner().invoke(app, ["rollback", folder_bus, "--to", "1"])
    assert said.exit_code == 0 and "restores 1" in said.output and "hotrow release" in said.output
    assert "released" in CliRunner().invoke(app, ["release", folder_bus]).output
    assert "not held" in CliRunner().invoke(app, ["release", folder_bus]).output
