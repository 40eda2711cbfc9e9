"""Ranks under launchers as people start them, killed, stopped, interrupted and restarted: minutes of real jobs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import forked
import psutil
import pytest
from checkpoint_contents import contents
from crew import environment, free_port
from jobs import BOUND, TIMEOUT, end_of, ranks_of, start, wait_for_checkpoints, write_job

from hotrow.signals import DUPLICATE_SECONDS
from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint

pytestmark = pytest.mark.soak


def none_runs(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_ends_the_job_by_its_name(tmp_path: Path, number: signal.Signals) -> None:
    process = start([sys.executable, "-m", "hotrow", "train", str(write_job(tmp_path)), "--ranks", "2", "--quiet"])
    wait_for_checkpoints(tmp_path / "run", process)
    ranks = ranks_of(process)
    ranks[1].send_signal(number)
    if number == signal.SIGSTOP:  # the launcher ends the stopped rank when rank 0 has reported it and ended
        output, _ = end_of(process, BOUND + 40)
    else:
        output, _ = end_of(process, BOUND)
        assert "rank 1 was killed by SIGKILL" in output
    assert process.returncode != 0
    assert re.search(r"rank 0 stops, because rank 1 \(process \d+ on .*\) died or was stopped", output), output
    assert none_runs(list(ranks.values()))
    open_checkpoint(tmp_path / "run").verify()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start([sys.executable, "-m", "hotrow", "train", str(write_job(tmp_path)), "--ranks", "2", "--quiet"])
    wait_for_checkpoints(tmp_path / "run", process)
    ranks = ranks_of(process)
    process.send_signal(number)
    output, _ = end_of(process, 60)
    assert process.returncode == code, output
    newest = list_checkpoints(tmp_path / "run")[0]
    assert f"saved to {newest}" in output, output
    assert none_runs(list(ranks.values()))
    open_checkpoint(newest).verify()


def test_a_second_ctrl_c_ends_all_ranks_at_once(tmp_path: Path) -> None:
    process = start([sys.executable, "-m", "hotrow", "train", str(write_job(tmp_path)), "--ranks", "2", "--quiet"])
    wait_for_checkpoints(tmp_path / "run", process)
    ranks = ranks_of(process)
    for rank in ranks.values():
        rank.suspend()  # so that they cannot stop before the second one comes
    process.send_signal(signal.SIGINT)
    time.sleep(DUPLICATE_SECONDS + 0.2)
    process.send_signal(signal.SIGINT)
    output, _ = end_of(process, BOUND)
    assert process.returncode == 130, output
    assert none_runs(list(ranks.values()))
    open_checkpoint(tmp_path / "run").verify()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to", ["torchrun", "rank 1"])
def test_under_torchrun_a_signal_saves_and_ends_all_ranks(tmp_path: Path, number: signal.Signals, to: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", str(free_port())]
    process = start([*command, "-m", "hotrow", "train", str(write_job(tmp_path)), "--quiet"])
    wait_for_checkpoints(tmp_path / "run", process)
    ranks = ranks_of(process)
    (process if to == "torchrun" else ranks[1]).send_signal(number)
    output, _ = end_of(process, 60)
    newest = list_checkpoints(tmp_path / "run")[0]
    assert f"saved to {newest}" in output, output
    assert none_runs(list(ranks.values()))
    open_checkpoint(newest).verify()


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


DIES = """
import os, signal, sys
from hotrow.job import load_job
from hotrow.train.checkpoint import saving

job, dying = load_job(sys.argv[1]), sys.argv[2]
write_rows, publish = saving._write_rows, saving._publish

def dies(instant, where):
    return instant.step == 8 and dying == f"{where} {instant.ranks.rank}"

def die_after_a_table(instant, draft):
    if dies(instant, "rows"):
        table = instant.tables[0]
        instant.snapshots[table["name"]].finish(str(draft / instant.folder(table)), "")
        os.kill(os.getpid(), signal.SIGKILL)
    return write_rows(instant, draft)

def die_before_the_manifest(instant, *rest):
    if dies(instant, "publish"):
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(instant, *rest)

saving._write_rows, saving._publish = die_after_a_table, die_before_the_manifest
job.run(progress=False)
"""


@pytest.mark.parametrize("dying", ["rows 0", "rows 1", "publish 0"])
def test_a_rank_that_is_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path: Path, dying: str) -> None:
    """The save after step 8: half of a rank's rows are written, or all of them and no manifest."""
    whole, home = write_job(tmp_path / "whole", examples=20 * 64), tmp_path / "killed"
    job, port, dead = write_job(home, examples=20 * 64), free_port(), int(dying[-1])
    env = [environment(rank, 2, port) for rank in (0, 1)]
    ranks = [forked.python(DIES, str(job), dying, log=home / f"{i}", env=one) for i, one in enumerate(env)]
    assert ranks[dead].wait(BOUND) == -signal.SIGKILL
    assert ranks[1 - dead].wait(BOUND) != 0
    if dead == 1:  # otherwise their rendezvous store died with it
        assert re.search(r"rank 1 \(process \d+ on .*\) died or was stopped", ranks[0].text()), ranks[0].text()
    assert [path.name for path in list_checkpoints(home / "run")] == ["step-000000000004"]
    open_checkpoint(home / "run").verify()
    for path, options in ((job, ["--resume"]), (whole, [])):
        port = free_port()
        ranks = [
            forked.hotrow("train", str(path), "--quiet", *options, log=home / f"{i}", env=environment(i, 2, port))
            for i in (0, 1)
        ]
        assert [one.wait(60) for one in ranks] == [0, 0], ranks[0].text()
    assert contents(home / "run") == contents(whole.parent / "run")


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
        "from hotrow.parallel.watchdog import Watchdog\n"
        "class Event:\n"
        "    def query(self): return False\n"
        f"ranks = hr.join_ranks('gloo', timeout={TIMEOUT})\n"
        "ranks.rows.gather_numbers(1)\n"
        "if ranks.rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Watchdog(ranks._health).issued('rows', Event())\n"
        "threading.Event().wait()\n"
    )
    port = free_port()
    environments = [{**os.environ, **environment(rank, 2, port)} for rank in (0, 1)]
    processes = [start([sys.executable, str(script)], env=env) for env in environments]
    output, _ = end_of(processes[0], BOUND + 30)
    assert re.search(r"error: rank 0 stops, because rank 1 \(process \d+ on .*\) died or was stopped", output), output
    assert processes[0].returncode == 1
    processes[1].wait()
