"""Several tasks on N ranks: the mean of a task is over the examples of all ranks that have its label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from crew import Crew
from torch import Tensor, nn

import hotrow as hr
from hotrow.data import Cursor

TASKS = [hr.Task("click"), hr.Task("dwell", "regression", weight=0.3), hr.Task("orders", "count", weight=0.5)]
SHAPE = hr.data.Shape(sparse={"user": None, "item": None}, dense=3, history_length=0)
NAN = float("nan")


class Log:
    """Batches whose labels differ much in how many are there: every third batch has no dwell time at all."""

    def __init__(self, examples: int, batch_size: int) -> None:
        self.clicks = hr.data.synthetic(examples=examples, batch_size=batch_size, keys=600, shape=SHAPE)
        self.examples = examples

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for batch, after in self.clicks.batches(cursor):
            assert batch.labels is not None and batch.dense is not None
            user, item = batch.ids["user"].values, batch.ids["item"].values
            dwell = torch.where(user % 3 == 0, NAN, batch.dense[:, 0])
            orders = torch.where(item % 5 < 2, NAN, (user % 4).float())
            rows = torch.stack([batch.labels, dwell, orders], 1)
            yield hr.KeyedBatch(batch.ids, batch.dense, rows, batch.time), after

    def describe(self) -> str:
        return self.clicks.describe()


class SparseLabels(Log):
    """Task by task, all labels of some stretches of 24 examples are missing: a rank's batch may have none."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        at = 0
        for batch, after in super().batches(cursor):
            assert batch.labels is not None
            place = torch.arange(at, at + batch.size) // 24
            labels = batch.labels.clone()
            labels[place % 3 == 0, 1] = NAN
            labels[place % 4 == 1, 0] = NAN
            at += batch.size
            yield hr.KeyedBatch(batch.ids, batch.dense, labels, batch.time), after


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = hr.nn.MMoE(11, TASKS, experts=2, expert=(8,), tower=(4,))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([vectors["user"], vectors["item"], dense], 1))
        return logits


def train(ranks: hr.Ranks | None, examples: int, batch: int, **options: Any) -> dict[str, Any]:
    tables = [hr.Table("user", dim=4), hr.Table("item", dim=4)]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), seed=3, ranks=ranks)
    torch.manual_seed(1)
    tower = Tower() if ranks is None or ranks.has_tower else nn.Identity()
    dense = torch.optim.Adam(tower.parameters(), lr=0.01) if list(tower.parameters()) else None
    trainer = hr.Trainer(hr.Recommender(embeddings, tower), dense, tasks=TASKS, **options)
    source = SparseLabels(examples, batch)
    report = trainer.fit(source, progress=False)
    return {
        "tower": {name: value.tolist() for name, value in trainer.model.tower.state_dict().items()},
        "losses": report.losses,
        "metrics": report.metrics,
        "steps": report.steps,
        "evaluated": trainer.evaluate(source, progress=False),
    }


def train_with(ranks: hr.Ranks, examples: int, batch: int, options: dict[str, Any]) -> dict[str, Any]:
    return train(ranks, examples, batch, **options)


def check_same(ours: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    for name in ("tower", "losses", "metrics", "steps", "evaluated"):
        assert all(one[name] == ours[0][name] for one in ours), f"ranks differ in {name}"
    assert ours[0]["steps"] == whole["steps"]
    np.testing.assert_allclose(ours[0]["losses"], whole["losses"], rtol=1e-5)
    for name in ("metrics", "evaluated"):
        assert ours[0][name] == pytest.approx(whole[name], rel=1e-4, nan_ok=True)
    for name, values in whole["tower"].items():
        np.testing.assert_allclose(ours[0]["tower"][name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("examples", "options"), [(960, {"accumulate": 2}), (1030, {})])
def test_n_ranks_are_one_with_n_times_the_batch(crew: Crew, examples: int, options: dict[str, Any]) -> None:
    """With 1,030 examples some ranks have a short batch or none in the last step."""
    ours = crew.run(train_with, examples, 24, options)
    check_same(ours, train(None, examples, 24 * crew.world, **options))


def test_towers_beside_row_ranks_are_one_process_too() -> None:
    crew = Crew(3, rows=1)
    try:
        ours = crew.run(train_with, 430, 24, {"accumulate": 2})
    finally:
        crew.close()
    assert ours[2]["metrics"] == ours[0]["metrics"] and ours[2]["evaluated"] == ours[0]["evaluated"]
    check_same(ours[:2], train(None, 430, 48, accumulate=2))


def test_ranks_of_other_tasks_are_refused(crews: dict[int, Crew]) -> None:
    errors = crews[2].run(build_with_other_weights)
    assert all("differs from rank 0 in the trainer, tasks" in error for error in errors)


def build_with_other_weights(ranks: hr.Ranks) -> str:
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)], ranks=ranks)
    tasks = [hr.Task("click", weight=1.0 + ranks.rank), *TASKS[1:]]
    try:
        hr.Trainer(hr.Recommender(embeddings, Tower()), tasks=tasks)
    except hr.OptionError as error:
        return str(error)
    return ""
