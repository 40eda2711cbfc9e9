"""A trainer of several tasks: bits after a resume, checkpoints of other tasks, missing labels, what is shown."""

from __future__ import annotations

import io
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from runs import bits
from runs import clicks as plain_clicks
from runs import make_trainer as make_plain_trainer
from several_tasks import NAMES, TASKS, Log, Tower, make_trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotrow as hr
from hotrow.errors import BatchError, CheckpointError, OptionError
from hotrow.train.progress_view import ProgressView

NAN = float("nan")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_of_several_tasks_has_the_same_bits(tmp_path: Path, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "window": 96}
    whole = make_trainer(**options)
    uninterrupted = whole.fit(Log(), progress=False)
    every = 5 if accumulate == 1 else 2
    first = make_trainer(tmp_path, checkpoint_every=every, **options)
    with pytest.raises(RuntimeError, match="the source dies"):
        first.fit(Log(crash_after=13), progress=False)
    first.wait()
    resumed = make_trainer(tmp_path, torch_seed=9, checkpoint_every=every, **options)
    report = resumed.fit(Log(), resume=True, progress=False)
    assert report.resumed_from is not None
    assert report.metrics == uninterrupted.metrics
    assert report.windows == uninterrupted.windows[-len(report.windows) :]
    assert bits(resumed) == bits(whole)


def test_one_binary_task_learns_as_a_trainer_without_tasks() -> None:
    plain = make_plain_trainer().fit(plain_clicks(), progress=False)
    named = make_plain_trainer(tasks=[hr.Task("click")]).fit(plain_clicks(), progress=False)
    assert named.losses == pytest.approx(plain.losses, rel=1e-4)
    assert named.metrics["click/auc"] == pytest.approx(plain.metrics["auc"], abs=1e-3)


def test_three_tasks_learn_beside_each_other() -> None:
    trainer = make_trainer()
    before = trainer.evaluate(Log(), progress=False)
    report = trainer.fit(Log(2560), epochs=2, progress=False)
    after = trainer.evaluate(Log(), progress=False)
    assert report.steps == 160
    assert after["click/auc"] > before["click/auc"] + 0.05
    assert after["dwell/rmse"] < 0.8 * before["dwell/rmse"]
    assert after["orders/deviance"] < before["orders/deviance"]
    assert after["click/examples"] == 640 and after["dwell/examples"] < 640 and after["orders/examples"] < 640


def test_a_missing_label_changes_no_weight_of_its_task() -> None:
    """With the labels of a task missing everywhere, its own tower inside the head keeps its bits."""

    def forget_dwell(number: int, labels: Tensor) -> Tensor:
        labels[:, 1] = NAN
        return labels

    head = partial(hr.nn.SharedBottom, tasks=NAMES, tower=(4,))
    trainer = make_trainer(head=head)
    before = {name: value.clone() for name, value in trainer.model.tower.head.state_dict().items()}
    with pytest.warns(UserWarning, match="task 'dwell' had no labels in training"):
        report = trainer.fit(Log(fate=forget_dwell), progress=False)
    assert report.metrics["dwell/examples"] == 0.0 and "dwell/rmse" not in report.metrics
    for name, value in trainer.model.tower.head.state_dict().items():
        assert torch.equal(value[1], before[name][1])
        assert not torch.equal(value[0], before[name][0])


def test_a_batch_without_labels_of_a_task_or_of_all_says_nothing() -> None:
    def forget(number: int, labels: Tensor) -> Tensor:
        labels[:, 1 if number % 2 else slice(None)] = NAN if number < 6 else 1.0
        return labels

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = make_trainer().fit(Log(fate=forget), progress=False)
    assert report.losses[0] == 0.0 and all(math.isfinite(loss) for loss in report.losses)


def test_an_evaluation_without_labels_of_a_task_says_so() -> None:
    def forget(number: int, labels: Tensor) -> Tensor:
        labels[:, 2] = NAN
        return labels

    with pytest.warns(UserWarning, match="task 'orders' had no labels in the evaluation"):
        figures = make_trainer().evaluate(Log(fate=forget), progress=False)
    assert {name for name in figures if name.startswith("orders/")} == {"orders/examples"}


def test_predictions_have_the_link_of_their_kind() -> None:
    trainer = make_trainer()
    batch = next(iter(Log().batches()))[0]
    predicted = trainer.predict(batch)
    trainer.model.eval()
    logits = trainer.model(batch).detach()
    assert torch.equal(predicted[:, 0], torch.sigmoid(logits[:, 0]))
    assert torch.equal(predicted[:, 1], logits[:, 1])
    assert torch.equal(predicted[:, 2], torch.exp(logits[:, 2]))


@pytest.mark.parametrize(
    ("tasks", "fact"),
    [
        ([TASKS[0], TASKS[2], TASKS[1]], "the order or the number differs"),
        ([*TASKS[:2], hr.Task("likes", "count")], "it lacks likes"),
        ([*TASKS[:2], hr.Task("orders", "regression")], "it lacks orders"),
        (TASKS[:2], "the order or the number differs"),
    ],
)
def test_a_checkpoint_of_other_tasks_is_refused(tmp_path: Path, tasks: list[hr.Task], fact: str) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(Log(), steps=2, progress=False)
    trainer.save()
    other = make_trainer(tmp_path, tasks=tasks, head=lambda width: nn.Linear(width, len(tasks)))
    before = bits(other)
    with pytest.raises(CheckpointError, match=rf"click \(binary\), dwell \(regression\), orders \(count\).*{fact}"):
        other.load(tmp_path)
    with pytest.raises(CheckpointError, match=fact):
        other.fit(Log(), resume=True, progress=False)
    assert bits(other)["rows"] == before["rows"] == {"user": {}, "item": {}}
    other.load(tmp_path, tables=["user"])


def test_checkpoints_with_and_without_tasks_do_not_mix(tmp_path: Path) -> None:
    plain = make_plain_trainer(tmp_path / "plain")
    plain.fit(plain_clicks(), steps=2, progress=False)
    plain.save()
    named = make_plain_trainer(tmp_path / "named", tasks=[hr.Task("click")])
    with pytest.raises(CheckpointError, match=r"was trained on no named task, .* Train with no tasks="):
        named.load(tmp_path / "plain")
    named.fit(plain_clicks(), steps=2, progress=False)
    named.save()
    with pytest.raises(CheckpointError, match=r"this trainer has no named task.* Train with tasks=\['click'\]"):
        plain.load(tmp_path / "named")


def test_heads_and_towers_of_other_tasks_are_refused() -> None:
    with pytest.raises(OptionError, match=r"MMoE gives logits of the tasks click, dwell, orders, but .* dwell, click"):
        make_trainer(tasks=[TASKS[1], TASKS[0]])
    with pytest.raises(OptionError, match=r"logits of shape \[32, 2\] but the trainer has 3 tasks"):
        make_trainer(head=lambda width: nn.Linear(width, 2)).fit(Log(), progress=False)
    with pytest.raises(OptionError, match="loss= beside tasks="):
        make_trainer(loss=nn.functional.mse_loss)
    with pytest.raises(OptionError, match=r"give a list of hr\.Task"):
        make_trainer(tasks=["click"])  # type: ignore[list-item]


def test_a_bad_label_changes_nothing() -> None:
    def spoil(number: int, labels: Tensor) -> Tensor:
        if number == 0:
            labels[3, 2] = -1.0
        return labels

    trainer = make_trainer()
    trainer.fit(Log(), steps=1, progress=False)
    before = bits(trainer)
    with pytest.raises(BatchError, match=r"task 'orders' of kind 'count' has the label -1.0 at example 3"):
        trainer.fit(Log(fate=spoil), cursor=trainer.cursor, progress=False)
    after = bits(trainer)
    for name in ("steps", "tower", "optimizer"):
        assert after[name] == before[name]


def test_a_spec_with_labels_of_other_tasks_is_refused() -> None:
    labels = [hr.features.Label("click"), hr.features.Label("dwell", "regression"), hr.features.Label("orders")]
    log = Log()
    log.features = hr.FeatureSpec([hr.features.Key("user")], label=labels)  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match=r"orders \(binary\), but .* orders \(count\); give the spec label="):
        make_trainer().fit(log, progress=False)
    with pytest.raises(OptionError, match=r"orders \(binary\)"):
        make_trainer().evaluate(log, progress=False)


def test_windows_and_the_progress_line_show_each_task() -> None:
    trainer = make_trainer(window=160)
    report = trainer.fit(Log(), progress=False)
    assert len(report.windows) == 4
    assert report.windows[0].auc == report.windows[0].tasks["click/auc"]
    assert {"dwell/rmse", "orders/deviance"} < report.windows[0].tasks.keys()
    out = io.StringIO()
    with ProgressView("train", 640, console=Console(file=out, width=400)) as view:
        view.update(640, 1280, {**report.metrics, "likes/examples": 0.0})
    for shown in ("click/auc 0.", "dwell/rmse ", "orders/deviance ", "likes: no labels"):
        assert shown in out.getvalue()
    assert "mean_label" not in out.getvalue()


class Checkpointed(Tower):
    """The same tower with its hidden layers computed again in backward."""

    again = True

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        x = torch.cat([vectors["user"], vectors["item"], dense], 1)
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.again else self.hidden(x)
        head = partial(checkpoint, self.head, use_reentrant=False) if self.again else self.head
        logits: Tensor = head(hidden)
        return logits


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("head", [hr.nn.SharedBottom, hr.nn.MMoE, hr.nn.PLE])
def test_checkpointed_activations_change_no_bit(precision: str, head: Any) -> None:
    """Dropout draws again what it drew in forward; the tasks' losses are outside of autocast."""
    options: dict[str, Any] = {"tasks": NAMES, "tower": (4,)}
    options |= {} if head is hr.nn.SharedBottom else {"expert": (6,)}
    runs = []
    for again in (False, True):
        torch.manual_seed(4)
        tower = Checkpointed(partial(head, **options))
        tower.again = again
        trainer = make_trainer(tower=tower, precision=precision, accumulate=2)
        report = trainer.fit(Log(320), progress=False)
        runs.append((report.losses, report.metrics, bits(trainer)))
    assert runs[0] == runs[1]
    assert all(math.isfinite(loss) for loss in runs[0][0])
