"""The programs of examples/ run, each as a user starts it, on a small number of examples."""

from __future__ import annotations

import importlib.util
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch

import hotrow as hr

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
    assert programs == {
        *("first_model.py", "rows_beyond_memory.py", "ranks.py", "train_to_serve.py"),
        *("embeddings_client.py", "embeddings_http.py", "embeddings_grpc.py"),
        "sequence_ranking.py",  # test_sequence_ranking.py
    }
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The ports of a server with the model of train_to_serve.py, which has seen some of the keys."""
    pytest.importorskip("httptools", reason="pip install 'hotrow[serve]'")
    folder = tmp_path_factory.mktemp("served")
    embeddings = hr.EmbeddingCollection([hr.Table(table, dim=16) for table in ("user", "item", "site")])
    embeddings(hr.KeyedBatch({name: hr.Jagged(torch.arange(10)) for name in ("user", "item", "site")}))
    tower = hr.models.DLRM(embeddings.features, dense_features=4, bottom=(32,), top=(64, 32))
    hr.export(hr.Recommender(embeddings, tower), folder / "repository" / "ctr")
    ports = ("--http", "0", "--grpc", "0", "--metrics", "0")
    process = forked.hotrow("serve", str(folder / "repository"), *ports, log=folder / "log", env={"COLUMNS": "200"})
    try:
        until = time.monotonic() + 150
        while "metrics " not in process.text():
            assert time.monotonic() < until and process.poll() is None, process.text()
            time.sleep(0.05)
        yield {name: where for name, _, where in re.findall(r"(\w+) +(http|grpc)://([\d.]+:\d+)", process.text())}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.parametrize(
    ("name", "protocol", "scheme"),
    [
        ("embeddings_http.py", "http", "http://"),
        ("embeddings_grpc.py", "grpc", ""),
        ("embeddings_client.py", "http", "http://"),
        ("embeddings_client.py", "grpc", "grpc://"),
    ],
)
def test_embeddings(served: dict[str, str], tmp_path: Path, name: str, protocol: str, scheme: str) -> None:
    if name == "embeddings_grpc.py":
        pytest.importorskip("tritonclient.grpc")
    text = run(name, tmp_path, scheme + served[protocol], "ctr")
    assert text.count("(2, 16)") == 2 and "publication 0" in text
    assert ("probabilities [" in text) == (name == "embeddings_client.py")
