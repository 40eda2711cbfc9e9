"""Ctrl-C and SIGTERM while training: a whole step, a valid checkpoint, no thread left; the run can continue."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from runs import bits, clicks, make_trainer, names

import hotrow as hr
from hotrow import signals
from hotrow.data import Cursor
from hotrow.job import load_job
from hotrow.train import interrupt, stage_threads
from hotrow.train.checkpoint.manifest import list_checkpoints
from hotrow.train.interrupt import Interrupted

JOB = """
[data]
examples = 20_000_000
test_examples = 0
batch_size = 256
keys = 1_000_000
[embeddings]
dim = 8
[tower]
bottom = [16]
top = [16]
[train]
lookahead = {lookahead}
{steps}
[checkpoints]
folder = "{folder}"
every = 5
"""


def press_ctrl_c(trainer: hr.Trainer, batch: int, number: int = signal.SIGINT) -> None:
    """In the middle of that batch's computation."""
    real, calls = trainer._forward_backward, [0]

    def compute(lookup: Any) -> Any:
        calls[0] += 1
        result = real(lookup)
        if calls[0] == batch:
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        return result

    trainer._forward_backward = compute  # type: ignore[method-assign]


@pytest.mark.parametrize(("lookahead", "number"), [(0, signal.SIGINT), (2, signal.SIGTERM)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_signal_saves_the_last_whole_step_and_the_run_goes_on_from_it(
    tmp_path: Path, lookahead: int, number: signal.Signals, accumulate: int
) -> None:
    whole = make_trainer(accumulate=accumulate)
    losses = whole.fit(clicks(), progress=False).losses
    expected = bits(whole)
    trainer = make_trainer(tmp_path, accumulate=accumulate, lookahead=lookahead)
    press_ctrl_c(trainer, 8, number)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit(clicks(), progress=False)
    stop = caught.value
    assert isinstance(stop, Interrupted) and stop.signal == number
    step = -(-8 // accumulate)  # the batches of a step that has begun are finished
    assert stop.step == trainer.steps == step
    assert stop.checkpoint == tmp_path / f"step-{step:012}" and stop.checkpoint.is_dir()
    assert names(tmp_path) == [stop.checkpoint.name]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("hotrow ", "save "))]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed = make_trainer(tmp_path, torch_seed=9, accumulate=accumulate, lookahead=lookahead)
    report = resumed.fit(clicks(), resume=True, progress=False)
    assert report.losses == losses[step * accumulate :]
    assert bits(resumed) == expected


def test_a_checkpoint_of_that_very_step_is_not_written_again(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, checkpoint_every=4)
    press_ctrl_c(trainer, 8)
    with pytest.raises(Interrupted) as caught:
        trainer.fit(clicks(), progress=False)
    assert caught.value.checkpoint == tmp_path / "step-000000000008"
    assert names(tmp_path) == ["step-000000000004", "step-000000000008"]


def test_without_a_folder_ctrl_c_says_that_nothing_was_saved() -> None:
    trainer = make_trainer()
    press_ctrl_c(trainer, 3)
    with pytest.raises(KeyboardInterrupt, match="after step 3; nothing was saved: there is no checkpoints="):
        trainer.fit(clicks(), progress=False)
    assert trainer.evaluate(clicks(), progress=False)["examples"] == clicks().examples  # it was `fit` that was to end
    trainer.fit(clicks(), cursor=trainer.cursor, progress=False)
    assert trainer.steps == 20


def test_ctrl_c_does_not_wait_for_a_source_that_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_threads, "JOIN_TIMEOUT", 0.3)
    monkeypatch.setattr(interrupt, "STEP_TIMEOUT", 0.3)
    opened = threading.Event()

    class Blocks:
        examples = None

        def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
            for i, item in enumerate(clicks().batches(cursor)):
                if i == 5:
                    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                    opened.wait(60)
                yield item

        def describe(self) -> str:
            return "blocks"

    start = time.monotonic()
    for accumulate in (1, 2):
        trainer = make_trainer(tmp_path / str(accumulate), accumulate=accumulate)
        with pytest.raises(Interrupted) as caught, pytest.warns(UserWarning, match="'hotrow read' has not ended"):
            trainer.fit(Blocks(), progress=False)
        assert caught.value.step == 5 // accumulate
        if accumulate == 1:
            assert caught.value.checkpoint is not None and caught.value.checkpoint.is_dir()
        else:  # the fifth batch waited for a sixth
            assert caught.value.checkpoint is None and "1 of 2 batches of the next step" in caught.value.why
    assert time.monotonic() - start < 10
    opened.set()


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "DUPLICATE_SECONDS", 0.0)
    trainer = make_trainer(tmp_path)
    press_ctrl_c(trainer, 3)
    inner = trainer._forward_backward

    def twice(lookup: Any) -> Any:
        result = inner(lookup)
        if trainer.stop_requests.number:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return result

    trainer._forward_backward = twice  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit(clicks(), progress=False)
    assert not isinstance(caught.value, Interrupted)
    assert names(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hotrow ")]


def start(job: Path, *options: str) -> forked.Forked:
    log = job.with_suffix(".log")
    return forked.hotrow("train", str(job), "--quiet", *options, log=log, env={"COLUMNS": "400"})


@pytest.mark.parametrize("lookahead", [3])
def test_sigint_to_a_real_run_exits_with_130_and_resume_is_exact(tmp_path: Path, lookahead: int) -> None:
    job, folder = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB.format(folder=folder, lookahead=lookahead, steps=""))
    process = start(job)
    deadline = time.monotonic() + 120
    while not (folder.exists() and list_checkpoints(folder)):
        assert process.poll() is None and time.monotonic() < deadline, process.text()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, out = process.wait(60), process.text()
    assert code == 130, out
    newest = list_checkpoints(folder)[0]
    step = int(newest.name.split("-")[1])
    assert f"stopped after step {step:,}; saved to {newest}; go on with `hotrow train {job} --resume`" in out
    assert "Traceback" not in out and "Aborted" not in out

    resumed = start(job, "--resume", "--steps", str(step + 7))
    code, out = resumed.wait(120), resumed.text()
    assert code == 0, out
    assert "stages busy at a time" in out and "compute" in out

    plain_job = tmp_path / "plain.toml"
    plain_job.write_text(JOB.format(folder=tmp_path / "plain", lookahead=0, steps=f"steps = {step + 7}"))
    plain = load_job(plain_job)
    plain.trainer.fit(plain.source, steps=plain.steps, progress=False)
    loaded = load_job(plain_job).trainer
    loaded.load(list_checkpoints(folder)[0])
    assert loaded.steps == step + 7
    assert {k: v for k, v in bits(loaded).items() if k != "place"} == {
        k: v for k, v in bits(plain.trainer).items() if k != "place"
    }
