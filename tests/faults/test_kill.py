"""SIGKILL at any moment, repeatedly: the resumed run equals an uninterrupted run, bit for bit.

Moments are drawn from a seed: a phase (starting up, loading a checkpoint, training, saving while training goes on), how
often it has come by, and a delay of some milliseconds into it. Compaction runs beside all of them, as fast as it can.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run import PHASES, Options, Run, finish
from runs import names

MOST = {"start": 1, "load": 2, "step": 9, "save": 6}  # how often a phase may occur before the kill


def strike(draw: random.Random, folder: Path, options: Options) -> str | None:
    """Start or resume the run and kill it; returns the phase at the kill, or None if the run ended first."""
    folder.mkdir(parents=True, exist_ok=True)
    phase = draw.choice(PHASES)
    times, delay = draw.randint(1, MOST[phase]), draw.choice([0, 0.002, 0.01, 0.04]) * draw.random()
    with Run(folder, options) as run:
        if not run.reach(phase, times):
            run.result()
            return None
        time.sleep(delay)
    return phase


def check(result: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
    assert result["losses"] == expected["losses"][len(expected["losses"]) - len(result["losses"]) :]
    assert result["digest"] == expected["digest"]
    assert result["compaction_errors"] == 0
    assert not result["over_budget"]
    assert names(folder / "checkpoints") == ["step-000000000057", "step-000000000060"]  # no temporary folder left


def campaign(seed: int, kills: int, folder: Path, options: Options, expected: dict[str, Any]) -> dict[str, Any]:
    """Kill runs until there were so many kills; every run that ends is compared, the last one always."""
    draw, hits, runs, compacted = random.Random(seed), Counter[str](), 0, 0
    while hits.total() < kills:
        home = folder / str(runs)
        if (phase := strike(draw, home, options)) is not None:
            hits[phase] += 1
            if hits.total() < kills:
                continue
        result = finish(home, options)
        check(result, expected, home)
        compacted += result["compacted"]
        runs += 1
    return {"kills": dict(hits), "runs": runs, "compacted": compacted}


@pytest.mark.parametrize(("ssd", "kills"), [(True, 3), (False, 2)])
def test_killed_at_random_moments(tmp_path: Path, uninterrupted: dict[str, Any], ssd: bool, kills: int) -> None:
    outcome = campaign(1, kills, tmp_path, Options(ssd), uninterrupted)
    assert sum(outcome["kills"].values()) == kills


@pytest.mark.parametrize("ssd", [True, False])
def test_resumed_over_the_other_memory(tmp_path: Path, uninterrupted: dict[str, Any], ssd: bool) -> None:
    """Rows that a dead process had on SSD are restored into DRAM only, and the reverse."""
    with Run(tmp_path, Options(ssd)) as run:
        assert run.reach("save", 14)
    result = finish(tmp_path, Options(not ssd))
    assert result["resumed_from"] >= 15
    check(result, uninterrupted, tmp_path)


def test_the_log_of_a_dead_process_is_removed_by_a_run_over_ssd(tmp_path: Path) -> None:
    with Run(tmp_path, Options(ssd=False)) as run:
        assert run.reach("save", 3)
    assert list((tmp_path / "checkpoints").glob(".rows-*"))
    finish(tmp_path, Options(ssd=True))
    assert not list((tmp_path / "checkpoints").glob(".rows-*"))


def test_busy_runs_are_what_the_kills_interrupt(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    """The campaign's runs do evict and compact; otherwise killing them would prove little."""
    result = finish(tmp_path, Options(ssd=True))
    check(result, uninterrupted, tmp_path)
    assert result["evicted"] > 1000
    assert result["compacted"] > 1 << 20


@pytest.mark.soak
@pytest.mark.parametrize(("ssd", "kills"), [(True, 100), (False, 40)])
def test_killed_at_a_hundred_random_moments(
    tmp_path: Path, uninterrupted: dict[str, Any], ssd: bool, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    outcome = campaign(2, kills, tmp_path, Options(ssd), uninterrupted)
    assert set(outcome["kills"]) == set(PHASES)
    assert outcome["compacted"] > 0
    with capsys.disabled():
        print(f"\nssd={ssd}: {kills} kills {outcome} in {time.monotonic() - start:.0f} s, all runs equal")
