"""The tutorial runs from top to bottom, and its request is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import hotrow as hr

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8")


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "tutorial"}
    for block in re.findall(r"^```python\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL):
        exec(compile(block, "tutorial.md", "exec"), names)
    auc = re.search(r"test AUC (\d\.\d+)", capsys.readouterr().out)
    assert auc is not None and float(auc[1]) > 0.6  # it learns: 0.5 is chance
    body = re.search(r"-d '(\{.*?\})'\n", TUTORIAL, re.DOTALL)
    assert body is not None
    columns = {each["name"]: each["data"] for each in json.loads(body[1])["inputs"]}
    with hr.Engine("repository/ctr") as engine:
        assert 0 < float(engine.predict(columns)[0]) < 1
