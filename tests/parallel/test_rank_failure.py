"""Ranks that die, hang, fail or do not fit: the job ends in bounded time, says which rank it was, and can go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from crew import environment, free_port

from hotrow import _core
from hotrow.train.checkpoint import list_checkpoints, open_checkpoint

pytestmark = pytest.mark.soak  # five minutes of jobs that are killed, stopped and restarted
TIMEOUT = 4  # seconds that ranks wait for each other
BOUND = TIMEOUT + 20  # until the job is gone; looking at hearts takes a few seconds, and machines are busy
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
    return subprocess.Popen(
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


def wait_for_checkpoints(folder: Path, process: subprocess.Popen[str], count: int = 1) -> None:
    deadline = time.monotonic() + 90
    while len(list_checkpoints(folder)) < count:
        assert process.poll() is None, process.communicate()[0]
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_ends_the_job_by_its_name(tmp_path: Path, number: signal.Signals) -> None:
    process = start([sys.executable, "-m", "hotrow", "train", str(write_job(tmp_path)), "--ranks", "2", "--quiet"])
    wait_for_checkpoints(tmp_path / "run", process)
    ranks = ranks_of(process)
    ranks[1].send_signal(number)
    if number == signal.SIGSTOP:  # as soon as rank 0 has said so and ended, the launcher ends the stopped one
        output, _ = end_of(process, BOUND + 40)
    else:
        output, _ = end_of(process, BOUND)
        assert "rank 1 was killed by SIGKILL" in output
    assert process.returncode != 0
    assert re.search(r"rank 0 stops, because rank 1 \(process \d+ on .*\) died or was stopped", output), output
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in ranks.values())
    open_checkpoint(tmp_path / "run").verify()


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    process = start([sys.executable, "-m", "hotrow", "train", str(write_job(tmp_path)), "--ranks", "2", "--quiet"])
    wait_for_checkpoints(tmp_path / "run", process)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGINT)
    end_of(process, 60)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in ranks.values())
    open_checkpoint(tmp_path / "run").verify()


def contents(folder: Path) -> dict[str, Any]:
    """All that a run has come to: its newest checkpoint, without times and numbers of publication."""
    checkpoint = open_checkpoint(folder)
    rows = {}
    for table in checkpoint.tables:
        for part in checkpoint.parts(table):
            reader = _core.SnapshotReader(str(part.folder))
            while (chunk := reader.next(65536)) is not None:
                for key, count, last, values in zip(*chunk, strict=True):
                    rows[table, int(key)] = (int(count), int(last), values.tobytes())
    manifest = checkpoint.manifest
    kept = {name: manifest[name] for name in ("step", "metrics", "ranks", "cursor", "fit", "dense_optimizer")}
    files = {name: checkpoint.read(f"{name}.safetensors") for name in ("dense", "optimizer", "state")}
    return {"rows": rows, "manifest": kept, "files": files}


def test_under_torchrun_a_killed_job_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    results = []
    for kill in (False, True):
        home = tmp_path / f"killed-{kill}"
        job = write_job(home, examples=60 * 64)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
        command += ["--master-port", str(free_port()), "-m", "hotrow", "train", str(job), "--resume", "--quiet"]
        process = start(command)
        if kill:
            wait_for_checkpoints(home / "run", process, 2)
            ranks_of(process)[1].kill()
        output, _ = end_of(process, 180)
        assert process.returncode == 0, output
        assert ("resumed after step" in output) == kill, output
        results.append(contents(home / "run"))
    assert results[0]["manifest"] == results[1]["manifest"]
    assert results[0] == results[1]
    assert results[0]["manifest"]["step"] == 60


def by_hand(jobs: list[Path], worlds: list[int]) -> list[tuple[int, str]]:
    """One process for each, as a launcher would start them; exit code and output of each."""
    port = free_port()
    processes = [
        start(
            [sys.executable, "-m", "hotrow", "train", str(job), "--quiet"],
            env={**os.environ, **environment(rank, world, port)},
        )
        for rank, (job, world) in enumerate(zip(jobs, worlds, strict=True))
    ]
    return [(process.returncode, output) for process in processes for output, _ in [end_of(process, 90)]]


def test_ranks_with_other_job_files_are_refused_on_every_rank(tmp_path: Path) -> None:
    jobs = [write_job(tmp_path, 1000, seed=seed, name=f"job-{seed}") for seed in (0, 1)]
    for code, output in by_hand(jobs, [2, 2]):
        assert code == 2
        assert "rank 1 differs from rank 0 in the job file, tower: {'seed': 1} against {'seed': 0}" in output


def test_ranks_with_other_world_sizes_are_refused_on_every_rank(tmp_path: Path) -> None:
    job = write_job(tmp_path, 1000)
    for code, output in by_hand([job, job], [2, 3]):
        assert code == 2
        assert "was started for" in output
        assert "WORLD_SIZE" in output


def test_a_rank_that_fails_tells_the_others_why(tmp_path: Path) -> None:
    """Rank 1 cannot write where its checkpoints go: a file is in the way of a folder that only it makes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import hotrow as hr\n"
        f"ranks = hr.join_ranks('gloo', timeout={TIMEOUT})\n"
        "if ranks.rank == 1:\n"
        "    raise hr.DataError('clicks.csv has no line 7')\n"
        "ranks.rows.gather_numbers(1)\n"
    )
    port = free_port()
    processes = [
        start([sys.executable, str(script)], env={**os.environ, **environment(rank, 2, port)}) for rank in (0, 1)
    ]
    outputs = [end_of(process, 60)[0] for process in processes]
    assert "rank 0 stops, because rank 1 failed: DataError: clicks.csv has no line 7" in outputs[0]


def test_a_rank_that_hangs_but_lives_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, hotrow as hr\n"
        "ranks = hr.join_ranks('gloo', timeout=2)\n"
        "ranks.rows.gather_numbers(1)\n"
        "if ranks.rank == 1:\n"
        "    time.sleep(20)\n"
        "ranks.rows.gather_numbers(1)\n"
    )
    port = free_port()
    processes = [
        start([sys.executable, str(script)], env={**os.environ, **environment(rank, 2, port)}) for rank in (0, 1)
    ]
    output, _ = end_of(processes[0], 60)
    assert re.search(r"rank 0 stops, because rank 1 \(process \d+ on .*\) hangs: it lives but has not come", output)
    os.killpg(processes[1].pid, signal.SIGKILL)
    processes[1].wait()


def test_a_process_whose_device_waits_for_a_dead_rank_ends_by_its_name(tmp_path: Path) -> None:
    """The device is one whose events are never reached, and the thread that trains cannot be interrupted."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading, hotrow as hr\n"
        "from hotrow.parallel.watch import Watch\n"
        "class Event:\n"
        "    def query(self): return False\n"
        f"ranks = hr.join_ranks('gloo', timeout={TIMEOUT})\n"
        "ranks.rows.gather_numbers(1)\n"
        "if ranks.rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Watch(ranks._health).asked('rows', Event())\n"
        "threading.Event().wait()\n"
    )
    port = free_port()
    environments = [{**os.environ, **environment(rank, 2, port)} for rank in (0, 1)]
    processes = [start([sys.executable, str(script)], env=env) for env in environments]
    output, _ = end_of(processes[0], BOUND + 30)
    assert re.search(r"error: rank 0 stops, because rank 1 \(process \d+ on .*\) died or was stopped", output), output
    assert processes[0].returncode == 1
    processes[1].wait()


def test_the_environment_of_a_launcher_is_checked(tmp_path: Path) -> None:
    env = {**os.environ, "WORLD_SIZE": "2", "RANK": "zero"}
    process = start([sys.executable, "-c", "import hotrow as hr; hr.join_ranks('gloo')"], env=env)
    assert "RANK='zero' in the environment" in end_of(process, 60)[0]
