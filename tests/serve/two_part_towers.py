"""A small tower with a user part, in plain torch over lengths, for the tests of export and execution."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.serve.graph.tower_inputs import TowerInputs

DIM = 4
USER = ("user", "seen", "action", "when")
WIDTHS = {"user": DIM, "seen": DIM, "action": DIM, "item": DIM}
INPUTS = TowerInputs(
    WIDTHS,
    frozenset({"seen", "action"}),
    2,
    numbers=("when",),
    jagged=True,
    user=USER,
    aligned=(("seen", "action", "when"),),
)


def owners(lengths: Tensor, events: int) -> Tensor:
    """The user of each event; users for padding."""
    return torch.searchsorted(lengths.cumsum(0), torch.arange(events), right=True)


class SumTower(nn.Module):
    """A candidate's logit from the sum of its user's events, the user and the item."""

    jagged = True
    user_features = USER
    aligned = (("seen", "action", "when"),)

    def __init__(self, dense: int = 2) -> None:
        super().__init__()
        self.dense_features = dense
        self.event, self.user, self.item = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.top = nn.Linear(DIM + dense, 1)

    def encode_user(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        hours = (vectors["when"] - 1_700_000_000_000).float() / 3.6e6
        events = self.event(vectors["seen"] * vectors["action"].sigmoid()) + hours.log1p().unsqueeze(1) * 0.01
        return {"events": events, "events_lengths": vectors["seen_lengths"], "user": self.user(vectors["user"])}

    def score(self, vectors: dict[str, Tensor], encoding: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        events, lengths, users = encoding["events"], encoding["events_lengths"], encoding["user"]
        sums = torch.cat([users, users[:1] * 0]).index_add(0, owners(lengths, events.shape[0]), events)
        mixed = self.item(vectors["item"]) * sums[vectors["user_of"]]
        logits: Tensor = self.top(mixed if dense is None else torch.cat([mixed, dense], 1)).squeeze(1)
        return logits

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return self.score(vectors, self.encode_user(vectors), dense)


def sum_tower(seed: int = 0) -> SumTower:
    torch.manual_seed(seed)
    return SumTower().eval()


def two_part_model() -> hr.Recommender:
    """The tower over rows of 50 keys."""
    tables = [
        hr.Table("user", dim=DIM),
        hr.Table("item", dim=DIM, features={"seen": "none", "item": "sum"}, max_length=20),
        hr.Table("action", dim=DIM, features={"action": "none"}),
    ]
    embeddings = hr.EmbeddingCollection(tables, seed=2)
    generator = torch.Generator().manual_seed(3)
    for rows in embeddings.tables:
        rows.assign(torch.arange(50), torch.randn(50, DIM, generator=generator))
    return hr.Recommender(embeddings, sum_tower()).eval()
