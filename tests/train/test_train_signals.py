"""`hotrow train` and signals: exit codes, output, and the evaluation at its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import hotrow
from runs import clicks, make_trainer

from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint
from hotrow.train.fit import FitRun
from hotrow.train.trainer import Trainer

JOB = """
[data]
examples = 4_000
test_examples = 2_000
batch_size = 100
keys = 600_000
[embeddings]
dim = 4
[tower]
bottom = [4]
top = [4]
[checkpoints]
folder = "{folder}"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(folder=tmp_path / "run"))
    return path


def send_in(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int, number: int) -> None:
    """Send the signal in that call of a method."""
    real, calls = getattr(owner, method), [0]

    def sends(self: Any, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), number)
        return real(self, *arguments, **options)

    monkeypatch.setattr(owner, method, sends)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_was_stopped_exits_by_its_signal(
    job: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    send_in(monkeypatch, Trainer, "_forward_backward", 7, number)
    done = hotrow("train", str(job), "--quiet")
    assert done.returncode == code, done.stderr
    assert [path.name for path in list_checkpoints(job.parent / "run")] == ["step-000000000007"]
    assert "stopped after step 7; saved to" in done.stdout


@pytest.fixture
def ignores_ctrl_c() -> Iterator[None]:
    """As a shell starts the background jobs of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignores_ctrl_c")
def test_a_run_that_ignores_ctrl_c_says_how_it_is_ended(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send_in(monkeypatch, Trainer, "_forward_backward", 3, signal.SIGINT)
    send_in(monkeypatch, FitRun, "_step", 7, signal.SIGTERM)
    done = hotrow("train", str(job), "--quiet")
    assert done.returncode == 143, done.stderr
    assert "stopped after step 7; saved to" in done.stdout
    says = f"Ctrl-C is ignored because the parent process ignores SIGINT; SIGTERM (kill {os.getpid()}) ends the run in"
    assert done.stderr.count(says) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_evaluation_at_the_end_loses_no_training(
    job: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    with monkeypatch.context() as patch:
        send_in(patch, Trainer, "evaluate", 1, number)
        done = hotrow("train", str(job), "--quiet")
    assert done.returncode == code, done.stderr
    assert "stopped after step 40; saved to" in done.stdout
    checkpoint = open_checkpoint(job.parent / "run")
    assert checkpoint.step == 40
    assert checkpoint.manifest["notes"]["metrics"]["test"] is None  # of some of the examples it would be another figure
    done = hotrow("train", str(job), "--quiet", "--resume")
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(job.parent / "run").manifest["notes"]["metrics"]["test"]["examples"] == 2000


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        trainer = make_trainer()
        real = trainer._forward_backward

        def compute(lookup: Any) -> Any:
            if trainer.steps == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
            return real(lookup)

        trainer._forward_backward = compute  # type: ignore[method-assign]
        trainer.fit(clicks(), progress=False)
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
    assert sorted(came) == [signal.SIGINT, signal.SIGTERM] and trainer.steps == 20
