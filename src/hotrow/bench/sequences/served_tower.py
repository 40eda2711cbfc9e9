"""Exported towers over one history, and requests of one user with many candidates for them.

A model has one table of ITEMS items, 64 wide, which the history and the candidates share. A few batches give every item
a row. It is exported and opened as a server opens it. A request is a batch with users, as the server's join makes it:
the user's features once, one entry for each candidate of the others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.bench.sequences.workload import DIM

ITEMS, CATEGORIES, CANDIDATES = 50_000, 100, 500
SEEN, SEEN_TIME, SEEN_CATEGORY = "seen", "seen_time", "seen_category"
ITEM, ITEM_CATEGORY = "item", "item_category"
FIRST_TIME, MONTH = 1_700_000_000_000, 30 * 86_400_000  # milliseconds


def candidates() -> int:
    """CANDIDATES, scaled by HOTROW_BENCH_SCALE."""
    return max(2, math.ceil(CANDIDATES * float(os.environ.get("HOTROW_BENCH_SCALE", "1"))))


def items() -> int:
    """ITEMS, scaled by HOTROW_BENCH_SCALE."""
    return max(200, math.ceil(ITEMS * float(os.environ.get("HOTROW_BENCH_SCALE", "1"))))


def export(tower: nn.Module, path: Path, numbers: tuple[str, ...] = ()) -> Path:
    """Export the tower with a row for each item, and return the model's folder."""
    tables = [hr.Table("item", DIM, {SEEN: "none", ITEM: "sum"})]
    embeddings = hr.EmbeddingCollection(tables, seed=1)
    model = hr.Recommender(embeddings, tower.eval())
    for keys in torch.arange(items()).split(8192):
        embeddings(hr.KeyedBatch({SEEN: hr.Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(len(keys) + 1, dtype=torch.int64)), ITEM: hr.Jagged(keys)}))
    hr.export(model, path, numbers=numbers)
    return path


class Request:
    """One user's history and its candidates."""

    def __init__(self, events: int, seed: int, *, rows: int | None = None, categories: int = CATEGORIES) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.rows = candidates() if rows is None else rows
        self.seen = torch.randint(0, items(), (events,), generator=draw)
        self.seen_time = FIRST_TIME + torch.randint(0, MONTH, (events,), generator=draw).sort().values
        self.seen_category = torch.randint(0, categories, (events,), generator=draw)
        self.item = torch.randint(0, items(), (self.rows,), generator=draw)
        self.item_category = torch.randint(0, categories, (self.rows,), generator=draw)

    def batch(self, model: hr.Engine) -> hr.KeyedBatch:
        """As a server joins it: the user's features once."""
        one = torch.tensor([0, len(self.seen)])
        columns = {SEEN_TIME: self.seen_time, SEEN_CATEGORY: self.seen_category, ITEM_CATEGORY: self.item_category}
        numbers = {
            name: hr.Jagged(columns[name], None if name == ITEM_CATEGORY else one) for name in model.signature.numbers
        }
        ids = {SEEN: hr.Jagged(self.seen, one), ITEM: hr.Jagged(self.item)}
        user_of = torch.zeros(self.rows, dtype=torch.int64)
        return hr.KeyedBatch(ids, numbers=numbers, user_of=user_of, user_features=model.signature.user)

    def expanded(self, model: hr.Engine) -> hr.KeyedBatch:
        """The history repeated for each candidate, each of which is a user of its own."""
        batch = self.batch(model)

        def repeat(name: str, column: hr.Jagged) -> hr.Jagged:
            if name not in model.signature.user:
                return column
            return hr.Jagged(column.values.repeat(self.rows), torch.arange(self.rows + 1) * len(self.seen))

        ids = {name: repeat(name, column) for name, column in batch.ids.items()}
        numbers = {name: repeat(name, column) for name, column in batch.numbers.items()}
        user_of = torch.arange(self.rows)
        return hr.KeyedBatch(ids, numbers=numbers, user_of=user_of, user_features=model.signature.user)
