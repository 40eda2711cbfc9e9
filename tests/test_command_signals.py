"""SIGTERM ends every command in order: exit code 143, no process and no temporary folder left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import forked
import psutil
import pytest


def until(process: forked.Forked, words: str) -> None:
    deadline = time.monotonic() + 90
    while words not in process.text():
        assert process.poll() is None and time.monotonic() < deadline, process.text()
        time.sleep(0.05)


BENCH = """
import sys, tempfile, time

tempfile.tempdir = sys.argv[1]
from hotrow.bench.servers import redis_cluster
from hotrow.bench.storage import eviction
from hotrow.cli import main

def wait():
    while True:  # one long sleep may begin just after the signal
        time.sleep(0.05)

def results():
    with tempfile.TemporaryDirectory() as folder, redis_cluster.RedisServers():
        print("in", folder, flush=True)
        if "{where}" == "in a step":
            wait()
        yield "measuring"

eviction.results = results
if "{where}" == "between steps":
    from rich.status import Status
    Status.update = lambda *_: wait()
sys.argv = ["hotrow", "bench", "eviction"]
main()
"""


@pytest.mark.parametrize("where", ["in a step", "between steps"])
@pytest.mark.usefixtures("redis_installed")
def test_a_bench_ends_its_servers_and_removes_its_folders(tmp_path: Path, where: str) -> None:
    (tmp_path / "temporary").mkdir()
    process = forked.python(BENCH.format(where=where), str(tmp_path / "temporary"), log=tmp_path / "log")
    until(process, f"in {tmp_path / 'temporary'}")
    (server,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143, process.text()
    assert not server.is_running()
    assert not list((tmp_path / "temporary").iterdir())
    assert "Traceback" not in process.text()


def test_the_demo_ends_while_it_learns(tmp_path: Path) -> None:
    """A step of training is finished first, as in any call of `fit`."""
    process = forked.hotrow("demo", "--seconds", "100", "--output", str(tmp_path / "demo"), log=tmp_path / "log")
    until(process, "learning")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143, process.text()
    assert "serving" not in process.text() and "Traceback" not in process.text()


INSPECT = """
import sys, time
from hotrow import inspect
from hotrow.cli import main

def run(*arguments):
    print("inspecting", flush=True)
    while True:
        time.sleep(0.05)

inspect.inspect = run
sys.argv = ["hotrow", "inspect", "runs"]
main()
"""


def test_inspect_ends(tmp_path: Path) -> None:
    process = forked.python(INSPECT, log=tmp_path / "log")
    until(process, "inspecting")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143, process.text()
