"""The examples of docs/serving.md run as they are written, against a front end with a model `ctr`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from in_process import Running

PROTOCOL = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().partition("## Protocol")[2]


def example(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PROTOCOL, re.S)
    assert found is not None
    return found[1]


def test_the_python_example_runs(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    exec(example("python"), {"http_address": running.address("http")})
    assert capsys.readouterr().out.rstrip().endswith("2")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_example_runs(running: Running) -> None:
    command = example("bash").replace("127.0.0.1:8000", running.address("http"))
    ran = subprocess.run(["bash", "-c", command], capture_output=True, timeout=30, check=True)
    answer = json.loads(ran.stdout)
    assert answer["outputs"][0]["shape"] == [2], answer
