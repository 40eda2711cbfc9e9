"""A run that was interrupted and resumed is the run that was not, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import Crash, CrashAfter, bits, clicks, make_trainer

import hotrow as hr
from hotrow.train.checkpoint.manifest import list_checkpoints


def crash(folder: Path, after: int, *, steps: int | None = None, epochs: int = 1, **options: object) -> None:
    """Train until the source dies, and leave only what a dead process leaves: its checkpoints."""
    trainer = make_trainer(folder, **options)  # type: ignore[arg-type]
    with pytest.raises(Crash):
        trainer.fit(CrashAfter(clicks(), after), steps=steps, epochs=epochs, progress=False)
    trainer.wait()


@pytest.mark.parametrize("after", [4, 5, 11, 19])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("precision", "dense"), [("fp32", "adam"), ("fp32", "sgd"), ("fp16", "adam")])
def test_resumed_equals_uninterrupted(tmp_path: Path, after: int, accumulate: int, precision: str, dense: str) -> None:
    options = {"accumulate": accumulate, "precision": precision, "dense": dense}
    whole = make_trainer(**options)
    uninterrupted = whole.fit(clicks(), progress=False)
    expected = bits(whole)

    every = 4 if accumulate == 1 else 1
    crash(tmp_path, after, checkpoint_every=every, **options)
    resumed = make_trainer(tmp_path, torch_seed=99, checkpoint_every=every, **options)
    report = resumed.fit(clicks(), resume=True, progress=False)

    assert report.resumed_from is not None
    assert report.losses == uninterrupted.losses[20 - len(report.losses) :]
    assert report.metrics == uninterrupted.metrics
    assert bits(resumed) == expected


def test_updates_that_fp16_skipped_are_skipped_again(tmp_path: Path) -> None:
    def make(folder: Path | None = None) -> hr.Trainer:
        trainer = make_trainer(folder, precision="fp16", checkpoint_every=folder and 2)
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
        return trainer

    whole = make()
    uninterrupted = whole.fit(clicks(), progress=False)
    expected = bits(whole)
    assert 2 < uninterrupted.steps < 18
    first = make(tmp_path)
    with pytest.raises(Crash):
        first.fit(CrashAfter(clicks(), 15), progress=False)
    first.wait()
    resumed = make(tmp_path)
    report = resumed.fit(clicks(), resume=True, progress=False)
    assert report.losses == uninterrupted.losses[20 - len(report.losses) :]
    assert bits(resumed) == expected


def test_checkpoints_do_not_change_the_run(tmp_path: Path) -> None:
    plain, saving = make_trainer(), make_trainer(tmp_path, checkpoint_every=1, keep=2)
    losses = plain.fit(clicks(), progress=False).losses
    expected = bits(plain)
    torch.manual_seed(1)
    saving = make_trainer(tmp_path, checkpoint_every=1, keep=2)
    report = saving.fit(clicks(), progress=False)
    assert report.losses == losses
    assert bits(saving) == expected
    assert [save.step for save in report.saves] == list(range(1, 21))
    assert all(save.done for save in report.saves)
    assert report.longest_pause == max(save.pause_seconds for save in report.saves) > 0


def test_crashing_again_and_again_still_gets_there(tmp_path: Path) -> None:
    whole = make_trainer()
    losses = whole.fit(clicks(), progress=False).losses
    expected = bits(whole)
    crash(tmp_path, 3, checkpoint_every=2)
    for _ in range(5):
        trainer = make_trainer(tmp_path, torch_seed=5, checkpoint_every=2)
        with pytest.raises(Crash):
            trainer.fit(CrashAfter(clicks(), 3), resume=True, progress=False)
        trainer.wait()
    last = make_trainer(tmp_path, torch_seed=6, checkpoint_every=2)
    report = last.fit(clicks(), resume=True, progress=False)
    assert report.resumed_from == 12
    assert report.losses == losses[12:]
    assert bits(last) == expected


def test_steps_count_from_the_start_of_the_interrupted_run(tmp_path: Path) -> None:
    whole = make_trainer()
    whole.fit(clicks(), steps=3, progress=False)  # the run in question is the second one of its trainer
    losses = whole.fit(clicks(), steps=10, progress=False).losses
    expected = bits(whole)

    first = make_trainer(tmp_path, checkpoint_every=3)
    first.fit(clicks(), steps=3, progress=False)
    with pytest.raises(Crash):
        first.fit(CrashAfter(clicks(), 7), steps=10, progress=False)
    first.wait()
    resumed = make_trainer(tmp_path, checkpoint_every=3)
    report = resumed.fit(clicks(), steps=10, resume=True, progress=False)
    assert (report.resumed_from, report.steps) == (9, 4)
    assert report.losses == losses[6:]
    assert bits(resumed) == expected
    again = make_trainer(tmp_path)
    assert again.fit(clicks(), steps=9, resume=True, progress=False).steps == 0


@pytest.mark.parametrize("after", [17, 20, 23, 39])
def test_resuming_in_the_middle_of_any_epoch(tmp_path: Path, after: int) -> None:
    whole = make_trainer(accumulate=3)
    uninterrupted = whole.fit(clicks(), epochs=3, progress=False)
    expected = bits(whole)
    crash(tmp_path, after, epochs=3, accumulate=3, checkpoint_every=1)
    resumed = make_trainer(tmp_path, torch_seed=1, accumulate=3, checkpoint_every=1)
    report = resumed.fit(clicks(), epochs=3, resume=True, progress=False)
    assert report.resumed_from is not None
    assert report.losses == uninterrupted.losses[60 - len(report.losses) :]
    assert report.metrics == uninterrupted.metrics
    assert bits(resumed) == expected


def test_a_finished_run_resumes_to_nothing_and_can_be_made_longer(tmp_path: Path) -> None:
    whole = make_trainer()
    losses = whole.fit(clicks(), epochs=2, progress=False).losses
    expected = bits(whole)
    make_trainer(tmp_path, checkpoint_every=20).fit(clicks(), progress=False)
    resumed = make_trainer(tmp_path)
    report = resumed.fit(clicks(), resume=True, progress=False)
    assert (report.steps, report.losses) == (0, [])
    longer = make_trainer(tmp_path)
    assert longer.fit(clicks(), epochs=2, resume=True, progress=False).losses == losses[20:]
    assert bits(longer) == expected


def test_evaluation_comes_at_the_same_steps_after_a_resume(tmp_path: Path) -> None:
    def fit(trainer: hr.Trainer, source: object, **options: object) -> hr.Report:
        return trainer.fit(source, evaluate=clicks(64), evaluate_every=3, progress=False, **options)  # type: ignore[arg-type]

    evaluations = fit(make_trainer(), clicks()).evaluations
    first = make_trainer(tmp_path, checkpoint_every=4)
    with pytest.raises(Crash):
        fit(first, CrashAfter(clicks(), 10))
    first.wait()
    assert fit(make_trainer(tmp_path), clicks(), resume=True).evaluations == evaluations[2:]


def test_resuming_without_a_checkpoint_begins_at_the_beginning(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "none" / "yet", checkpoint_every=10)
    report = trainer.fit(clicks(), resume=True, progress=False)
    assert (report.resumed_from, report.steps) == (None, 20)
    assert [path.name for path in list_checkpoints(tmp_path / "none" / "yet")] == [
        "step-000000000020",
        "step-000000000010",
    ]


@pytest.mark.parametrize("name", ["manifest.json", "dense.safetensors", "optimizer.safetensors", "rows/user"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, name: str) -> None:
    whole = make_trainer()
    losses = whole.fit(clicks(), progress=False).losses
    expected = bits(whole)
    crash(tmp_path, 15, checkpoint_every=4)
    newest = list_checkpoints(tmp_path)[0]
    assert newest.name == "step-000000000012"
    damaged = newest / name
    if damaged.is_dir():
        damaged = max(damaged.glob("segment-*"))  # the older ones are the very files of the checkpoint before
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))

    resumed = make_trainer(tmp_path, checkpoint_every=4)
    with pytest.warns(UserWarning, match=r"passing over the checkpoint .*000012: .*" + damaged.name):
        report = resumed.fit(clicks(), resume=True, progress=False)
    assert report.resumed_from == 8
    assert report.losses == losses[8:]
    assert bits(resumed) == expected
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-{step:012d}" for step in (20, 16, 12)]
    make_trainer().load(tmp_path / "step-000000000012")  # the run saved this step again, with a valid checkpoint


def test_when_no_checkpoint_can_be_read_each_one_is_named(tmp_path: Path) -> None:
    crash(tmp_path, 15, checkpoint_every=4)
    for path in list_checkpoints(tmp_path):
        (path / "dense.safetensors").unlink()
    with (
        pytest.warns(UserWarning),
        pytest.raises(hr.CheckpointError, match=r"none of the 3 .*000012.*000008.*000004.*"),
    ):
        make_trainer(tmp_path).fit(clicks(), resume=True, progress=False)


def test_a_checkpoint_that_does_not_fit_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    crash(tmp_path, 9, checkpoint_every=4)
    trainer = make_trainer(tmp_path, dim=8)
    with pytest.raises(hr.CheckpointError, match=r"dim 8 but .* has 4"):
        trainer.fit(clicks(), resume=True, progress=False)
    with pytest.raises(hr.DataError, match="batch_size is 32 and the source has 64"):
        make_trainer(tmp_path).fit(clicks(batch_size=64), resume=True, progress=False)


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(tmp_path: Path) -> None:
    crash(tmp_path, 9, checkpoint_every=4)
    with pytest.raises(hr.OptionError, match=r"earlier run .*000008\); go on from there with resume=True"):
        make_trainer(tmp_path, checkpoint_every=4).fit(clicks(), progress=False)
    resumed = make_trainer(tmp_path, checkpoint_every=4)
    resumed.load(tmp_path)
    resumed.fit(clicks(), cursor=resumed.cursor, progress=False)
    assert len(list_checkpoints(tmp_path)) == 3


def test_resume_needs_to_know_where(tmp_path: Path) -> None:
    with pytest.raises(hr.OptionError, match="give the Trainer checkpoints="):
        make_trainer().fit(clicks(), resume=True, progress=False)
    with pytest.raises(hr.OptionError, match="epochs=0"):
        make_trainer().fit(clicks(), epochs=0, progress=False)
    with pytest.raises(hr.OptionError, match="checkpoint_every=5 with checkpoints=None"):
        make_trainer(checkpoint_every=5)
    with pytest.raises(hr.OptionError, match="keep=0"):
        make_trainer(tmp_path, keep=0)
