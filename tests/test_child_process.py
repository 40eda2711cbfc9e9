"""Children that end when their parent ends, SIGKILL included: those of benches, of the demo, and of these tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest

from hotrow import child_process
from hotrow.bench.servers.redis_cluster import installed

SERVER = """
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""
BENCH = """
import sys, time
from contextlib import ExitStack
from importlib.util import find_spec

from hotrow.bench.servers import kafka_mock, redis_cluster
from hotrow.bench.serving.serve_process import ServerProcess

with ExitStack() as stack:
    stack.enter_context(ServerProcess("http", [sys.executable, "-S", "-c", sys.argv[1]], b"GET / HTTP/1.1\\r\\n\\r\\n"))
    if redis_cluster.installed():
        redis = stack.enter_context(redis_cluster.RedisServers())
        redis.servers[0].pause()  # a stopped process ends, too
    if find_spec("confluent_kafka"):
        stack.enter_context(kafka_mock.brokers())
    print("all run", flush=True)
    time.sleep(600)
"""


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_all_end(children: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 20
    while any(runs(child) for child in children):
        assert time.monotonic() < deadline, [child.cmdline() for child in children if runs(child)]
        time.sleep(0.05)


def until_all_run(process: Any, log: Path) -> list[psutil.Process]:
    """The processes that it has started, once it says so."""
    deadline = time.monotonic() + 90
    while not log.exists() or "all run" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, [
            one.read_text() for one in log.parent.glob("*log")
        ]
        time.sleep(0.05)
    return list(psutil.Process(process.pid).children(recursive=True))


@pytest.fixture
def killed() -> Iterator[list[psutil.Process]]:
    """Processes that must be gone; should they not, they go when the test has failed."""
    children: list[psutil.Process] = []
    yield children
    for child in filter(runs, children):
        child.kill()


def test_a_bench_that_is_killed_leaves_no_process(tmp_path: Path, killed: list[psutil.Process]) -> None:
    process = forked.python(BENCH, SERVER, log=tmp_path / "log")
    killed += until_all_run(process, tmp_path / "log")
    words = [" ".join(child.cmdline()) for child in killed]
    assert any("http.server" in one for one in words)
    assert not installed() or any(one.startswith("redis-server") for one in words)
    process.kill()
    check_all_end(killed)


TESTS = """
import os, time
from pathlib import Path
import forked
from crew import Crew
from hotrow.bench.training.rank_processes import RankProcesses
from hotrow.bench.training.ranks import TrainingJob, prepare

def test_that_waits(tmp_path, redis, kafka_brokers):
    forked.python("import time; time.sleep(600)", log=tmp_path / "log")
    crew, side = Crew(2), RankProcesses([[0]], prepare, TrainingJob(((8,), (8,)), 1))
    Path(os.environ["SAYS"]).write_text("all run")
    time.sleep(600)
"""


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_tests_that_are_killed_leave_no_process(
    tmp_path: Path, killed: list[psutil.Process], options: list[str]
) -> None:
    tests = Path(__file__).parent
    (tmp_path / "test_waiting.py").write_text(TESTS)
    says = tmp_path / "says"
    env = {**os.environ, "PYTHONPATH": f"{tests}:{tests / 'parallel'}", "SAYS": str(says)}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options, str(tmp_path)]
    with open(tmp_path / "log", "w") as log:
        process = child_process.start(command, stdout=log, stderr=log, env=env, cwd=tmp_path)
    killed += until_all_run(process, says)
    assert len(killed) >= 8, [child.cmdline() for child in killed]
    process.kill()
    process.wait()
    check_all_end(killed)


def test_a_child_outlives_the_thread_that_started_it() -> None:
    made: list[subprocess.Popen[str]] = []
    command = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
    thread = threading.Thread(
        target=lambda: made.append(child_process.start(command, stdout=subprocess.PIPE, text=True))
    )
    thread.start()
    thread.join()
    with made[0] as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child.kill()


def test_the_child_is_the_command_itself() -> None:
    """It has the process id that was given, our environment, and Python's signals undone."""
    code = "import os, signal; print(os.getpid(), os.environ['A'])"
    child = child_process.start(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, env={"A": "value"}
    )
    assert child.communicate(timeout=60)[0] == f"{child.pid} value\n"
    ignored = int(child_process.run(["grep", "SigIgn", "/proc/self/status"]).stdout.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))


def test_run_returns_a_commands_output_and_ends_it_at_its_timeout() -> None:
    done = child_process.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(subprocess.CalledProcessError):
        child_process.run(["false"], check=True)
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        child_process.run(["sleep", "600"], timeout=0.5)
    assert time.monotonic() - start < 30
    assert child_process.run(["no-such-program"]).returncode == 127
    assert "cannot start no-such-program" in child_process.run(["no-such-program"]).stderr
