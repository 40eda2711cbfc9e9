"""The page about histories runs from top to bottom and prints what it says; its job file builds a tower."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hotrow.job import SECTIONS, tomllib
from hotrow.models import BST, build_tower

PAGE = (Path(__file__).parents[1] / "docs" / "histories.md").read_text(encoding="utf-8")


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "histories"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "histories.md", "exec"), names)
    out = capsys.readouterr().out
    loss = re.search(r"loss (\d\.\d+)", out)
    assert loss is not None and float(loss[1]) < 0.693  # below that of a coin
    assert "[0, 0, 1] events: 3" in out and "`[0, 0, 1] events: 3`" in PAGE


def test_the_job_file_of_the_page_builds_its_tower() -> None:
    text = re.search(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert text is not None
    values = tomllib.loads(text[1])
    assert set(values) <= set(SECTIONS)
    tower = build_tower(
        values["tower"].pop("kind"), features={"user": 4, "item": 4}, sequences={"seen_item": 4}, **values["tower"]
    )
    assert isinstance(tower, BST) and tower.max_lengths == {"seen_item": 200}
