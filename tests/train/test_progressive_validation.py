"""Progressive validation: windows depend on the stream of examples alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import runs
import torch

import hotrow as hr
from hotrow.errors import BatchError, OptionError
from hotrow.train.metrics import Metrics
from hotrow.train.progressive_validation import Windows


def scored(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = (torch.rand(count, generator=generator) < 0.4).float()
    logits = labels + torch.randn(count, generator=generator)
    return logits, labels, torch.arange(count) * 7 + 1_000_000


@pytest.mark.parametrize("every", [50, "1s"])
@pytest.mark.parametrize("batch", [1, 13, 50, 400])
def test_how_examples_are_batched_makes_no_difference(every: int | str, batch: int) -> None:
    logits, labels, times = scored(400)
    curves = []
    for size in (batch, 400):
        windows = Windows(every)
        for at in range(0, 400, size):
            windows.update(*(part[at : at + size] for part in (logits, labels, times)), step=1)
        curves.append([(w.number, w.examples, w.time, w.auc, round(w.logloss, 9)) for w in windows.points])
    assert curves[0] == curves[1]
    assert len(curves[0]) == (8 if every == 50 else 2)


def test_a_window_is_what_metrics_say_of_its_examples() -> None:
    logits, labels, _ = scored(400)
    windows, metrics = Windows(100), Metrics()
    windows.update(logits, labels, None, step=1)
    metrics.update(logits[100:200], labels[100:200])
    assert windows.points[1].auc == metrics.compute()["auc"]
    assert windows.points[1].logloss == metrics.compute()["logloss"]


def test_event_time_cuts_at_full_stretches_and_late_examples_stay() -> None:
    windows = Windows("1s")
    times = torch.tensor([1_500, 1_900, 2_100, 1_200, 2_900, 9_000])
    windows.update(torch.zeros(6), torch.tensor([1.0, 0, 1, 0, 1, 0]), times, step=1)
    assert [(w.examples, w.time) for w in windows.points] == [(2, 1_900), (5, 2_900)]
    with pytest.raises(BatchError, match="needs event times"):
        windows.update(torch.zeros(1), torch.zeros(1), None, step=1)


def test_the_curve_goes_on_over_a_checkpoint(tmp_path: Path) -> None:
    def trainer(folder: Path | None) -> hr.Trainer:
        made = runs.make_trainer(folder)
        made.counts.windows = Windows(100)
        return made

    log = runs.clicks(640)
    whole = trainer(None).fit(log, progress=False).windows
    first = trainer(tmp_path / "a")
    head = first.fit(log, steps=7, progress=False).windows
    first.save()
    tail = trainer(tmp_path / "a").fit(log, resume=True, progress=False).windows
    assert [dataclasses.astuple(w) for w in [*head, *tail]] == [dataclasses.astuple(w) for w in whole]
    assert len(whole) == 6


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "0s", "soon"])
def test_a_wrong_window_is_refused(window: object) -> None:
    with pytest.raises(OptionError):
        Windows(window)  # type: ignore[arg-type]
