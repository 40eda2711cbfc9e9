"""Several ranks publish their rows under one number: complete, or not at all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "parallel"))

from crew import Crew
from readers import Reader, rows_of
from runs import DropoutTower, clicks

import hotrow as hr
from hotrow.publish.bus import open_bus
from hotrow.publish.history import commits_after
from hotrow.publish.message import PART, Message


def train(ranks: hr.Ranks, bus: str, folder: str, steps: int) -> dict[str, Any]:
    """Runs on each rank: returns its rows at the end, and its counters."""
    tables = [hr.Table("user", dim=4), hr.Table("item", dim=4)]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), seed=3, ranks=ranks)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tower = DropoutTower(16, 4)
    publish = hr.Publish(bus, every_steps=2, heartbeat=60.0)
    optimizer = torch.optim.Adam(tower.parameters(), lr=0.01)
    trainer = hr.Trainer(
        hr.Recommender(embeddings, tower), optimizer, checkpoints=folder, checkpoint_every=4, publish=publish
    )
    trainer.fit(clicks(1280), steps=steps, resume=True, progress=False)
    assert trainer.publisher is not None
    trainer.publisher.delivery.flush(30)
    counters = trainer.publisher.counters
    said = {"rows": rows_of(trainer, "fp16"), "replayed": counters.replayed, "differed": counters.differed}
    trainer.publisher.close()
    trainer.wait()
    return said


@pytest.fixture(scope="module")
def crew() -> Any:
    crew = Crew(2)
    yield crew
    crew.close()


def test_ranks_publish_under_one_number_and_repeat_themselves(crew: Crew, tmp_path: Path) -> None:
    bus = f"dir:{tmp_path / 'bus'}"
    crew.run(train, bus, str(tmp_path / "a"), 6)
    before = commits_after(open_bus(bus), 0)
    assert sorted(before) == [1, 2, 3] and all(len(commit.parts) == 2 for commit in before.values())
    said = crew.run(train, bus, str(tmp_path / "a"), 9)
    assert [(one["replayed"], one["differed"]) for one in said] == [(1, 0), (1, 0)]  # from the checkpoint at 4
    reader = Reader(bus)
    reader.catch_up(5)
    assert [one.step for one in reader.read] == [2, 4, 6, 8, 9]
    rows = {name: {**said[0]["rows"][name], **said[1]["rows"][name]} for name in ("user", "item")}
    assert rows_of(reader.trainer) == rows
    assert all(len(said[1]["rows"][name]) for name in rows)


def test_a_publication_without_its_commit_is_not_read(crew: Crew, tmp_path: Path) -> None:
    bus = f"dir:{tmp_path / 'bus'}"
    crew.run(train, bus, str(tmp_path / "a"), 4)
    messages = [Message.decode(entry.data) for entry in open_bus(bus).read(0)]
    assert {message.rank for message in messages if message.kind == PART} == {0, 1}
    last = max((tmp_path / "bus").glob("*.msg"))  # the commit of 2
    last.unlink()
    reader = Reader(bus)
    reader.take(wait=0.3)
    assert reader.numbers == [1]
