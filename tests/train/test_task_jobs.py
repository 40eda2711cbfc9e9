"""[[tasks]] in a job file: columns, heads, checkpoints and an export, without a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

import hotrow as hr
from hotrow.cli import app
from hotrow.errors import OptionError
from hotrow.features import Dense, Key, Label
from hotrow.job import build_job

TASKS = [
    {"name": "click", "column": "is_click"},
    {"name": "dwell", "kind": "regression", "weight": 0.5, "loss": "huber"},
    {"name": "orders", "kind": "count"},
]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """A small log of three labels, one of which is often null."""
    hr.FeatureSpec([Key("user"), Key("item"), Dense("price")], label=[Label("dwell", "regression", "dwell_ms")]).save(
        tmp_path / "spec.json"
    )
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {name: draw.integers(0, 50, 256) for name in ("user", "item")}
    columns |= {"price": draw.random(256), "is_click": draw.integers(0, 2, 256), "orders": draw.poisson(1.0, 256)}
    columns["dwell_ms"] = pyarrow.array(draw.random(256), mask=draw.random(256) < 0.5)
    parquet.write_table(pyarrow.table(columns), tmp_path / "log.parquet")
    return {"source": "parquet", "path": str(tmp_path / "log.parquet"), "features": str(tmp_path / "spec.json")}


def job_of(data: dict[str, Any], **changed: Any) -> dict[str, Any]:
    head = {"kind": "mmoe", "experts": 2, "expert": [4], "tower": []}
    tower = {"kind": "dlrm", "bottom": [4], "top": [4], "head": head}
    return {"data": {"batch_size": 64, **data}, "embeddings": {"dim": 4}, "tower": tower, "tasks": TASKS, **changed}


def test_a_job_trains_its_tasks_on_their_columns(data: dict[str, Any]) -> None:
    job = build_job(job_of(data))
    assert [(task.name, task.kind, task.weight, task.loss_name) for task in job.trainer.tasks] == [
        ("click", "binary", 1.0, "cross_entropy"),
        ("dwell", "regression", 0.5, "huber"),
        ("orders", "count", 1.0, "poisson"),
    ]
    report, _ = job.run(progress=False)
    assert report.metrics["click/examples"] == 256 and 64 < report.metrics["dwell/examples"] < 192
    assert job.trainer.job is not None and [task["name"] for task in job.trainer.job["tasks"]] == [
        "click",
        "dwell",
        "orders",
    ]
    labels = job.source.features.labels  # type: ignore[attr-defined]
    assert [label.column for label in labels] == ["is_click", "dwell_ms", "orders"]  # dwell's is the spec's own


def test_trained_tasks_are_shown_inspected_and_exported_without_the_program(
    data: dict[str, Any], tmp_path: Path
) -> None:
    tasks = "".join("[[tasks]]\n" + "".join(f"{name} = {value!r}\n" for name, value in task.items()) for task in TASKS)
    (tmp_path / "job.toml").write_text(
        f"[data]\nsource = 'parquet'\npath = '{data['path']}'\nfeatures = '{data['features']}'\nbatch_size = 64\n"
        f"[embeddings]\ndim = 4\n[tower]\nkind = 'dlrm'\nbottom = [4]\ntop = [4]\nhead = 'shared_bottom'\n{tasks}"
        f"[checkpoints]\nfolder = '{tmp_path / 'runs' / 'ctr'}'\n"
    )
    run = CliRunner()
    trained = run.invoke(app, ["train", str(tmp_path / "job.toml"), "--quiet"])
    assert trained.exit_code == 0, trained.output
    shown = " ".join(trained.output.split())
    assert "click/auc 0." in shown and "orders/deviance" in shown and "examples 256" not in shown
    inspected = run.invoke(app, ["inspect", str(tmp_path / "runs" / "ctr")])
    assert "dwell/rmse" in inspected.output.replace("\n", " ")
    assert "tasks: click (binary), dwell (regression), orders (count)" in inspected.output.replace("\n", " ")
    exported = run.invoke(app, ["export", str(tmp_path / "runs" / "ctr"), str(tmp_path / "repository")])
    assert exported.exit_code == 0, exported.output
    with hr.Engine(tmp_path / "repository" / "ctr") as engine:
        assert engine.signature.named_tasks == (("click", "binary"), ("dwell", "regression"), ("orders", "count"))
        assert engine.predict({"user": [1, 2], "item": [3, 4], "price": [0.5, None]}).shape == (2, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tower": {"kind": "dlrm"}}, r"3 tasks need a head: give \[tower\] head = one of shared_bottom, mmoe, ple"),
        ({"tasks": [{"kind": "count"}]}, "give a name"),
        ({"tasks": [{"name": "x", "wieght": 2}]}, "task 'x' has no option 'wieght'; did you mean 'weight'"),
        ({"tasks": {"name": "x"}}, r"give each task a section \[\[tasks\]\]"),
        ({"data": {"source": "criteo", "path": "x"}}, r"\[\[tasks\]\] with source='criteo' and no features="),
    ],
)
def test_wrong_tasks_of_a_job_are_named_with_the_cure(
    data: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        build_job({**job_of(data), **changed})
