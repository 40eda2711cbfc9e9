"""SIGKILL while rows move between HBM, DRAM and SSD: for every lookahead and budget, the resumed run equals a run that
was not killed. Without a GPU kernels are interpreted, and only some cases with small batches run; `pytest -m gpu` runs
all of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run import Options, Run, finish

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LARGE = Options(ssd=False, hbm="256MiB", device="cuda")
SMALL = Options(ssd=False, hbm="4MiB", device="cpu", size=12, steps=11, dim=4)
BUDGETS = {
    "all": {},
    "small": {"hbm": "4KiB" if INTERPRETED else "4MiB"},
    "ssd": {"hbm": "4KiB" if INTERPRETED else "4MiB", "ssd": True, "dram": "8MiB" if INTERPRETED else "14MiB"},
}
EVERYTHING = [(lookahead, budget) for lookahead in (0, 1, 2, 4) for budget in BUDGETS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    options = replace(SMALL if INTERPRETED else LARGE, checkpoints=False, lookahead=0)
    return finish(tmp_path_factory.mktemp("undisturbed"), options)


def kill_and_resume(folder: Path, options: Options, at: int, undisturbed: dict[str, Any]) -> dict[str, Any]:
    with Run(folder, options) as run:
        assert run.reach("step", at, seconds=120)
    result = finish(folder, options)
    assert result["resumed_from"]  # the newest checkpoint that was published: on a busy machine saves are late
    assert result["losses"] == undisturbed["losses"][-len(result["losses"]) :]
    assert result["digest"] == undisturbed["digest"]
    assert not result["over_budget"]
    return result


@pytest.mark.gpu
@pytest.mark.parametrize(("lookahead", "budget"), EVERYTHING)
def test_killed_on_a_gpu_and_resumed(tmp_path: Path, undisturbed: dict[str, Any], lookahead: int, budget: str) -> None:
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    options = replace(LARGE, lookahead=lookahead, **BUDGETS[budget])  # type: ignore[arg-type]
    result = kill_and_resume(tmp_path, options, 20 + 5 * lookahead, undisturbed)
    assert (result["left_hbm"] > 1000) == (budget != "all")


@pytest.mark.parametrize(("lookahead", "budget"), [(0, "ssd"), (2, "small")])
def test_killed_and_resumed(tmp_path: Path, undisturbed: dict[str, Any], lookahead: int, budget: str) -> None:
    if not INTERPRETED:
        pytest.skip("this process compiles kernels")
    options = replace(SMALL, lookahead=lookahead, **BUDGETS[budget])  # type: ignore[arg-type]
    assert kill_and_resume(tmp_path, options, 8, undisturbed)["left_hbm"] > 5
