"""SIGKILL while batches are in flight: for every lookahead and budget, the resumed run equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run import Options, Run, finish

BUDGETS = {"dram": Options(ssd=False), "small": Options(dram="14MiB"), "tiny": Options(dram="11MiB")}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_killed_in_the_middle_and_resumed(
    tmp_path: Path, uninterrupted: dict[str, Any], lookahead: int, budget: str
) -> None:
    base = BUDGETS[budget]
    options = Options(ssd=base.ssd, dram=base.dram, lookahead=lookahead)
    with Run(tmp_path, options) as run:
        assert run.reach("step", 20 + 5 * lookahead)
    result = finish(tmp_path, options)
    assert result["resumed_from"] is not None and result["resumed_from"] >= 12
    assert result["losses"] == uninterrupted["losses"][len(uninterrupted["losses"]) - len(result["losses"]) :]
    assert result["digest"] == uninterrupted["digest"]
    assert not result["over_budget"]
    if budget == "tiny":  # with more DRAM, few rows are evicted in the remaining steps
        assert result["evicted"] > 1000
