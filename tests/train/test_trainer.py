"""The trainer learns, repeats a run bit for bit, and refuses bad numbers."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from rich.console import Console
from runs import all_rows

import hotrow as hr
from hotrow import _core
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.train.progress_view import ProgressView


def clicks(examples: int = 8192, offset: int = 0, batch_size: int = 512) -> SyntheticClicks:
    return SyntheticClicks.criteo_like(examples=examples, offset=offset, batch_size=batch_size, keys=600_000)


def make_trainer(source: SyntheticClicks, optimizer: hr.optim.Optimizer | None = None, **options: object) -> hr.Trainer:
    embeddings = hr.EmbeddingCollection(
        [hr.Table(name, dim=8) for name in source.shape.sparse], optimizer=optimizer or hr.optim.RowWiseAdagrad(lr=0.1)
    )
    torch.manual_seed(0)
    tower = hr.models.DLRM(embeddings.features, dense_features=13, bottom=(16,), top=(32,))
    return hr.Trainer(hr.Recommender(embeddings, tower), **options)  # type: ignore[arg-type]


def test_it_learns_on_a_synthetic_log() -> None:
    source = clicks(60_000)
    trainer = make_trainer(source)
    trainer.fit(source, progress=False)
    tested = trainer.evaluate(clicks(20_000, offset=60_000), progress=False)
    assert tested["auc"] > 0.68
    assert tested["auc"] < source.best_auc(20_000) + 0.02


def test_the_same_run_twice_gives_the_same_bits() -> None:
    runs = []
    for _ in range(2):
        source = clicks()
        trainer = make_trainer(source)
        report = trainer.fit(source, progress=False)
        weights = [p.detach().numpy().tobytes() for p in trainer.model.tower.parameters()]
        runs.append((report.losses, all_rows(trainer), weights))
    assert runs[0] == runs[1]


def test_rows_do_not_depend_on_the_stores_threads() -> None:
    before = _core.threads()
    runs = []
    try:
        for threads in (1, 2, 3):
            _core.set_threads(threads)
            source = clicks()
            trainer = make_trainer(source, hr.optim.Adam(lr=0.01))
            runs.append((trainer.fit(source, progress=False).losses, all_rows(trainer)))
    finally:
        _core.set_threads(before)
    assert runs[0] == runs[1] == runs[2]


def test_evaluation_creates_no_row_and_touches_no_count() -> None:
    source = clicks()
    trainer = make_trainer(source)
    trainer.fit(source, progress=False)
    before = all_rows(trainer)
    trainer.evaluate(clicks(4096, offset=1_000_000), progress=False)
    trainer.predict(next(iter(source.batches()))[0])
    assert all_rows(trainer) == before
    assert trainer.model.training


def test_stopping_and_going_on_from_the_cursor_is_the_same_as_not_stopping() -> None:
    source = clicks()
    whole = make_trainer(source)
    losses = whole.fit(source, progress=False).losses
    parts = make_trainer(source)
    first = parts.fit(source, steps=5, progress=False)
    second = parts.fit(source, cursor=first.cursor, progress=False)
    assert first.steps == 5
    assert first.losses + second.losses == losses
    assert all_rows(parts) == all_rows(whole)


def test_accumulation_makes_one_update_of_several_batches() -> None:
    small = clicks(4096, batch_size=256)
    large = dataclasses.replace(small, batch_size=1024)
    accumulated = make_trainer(small, hr.optim.SGD(lr=0.1), accumulate=4)
    plain = make_trainer(large, hr.optim.SGD(lr=0.1))
    a, b = accumulated.fit(small, progress=False), plain.fit(large, progress=False)
    assert a.steps == b.steps == 4
    for one, other in zip(accumulated.model.embeddings.tables, plain.model.embeddings.tables, strict=True):
        keys = torch.cat([chunk.keys for chunk in one.scan()])
        assert len(one) == len(other)
        torch.testing.assert_close(one.read(keys), other.read(keys), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_of_the_tower_trains_like_fp32(precision: str) -> None:
    source = clicks(512, batch_size=64)
    mixed, plain = make_trainer(source, precision=precision), make_trainer(source)
    mixed_losses = mixed.fit(source, progress=False).losses
    plain_losses = plain.fit(source, progress=False).losses
    assert mixed_losses != plain_losses
    torch.testing.assert_close(torch.tensor(mixed_losses), torch.tensor(plain_losses), rtol=0.05, atol=0.02)


def test_a_loss_that_is_not_finite_stops_the_run_and_changes_nothing() -> None:
    source = clicks(1024)
    trainer = make_trainer(source)
    trainer.fit(source, progress=False)
    before = all_rows(trainer)
    weights = [p.detach().clone() for p in trainer.model.tower.parameters()]
    batch, cursor = next(iter(source.batches()))
    assert batch.dense is not None
    bad = dataclasses.replace(batch, dense=torch.full_like(batch.dense, float("nan")))

    class Bad:
        examples = 512

        def batches(self, _: object = None) -> object:
            yield bad, cursor

        def describe(self) -> str:
            return "bad"

    with pytest.raises(hr.GradientError, match="loss is nan at step 3"):
        trainer.fit(Bad(), progress=False)  # type: ignore[arg-type]
    after = all_rows(trainer)
    assert {n: {k: v for k, v in rows.items() if k in before[n]} for n, rows in after.items()} == before
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.model.tower.parameters(), strict=True))


def test_a_batch_without_labels_is_refused() -> None:
    source = clicks(512)
    trainer = make_trainer(source)
    batch, cursor = next(iter(source.batches()))

    class Unlabelled:
        examples = None

        def batches(self, _: object = None) -> object:
            yield dataclasses.replace(batch, labels=None), cursor

        def describe(self) -> str:
            return "unlabelled"

    with pytest.raises(hr.BatchError, match="no labels"):
        trainer.fit(Unlabelled(), progress=False)  # type: ignore[arg-type]


def test_wrong_options_are_named_with_their_values() -> None:
    source = clicks(512)
    with pytest.raises(hr.OptionError, match="precision='fp8'"):
        make_trainer(source, precision="fp8")
    with pytest.raises(hr.OptionError, match="accumulate=0"):
        make_trainer(source, accumulate=0)


def test_tensorboard_gets_the_metrics(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("tensorboard")
    source = clicks(1024)
    trainer = make_trainer(source, log_dir=str(tmp_path))
    trainer.fit(source, evaluate=source, evaluate_every=1, progress=False)
    trainer.writer.flush()
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_the_progress_line_says_that_a_checkpoint_is_being_written() -> None:
    text = io.StringIO()
    view = ProgressView("train", 1000, console=Console(file=text, width=200), done=500)
    view.update(100, 200, {"auc": 0.5}, saving=12)
    view.update(200, 400, {"auc": 0.5})
    first, second = text.getvalue().splitlines()
    assert "600 of 1.0k examples" in first
    assert first.endswith("saving step 12")
    assert "saving" not in second
