"""Job files and processes for tests in which ranks are killed, stopped or interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from forked import Forked

from hotrow import child_process
from hotrow.train.checkpoint.manifest import list_checkpoints

TIMEOUT = 4  # seconds that ranks wait for each other
BOUND = TIMEOUT + 20  # until the job has ended; checking heartbeats takes a few seconds, and machines are busy
JOB = """
[data]
examples = {examples}
test_examples = 0
batch_size = 32
keys = 600_000
[embeddings]
dim = 4
optimizer = {{ kind = "Adam", lr = 0.01 }}
[tower]
kind = "dlrm"
bottom = [8]
top = [8]
seed = {seed}
[checkpoints]
folder = "{folder}"
every = 4
[ranks]
timeout = {timeout}
"""


def write_job(home: Path, examples: int = 1_000_000, seed: int = 0, name: str = "job") -> Path:
    home.mkdir(exist_ok=True)
    path = home / f"{name}.toml"
    path.write_text(JOB.format(examples=examples, folder=home / "run", timeout=TIMEOUT, seed=seed))
    return path


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    return child_process.start(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options, start_new_session=True
    )


def ranks_of(process: subprocess.Popen[str], count: int = 2) -> dict[int, psutil.Process]:
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            rank = child.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found[int(rank)] = child
    assert len(found) == count, found
    return found


def wait_for_checkpoints(folder: Path, process: subprocess.Popen[str] | Forked, count: int = 1) -> None:
    deadline = time.monotonic() + 90
    while len(list_checkpoints(folder)) < count:
        if process.poll() is not None:
            raise AssertionError(process.text() if isinstance(process, Forked) else process.communicate()[0])
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


def end_of(process: subprocess.Popen[str], within: float) -> tuple[str, float]:
    """Output without line breaks, and how long it took to end."""
    begin = time.monotonic()
    try:
        output, _ = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return re.sub(r"\s+", " ", output), time.monotonic() - begin
