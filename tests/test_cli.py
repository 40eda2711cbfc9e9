"""The command line as a person uses it: one word each, readable output, one-line errors with exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from command_line import hotrow

from hotrow.job import load_job

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


def write_job(tmp_path: Path, tower: str = "deepfm", dram: str = "1GiB", extra: str = "") -> str:
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(tower=tower, dram=dram, out=tmp_path / "model") + extra)
    return str(file)


def test_train_then_inspect(tmp_path: Path) -> None:
    done = hotrow("train", write_job(tmp_path), "--quiet")
    assert done.returncode == 0, done.stderr
    assert "trained 8 steps, 4,096 examples" in done.stdout
    assert "test:" in done.stdout
    saved = tmp_path / "model" / "step-000000000008"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert [t["optimizer"]["kind"] for t in manifest["tables"] if t["name"] == "C3"] == ["Adam"]
    for folder in (tmp_path / "model", saved):
        shown = hotrow("inspect", str(folder))
        assert "DeepFM after 8 steps" in " ".join(shown.stdout.split()), shown.stderr
        table = hotrow("inspect", str(folder), "--table", "C3", "--top", "3")
        assert "hottest 3 keys" in table.stdout, table.stderr
    rows = hotrow("inspect", str(saved / "rows" / "C3"), "--top", "2")
    assert "hottest 2 keys" in rows.stdout, rows.stderr
    wrong = hotrow("inspect", str(tmp_path / "model"), "--table", "C33")
    assert wrong.returncode == 2
    assert "did you mean 'C3" in wrong.stderr.replace("\n", " ")


def test_a_job_that_was_cut_short_resumes_to_the_same_model(tmp_path: Path) -> None:
    done = {}
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        job = write_job(folder, extra=f'[checkpoints]\nfolder = "{folder / "checkpoints"}"\nevery = 3\n')
        if name == "cut":
            assert hotrow("train", job, "--quiet", "--steps", "4").returncode == 0
            assert "--resume" in " ".join(hotrow("train", job, "--quiet").stderr.split())
            resumed = hotrow("train", job, "--quiet", "--resume")
            assert "resumed after step 3" in resumed.stdout, resumed.stderr
            assert "trained 5 steps" in resumed.stdout
            assert "longest pause" in resumed.stdout
        else:
            assert hotrow("train", job, "--quiet").returncode == 0
        manifest = json.loads((folder / "model" / "step-000000000008" / "manifest.json").read_text())
        tensors = {file: about for file, about in manifest["files"].items() if file.endswith(".safetensors")}
        done[name] = (tensors, manifest["metrics"], [table["rows"] for table in manifest["tables"]])
    assert done["cut"] == done["whole"]


def test_inspect_reads_an_ssd_folder(tmp_path: Path) -> None:
    code = "import hotrow as hr, torch\n"
    code += f"memory = hr.Memory(dram='4MiB', ssd={str(tmp_path / 'ssd')!r})\n"
    code += "e = hr.EmbeddingCollection([hr.Table('user', dim=64)], memory=memory)\n"
    code += "for start in range(0, 100_000, 2000): e.table('user').create(torch.arange(start, start + 2000))\n"
    made = forked.python(code, log=tmp_path / "log")
    assert made.wait(120) == 0, made.text()
    for folder in (tmp_path / "ssd", tmp_path / "ssd" / "user"):
        shown = hotrow("inspect", str(folder))
        assert "records" in shown.stdout, shown.stderr
        assert "hottest 10 keys" in shown.stdout
    segment = tmp_path / "ssd" / "user" / "segment-0000000000.hrs"
    data = segment.read_bytes()
    segment.write_bytes(data[:9000] + bytes([data[9000] ^ 1]) + data[9001:])
    shown = hotrow("inspect", str(tmp_path / "ssd"), "--table", "user")
    assert shown.returncode == 2
    assert "hottest 10 keys" in shown.stdout
    assert f"{segment.name}: damaged in block 1".replace(" ", "") in "".join(shown.stderr.split())  # lines are broken


@pytest.mark.parametrize(
    ("options", "extra", "message"),
    [
        ({"tower": "dlmr"}, "", "did you mean 'dlrm'"),
        ({"dram": "12 potatoes"}, "", "dram='12 potatoes' is not a size"),
        ({"dram": "1MiB"}, "", "dram=1.0MiB has"),
        ({}, "[trian]\nsteps = 1\n", "no option 'trian'; did you mean 'train'"),
        ({}, "colour = 'red'\n", "[output] has no option 'colour'"),
        ({}, "[checkpoints]\nevery = 3\n", "[checkpoints] needs folder="),
    ],
)
def test_a_wrong_option_is_one_line_with_the_cure(tmp_path: Path, options: dict, extra: str, message: str) -> None:
    done = hotrow("train", write_job(tmp_path, extra=extra, **options), "--quiet")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "there is no job file" in hotrow("train", str(tmp_path / "none.toml")).stderr
    assert "not a checkpoint" in " ".join(hotrow("inspect", str(tmp_path)).stderr.split())
    assert "did you mean 'rows'" in " ".join(hotrow("bench", "row").stderr.split())


def test_the_command_starts_and_its_errors_are_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hotrow", "inspect", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "not a checkpoint" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_help_has_examples() -> None:
    for command in ("demo", "train", "inspect", "bench"):
        shown = hotrow(command, "--help")
        assert shown.returncode == 0
        assert f"hotrow {command}" in shown.stdout
        assert "Example" in shown.stdout


def test_the_job_in_the_help_is_one(tmp_path: Path) -> None:
    """As it is shown, on a terminal of 80 columns: `[data]` is markup to who prints it."""
    shown = hotrow("train", "--help").stdout
    lines = shown[shown.index("to start from:") : shown.index("Examples:")].splitlines()[1:]
    job = tmp_path / "job.toml"
    job.write_text("\n".join(line.strip() for line in lines).replace("runs/first", str(tmp_path / "run")))
    loaded = load_job(job).trainer
    assert loaded.model.embeddings.budget.limit == 4 << 30 and loaded.checkpoint_every == 50
