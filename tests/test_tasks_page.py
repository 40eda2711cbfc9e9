"""The page about several tasks runs from top to bottom, and its job file is one."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from hotrow.features import FeatureSpec
from hotrow.job import load_job

PAGE = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_the_page_about_tasks_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "tasks"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(block, "tasks.md", "exec"), names)
    figures, prediction = capsys.readouterr().out.splitlines()[:2]
    assert len([float(figure) for figure in figures.split()]) == 3
    assert prediction.startswith("tensor([[")
    spec = names["spec"]
    assert isinstance(spec, FeatureSpec)
    spec.save("features.json")
    job = re.search(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert job is not None
    Path("job.toml").write_text(job[1])
    loaded = load_job("job.toml")
    assert [task.loss_name for task in loaded.trainer.tasks] == ["cross_entropy", "huber"]
