"""A small two-part tower over a history of three aligned columns, and requests of one user each for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.publish.publication import DELTA, Publication, TableChange
from hotrow.serve.protocol.request import Ids, Request, Signature

DIM, DENSE, KEYS, MOST = 4, 2, 60, 12
USER = ("seen_item", "seen_action", "seen_time", "age")
HISTORY = USER[:3]
FEATURES = ("seen_item", "item", "seen_action", "age", "tags")  # with rows, in the model's order


class SmallUserTower(nn.Module):
    """Encodes each event with its place and time, jagged, and a vector of each user; candidates read both."""

    jagged = True
    user_features = USER
    aligned = (HISTORY,)
    dense_features = DENSE

    def __init__(self, tasks: int = 1) -> None:
        super().__init__()
        self.event = nn.Linear(2 * DIM, DIM)
        self.top = nn.Linear(3 * DIM + DENSE, tasks)
        self.tasks = tasks

    def encode_user(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths = vectors["seen_item_lengths"]
        events = torch.cat([vectors["seen_item"], vectors["seen_action"]], dim=1)
        owner = owners(lengths, events.shape[0])
        starts = torch.cat([lengths.cumsum(0) - lengths, lengths.new_zeros(1)])
        place = torch.arange(events.shape[0]) - starts[owner]
        weight = 1 / (2.0 + place) + (vectors["seen_time"] % 7) / 10
        return {
            "x": torch.tanh(self.event(events)) * weight.unsqueeze(1),
            "x_lengths": lengths.clone(),
            "age": vectors["age"] * 2,
        }

    def score(self, vectors: dict[str, Tensor], encoding: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        lengths, events = encoding["x_lengths"], encoding["x"]
        owner = owners(lengths, events.shape[0])
        total = events.new_zeros(lengths.shape[0] + 1, DIM).index_add(0, owner, events)
        user_of = vectors["user_of"]
        mixed = [total[user_of] * vectors["item"], encoding["age"][user_of], vectors["tags"], dense]
        logits: Tensor = self.top(torch.cat(mixed, dim=1))  # type: ignore[arg-type]
        return logits.squeeze(1) if self.tasks == 1 else logits

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return self.score(vectors, self.encode_user(vectors), dense)


def owners(lengths: Tensor, events: int) -> Tensor:
    """The user of each event; of padding, the number of users."""
    return torch.searchsorted(lengths.cumsum(0), torch.arange(events), right=True)


def user_model(tasks: int = 1, memory: hr.Memory | None = None) -> hr.Recommender:
    tables = [
        hr.Table("item", DIM, {"seen_item": "none", "item": "sum"}),
        hr.Table("action", DIM, {"seen_action": "none"}),
        hr.Table("age", DIM),
        hr.Table("tags", DIM, {"tags": "mean"}),
    ]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.SGD(lr=0.2), memory=memory, seed=3)
    torch.manual_seed(0)
    return hr.Recommender(embeddings, SmallUserTower(tasks))


class Ask(NamedTuple):
    """One user's request: the history, and the candidates."""

    items: list[int]
    actions: list[int]
    times: list[int]
    age: int
    candidates: list[int]
    tags: list[list[int]]
    dense: Tensor

    @property
    def rows(self) -> int:
        return len(self.candidates)


def ask(seed: int, rows: int = 5, events: int | None = None) -> Ask:
    """A request; the same seed has the same user, whatever the number of rows."""
    draw = torch.Generator().manual_seed(seed)

    def ids(count: int, most: int = KEYS) -> list[int]:
        return torch.randint(0, most, (count,), generator=draw).tolist()

    length = ids(1, MOST + 1)[0] if events is None else events
    user = ids(length), ids(length, 4), ids(length, 1000), ids(1, 5)[0]
    tags = [ids(number % 3) for number in range(rows)]
    return Ask(*user, ids(rows), tags, torch.randn(rows, DENSE, generator=draw))


def batch_of(asks: Sequence[Ask]) -> hr.KeyedBatch:
    """The requests as a batch without users: each row has the whole history."""

    def rows(column: str) -> hr.Jagged:
        return hr.Jagged.from_lists([getattr(one, column) for one in asks for _ in range(one.rows)])

    ids = {
        "seen_item": rows("items"),
        "item": hr.Jagged(torch.tensor([key for one in asks for key in one.candidates])),
        "seen_action": rows("actions"),
        "age": hr.Jagged(torch.tensor([one.age for one in asks for _ in range(one.rows)])),
        "tags": hr.Jagged.from_lists([keys for one in asks for keys in one.tags]),
    }
    dense = torch.cat([one.dense for one in asks])
    return hr.KeyedBatch(ids, dense, numbers={"seen_time": rows("times")})


def request_of(one: Ask, model: str = "ctr", shared: bool = True, **more: Any) -> Request:
    """The request as a front end sends it: the user's features once, or for each row."""
    array = np.array
    if shared:
        history = {
            name: Ids(array(values, np.int64), None if one.rows > 1 else array([0, len(values)]), shared=one.rows > 1)
            for name, values in zip(HISTORY, (one.items, one.actions, one.times), strict=True)
        }
        age = Ids(array([one.age]), shared=one.rows > 1)
    else:
        history = {
            name: Ids(np.tile(array(values, np.int64), one.rows), np.arange(one.rows + 1) * len(values))
            for name, values in zip(HISTORY, (one.items, one.actions, one.times), strict=True)
        }
        age = Ids(np.full(one.rows, one.age))
    tags = Ids(
        array([key for keys in one.tags for key in keys], np.int64), np.cumsum([0, *map(len, one.tags)], dtype=np.int64)
    )
    by_name = {**history, "age": age, "item": Ids(array(one.candidates)), "tags": tags}
    ids = tuple(by_name[name] for name in (*FEATURES, "seen_time"))
    return Request(model, one.rows, ids, one.dense.numpy(), **more)


class Asks:
    """A source of batches of a few users."""

    examples = None

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def batches(self, cursor: Any = None) -> Any:
        for number in range(cursor or 0, self.count):
            batch = batch_of([ask(1000 + self.first + number + user) for user in range(5)])
            labels = torch.randint(0, 2, (batch.size,), generator=torch.Generator().manual_seed(number)).float()
            yield hr.KeyedBatch(batch.ids, batch.dense, labels, numbers=batch.numbers), number + 1

    def describe(self) -> str:
        return "requests of users"


def user_trainer(**options: Any) -> hr.Trainer:
    model = user_model()
    trainer = hr.Trainer(model, torch.optim.SGD(model.tower.parameters(), lr=0.1), **options)
    trainer.fit(Asks(6), progress=False)
    return trainer


def exported(folder: Path, model: hr.Recommender) -> Path:
    """A repository with the model ctr."""
    hr.export(model, folder / "ctr", max_lengths={"seen_item": MOST})
    return folder


def items_set_to(value: float, keys: Sequence[int], number: int) -> Publication:
    """The publication that follows `number - 1` and sets these items' rows."""
    rows = torch.tensor(sorted(set(keys)), dtype=torch.int64)
    changed = TableChange(rows, torch.full((len(rows), DIM), value), torch.empty(0, dtype=torch.int64))
    return Publication(DELTA, number, number - 1, "r", number, None, 0.0, {"item": changed})


def signature() -> Signature:
    """The signature that `exported` has."""
    return Signature(
        FEATURES,
        frozenset(["seen_item", "seen_action"]),
        DENSE,
        1,
        user=frozenset(USER),
        numbers=("seen_time",),
        jagged=True,
        aligned=(HISTORY,),
        max_lengths=dict.fromkeys(HISTORY, MOST),
    )
