"""A run of N ranks is the run of one process with batches N times as large; and the same bits every time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crew import Crew, working_in
from torch import Tensor, nn
from work import Rows, rows_of

import hotrow as hr
from hotrow.data import Cursor

SHAPE = hr.data.Shape(sparse={"user": None, "item": None}, dense=3, history_length=4)


class Tower(nn.Module):
    """With a parameter that no loss reaches and, if wanted, dropout and batch norm."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        parts = [nn.BatchNorm1d(16), nn.Dropout(0.3)] if noisy else []
        self.layers = nn.Sequential(nn.Linear(19, 16), *parts, nn.ReLU(), nn.Linear(16, 1))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        pooled = [v for name, v in vectors.items() if name in ("user", "item", "recent")]
        history = vectors["history"].sum(1)
        return self.layers(torch.cat([*pooled, history, dense], 1)).squeeze(1)


class WithSequences:
    """Synthetic clicks whose history is a sequence and, pooled, a second feature."""

    def __init__(self, examples: int, batch_size: int, poison: int | None = None, keys: int = 600) -> None:
        self.clicks = hr.data.synthetic(examples=examples, batch_size=batch_size, keys=keys, shape=SHAPE)
        self.examples, self.poison, self.late = examples, poison, -1

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for number, (batch, after) in enumerate(self.clicks.batches(cursor)):
            ids = {**batch.ids, "recent": batch.ids["history"]}
            dense = batch.dense
            if number == self.late:
                time.sleep(0.5)
            if number == self.poison and dense is not None:
                dense = dense * float("nan")
            yield hr.KeyedBatch(ids, dense, batch.labels, batch.time), after

    def describe(self) -> str:
        return self.clicks.describe()


def make(ranks: hr.Ranks | None, folder: Path | None = None, noisy: bool = False, **options: Any) -> hr.Trainer:
    tables = [
        hr.Table("user", dim=4),
        hr.Table("item", dim=4, features={"item": "sum", "recent": "mean", "history": "none"}),
    ]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), seed=3, ranks=ranks)
    torch.manual_seed(1 if ranks is None else 1 + ranks.rank)  # rank 0's weights count
    tower = Tower(noisy)
    return hr.Trainer(
        hr.Recommender(embeddings, tower), torch.optim.Adam(tower.parameters(), lr=0.01), checkpoints=folder, **options
    )


def outcome(trainer: hr.Trainer, report: hr.Report) -> dict[str, Any]:
    return {
        "rows": rows_of(trainer.model.embeddings),
        "tower": {name: value.numpy().tobytes() for name, value in trainer.model.tower.state_dict().items()},
        "losses": report.losses,
        "metrics": report.metrics,
        "examples": (report.examples, trainer.position.examples, report.ids),
        "steps": report.steps,
        "cursor": trainer.cursor,
        "random": torch.get_rng_state().numpy().tobytes(),
        "unused": trainer.model.tower.unused.tolist(),
    }


def train(ranks: hr.Ranks | None, examples: int, batch: int, fit: dict[str, Any], **options: Any) -> dict[str, Any]:
    trainer = make(ranks, **options)
    source = WithSequences(examples, batch)
    report = trainer.fit(source, progress=False, **fit)
    return {**outcome(trainer, report), "evaluated": trainer.evaluate(source, progress=False)}


def train_with(ranks: hr.Ranks, examples: int, batch: int, fit: dict[str, Any], options: dict[str, Any]) -> Any:
    return train(ranks, examples, batch, fit, **options)


def check_same(ours: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    first = ours[0]
    for name in ("tower", "losses", "metrics", "examples", "steps", "cursor", "evaluated"):
        assert all(one[name] == first[name] for one in ours), f"ranks differ in {name}"
    assert (first["steps"], first["examples"]) == (whole["steps"], whole["examples"])
    assert first["cursor"]["next"] == whole["cursor"]["next"]
    np.testing.assert_allclose(first["losses"], whole["losses"], rtol=1e-5)
    for name in ("metrics", "evaluated"):
        assert first[name].keys() == whole[name].keys()
        for figure, value in whole[name].items():
            assert first[name][figure] == pytest.approx(value, rel=1e-4)
    for name, data in whole["tower"].items():
        a, b = (np.frombuffer(one, dtype=np.float32) for one in (first["tower"][name], data))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert first["unused"] == [1.0, 1.0, 1.0]
    rows: Rows = {}
    for one in ours:
        for name, some in one["rows"].items():
            rows.setdefault(name, {}).update(some)
    for name, expected in whole["rows"].items():
        assert {k: r[1:] for k, r in rows[name].items()} == {k: r[1:] for k, r in expected.items()}
        for key, (values, *_) in expected.items():
            a, b = (np.frombuffer(one, dtype=np.float32) for one in (rows[name][key][0], values))
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("fit", "options"),
    [({"epochs": 2}, {}), ({"steps": 5}, {}), ({}, {"accumulate": 2}), ({}, {"clip_dense_norm": 0.05})],
)
def test_n_ranks_are_one_with_n_times_the_batch(crew: Crew, fit: dict[str, Any], options: dict[str, Any]) -> None:
    """960 examples in batches of 32: no step is short. 32 does not divide into rounding errors of weights."""
    ours = crew.run(train_with, 960, 32, fit, options)
    check_same(ours, train(None, 960, 32 * crew.world, fit, **options))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_tower_of_low_precision_is_that_of_one_process_to_rounding(crews: dict[int, Crew], precision: str) -> None:
    ours = crews[2].run(train_with, 320, 16, {}, {"precision": precision})
    whole = train(None, 320, 32, {}, precision=precision)
    for name in ("tower", "losses", "steps", "evaluated"):
        assert ours[0][name] == ours[1][name], name
    assert (ours[0]["steps"], ours[0]["examples"]) == (whole["steps"], whole["examples"])
    np.testing.assert_allclose(ours[0]["losses"], whole["losses"], rtol=2e-3)
    assert ours[0]["losses"] != crews[2].run(train_with, 320, 16, {}, {})[0]["losses"]


@pytest.mark.parametrize("examples", [980, 1030])
def test_ranks_that_run_out_first_go_on_with_empty_batches(crew: Crew, examples: int) -> None:
    """The last step has a short batch, or none, on some ranks: the mean is over the examples that there are."""
    ours = crew.run(train_with, examples, 32, {"epochs": 2}, {})
    check_same(ours, train(None, examples, 32 * crew.world, {"epochs": 2}))


def test_every_run_gives_the_same_bits(crew: Crew) -> None:
    work = (640, 16, {}, {"noisy": True})
    assert crew.run(train_with, *work) == crew.run(train_with, *work)


def test_dropout_differs_from_rank_to_rank(crew: Crew) -> None:
    states = [one["random"] for one in crew.run(train_with, 320, 16, {}, {"noisy": True})]
    assert len(set(states)) == crew.world


def resume(ranks: hr.Ranks, folder: Path, interrupted: bool) -> dict[str, Any]:
    """A run of 20 steps that is interrupted after 8 and goes on in a new trainer, or is not."""
    source = WithSequences(20 * 16 * ranks.world, 16)
    trainer = make(ranks, folder, noisy=True, checkpoint_every=4)
    if interrupted:
        trainer.fit(source, steps=8, progress=False)
        trainer = make(ranks, folder, noisy=True, checkpoint_every=4)
        torch.manual_seed(99)
        report = trainer.fit(source, resume=True, progress=False)
        assert report.resumed_from == 8
    else:
        report = trainer.fit(source, progress=False)
    metrics = trainer.metrics.state()
    return {**outcome(trainer, report), "losses": report.losses[-12:], "own metrics": metrics, "steps": trainer.steps,
            "examples": trainer.position.examples}  # fmt: skip


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(crew: Crew, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = crew.run(resume, tmp_path / "whole", False)
    assert crew.run(resume, tmp_path / "resumed", True) == whole


def save_into(ranks: hr.Ranks, folder: Path) -> None:
    """Each rank has a folder of its own at the path where all should have one."""
    with working_in(folder / str(ranks.rank)):
        make(ranks, Path("saved")).fit(WithSequences(16, 16), steps=1, progress=False)


def test_ranks_without_one_shared_checkpoint_folder_are_an_error_on_every_rank(crew: Crew, tmp_path: Path) -> None:
    errors = crew.errors(save_into, tmp_path)
    assert all(isinstance(error, hr.CheckpointError) for error in errors), errors
    assert "does not see rank 0's folder" in str(errors[0]) and "one shared folder" in str(errors[0])


def poisoned(ranks: hr.Ranks, batch: int) -> tuple[str, bool]:
    """A NaN among the dense features of one rank's batch."""
    trainer = make(ranks)
    source = WithSequences(320, 16, poison=batch)
    try:
        trainer.fit(source, progress=False)
    except hr.GradientError as error:
        return str(error), trainer.steps == batch // ranks.world
    return "", False


def test_a_loss_that_is_nan_on_one_rank_stops_all_at_the_same_step(crew: Crew) -> None:
    batch = 2 * crew.world + 1  # the third step, rank 1
    for message, stopped in crew.run(poisoned, batch):
        assert "NaN or infinite on rank 1;" in message
        assert stopped


def poisoned_while_others_are_ahead(ranks: hr.Ranks, batch: int) -> tuple[float, list[str]]:
    """The same while rank 0 reads the batch after it late; the others have begun to route it."""
    trainer, source = make(ranks), WithSequences(320, 16, poison=batch)
    if ranks.first:
        source.late = (batch // ranks.world + 1) * ranks.world
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught, pytest.raises(hr.GradientError):
        warnings.simplefilter("always")
        trainer.fit(source, progress=False)
    return time.monotonic() - start, [str(w.message) for w in caught]


def test_ranks_that_raise_at_the_same_step_leave_no_route_behind(crew: Crew) -> None:
    """Otherwise a rank would wait ten seconds for its thread, and the next run would find the leftover route."""
    for seconds, said in crew.run(poisoned_while_others_are_ahead, 2 * crew.world + 1):
        assert seconds < 9
        assert said == []
    work = (320, 16, {}, {})
    assert crew.run(train_with, *work) == crew.run(train_with, *work)


def too_few(ranks: hr.Ranks) -> None:
    make(ranks).fit(WithSequences(10, 16), progress=False)


def test_a_rank_without_a_batch_is_an_error_on_every_rank(crew: Crew) -> None:
    for error in crew.errors(too_few):
        assert isinstance(error, hr.OptionError)
        assert "rank 1 gets no batch" in str(error)


def different(ranks: hr.Ranks, what: str) -> None:
    """The last rank has another model, version or option."""
    odd = ranks.rank == ranks.world - 1
    embeddings = hr.EmbeddingCollection(
        [hr.Table("user", dim=8 if odd and what == "dim" else 4)], ranks=ranks, seed=1 if odd and what == "seed" else 0
    )
    tower = nn.Linear(4, 2 if odd and what == "tower" else 1)
    version = hr.__version__
    try:
        if odd and what == "version":
            hr.__version__ = "0.0.7"
        options = {name: 3 if odd and what == name else 1 for name in ("accumulate", "lookahead")}
        hr.Trainer(hr.Recommender(embeddings, tower), **options)
    finally:
        hr.__version__ = version


@pytest.mark.parametrize(
    ("what", "named"),
    [("dim", "'dim': 8"), ("seed", "seed: 1 against 0"), ("tower", "weights"), ("version", "'0.0.7'"),
     ("accumulate", "accumulate: 3 against 1"), ("lookahead", "lookahead: 3 against 1")],
)  # fmt: skip
def test_ranks_that_differ_are_an_error_on_every_rank(crew: Crew, what: str, named: str) -> None:
    for error in crew.errors(different, what):
        assert isinstance(error, hr.OptionError)
        assert f"rank {crew.world - 1} differs from rank 0" in str(error)
        assert named in str(error)
