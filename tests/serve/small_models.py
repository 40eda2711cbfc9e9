"""Small trained models of every tower, and batches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrow as hr

DIM, DENSE, KEYS = 4, 3, 300
POOLED = ("user", "item", "tags")
TOWERS: dict[str, dict[str, Any]] = {
    "wide_and_deep": {"deep": (8,)},
    "deepfm": {"deep": (8,)},
    "dlrm": {"bottom": (8,), "top": (8,)},
    "dcn_v2": {"layers": 2, "deep": (8,)},
    "din": {"target": "item", "attention": (4,), "top": (8,)},
}


def collection(sequence: bool = False, memory: hr.Memory | None = None, **options: Any) -> hr.EmbeddingCollection:
    """Tables for user, item (with a history, where there is a sequence) and tags, which are several and averaged."""
    item = {"item": "sum", "history": "none"} if sequence else {"item": "sum"}
    tables = [hr.Table("user", DIM), hr.Table("item", DIM, item), hr.Table("tags", DIM, {"tags": "mean"})]
    return hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.05), memory=memory, seed=3, **options)


def make_model(kind: str = "dlrm", memory: hr.Memory | None = None, **options: Any) -> hr.Recommender:
    embeddings = collection(kind == "din", memory, **options)
    torch.manual_seed(0)
    tower = hr.models.build_tower(
        kind, features=embeddings.features, sequences=embeddings.sequences, dense_features=DENSE, **TOWERS[kind]
    )
    return hr.Recommender(embeddings, tower)


def make_batch(rows: int, seed: int = 0, keys: int = KEYS) -> hr.KeyedBatch:
    draw = torch.Generator().manual_seed(seed)
    ids = {name: hr.Jagged(torch.randint(0, keys, (rows,), generator=draw)) for name in ("user", "item")}
    for name, most in (("tags", 3), ("history", 6)):
        lengths = torch.randint(0, most + 1, (rows,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids[name] = hr.Jagged(torch.randint(0, keys, (int(offsets[-1]),), generator=draw), offsets)
    labels = torch.randint(0, 2, (rows,), generator=draw).float()
    return hr.KeyedBatch(ids, torch.randn(rows, DENSE, generator=draw), labels)


class Batches:
    """A source of drawn batches."""

    def __init__(self, count: int, rows: int = 64, first: int = 0) -> None:
        self.count, self.rows, self.first, self.examples = count, rows, first, count * rows

    def batches(self, cursor: Any = None) -> Any:
        for number in range(cursor or 0, self.count):
            yield make_batch(self.rows, self.first + number), number + 1

    def describe(self) -> str:
        return "drawn batches"


def trained(kind: str = "dlrm", steps: int = 4, **options: Any) -> hr.Trainer:
    model = make_model(kind, **options)
    trainer = hr.Trainer(model, torch.optim.Adam(model.tower.parameters(), lr=0.01))
    trainer.fit(Batches(steps), progress=False)
    return trainer


def rows_of(embeddings: hr.EmbeddingCollection) -> dict[str, dict[int, bytes]]:
    """All values by table and key."""
    return {
        rows.table.name: {
            int(key): value[: rows.table.dim].numpy().tobytes()
            for part in rows.scan()
            for key, value in zip(part.keys, part.values, strict=True)
        }
        for rows in embeddings.tables
    }


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class TwoTasks(nn.Module):
    """A tower that is not ours: two logits a row, one layer used twice under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(DIM)
        self.last = nn.Sequential(nn.Dropout(0.5), nn.Linear(DIM, 2))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        mixed = self.second(torch.relu(self.first(vectors["user"] + vectors["item"])))
        return self.last(self.norm(mixed))
