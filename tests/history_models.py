"""Towers of each kind over growing histories of a few users, with data, for tests of exactness.

Three aligned columns (item, action, time), a second history of the items' table, a tag list, and dense features. The
items' table may admit and expire. Histories grow within a batch, so causal towers read the beginnings of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import hotrow as hr
from hotrow.data import Cursor
from hotrow.models import BST, HSTU, SIM, History, JaggedDIN, SASRec, UserTower

DIM, DENSE, MOST = 4, 2, 12
SEEN = History({"seen_item": DIM, "seen_action": 2}, "seen_time", "seen_category", MOST)
PLAIN = History({"seen_item": DIM, "seen_action": 2}, "seen_time", None, MOST)
BOUGHT = History({"bought": DIM}, max_length=MOST)
FEATURES = {"item": DIM, "tags": 3, "age": 3}
_SIZE: dict[str, Any] = {"width": 8, "heads": 2, "dense_features": DENSE, "user_features": ["age"], "top": (6,)}

TOWERS: dict[str, Callable[..., UserTower]] = {
    "hstu": lambda **o: HSTU(FEATURES, [PLAIN], "item", time="now", layers=2, **{**_SIZE, **o}),
    "bst": lambda **o: BST(FEATURES, [PLAIN, BOUGHT], "item", interaction="dot", **{**_SIZE, **o}),
    "bst relative": lambda **o: BST(
        FEATURES, [PLAIN, BOUGHT], ["item", "tags"], positions="relative", layers=2, dropout=0.2, checkpoint=True,
        **{**_SIZE, **o},
    ),
    "sim hard": lambda **o: SIM(
        FEATURES, [SEEN], "item", keep=3, category="category", time="now", **{**_SIZE, **o}
    ),
    "sim soft": lambda **o: SIM(FEATURES, [PLAIN, BOUGHT], "item", keep=3, search="soft", **{**_SIZE, **o}),
    "sasrec": lambda **o: SASRec(FEATURES, [PLAIN, BOUGHT], "item", **{**_SIZE, **o}),
    "din": lambda **o: JaggedDIN(
        FEATURES, [BOUGHT, PLAIN], "item",
        **{name: value for name, value in {**_SIZE, **o}.items() if name != "heads"},
    ),
}  # fmt: skip


def _read() -> dict[str, frozenset[str]]:
    with torch.random.fork_rng(devices=[]):  # drawing weights must not change the random state of a run
        made = {name: tower() for name, tower in TOWERS.items()}
    return {name: frozenset((*tower.widths, *tower.user_features, *tower.numbers)) for name, tower in made.items()}


READ = _read()  # what each tower reads


def tables(name: str, **policies: Any) -> list[hr.Table]:
    """The tables that a tower reads; `policies` are the items' table's."""
    item = {"item": "sum", **{column: "none" for column in ("seen_item", "bought") if column in READ[name]}}
    return [
        hr.Table("item", DIM, item, **policies),
        hr.Table("action", 2, {"seen_action": "none"}),
        hr.Table("age", 3),
        hr.Table("tags", 3, {"tags": "mean"}),
    ]


def model(
    name: str,
    memory: hr.Memory | None = None,
    device: str | None = None,
    ranks: hr.Ranks | None = None,
    tower: Mapping[str, Any] | None = None,
    optimizer: hr.optim.Optimizer | None = None,
    **policies: Any,
) -> hr.Recommender:
    embeddings = hr.EmbeddingCollection(
        tables(name, **policies), optimizer or hr.optim.Adam(lr=0.02), memory, 3, device, ranks
    )
    torch.manual_seed(0)
    return hr.Recommender(embeddings, TOWERS[name](**(tower or {})))


def batch(name: str, seed: int, users: int = 5, rows: int = 17, keys: int = 60) -> hr.KeyedBatch:
    """Examples of a few users in turns, whose histories grow (or not, or are cut) between their examples."""
    draw = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=draw))

    events: list[list[tuple[int, int, int, int]]] = [[] for _ in range(users)]
    bought: list[list[int]] = [[] for _ in range(users)]
    owners = [number(users) for _ in range(rows)]
    seen, other = [], []
    for user in owners:
        for _ in range(number(4)):
            newest = events[user][-1][2] if events[user] else 1_000_000 * seed
            events[user].append((number(keys), number(5), newest + number(90_000), number(3)))
        bought[user] += [number(keys) for _ in range(number(2))]
        seen.append(events[user][-MOST:])
        other.append(bought[user][-MOST:])

    def column(at: int) -> hr.Jagged:
        return hr.Jagged.from_lists([[event[at] for event in history] for history in seen])

    ids = {
        "seen_item": column(0),
        "item": hr.Jagged(torch.randint(0, keys, (rows,), generator=draw)),
        "bought": hr.Jagged.from_lists(other),
        "seen_action": column(1),
        "age": hr.Jagged(torch.tensor([user % 3 for user in owners], dtype=torch.int64)),
        "tags": hr.Jagged.from_lists([[number(9) for _ in range(number(3))] for _ in range(rows)]),
    }
    now = torch.tensor([history[-1][2] if history else 0 for history in seen], dtype=torch.int64) + 1000
    numbers = {
        "seen_time": column(2),
        "seen_category": column(3),
        "now": hr.Jagged(now),
        "category": hr.Jagged(torch.randint(0, 3, (rows,), generator=draw)),
    }
    return hr.KeyedBatch(
        {feature: jagged for feature, jagged in ids.items() if feature in READ[name]},
        torch.randn(rows, DENSE, generator=draw),
        torch.randint(0, 2, (rows,), generator=draw).float(),
        torch.full((rows,), 60_000 * seed),
        {feature: jagged for feature, jagged in numbers.items() if feature in READ[name]},
    )


class Log:
    """`steps` batches of growing histories. `rows` are the sizes of the batches, again and again."""

    examples = None

    def __init__(self, name: str, steps: int, rows: tuple[int, ...] = (17,), crash: int | None = None) -> None:
        self.name, self.steps, self.rows, self.crash = name, steps, rows, crash

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for number in range((cursor or {}).get("batch", 0), self.steps):
            if number == self.crash:
                raise RuntimeError("the source dies")
            yield batch(self.name, number, rows=self.rows[number % len(self.rows)]), {"batch": number + 1}

    def describe(self) -> str:
        return "growing histories"


def trainer_of(built: hr.Recommender, **options: Any) -> hr.Trainer:
    parameters = list(built.tower.parameters())
    dense = torch.optim.Adam(parameters, lr=0.01) if parameters else None
    return hr.Trainer(built, dense, **options)


def random_weights(tower: torch.nn.Module) -> None:
    """So that no bias, norm or table of positions is without effect."""
    draw = torch.Generator().manual_seed(1)
    for weight in tower.parameters():
        weight.data += 0.2 * torch.randn(weight.shape, generator=draw)


def close(one: Tensor, other: Tensor, most: float = 1e-6) -> bool:
    return one.shape == other.shape and (not one.numel() or float((one - other).abs().max()) <= most)
