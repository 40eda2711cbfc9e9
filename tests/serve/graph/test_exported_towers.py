"""The tower of an exported version, whose graph has its weights as an argument, behind an engine's `towers=`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hotrow as hr
from hotrow.errors import OptionError
from hotrow.serve.compile.buckets import Ladder
from hotrow.serve.execution.towers import TowerOptions, Towers
from hotrow.serve.graph.tower import OriginalTower
from hotrow.serve.graph.tower_graph import TowerGraph


def tower(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return hr.models.DLRM({"user": 4, "item": 4}, dense_features=3, bottom=(8,), top=(8,)).eval()


def batch_of(rows: int, seed: int = 0) -> hr.KeyedBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = {name: hr.Jagged(torch.randint(0, 200, (rows,), generator=generator)) for name in ("user", "item")}
    return hr.KeyedBatch(ids, dense=torch.randn(rows, 3, generator=generator))


@pytest.fixture
def model(tmp_path: Path) -> hr.Recommender:
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)], seed=2)
    for rows in embeddings.tables:
        rows.assign(torch.arange(100), torch.randn(100, 4))
    made = hr.Recommender(embeddings, tower(1)).eval()
    hr.export(made, tmp_path / "repository" / "ctr")
    return made


def engine_of(folder: Path, **options: Any) -> hr.Engine:
    def towers(original: OriginalTower) -> Towers:
        given = {"cache": folder / "artifacts", "ladder": Ladder((16,)), "faster": float("inf"), **options}
        return Towers(TowerGraph(original.program), original.weights, original.device, TowerOptions(**given))

    return hr.Engine(folder / "repository" / "ctr", towers=towers)


def assert_answers(engine: hr.Engine, model: hr.Recommender) -> None:
    for rows in (1, 16, 40):
        with torch.no_grad():
            want = model(batch_of(rows, rows))
        torch.testing.assert_close(engine.logits(batch_of(rows, rows)), want, rtol=1e-5, atol=1e-6)


def test_towers_answer_with_the_exported_weights_and_with_new_ones(model: hr.Recommender, tmp_path: Path) -> None:
    with engine_of(tmp_path, compile=False) as engine:
        assert isinstance(engine.towers, Towers)
        assert_answers(engine, model)
        model.tower.load_state_dict(tower(5).state_dict())
        engine.replace_weights(model.tower.state_dict())
        assert_answers(engine, model)
        answered = engine.answer(batch_of(3))
        assert answered.late.ids == 0 and not answered.compiled


def test_a_graph_that_was_saved_without_weights_asks_for_them(model: hr.Recommender, tmp_path: Path) -> None:
    with hr.Engine(tmp_path / "repository" / "ctr") as engine:
        with pytest.raises(OptionError, match="saved without weights"):
            TowerGraph(engine.original.program).order_weights({}, torch.device("cpu"))


@pytest.mark.soak
def test_a_bucket_of_an_exported_tower_is_compiled_and_takes_new_weights(model: hr.Recommender, tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        towers = engine.towers
        assert isinstance(towers, Towers) and towers.start(wait=True, seconds=600)
        assert towers.metrics()["buckets"] == 1, towers.describe()
        assert_answers(engine, model)
        model.tower.load_state_dict(tower(5).state_dict())
        engine.replace_weights(model.tower.state_dict())
        assert_answers(engine, model)
        assert towers.metrics()["compilations"] == 1
