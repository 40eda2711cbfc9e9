"""Exported towers over one history, and requests of one user with many candidates for them.

A model has one table of ITEMS items, 64 wide, which the history and the candidates share. A few lookups give every item
a row. It is exported and opened as a server opens it. A request is a batch with users, as the server's join makes it:
the user's features once, one entry for each candidate of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.bench.sequences.workload import DIM, scaled
from hotrow.errors import HotRowError

ITEMS, CATEGORIES, CANDIDATES = 50_000, 100, 500
SEEN, ITEM = "seen", "item"
NUMBERS = ("now", "item_category")  # of candidates
FIRST_TIME, MONTH = 1_700_000_000_000, 30 * 86_400_000  # milliseconds
TOLERANCE = 1e-5


def export(tower: nn.Module, path: Path) -> Path:
    """Export the tower with a row for each item; returns the model's folder."""
    torch.manual_seed(1)
    tables = [hr.Table("item", DIM, {SEEN: "none", ITEM: "sum"})]
    model = hr.Recommender(hr.EmbeddingCollection(tables, seed=1), tower.eval())
    for keys in torch.arange(scaled(ITEMS, 200)).split(8192):
        nothing = hr.Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(len(keys) + 1, dtype=torch.int64))
        model.embeddings(hr.KeyedBatch({SEEN: nothing, ITEM: hr.Jagged(keys)}))
    read = {getattr(tower, name, None) for name in ("time", "category")}
    hr.export(model, path, numbers=[name for name in NUMBERS if name in read])
    return path


@dataclass(frozen=True)
class Request:
    """One user's events and candidates, by column."""

    events: Mapping[str, Tensor]
    candidates: Mapping[str, Tensor]

    @staticmethod
    def drawn(events: int, seed: int, categories: int = CATEGORIES) -> Request:
        """A random one; the candidates are of the categories of the events."""
        draw = torch.Generator().manual_seed(seed)
        rows, items = scaled(CANDIDATES, 2), scaled(ITEMS, 200)

        def integers(most: int, count: int) -> Tensor:
            return torch.randint(0, most, (count,), generator=draw)

        times = FIRST_TIME + integers(MONTH, events).sort().values
        of_events = {SEEN: integers(items, events), "seen_time": times, "seen_category": integers(categories, events)}
        now = torch.full((rows,), FIRST_TIME + MONTH)
        candidates = {ITEM: integers(items, rows), "now": now, "item_category": integers(categories, rows)}
        return Request(of_events, candidates)

    @property
    def rows(self) -> int:
        """How many candidates."""
        return len(self.candidates[ITEM])

    def only(self, row: int, events: Tensor) -> Request:
        """One candidate with these events of the history."""
        return replace(
            self,
            events={name: column[events] for name, column in self.events.items()},
            candidates={name: column[row : row + 1] for name, column in self.candidates.items()},
        )

    def batch(self, engine: hr.Engine) -> hr.KeyedBatch:
        """As a server joins it: the user's features once."""
        return self._batch(engine, 1, slice(None))

    def expanded(self, engine: hr.Engine, chunk: int) -> list[hr.KeyedBatch]:
        """Batches of `chunk` candidates, for each of which the history is repeated."""
        pieces = [slice(begin, min(begin + chunk, self.rows)) for begin in range(0, self.rows, chunk)]
        return [self._batch(engine, piece.stop - piece.start, piece) for piece in pieces]

    def _batch(self, engine: hr.Engine, users: int, rows: slice) -> hr.KeyedBatch:
        signature, length = engine.signature, len(self.events[SEEN])
        offsets = torch.arange(users + 1) * length
        columns = {name: hr.Jagged(column.repeat(users), offsets) for name, column in self.events.items()}
        columns |= {name: hr.Jagged(column[rows]) for name, column in self.candidates.items()}
        count = len(self.candidates[ITEM][rows])
        return hr.KeyedBatch(
            {name: columns[name] for name in signature.features},
            numbers={name: columns[name] for name in signature.numbers},
            user_of=torch.arange(count) if users == count else torch.zeros(count, dtype=torch.int64),
            user_features=signature.user,
        )

    def tensors(self, engine: hr.Engine) -> dict[str, Tensor]:
        """What a client sends: the history once."""
        columns = {name: column[None] for name, column in self.events.items()} | dict(self.candidates)
        return {name: columns[name] for name in (*engine.signature.features, *engine.signature.numbers)}


def check_equal(way: str, found: Tensor, expected: Tensor) -> None:
    """Raise HotRowError if logits of two ways differ."""
    difference = float((found - expected).abs().max()) if found.numel() else 0.0
    if found.shape != expected.shape or not difference <= TOLERANCE:
        raise HotRowError(f"logits of {way} differ by {difference:.3g}, more than {TOLERANCE}")
