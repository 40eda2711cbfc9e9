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
from hotrow.errors import BatchError
from hotrow.features import Dense, Key, Label, Sequence
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
kind = "bst"
histories = [{{ features = ["seen", "action"], max_length = 6 }}]
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


@pytest.fixture
def home(tmp_path: Path) -> Path:
    hr.FeatureSpec(
        [Key("user"), Key("item"), Sequence("seen", max_length=6), Sequence("action", max_length=6), Dense("price")],
        label=[Label("click"), Label("dwell", "regression")],
    ).save(tmp_path / "spec.json")
    draw = np.random.default_rng(0)
    seen = [draw.integers(0, 20, draw.integers(0, 9)).tolist() for _ in range(96)]
    columns = {name: draw.integers(0, 20, 96) for name in ("user", "item")}
    columns |= {"price": draw.random(96), "click": draw.integers(0, 2, 96), "dwell": draw.random(96)}
    columns |= {"seen": seen, "action": [[item % 3 for item in items] for items in seen]}
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
        assert signature.max_lengths == {"seen": 6, "action": 6} and signature.aligned == (("seen", "action"),)
        assert signature.user == {"user", "seen", "action"}
        torch.testing.assert_close(engine.predict(batch), job.trainer.predict(batch), rtol=0, atol=1e-6)
        raw = {"user": [7, 7], "item": [1, 2], "seen": [[3, 4], [3, 4]], "price": [0.5, 0.5]}
        assert engine.predict({**raw, "action": [[0, 1], [0, 1]]}).shape == (2, 2)
        with pytest.raises(BatchError, match="'seen' and 'action' are columns of one history, but row 0 has 2 and 1"):
            engine.predict({**raw, "action": [[0], [0]]})
