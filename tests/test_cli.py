"""The command line as a person uses it: one word each, readable output, one-line errors with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
[data]
source = "synthetic"
examples = 4096
test_examples = 1024
batch_size = 512
keys = 600_000
[embeddings]
dim = 8
[[tables]]
name = "C3"
optimizer = {{ kind = "adam", lr = {{ lr = 0.001, warmup = 10 }} }}
[tower]
kind = "{tower}"
[train]
dense_optimizer = {{ kind = "adagrad", lr = 0.01 }}
[memory]
dram = "{dram}"
[output]
path = "{out}"
"""


def hotrow(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hotrow", *args], capture_output=True, text=True, timeout=120)


def write_job(tmp_path: Path, tower: str = "deepfm", dram: str = "1GiB", extra: str = "") -> str:
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(tower=tower, dram=dram, out=tmp_path / "model") + extra)
    return str(file)


def test_train_then_inspect(tmp_path: Path) -> None:
    done = hotrow("train", write_job(tmp_path), "--quiet")
    assert done.returncode == 0, done.stderr
    assert "trained 8 steps, 4,096 examples" in done.stdout
    assert "test:" in done.stdout
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert [t["optimizer"]["kind"] for t in manifest["tables"] if t["name"] == "C3"] == ["Adam"]
    shown = hotrow("inspect", str(tmp_path / "model"))
    assert "DeepFM after 8 steps" in " ".join(shown.stdout.split())
    table = hotrow("inspect", str(tmp_path / "model"), "--table", "C3", "--top", "3")
    assert "hottest 3 keys" in table.stdout
    wrong = hotrow("inspect", str(tmp_path / "model"), "--table", "C33")
    assert wrong.returncode == 2
    assert "did you mean 'C3" in wrong.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "extra", "message"),
    [
        ({"tower": "dlmr"}, "", "did you mean 'dlrm'"),
        ({"dram": "12 potatoes"}, "", "dram='12 potatoes' is not a size"),
        ({"dram": "1MiB"}, "", "dram=1.0MiB has"),
        ({}, "[trian]\nsteps = 1\n", "no option 'trian'; did you mean 'train'"),
        ({}, "colour = 'red'\n", "[output] has no option 'colour'"),
    ],
)
def test_a_wrong_option_is_one_line_with_the_cure(tmp_path: Path, options: dict, extra: str, message: str) -> None:
    done = hotrow("train", write_job(tmp_path, extra=extra, **options), "--quiet")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "there is no job file" in hotrow("train", str(tmp_path / "none.toml")).stderr
    assert "not a saved model" in " ".join(hotrow("inspect", str(tmp_path)).stderr.split())
    assert "did you mean 'rows'" in " ".join(hotrow("bench", "row").stderr.split())


def test_help_has_examples() -> None:
    for command in ("demo", "train", "inspect", "bench"):
        shown = hotrow(command, "--help")
        assert shown.returncode == 0
        assert f"hotrow {command}" in shown.stdout
        assert "Example" in shown.stdout
