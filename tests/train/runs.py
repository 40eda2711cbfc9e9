"""A small run that can be interrupted, and the complete state of a trainer as bytes, to compare two runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.data import Cursor
from hotrow.data.synthetic_log.clicks import SyntheticClicks

SHAPE = hr.data.Shape(sparse={"user": None, "item": None}, dense=3, history_length=0)


class Crash(Exception):  # noqa: N818
    """Simulates a crash of the process."""


class DropoutTower(nn.Module):
    """Dropout draws from torch's random state and batch norm keeps buffers: a checkpoint must bring back both."""

    def __init__(self, width: int = 16, dim: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 * dim + 3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 1)
        )

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        return self.layers(torch.cat([*vectors.values(), dense], 1)).squeeze(1)


def clicks(examples: int = 640, batch_size: int = 32) -> SyntheticClicks:
    return SyntheticClicks(examples=examples, batch_size=batch_size, keys=2000, shape=SHAPE)


class CrashAfter:
    """A source that dies when the batch after the first `batches` is asked for."""

    def __init__(self, source: SyntheticClicks, batches: int) -> None:
        self.source, self.left, self.examples = source, batches, source.examples

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for item in self.source.batches(cursor):
            if self.left == 0:
                raise Crash
            self.left -= 1
            yield item

    def describe(self) -> str:
        return "a source that dies"


def make_trainer(
    checkpoints: Path | None = None,
    *,
    torch_seed: int = 0,
    seed: int = 3,
    dim: int = 4,
    width: int = 16,
    names: tuple[str, ...] = ("user", "item"),
    optimizer: hr.optim.Optimizer | None = None,
    dense: str = "adam",
    memory: hr.Memory | None = None,
    device: str | None = None,
    **options: Any,
) -> hr.Trainer:
    features = dict(zip(names, ("user", "item"), strict=False))
    tables = [hr.Table(name, dim=dim, features=[feature]) for name, feature in features.items()]
    optimizer = optimizer or hr.optim.Adam(lr=0.01)
    embeddings = hr.EmbeddingCollection(tables, optimizer=optimizer, memory=memory, seed=seed, device=device)
    torch.manual_seed(torch_seed)
    tower = DropoutTower(width, dim)
    kinds = {
        "adam": lambda: torch.optim.Adam(tower.parameters(), lr=0.01),
        "sgd": lambda: torch.optim.SGD(tower.parameters(), lr=0.05, momentum=0.9),
    }
    return hr.Trainer(hr.Recommender(embeddings, tower), kinds[dense](), checkpoints=checkpoints, **options)


def all_rows(trainer: hr.Trainer) -> dict[str, dict[int, bytes]]:
    tables: dict[str, dict[int, bytes]] = {}
    for table in trainer.model.embeddings.tables:
        rows = tables.setdefault(table.table.name, {})
        for chunk in table.scan():
            meta = torch.stack([chunk.counts, chunk.last_steps], 1)
            for key, values, numbers in zip(chunk.keys.tolist(), chunk.values, meta, strict=True):
                rows[key] = values.numpy().tobytes() + numbers.numpy().tobytes()
    return tables


def bits(trainer: hr.Trainer) -> dict[str, Any]:
    """The complete state that determines what the trainer does next."""
    return {
        "rows": all_rows(trainer),
        "steps": trainer.steps,
        "tower": {name: value.cpu().numpy().tobytes() for name, value in trainer.model.tower.state_dict().items()},
        "optimizer": _bytes(trainer.dense_optimizer.state_dict() if trainer.dense_optimizer else None),
        "scaler": trainer.scaler.state_dict(),
        "metrics": trainer.metrics.state(),
        "rng": torch.get_rng_state().numpy().tobytes(),
        "cursor": trainer.cursor,
        "place": vars(trainer.position),
    }


def _bytes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (str(value.dtype), list(value.shape), value.cpu().numpy().tobytes())
    if isinstance(value, dict):
        return {key: _bytes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_bytes(item) for item in value]
    return value


def trained(folder: Path | None = None, steps: int = 5, **options: Any) -> hr.Trainer:
    trainer = make_trainer(folder, **options)
    trainer.fit(clicks(), steps=steps, progress=False)
    return trainer


def names(folder: Path) -> list[str]:
    """Visible names and what a crash left, without the logs of live trainers."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".rows-"))
