"""The towers over histories (hr.models) as two graphs, which answer as the towers do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hotrow as hr
from hotrow.models import BST, HSTU, SIM, History, SASRec
from hotrow.serve.execution.two_part_tower import TwoPartTower, open_tower

DIM = 8
SEEN = History(["seen"], times="seen_time", max_length=12)
SEARCHED = History(["seen"], times="seen_time", categories="seen_category", max_length=12)
TOWERS: dict[str, Callable[[], torch.nn.Module]] = {
    "bst": lambda: BST(["user", "item"], [SEEN], "item", DIM, user_features=["user"], width=8, heads=2),
    "sasrec": lambda: SASRec(["item"], [SEEN], "item", DIM, width=8, heads=2, layers=1),
    "sasrec events": lambda: SASRec(["item"], [SEEN], "item", DIM, width=8, heads=2, layers=1, every_event=True),
    "hstu": lambda: HSTU(["user", "item"], [SEEN], "item", DIM, user_features=["user"], width=8, heads=2, layers=1),
    "sim hard": lambda: SIM(["item"], [SEARCHED], "item", DIM, category="item_category", keep=3, width=8, heads=2),
    "sim soft": lambda: SIM(["item"], [SEEN], "item", DIM, search="soft", keep=3, width=8, heads=2),
}


@pytest.mark.parametrize("name", TOWERS)
@torch.inference_mode()
def test_a_tower_over_histories_answers_as_two_graphs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    tables = [hr.Table("item", dim=DIM, features={"item": "sum", "seen": "none"})]
    tower = TOWERS[name]()
    if "user" in tower.user_features:  # type: ignore[operator]
        tables.append(hr.Table("user", dim=DIM))
    model = hr.Recommender(hr.EmbeddingCollection(tables), tower).eval()
    version = hr.export(model, tmp_path / "ctr", numbers=["item_category"] if name == "sim hard" else [])
    opened = open_tower(version, model.embeddings)
    assert isinstance(opened, TwoPartTower)
    for users, rows, most in ((1, 1, 0), (1, 7, 12), (3, 5, 9)):
        vectors, _ = opened.inputs.example(rows, most, seed=users, users=users)
        torch.testing.assert_close(opened.run(vectors), tower(dict(vectors)), rtol=1e-5, atol=1e-6)
