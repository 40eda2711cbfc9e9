"""Towers over histories train the same bits for every budget, lookahead and resume, with rows that come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import forked
import history_models as histories
import pytest
import torch
from runs import bits

import hotrow as hr
from hotrow.data import Cursor

pytestmark = pytest.mark.usefixtures("one_torch_thread")

STEPS = 8
ADMISSION = hr.Admission(after=2, sketch="64KiB")
EXPIRY = hr.Expiry(steps=2, min_count=3, grace=1, every=1)
KINDS = ["hstu", "bst", "bst relative", "sim hard", "sim soft"]


def make(name: str, memory: hr.Memory | None = None, **options: Any) -> hr.Trainer:
    device = "cpu" if memory is not None and memory.hbm is not None else None
    built = histories.model(name, memory, device, admission=ADMISSION, expiry=EXPIRY)
    return histories.trainer_of(built, **options)


def trained(
    name: str, memory: hr.Memory | None = None, steps: int = STEPS, resume: bool = False, **options: Any
) -> hr.Trainer:
    trainer = make(name, memory, **options)
    trainer.fit(histories.Log(name, steps), resume=resume, progress=False)
    trainer.model.embeddings.flush()
    return trainer


class Dying(histories.Log):
    """The log until batch 5, which raises, or kills the process."""

    kills = False

    def batches(self, cursor: Cursor | None = None) -> Any:
        for number, item in enumerate(super().batches(cursor)):
            if number == 5:
                if self.kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the source dies")
            yield item


def over_ssd(folder: Path) -> hr.Memory:
    return hr.Memory(dram="6MiB", ssd=folder)


@pytest.mark.parametrize(("name", "accumulate"), [*((name, 1) for name in KINDS), ("hstu", 2)])
def test_budgets_lookahead_and_resume_give_the_same_bits(tmp_path: Path, name: str, accumulate: int) -> None:
    options = {"accumulate": accumulate}
    whole = trained(name, lookahead=0, **options)
    rows = bits(whole)["rows"]["item"]
    assert 0 < len(rows) < 60  # some were never admitted, or expired
    assert bits(trained(name, over_ssd(tmp_path / "one"), lookahead=2, **options)) == bits(whole)
    options |= {"checkpoints": tmp_path / "run", "checkpoint_every": 2}
    dead = make(name, **options)
    with pytest.raises(RuntimeError, match="the source dies"):
        dead.fit(Dying(name, STEPS), progress=False)
    dead.wait()
    torch.manual_seed(99)
    resumed = trained(name, over_ssd(tmp_path / "two"), resume=True, lookahead=2, **options)
    assert bits(resumed) == bits(whole)


def die(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    source = Dying(name, STEPS)
    source.kills = True
    memory = over_ssd(folder / "ssd")
    make(name, memory, lookahead=1, checkpoints=folder / "run", checkpoint_every=1).fit(source, progress=False)


def test_a_killed_run_over_histories_resumes_to_the_same_bits(tmp_path: Path) -> None:
    name = "bst relative"
    process = forked.Process(target=die, args=(name, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    saves = {"checkpoints": tmp_path / "run", "checkpoint_every": 1}
    resumed = trained(name, over_ssd(tmp_path / "ssd"), resume=True, **saves)
    assert bits(resumed) == bits(trained(name, lookahead=0))


@pytest.mark.parametrize(("name", "lookahead"), [("hstu", 2), pytest.param("sim hard", 0, marks=pytest.mark.soak)])
def test_rows_in_gpu_memory_change_no_bit(name: str, lookahead: int) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles kernels")
    whole = trained(name, hr.Memory(hbm="64MiB"), steps=3, lookahead=0)
    assert bits(trained(name, hr.Memory(hbm="24KiB"), steps=3, lookahead=lookahead)) == bits(whole)
