"""A job file with a tower over a history and two tasks: trained, exported by the command line and answered."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from typer.testing import CliRunner

import hotrow as hr
from hotrow.cli import app
from hotrow.errors import HotRowError
from hotrow.features import Dense, EventTimes, Key, Label, Numbers, Sequence
from hotrow.job import load_job

JOB = """
[data]
source = "parquet"
path = "{home}/log.parquet"
features = "{home}/spec.json"
batch_size = 32
[embeddings]
dim = 4
[[tables]]
name = "item"
features = {{ item = "sum", seen = "none" }}
[[tables]]
name = "action"
features = {{ action = "none" }}
[tower]
kind = "sim"
keep = 3
time = "now"
category = "category"
histories = [{{ features = ["seen", "action"], times = "seen_time", categories = "categories", max_length = 6 }}]
target = "item"
user_features = ["user"]
width = 8
heads = 2
head = {{ kind = "shared_bottom", bottom = [4], tower = [] }}
[[tasks]]
name = "click"
[[tasks]]
name = "dwell"
kind = "regression"
[checkpoints]
folder = "{home}/runs/feed"
"""


LISTS = ("action", "categories")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    hr.FeatureSpec(
        [
            *(Key("user"), Key("item"), Dense("price"), EventTimes("now"), Numbers("category")),
            *(Sequence("seen", max_length=6), Sequence("action", aligned="seen")),
            *(EventTimes("seen_time", aligned="seen"), Numbers("categories", aligned="seen")),
        ],
        label=[Label("click"), Label("dwell", "regression")],
    ).save(tmp_path / "spec.json")
    draw = np.random.default_rng(0)
    seen = [draw.integers(0, 20, draw.integers(0, 9)).tolist() for _ in range(96)]
    columns = {name: draw.integers(0, 20, 96) for name in ("user", "item")}
    columns |= {"price": draw.random(96), "click": draw.integers(0, 2, 96), "dwell": draw.random(96)}
    columns |= {"seen": seen, **{name: [[item % 3 for item in items] for items in seen] for name in LISTS}}
    columns |= {"seen_time": [[1000 * at for at in range(len(items))] for items in seen]}
    columns |= {"now": draw.integers(10_000, 90_000, 96), "category": draw.integers(0, 3, 96)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "log.parquet")
    (tmp_path / "job.toml").write_text(JOB.format(home=tmp_path))
    return tmp_path


def test_a_job_with_a_history_is_exported_without_options(home: Path) -> None:
    job = load_job(home / "job.toml")
    job.run(progress=False)
    result = CliRunner().invoke(app, ["export", str(home / "runs" / "feed"), str(home / "repository"), "--quiet"])
    assert result.exit_code == 0, result.exception
    assert "version 1 of feed" in re.sub(r"\s+", " ", result.output)
    batch = next(iter(job.source.batches()))[0]
    with hr.Engine(home / "repository" / "feed") as engine:
        signature = engine.source.signature
        columns = ("seen", "action", "seen_time", "categories")
        assert signature.aligned == (columns,) and signature.user == {"user", *columns}
        assert signature.max_lengths == {**dict.fromkeys(columns, 6), "now": 1, "category": 1}
        torch.testing.assert_close(engine.predict(batch), job.trainer.predict(batch), rtol=0, atol=1e-6)
        raw = {"user": [7, 7], "item": [1, 2], "seen": [[3, 4]] * 2, "price": [0.5, 0.5]}
        raw |= {"action": [[0, 1]] * 2, "categories": [[0, 1]] * 2, "category": [0, 1], "now": [9000, 9000]}
        times = {"seen_time": [[1000, 5000]] * 2}
        assert engine.predict({**raw, **times}).shape == (2, 2)
        for wrong, match in (
            ({**times, "action": [[0]] * 2}, "history 'seen' has 2 events in column 'seen' and 1 in column 'action'"),
            ({"seen_time": [[5000, 1000]] * 2}, "times of history 'seen' run backwards: event 1 is at 1000 ms"),
            ({**times, "now": [None, 9000]}, "'now' has 0 entries in row 0; give each row one"),
        ):
            with pytest.raises(HotRowError, match=match):
                engine.predict({**raw, **wrong})
