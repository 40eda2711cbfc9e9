"""Small models with multi-hot features and histories, and batches for them: padded, jagged, and in two parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from serve.two_part_towers import SumTower, owners
from torch import Tensor, nn

import hotrow as hr
from hotrow.publish.publication import DELTA, Publication, TableChange

DIM, DENSE, KEYS, MOST = 4, 2, 300, 12
FORMS = ("pooled", "padded", "jagged", "two_parts")


class PooledTower(nn.Module):
    """Reads two multi-hot features."""

    dense_features = DENSE

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(2 * DIM + DENSE, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        logits: Tensor = self.top(torch.cat([vectors["item"], vectors["tags"], dense], dim=1))  # type: ignore[list-item]
        return logits.squeeze(1)


class PaddedTower(PooledTower):
    """Adds a mean over the history, weighted by the place of the event."""

    def __init__(self) -> None:
        super().__init__()
        self.event = nn.Linear(DIM, DIM)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        mask = vectors["seen_mask"].unsqueeze(2)
        place = torch.arange(vectors["seen"].shape[1]).unsqueeze(1)
        events = torch.tanh(self.event(vectors["seen"])) / (1.0 + place) * mask
        mean = events.sum(1) / mask.sum(1).clamp(min=1)
        return super().forward({**vectors, "item": vectors["item"] * (1 + mean)}, dense)


class JaggedTower(PooledTower):
    """The same over jagged histories, with the times of the events."""

    jagged = True
    aligned = (("seen", "when"),)

    def __init__(self) -> None:
        super().__init__()
        self.event = nn.Linear(DIM, DIM)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        lengths, events = vectors["seen_lengths"], vectors["seen"]
        weight = 1 + (vectors["when"] % 7) / 10
        values = torch.tanh(self.event(events)) * weight.unsqueeze(1)
        total = events.new_zeros(lengths.shape[0] + 1, DIM).index_add(0, owners(lengths, events.shape[0]), values)
        return super().forward({**vectors, "item": vectors["item"] * (1 + total[:-1])}, dense)


TOWERS = {"pooled": PooledTower, "padded": PaddedTower, "jagged": JaggedTower, "two_parts": SumTower}


def export(form: str, folder: Path) -> Path:
    """A model of this form, exported."""
    item = {"item": "sum"} if form == "pooled" else {"item": "sum", "seen": "none"}
    tables = [hr.Table("item", dim=DIM, features=item, max_length=MOST if form != "pooled" else None)]
    if form == "two_parts":
        tables += [hr.Table("user", dim=DIM), hr.Table("action", dim=DIM, features={"action": "none"})]
    else:
        tables += [hr.Table("tags", dim=DIM, features={"tags": "mean"})]
    embeddings = hr.EmbeddingCollection(tables, seed=2)
    generator = torch.Generator().manual_seed(3)
    for rows in embeddings.tables:
        rows.assign(torch.arange(KEYS), torch.randn(KEYS, DIM, generator=generator))
    torch.manual_seed(0)
    tower: nn.Module = TOWERS[form]()
    hr.export(hr.Recommender(embeddings, tower).eval(), folder / "ctr")
    return folder / "ctr"


def make_batch(form: str, rows: int, seed: int, longest: int = MOST) -> hr.KeyedBatch:
    """Random rows; histories of two parts are those of two users, in turns."""
    draw = np.random.default_rng(seed)

    def jagged(lengths: np.ndarray, weights: bool = False) -> hr.Jagged:
        keys = torch.from_numpy((draw.random(int(lengths.sum())) ** 3 * (KEYS + 20)).astype(np.int64))
        offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
        return hr.Jagged(keys, offsets, torch.rand(keys.numel()) + 0.5 if weights else None)

    ids = {"item": hr.Jagged(torch.from_numpy(draw.integers(0, KEYS + 20, rows)))}
    dense = torch.from_numpy(draw.normal(size=(rows, DENSE)).astype(np.float32))
    if form != "two_parts":
        ids["tags"] = jagged(draw.integers(0, 4, rows), weights=seed % 2 == 1)
    if form == "pooled":
        return hr.KeyedBatch(ids, dense)
    if form == "two_parts":
        users = min(2, rows)
        lengths = draw.integers(0, longest + 1, users)
        ids |= {"user": hr.Jagged(torch.arange(users)), "seen": jagged(lengths), "action": jagged(lengths)}
        of_user = frozenset({"user", "seen", "action", "when"})
        user_of = torch.arange(rows) % users
    else:
        ids["seen"], of_user, user_of = jagged(draw.integers(0, longest + 1, rows)), frozenset(), None
    if form == "padded":
        return hr.KeyedBatch(ids, dense)
    seen = ids["seen"]
    when = hr.Jagged(1_700_000_000_000 + torch.arange(seen.values.numel()) * 3_600_000, seen.offsets)
    return hr.KeyedBatch(ids, dense, numbers={"when": when}, user_of=user_of, user_features=of_user)


def other_keys(batch: hr.KeyedBatch) -> hr.KeyedBatch:
    """A batch of the same lengths with other keys."""
    ids = {
        name: hr.Jagged((one.values + KEYS // 2) % (KEYS + 20), one.offsets, one.weights)
        for name, one in batch.ids.items()
    }
    return replace(batch, ids=ids)


def publication(engine: hr.Engine) -> Publication:
    """New rows of a third of the items, and new weights."""
    original = engine.original
    parts = [original.user, original.candidates] if hasattr(original, "candidates") else [original]
    weights = {name: value.cpu() * 1.25 for part in parts for name, value in part.weights.items()}
    changed = torch.arange(0, KEYS, 3)
    rows = torch.full((changed.numel(), DIM), 0.25)
    tables = {"item": TableChange(changed, rows, torch.arange(1, 2 * DIM + 4, 3))}
    said = {"kind": DELTA, "previous": 0, "run": "r", "step": 1, "watermark": None, "cut": 0.0}
    return Publication(number=1, tables=tables, dense=weights, **said)
