"""`hotrow export`: from a run's checkpoints to a model that answers as the run did, without its program."""

from __future__ import annotations

from pathlib import Path

import forked
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from small_models import trained
from typer.testing import CliRunner

import hotrow as hr
from hotrow.cli import app
from hotrow.features import Dense, Key
from hotrow.job import build_job, load_job
from hotrow.progress import ProgressBar

JOB = """
[data]
source = "parquet"
path = "{data}"
features = "{spec}"
batch_size = 256
[embeddings]
dim = 4
[tower]
kind = "dlrm"
bottom = [8]
top = [8]
[checkpoints]
folder = "{folder}"
"""


def hotrow(*words: object) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output, result.exception


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Path]:
    """A small log and its feature spec."""
    spec = hr.FeatureSpec([Key("C1"), Key("C2"), Dense("price")], label="click")
    spec.save(tmp_path / "spec.json")
    draw = np.random.default_rng(0)
    columns = {name: draw.zipf(1.3, 4096) % 5000 for name in ("C1", "C2")}
    columns |= {"price": draw.random(4096), "click": draw.integers(0, 2, 4096)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "log.parquet")
    return {"data": tmp_path / "log.parquet", "spec": tmp_path / "spec.json"}


@pytest.fixture
def job(data: dict[str, Path], tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(folder=tmp_path / "runs" / "clicks", **data))
    return path


def test_a_run_becomes_a_version_without_its_job_file(job: Path, tmp_path: Path) -> None:
    loaded = load_job(job)
    loaded.run(progress=False)
    job.unlink()
    code, output, error = hotrow("export", tmp_path / "runs" / "clicks", tmp_path / "repository")
    assert code == 0, error
    assert "exported step 16 as version 1 of clicks" in output
    batch = next(iter(loaded.source.batches()))[0]
    with hr.Engine(tmp_path / "repository" / "clicks") as engine:
        assert engine.source.manifest["trained"]["step"] == 16
        torch.testing.assert_close(engine.predict(batch), loaded.trainer.predict(batch), rtol=0, atol=1e-6)
        assert engine.predict({"C1": [1], "C2": [2], "price": [0.5]}).shape == (1,)  # the spec came along
    assert [path.name for path in (tmp_path / "repository").iterdir()] == ["clicks"]  # nothing is left beside it


def test_a_checkpoint_that_lacks_its_tower_asks_for_the_job(job: Path, tmp_path: Path) -> None:
    trainer = trained("dlrm")
    trainer.save(tmp_path / "mine")
    code, _, error = hotrow("export", tmp_path / "mine", tmp_path / "repository")
    assert code != 0 and "--job job.toml" in str(error)
    loaded = load_job(job)
    loaded.trainer.job = None
    loaded.run(progress=False)
    options = ["--job", job, "--model", "home", "--deadline", "20", "--policy", "initial", "--quiet"]
    code, _, error = hotrow("export", tmp_path / "runs" / "clicks", tmp_path / "repository", *options)
    assert code == 0, error
    with hr.Engine(tmp_path / "repository" / "home") as engine:
        assert (engine.source.deadline, engine.source.policy) == (0.02, "initial")
    other = job.with_name("other.toml")
    other.write_text(job.read_text().replace("top = [8]", "top = [9]"))
    code, _, error = hotrow("export", tmp_path / "runs" / "clicks", tmp_path / "repository", "--job", other)
    assert code != 0 and "'top.layers.0.bias'" in str(error)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    trainer = trained("dlrm")
    trainer.save(tmp_path / "mine")
    for words, says in (
        ([tmp_path / "nothing", tmp_path / "r"], "is not a checkpoint"),
        ([tmp_path / "mine", tmp_path / "r", "--model", "../x"], "model name"),
    ):
        code, _, error = hotrow("export", *words)
        assert code != 0 and says in str(error)


def test_what_left_memory_and_what_expired_is_exported_right(data: dict[str, Path], tmp_path: Path) -> None:
    """Over SSD, expired rows stay in a checkpoint's files until they are read."""
    values = {
        "data": {
            "source": "parquet",
            "path": str(data["data"]),
            "features": str(data["spec"]),
            "batch_size": 256,
        },
        "embeddings": {"dim": 4},
        "tables": [
            {"name": "C1", "expiry": {"steps": 3, "every": 2}},
            {"name": "C2", "admission": {"after": 2, "sketch": "64KiB"}},
        ],
        "tower": {"kind": "dlrm", "bottom": [8], "top": [8]},
        "memory": {"dram": "8MiB", "ssd": str(tmp_path / "ssd")},
        "checkpoints": {"folder": str(tmp_path / "clicks")},
    }
    run = build_job(values)
    run.run(progress=False)
    code, _, error = hotrow("export", tmp_path / "clicks", tmp_path / "repository")
    assert code == 0, error
    keys = torch.cat([batch.ids["C1"].values for batch, _ in run.source.batches()]).unique()
    with hr.Engine(tmp_path / "repository" / "clicks") as engine:
        mine, theirs = engine.embeddings.table("C1"), run.trainer.model.embeddings.table("C1")
        assert torch.equal(mine.read(keys), theirs.read(keys))
        assert 0 < len(mine) < keys.numel()


def test_the_bar_shows_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setattr("hotrow.progress.DELAY", 0.0)
    console = Console(force_terminal=True, record=True, width=100)
    with ProgressBar("export", console=console) as bar:
        bar.begin("writing rows", 10)
        bar.advance(10)
        bar._timer.join()
    assert "writing rows" in console.export_text()


STOPPED = """
import os, signal, sys
from hotrow.cli import main
from hotrow.serve.repository import export

write = export._write_table
def stop(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)

export._write_table = stop
sys.argv = ["hotrow", "export", *sys.argv[1:]]
main()
"""


def test_an_export_that_sigterm_ends_leaves_nothing_behind(job: Path, tmp_path: Path) -> None:
    load_job(job).run(progress=False)
    words = [str(tmp_path / "runs" / "clicks"), str(tmp_path / "repository")]
    process = forked.python(STOPPED, *words, log=tmp_path / "log")
    assert process.wait(60) == 143, process.text()
    assert [path.name for path in (tmp_path / "repository").iterdir()] == ["clicks"]
    assert not list((tmp_path / "repository" / "clicks").glob("*"))
