"""A small run of three tasks, a binary one, a regression and a count, whose labels are often missing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.data import Cursor
from hotrow.data.synthetic_log.clicks import SyntheticClicks

TASKS = [hr.Task("click"), hr.Task("dwell", "regression", weight=0.3), hr.Task("orders", "count", weight=0.5)]
NAMES = [task.name for task in TASKS]
SHAPE = hr.data.Shape(sparse={"user": None, "item": None}, dense=3, history_length=0)


def labels_of(batch: hr.KeyedBatch) -> Tensor:
    """A click is always known, a dwell time after clicks alone, an order for two users of three."""
    assert batch.labels is not None and batch.dense is not None
    clicks, user = batch.labels, batch.ids["user"].values
    dwell = torch.where(clicks == 1, 1.5 + batch.dense[:, 0], float("nan"))
    orders = torch.where(user % 3 == 0, float("nan"), (clicks * (user % 4)).float())
    return torch.stack([clicks, dwell, orders], 1)


class Log:
    """Synthetic clicks with the labels of three tasks. `fate` may change a batch's labels by its number."""

    def __init__(self, examples: int = 640, batch_size: int = 32, fate: Any = None, crash_after: int = -1) -> None:
        self.clicks = SyntheticClicks(examples=examples, batch_size=batch_size, keys=2000, shape=SHAPE)
        self.examples, self.fate, self.crash_after = examples, fate, crash_after

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for number, (batch, after) in enumerate(self.clicks.batches(cursor)):
            if number == self.crash_after:
                raise RuntimeError("the source dies")
            labels = labels_of(batch)
            if self.fate is not None:
                labels = self.fate(number, labels)
            yield hr.KeyedBatch(batch.ids, batch.dense, labels, batch.time), after

    def describe(self) -> str:
        return self.clicks.describe()


class Tower(nn.Module):
    """Dropout, and a head of all tasks."""

    def __init__(self, head: Any = None, dim: int = 4) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(2 * dim + 3, 12), nn.ReLU(), nn.Dropout(0.2))
        self.head = (head or partial(hr.nn.MMoE, tasks=TASKS, experts=3, expert=(8,), tower=(4,)))(12)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(torch.cat([vectors["user"], vectors["item"], dense], 1)))
        return logits


def make_trainer(
    checkpoints: Path | None = None,
    tasks: list[hr.Task] | None = None,
    head: Any = None,
    torch_seed: int = 0,
    tower: nn.Module | None = None,
    ranks: hr.Ranks | None = None,
    **options: Any,
) -> hr.Trainer:
    tables = [hr.Table("user", dim=4), hr.Table("item", dim=4)]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.02), seed=3, ranks=ranks)
    torch.manual_seed(torch_seed)
    chosen = tower or Tower(head)
    dense = torch.optim.Adam(chosen.parameters(), lr=0.01)
    recommender = hr.Recommender(embeddings, chosen)
    return hr.Trainer(recommender, dense, tasks=TASKS if tasks is None else tasks, checkpoints=checkpoints, **options)
