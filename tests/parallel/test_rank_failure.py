"""Ranks that die, fail or differ: the job ends in bounded time, names the rank, and can be resumed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import forked
import psutil
import pytest
from crew import environment
from jobs import BOUND, wait_for_checkpoints, write_job
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import hotrow as hr
from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint

Start = Callable[[int, dict[str, str]], forked.Forked]


class Launched:
    """Ranks as a launcher starts them: the launcher has the rendezvous store, so that any rank may die."""

    def __init__(self, begin: Start, worlds: Sequence[int] = (2, 2)) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        held = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "COLUMNS": "400"}
        self.ranks = [
            begin(rank, environment(rank, world, self.store.port) | held) for rank, world in enumerate(worlds)
        ]

    def end(self, within: float = BOUND) -> list[tuple[int, str]]:
        """Each one's exit code and output, without line breaks."""
        return [(rank.wait(within), re.sub(r"\s+", " ", rank.text())) for rank in self.ranks]


def train(home: Path, jobs: Sequence[Path], worlds: Sequence[int] = (2, 2)) -> Launched:
    def begin(rank: int, env: dict[str, str]) -> forked.Forked:
        return forked.hotrow("train", str(jobs[rank]), "--quiet", log=home / f"rank-{rank}.log", env=env)

    return Launched(begin, worlds)


def run(home: Path, code: str, *arguments: str) -> Launched:
    return Launched(lambda rank, env: forked.python(code, *arguments, log=home / f"rank-{rank}.log", env=env))


def test_ranks_with_other_job_files_are_refused_on_every_rank(tmp_path: Path) -> None:
    jobs = [write_job(tmp_path, 1000, seed=seed, name=f"job-{seed}") for seed in (0, 1)]
    for code, output in train(tmp_path, jobs).end():
        assert code == 2
        assert "rank 1 differs from rank 0 in the job file, tower: {'seed': 1} against {'seed': 0}" in output


def test_ranks_with_other_world_sizes_are_refused_on_every_rank(tmp_path: Path) -> None:
    job = write_job(tmp_path, 1000)
    for code, output in train(tmp_path, [job, job], [2, 3]).end():
        assert code == 2
        assert "was started for" in output
        assert "WORLD_SIZE" in output


def test_a_rank_that_fails_tells_the_others_why(tmp_path: Path) -> None:
    launched = run(
        tmp_path,
        "import hotrow as hr\n"
        "ranks = hr.join_ranks('gloo', timeout=4)\n"
        "if ranks.rank == 1:\n"
        "    raise hr.DataError('clicks.csv has no line 7')\n"
        "ranks.rows.gather_numbers(1)\n",
    )
    (code, output), _ = launched.end()
    assert code == 1
    assert "rank 0 stops, because rank 1 failed: DataError: clicks.csv has no line 7" in output


STAGES = """
import sys
import hotrow as hr
from hotrow.train import fit, pipeline, trainer as of_trainer
from test_rank_training import WithSequences, make

def fails(real):
    calls = []
    def work(*arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            raise ValueError(f"{stage} broke")
        return real(*arguments, **options)
    return work

stage, ranks = sys.argv[1], hr.join_ranks("gloo", timeout=60)
trainer, source = make(ranks, sys.argv[2], checkpoint_every=1), WithSequences(40 * 32, 16)
at = {"compute": (trainer, "_forward_backward"), "update": (fit, "make_step"), "save": (of_trainer, "capture")}
place, name = at.get(stage, (pipeline.Pipeline, stage))
if ranks.rank == 1 and stage == "read":
    reads = source.batches
    source.batches = lambda cursor=None: map(fails(lambda item: item), reads(cursor))
elif ranks.rank == 1:
    setattr(place, name, fails(getattr(place, name)))
trainer.fit(source, progress=False)
"""


def test_an_error_of_any_stage_on_one_rank_ends_all_by_its_name(tmp_path: Path) -> None:
    launched = {}
    for stage in ("read", "route", "prefetch", "stage", "fetch", "compute", "update", "save"):
        home = tmp_path / stage
        home.mkdir()
        launched[stage] = run(home, STAGES, stage, str(home / "run"))
    for stage, ranks in launched.items():
        (code, output), (its_code, its_output) = ranks.end(60)
        assert (code, its_code) == (1, 1), f"{stage}: {output}"
        assert f"ValueError: {stage} broke" in its_output
        assert f"rank 0 stops, because rank 1 failed: ValueError: {stage} broke" in output, f"{stage}: {output}"


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_other_and_the_checkpoint_stays(tmp_path: Path, dead: int) -> None:
    job = write_job(tmp_path)
    launched = train(tmp_path, [job, job])
    wait_for_checkpoints(tmp_path / "run", launched.ranks[0])
    launched.ranks[dead].send_signal(signal.SIGKILL)
    ends = launched.end()
    assert ends[dead][0] == -signal.SIGKILL
    code, output = ends[1 - dead]
    assert code == 2
    who = rf"rank {dead} \(process {launched.ranks[dead].pid} on .*\) died or was stopped"
    assert re.search(rf"rank {1 - dead} stops, because {who}", output), output
    open_checkpoint(tmp_path / "run").verify()


FORKS = """
import os, signal, sys
from hotrow import child_process
from hotrow.cli import main

class Fork:
    def __init__(self, command, env, start_new_session):
        parent = os.getpid()
        self.returncode, self.pid = None, os.fork()
        if self.pid:
            return
        os.setsid()
        child_process.end_with_parent(parent)
        os.environ.update(env)
        code = 1
        try:
            sys.argv = command[2:]
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self):
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

child_process.start = Fork
sys.argv = ["hotrow", "train", sys.argv[1], "--ranks", "2", "--quiet"]
main()
"""  # `hotrow train --ranks 2` whose ranks are forked: interpreters of their own take ten seconds of two cores


@pytest.mark.parametrize(
    ("to", "number", "code", "first"),
    [
        ("the launcher", signal.SIGINT, 130, ""),
        ("rank 1", signal.SIGTERM, 143, ""),
        ("the launcher", signal.SIGTERM, 143, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"),
    ],
)
def test_a_signal_ends_a_job_of_ranks_with_a_checkpoint(
    tmp_path: Path, to: str, number: signal.Signals, code: int, first: str
) -> None:
    job, folder = write_job(tmp_path), tmp_path / "run"
    env = {"COLUMNS": "400", "OMP_NUM_THREADS": "1"}
    process = forked.python(first + FORKS, str(job), log=tmp_path / "log", env=env)
    wait_for_checkpoints(folder, process)
    ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
    assert len(ranks) == 2
    if first:
        process.send_signal(signal.SIGINT)
    (process if to == "the launcher" else ranks[int(to[-1])]).send_signal(number)
    ended, output = process.wait(60), process.text()
    assert ended == code, output
    assert output.count("Ctrl-C is ignored") == bool(first)
    newest = list_checkpoints(folder)[0]
    step = int(newest.name.split("-")[1])
    assert output.count("stopped after step") == 1
    assert f"stopped after step {step:,}; saved to {newest}; go on with `hotrow train {job} --resume`" in output
    assert "Traceback" not in output
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    open_checkpoint(newest).verify()


def test_the_environment_of_a_launcher_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "zero")
    with pytest.raises(hr.OptionError, match="RANK='zero' in the environment"):
        hr.join_ranks("gloo")
