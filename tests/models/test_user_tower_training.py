"""Towers over histories in a Recommender: a log with growing histories trains the same model, shared or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hotrow as hr
from hotrow.data import Cursor
from hotrow.models import BST, HSTU, History, JaggedDIN, SASRec, UserTower

HISTORY = History({"seen_item": 4, "seen_action": 2}, times="seen_time", max_length=12)


def growing_log(seed: int, users: int = 5, each: int = 4) -> hr.KeyedBatch:
    """Examples of a few users in turns; the history of each grows by 0 to 2 events between its examples."""
    draw = torch.Generator().manual_seed(seed)
    items: list[list[int]] = [[] for _ in range(users)]
    seen, ages = [], []
    for turn in range(users * each):
        user = turn % users
        items[user] += torch.randint(0, 30, (int(torch.randint(0, 3, (1,), generator=draw)),), generator=draw).tolist()
        seen.append(list(items[user]))
        ages.append(user % 3)
    ids = {
        "seen_item": hr.Jagged.from_lists(seen),
        "seen_action": hr.Jagged.from_lists([[item % 3 for item in history] for history in seen]),
        "age": hr.Jagged(torch.tensor(ages)),
        "item": hr.Jagged(torch.randint(0, 30, (len(seen),), generator=draw)),
    }
    times = hr.Jagged.from_lists([[1000 * place for place, _ in enumerate(history)] for history in seen])
    labels = torch.randint(0, 2, (len(seen),), generator=draw).float()
    return hr.KeyedBatch(ids, labels=labels, numbers={"seen_time": times})


class Log:
    examples = None

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for number in range((cursor or {}).get("batch", 0), 5):
            yield growing_log(number), {"batch": number + 1}

    def describe(self) -> str:
        return "a log with growing histories"


def trained(kind: type[UserTower], shared: bool) -> hr.Trainer:
    torch.manual_seed(0)
    options = {"positions": "relative"} if kind is BST else {}
    width = {"width": 6} if kind is JaggedDIN else {"width": 8, "heads": 2}
    top = (6,)
    tower = kind({"item": 4, "age": 3}, [HISTORY], "item", user_features=["age"], top=top, **width, **options)  # type: ignore[call-arg]
    tables = [
        hr.Table("item", dim=4, features={"seen_item": "none", "item": "sum"}),
        hr.Table("action", dim=2, features={"seen_action": "none"}),
        hr.Table("age", dim=3),
    ]
    embeddings = hr.EmbeddingCollection(tables, hr.optim.SGD(lr=0.1), seed=1)
    model = hr.Recommender(embeddings, tower)
    if not shared:  # as if the tower had no user part: each example is a user
        form = model.embeddings.form
        model.embeddings.form = type(form)(jagged=True)
    trainer = hr.Trainer(model, dense_optimizer=torch.optim.SGD(tower.parameters(), lr=0.1))
    trainer.fit(Log(), progress=False)
    return trainer


@pytest.mark.parametrize("kind", [BST, HSTU, SASRec, JaggedDIN])
def test_growing_histories_train_the_same_model_shared_or_not(kind: type[UserTower]) -> None:
    shared, apart = trained(kind, True), trained(kind, False)
    for one, other in zip(shared.model.tower.parameters(), apart.model.tower.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    batch = growing_log(99)
    torch.testing.assert_close(shared.predict(batch), apart.predict(batch), atol=1e-5, rtol=1e-4)


def test_a_causal_tower_reads_each_growing_history_once() -> None:
    tower = trained(HSTU, True).model
    arranged = tower.embeddings.form.arrange(growing_log(0))
    assert (
        arranged.users == 5
        and arranged.ids["seen_item"].values.numel() < growing_log(0).ids["seen_item"].values.numel() / 2
    )
