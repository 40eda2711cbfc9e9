"""State that must be equal on every rank and is not: every rank raises an error that names it, and none waits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from test_rank_training import WithSequences, make
from work import rows_of

import hotrow as hr
from hotrow import data
from hotrow.job import build_job
from hotrow.train.checkpoint.manifest import list_checkpoints


class WithSpec(WithSequences):
    """As if its batches were made by a feature spec."""

    def __init__(self, seed: int) -> None:
        super().__init__(320, 16)
        self.features = hr.FeatureSpec([hr.features.Key("user"), hr.features.Key("item", seed=seed)])


def fit_otherwise(ranks: hr.Ranks, folder: Path, what: str) -> None:
    """The last rank calls `fit` in another way."""
    odd = ranks.rank == ranks.world - 1
    trainer = make(ranks, folder)
    fit: dict[str, dict[str, Any]] = {
        "steps": {"steps": 3 if odd else 2},
        "epochs": {"epochs": 0 if odd else 1},
        "resume": {"resume": odd},
        "cursor": {"cursor": {"next": 16} if odd else None},
        "evaluate_every": {"evaluate": WithSequences(16, 16), "evaluate_every": 1 if odd else 2},
    }
    trainer.fit(WithSpec(8 if odd and what == "spec" else 9), progress=False, **fit.get(what, {}))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("steps", "steps: 3 against 2"),
        ("epochs", "epochs: 0 against 1"),
        ("resume", "resume: True against False"),
        ("cursor", "cursor: {'next': 16} against None"),
        ("evaluate_every", "evaluate_every: 1 against 2"),
        ("spec", "the source's feature spec: {'features': [{'name': 'item', 'seed': 8}]} against"),
    ],
)
def test_a_call_of_fit_that_differs_is_an_error_on_every_rank(
    crews: dict[int, Crew], tmp_path: Path, what: str, named: str
) -> None:
    for error in crews[3].errors(fit_otherwise, tmp_path, what):
        assert isinstance(error, hr.OptionError)
        assert f"rank 2 differs from rank 0 in the call of fit, {named}" in str(error)


def evaluate_otherwise(ranks: hr.Ranks, folder: Path) -> None:
    make(ranks, folder).evaluate(WithSequences(160, 16), steps=2 if ranks.first else None, progress=False)


def test_a_call_of_evaluate_that_differs_is_an_error_on_every_rank(crews: dict[int, Crew], tmp_path: Path) -> None:
    for error in crews[3].errors(evaluate_otherwise, tmp_path):
        assert isinstance(error, hr.OptionError)
        assert "rank 1 differs from rank 0 in the call of evaluate, steps: None against 2" in str(error)


def save_some(ranks: hr.Ranks, folder: Path) -> None:
    trainer = make(ranks, folder)
    source = WithSequences(20 * 16 * ranks.world, 16)
    for step in (2, 4):
        trainer.fit(source, steps=2, progress=False)
        assert trainer.steps == step
        trainer.save()


def load_late(ranks: hr.Ranks, folder: Path, stale: Path) -> tuple[int, Any]:
    """Rank 1 does not see the newest checkpoint in the folder yet, as it may be on a network's."""
    from hotrow.train.checkpoint import manifest as checkpoint_manifest

    trainer, real = make(ranks), checkpoint_manifest.list_checkpoints
    if ranks.rank == 1:
        checkpoint_manifest.list_checkpoints = lambda _: real(stale)
    try:
        trainer.load(folder)
    finally:
        checkpoint_manifest.list_checkpoints = real
    return trainer.steps, rows_of(trainer.model.embeddings)


def test_all_ranks_load_the_checkpoint_that_rank_0_takes_for_the_newest(crews: dict[int, Crew], tmp_path: Path) -> None:
    folder, stale = tmp_path / "run", tmp_path / "stale"
    crews[2].run(save_some, folder)
    newest, older = list_checkpoints(folder)
    shutil.copytree(older, stale / older.name)
    late = crews[2].run(load_late, folder, stale)
    assert [step for step, _ in late] == [4, 4]
    assert late == crews[2].run(load_late, newest, stale)


def load_own(ranks: hr.Ranks, folders: list[Path]) -> None:
    make(ranks).load(folders[ranks.rank])


def test_ranks_that_load_other_checkpoints_are_an_error_on_every_rank(crews: dict[int, Crew], tmp_path: Path) -> None:
    """Two folders that are not one on a network: the names are the same, and what is in them is not."""
    crews[2].run(save_some, tmp_path / "a")
    newest, older = list_checkpoints(tmp_path / "a")
    shutil.copytree(older, tmp_path / "b" / newest.name)
    for error in crews[2].errors(load_own, [tmp_path / "a", tmp_path / "b"]):
        assert isinstance(error, hr.OptionError)
        assert "rank 1 differs from rank 0 in what is in " in str(error)


def does_not_fit(ranks: hr.Ranks, folder: Path, how: str) -> tuple[str, bool]:
    """A model with another table, tower or optimizer than was saved; whether it is as it was before."""
    wide = 8 if how.startswith("dim") else 4
    tables = [
        hr.Table("user", dim=wide),
        hr.Table("item", dim=4, features={"item": "sum", "recent": "mean", "history": "none"}),
    ]
    rule = hr.optim.SGD(lr=0.1) if how.startswith("rule") else hr.optim.Adam(lr=0.01)
    embeddings = hr.EmbeddingCollection(tables, optimizer=rule, seed=3, ranks=ranks)
    tower = torch.nn.Linear(19, 1)
    trainer = hr.Trainer(hr.Recommender(embeddings, tower), checkpoints=folder)
    before = tower.weight.tolist()
    try:
        if how.endswith("resume"):
            trainer.fit(WithSequences(320, 16), resume=True, progress=False)
        else:
            trainer.load(folder)
    except hr.CheckpointError as error:
        return str(error), (before, 0, 0) == (tower.weight.tolist(), trainer.steps, len(embeddings.table("user")))
    return "it was loaded", False


@pytest.mark.parametrize(
    ("how", "named"), [("dim", "has dim 8 but"), ("tower", "has the weight"), ("rule", "is trained by SGD")]
)
def test_a_checkpoint_that_does_not_fit_is_an_error_on_every_rank(
    crews: dict[int, Crew], tmp_path: Path, how: str, named: str
) -> None:
    crews[2].run(save_some, tmp_path)
    for call in ("load", "resume"):
        for message, unchanged in crews[2].run(does_not_fit, tmp_path, f"{how} {call}"):
            assert named in message
            assert unchanged


def read_on_ray(ranks: hr.Ranks, fails: list[int]) -> None:
    """A cluster that the ranks `fails` cannot reach."""
    real = data.on_ray
    if ranks.rank not in fails:
        data.on_ray = lambda source, **_: source
    try:
        build_job({"data": {"examples": 1000, "ray": {"address": "127.0.0.1:1"}}})
    finally:
        data.on_ray = real


@pytest.mark.parametrize("fails", [[0, 1], [1]])
def test_a_ray_cluster_that_cannot_be_reached_is_an_error_on_every_rank(
    crews: dict[int, Crew], fails: list[int]
) -> None:
    pytest.importorskip("ray")
    for rank, error in enumerate(crews[2].errors(read_on_ray, fails)):
        assert isinstance(error, hr.ClusterError)
        assert "nobody answers at the Ray cluster's address '127.0.0.1:1'" in str(error)
        assert rank in fails or "opening the data failed on rank 1" in str(error)
