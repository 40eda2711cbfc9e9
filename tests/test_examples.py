"""The programs of examples/ run, each as a user starts it, on a small number of examples."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import forked
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, folder: Path, *arguments: str) -> str:
    """What the program prints."""
    code = f"import os, runpy; os.chdir({str(folder)!r}); runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    process = forked.python(code, *arguments, log=folder / "log")
    assert process.wait(240) == 0, process.text()
    return process.text()


def test_every_program_is_listed_and_tested() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    listed = (EXAMPLES / "README.md").read_text()
    assert programs == {"first_model.py", "rows_beyond_memory.py", "ranks.py", "train_to_serve.py"}
    assert all(f"[{name}]({name})" in listed for name in programs)


def test_first_model(tmp_path: Path) -> None:
    text = run("first_model.py", tmp_path, "--examples", "20000")
    assert "best possible" in text and (tmp_path / "runs/first_model").is_dir()


def test_rows_beyond_memory(tmp_path: Path) -> None:
    text = run("rows_beyond_memory.py", tmp_path, "--examples", "20000", "--dram", "6MiB")
    assert text.count("same bits in both runs") == 3


def test_ranks_in_one_process(tmp_path: Path) -> None:
    assert "rank 0 of 1: owns" in run("ranks.py", tmp_path, "--examples", "5000")


@pytest.mark.skipif(importlib.util.find_spec("httptools") is None, reason="pip install 'hotrow[serve]'")
def test_train_to_serve(tmp_path: Path) -> None:
    text = run("train_to_serve.py", tmp_path, "--examples", "30000")
    assert len([line for line in text.splitlines() if line.startswith("publication ")]) == 2
