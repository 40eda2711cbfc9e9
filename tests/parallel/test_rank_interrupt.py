"""Ctrl-C or SIGTERM on one rank: all stop after the same step, with one checkpoint from which a run continues to the
same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from test_rank_training import WithSequences, make, outcome

import hotrow as hr
from hotrow.data import Cursor
from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint
from hotrow.train.fit import FitRun
from hotrow.train.interrupt import Interrupted

BATCH = 16


def press(sent: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), sent)
    time.sleep(0.02)


def press_in_batch(trainer: hr.Trainer, number: int, sent: int) -> None:
    """The signal, in the middle of that batch's computation."""
    real, calls = trainer._forward_backward, [0]

    def compute(lookup: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            press(sent)
        return real(lookup)

    trainer._forward_backward = compute  # type: ignore[method-assign]


def stopped(trainer: hr.Trainer, source: Any, **fit: Any) -> Interrupted:
    try:
        trainer.fit(source, progress=False, **fit)
    except Interrupted as stop:
        assert stop.step == trainer.steps
        assert not [thread for thread in threading.enumerate() if thread.name.startswith(("hotrow ", "save "))]
        return stop
    raise AssertionError("Ctrl-C did not end it")


def state(trainer: hr.Trainer, report: hr.Report) -> dict[str, Any]:
    """What does not depend on where this call of `fit` began."""
    made = outcome(trainer, report)
    return {name: made[name] for name in ("rows", "tower", "cursor", "random", "metrics")} | {
        "steps": trainer.steps,
        "own metrics": trainer.metrics.state(),
        "place": vars(trainer.position),
    }


def train(ranks: hr.Ranks, batches: int, epochs: int, options: dict[str, Any]) -> dict[str, Any]:
    trainer = make(ranks, noisy=True, **options)
    report = trainer.fit(WithSequences(batches * BATCH, BATCH), epochs=epochs, progress=False)
    return {**state(trainer, report), "losses": report.losses}


def interrupt(
    ranks: hr.Ranks,
    folder: Path,
    batches: int,
    epochs: int,
    options: dict[str, Any],
    on: int,
    at: int,
    sent: int = signal.SIGINT,
) -> dict[str, Any]:
    """The same, with a signal to one rank in its batch number `at`; then another trainer goes on."""
    source = WithSequences(batches * BATCH, BATCH)
    trainer = make(ranks, folder, noisy=True, **options)
    if ranks.rank == on:
        press_in_batch(trainer, at, sent)
    stop = stopped(trainer, source, epochs=epochs)
    assert stop.report is not None and stop.signal == sent
    trainer = make(ranks, folder, noisy=True, **options)
    torch.manual_seed(99)
    report = trainer.fit(source, epochs=epochs, resume=True, progress=False)
    return {
        **state(trainer, report),
        "losses": stop.report.losses + report.losses,
        "stop": (stop.step, stop.checkpoint, report.resumed_from),
    }


def check_stop(whole: list[dict[str, Any]], ours: list[dict[str, Any]], folder: Path, step: int) -> None:
    stops = [one.pop("stop") for one in ours]
    assert stops == [(step, folder / f"step-{step:012}", step)] * len(ours)
    assert [path.name for path in list_checkpoints(folder)] == [f"step-{step:012}"]
    open_checkpoint(folder).verify()
    assert ours == whole


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("lookahead", "sent"), [(0, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_goes_on_from_it(
    crews: dict[int, Crew], tmp_path: Path, lookahead: int, sent: int, accumulate: int
) -> None:
    """With accumulate=3 it comes in the middle of a step, whose batches are still computed."""
    options = {"lookahead": lookahead, "accumulate": accumulate}
    crew = crews[2 if lookahead else 3]
    whole = crew.run(train, 14 * crew.world, 1, options)
    ours = crew.run(interrupt, tmp_path, 14 * crew.world, 1, options, 1, 8, sent)
    check_stop(whole, ours, tmp_path, -(-8 // accumulate))


def test_ctrl_c_on_a_rank_that_has_run_out_of_data_stops_all(crews: dict[int, Crew], tmp_path: Path) -> None:
    """The sixth and last step of a pass has a batch for rank 0 alone."""
    crew = crews[3]
    whole = crew.run(train, 5 * 3 + 1, 2, {})
    ours = crew.run(interrupt, tmp_path, 5 * 3 + 1, 2, {}, 2, 6)
    check_stop(whole, ours, tmp_path, 6)


class PressesIn(WithSequences):
    """A source that presses Ctrl-C on one rank, as it gives its third batch."""

    def __init__(self, examples: int, mine: bool) -> None:
        super().__init__(examples, BATCH)
        self.mine = mine

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for number, item in enumerate(super().batches(cursor)):
            if number == 3 and self.mine:
                press()
            yield item


def interrupt_evaluation(ranks: hr.Ranks, folder: Path) -> tuple[Any, ...]:
    source = WithSequences(12 * ranks.world * BATCH, BATCH)
    trainer = make(ranks, folder)
    tested = PressesIn(10_000, ranks.rank == 1)
    stop = stopped(trainer, source, evaluate=tested, evaluate_every=4)
    assert stop.report is not None
    ((_, figures),) = stop.report.evaluations
    tested.mine = False
    return stop.step, stop.checkpoint, figures["examples"], trainer.evaluate(tested, progress=False)["examples"]


def test_ctrl_c_on_one_rank_ends_an_evaluation_on_all(crews: dict[int, Crew], tmp_path: Path) -> None:
    """And one that is made afterwards is whole."""
    for step, checkpoint, part, whole in crews[2].run(interrupt_evaluation, tmp_path):
        assert (step, checkpoint) == (4, tmp_path / "step-000000000004")
        assert 0 < part < 10_000
        assert whole == 10_000


def interrupt_the_end(ranks: hr.Ranks, folder: Path) -> tuple[Any, ...]:
    trainer = make(ranks, folder)
    reduce = FitRun._reduce

    def press_and_reduce(run: FitRun) -> None:
        press()
        reduce(run)

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(FitRun, "_reduce", press_and_reduce)
        stop = stopped(trainer, WithSequences(5 * ranks.world * BATCH, BATCH))
    return stop.step, stop.checkpoint


def test_ctrl_c_on_one_rank_after_the_last_step_is_heard_by_all(crews: dict[int, Crew], tmp_path: Path) -> None:
    assert crews[2].run(interrupt_the_end, tmp_path) == [(5, tmp_path / "step-000000000005")] * 2


def stop_from_a_thread(ranks: hr.Ranks) -> tuple[int, str]:
    """Rank 0 calls `stop` while it trains; there is no folder for a checkpoint."""
    trainer = make(ranks)
    if ranks.first:
        threading.Timer(0.1, trainer.stop).start()
    stop = stopped(trainer, WithSequences(100_000 * BATCH, BATCH))
    return stop.step, stop.why


def test_stop_on_one_rank_stops_all(crews: dict[int, Crew]) -> None:
    one, other = crews[2].run(stop_from_a_thread)
    assert one == other
    assert one[0] > 0 and one[1] == "nothing was saved: there is no checkpoints="
