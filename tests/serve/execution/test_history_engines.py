"""Towers over histories (hr.models) in hr.Engine: users are encoded once, and answers are the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hotrow as hr
from hotrow.models import BST, HSTU, SIM, History, SASRec

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, MOST = 8, 12
SEEN = History(["seen"], times="seen_time", max_length=MOST)
TOWERS: dict[str, Callable[[], torch.nn.Module]] = {
    "bst": lambda: BST(["user", "item"], [SEEN], "item", DIM, user_features=["user"], width=8, heads=2),
    "sasrec": lambda: SASRec(["item"], [SEEN], "item", DIM, width=8, heads=2, layers=1),
    "hstu": lambda: HSTU(["user", "item"], [SEEN], "item", DIM, user_features=["user"], width=8, heads=2, layers=1),
    "sim": lambda: SIM(["item"], [SEEN], "item", DIM, search="soft", keep=3, width=8, heads=2),
}


def batch_of(users: list[int], lengths: list[int], rows: int, with_user: bool) -> hr.KeyedBatch:
    """A batch of these users with `rows` candidates each, whose histories are repeated for each row."""
    draw = torch.Generator().manual_seed(3)
    seen, times, who = [], [], []
    for user, length in zip(users, lengths, strict=True):
        own = torch.Generator().manual_seed(user)
        seen += [torch.randint(0, 40, (length,), generator=own).tolist()] * rows
        times += [(1_700_000_000_000 + torch.arange(length) * 60_000 * (user + 1)).tolist()] * rows
        who += [user] * rows
    ids = {
        "item": hr.Jagged(torch.randint(0, 40, (len(who),), generator=draw)),
        "seen": hr.Jagged.from_lists(seen),
        **({"user": hr.Jagged(torch.tensor(who))} if with_user else {}),
    }
    return hr.KeyedBatch(ids, numbers={"seen_time": hr.Jagged.from_lists(times)})


@pytest.mark.parametrize("name", TOWERS)
def test_answers_are_the_trainers_with_and_without_a_cache(name: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    tables, tower = [hr.Table("item", DIM, {"item": "sum", "seen": "none"})], TOWERS[name]()
    with_user = "user" in tower.user_features  # type: ignore[operator]
    if with_user:
        tables.append(hr.Table("user", DIM))
    trainer = hr.Trainer(hr.Recommender(hr.EmbeddingCollection(tables, seed=2), tower))
    hr.export(trainer.model, tmp_path / "ctr")
    batches = [
        batch_of([1], [7], 5, with_user),
        batch_of([2], [0], 3, with_user),
        batch_of([3, 1, 4], [MOST, 7, 1], 4, with_user),  # user 1 is cached by now
        batch_of([5, 6], [0, 0], 1, with_user),
    ]
    with hr.Engine(tmp_path / "ctr") as plain, hr.Engine(tmp_path / "ctr", user_cache="1MiB") as cached:
        assert cached.users is not None and cached.users.cache is not None
        for batch in (*batches, *batches):
            expected = trainer.predict(batch)
            for engine in (plain, cached):
                torch.testing.assert_close(engine.predict(batch), expected, rtol=0, atol=1e-6)
        assert cached.users.cache.figures()["hits"] >= 7
