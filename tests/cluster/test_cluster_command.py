"""`hotrow train --on`: its options, and the job file of the guide. No Ray runs here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command_line import hotrow

from hotrow.cluster import ClusterJob
from hotrow.cluster.resources import rank_groups
from hotrow.job import SECTIONS, cluster_of, read_job

GUIDE = Path(__file__).parents[2] / "docs" / "ray.md"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ClusterJob]:
    """The jobs that the command would have started, in a folder with a job file."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[data]\nexamples = 9\n")
    jobs: list[ClusterJob] = []

    def start(job: ClusterJob) -> int:
        jobs.append(job)
        return 7

    monkeypatch.setattr("hotrow.cluster.train_on_cluster", start)
    return jobs


def test_the_options_of_training_go_to_every_rank(started: list[ClusterJob]) -> None:
    words = ["--towers", "2", "--rows", "3", "--steps", "5", "--quiet", "--ray", "auto", "--trace", "t.json"]
    done = hotrow("train", "job.toml", "--on", "10.0.0.5:6379", *words, "--resume", "--max-restarts", "4")
    assert done.returncode == 7, done.stderr
    (job,) = started
    assert (job.path, job.address, job.towers, job.rows) == ("job.toml", "10.0.0.5:6379", 2, 3)
    assert (job.resume, job.max_restarts) == (True, 4)
    given = dict(zip(job.options[:-1:2], job.options[1::2], strict=True))
    assert given == {"--steps": "5", "--trace": "t.json", "--towers": "2", "--rows": "3", "--ray": "auto"}
    assert job.options[-1] == "--quiet"
    assert job.reading == {"address": "auto"} and job.text == Path("job.toml").read_text()


def test_ranks_with_both_roles(started: list[ClusterJob]) -> None:
    assert hotrow("train", "job.toml", "--on", "auto", "--ranks", "4").returncode == 7
    assert (started[0].towers, started[0].rows) == (4, 0) and "--ranks" in started[0].options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "auto"], r"--on auto: say how many ranks to start, by \[cluster\] towers and rows"),
        (["--max-restarts", "2"], r"--max-restarts 2 without --on"),
        (["--on", "auto", "--rows", "2", "--start", "rows"], r"--start rows with --on auto: Ray starts all ranks"),
        (["--on", "auto", "--rows", "2", "--meet", "a:1"], r"--meet a:1 with --on auto: Ray starts all ranks"),
        (["--on", "auto", "--rows", "2", "--token-file", "t"], r"--token-file t with --on auto: Ray starts all"),
    ],
)
def test_options_that_do_not_go_together_are_named(started: list[ClusterJob], words: list[str], message: str) -> None:
    done = hotrow("train", "job.toml", *words)
    assert done.returncode == 2 and re.search(message, " ".join(done.stderr.split())), done.stderr
    assert not started


def test_the_guides_job_takes_what_the_guide_says(tmp_path: Path) -> None:
    section = GUIDE.read_text().split("## Ranks on Ray")[1]
    block = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    (tmp_path / "job.toml").write_text(block[1])
    job: dict[str, Any] = read_job(tmp_path / "job.toml")
    assert all(set(options) <= set(SECTIONS[name] or options) for name, options in job.items())
    cluster = cluster_of(tmp_path / "job.toml")
    assert cluster is not None
    towers, rows = rank_groups(job, cluster.towers, cluster.rows)
    assert (towers.count, towers.needs) == (2, {"CPU": 8, "GPU": 1})
    assert (rows.count, rows.needs) == (4, {"CPU": 16, "memory": 200 << 30, "fast_disk": 1})
