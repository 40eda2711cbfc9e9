"""The driver on a real Ray cluster of several nodes. Its ranks are small programs that do what their job file says."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
from checkpoint_contents import BY_ANYONE, contents

from hotrow import signals
from hotrow.cluster import ClusterJob, driver, placement, train_on_cluster
from hotrow.data.cluster.connect import connect
from hotrow.errors import ClusterError, OptionError
from hotrow.train.checkpoint.manifest import list_checkpoints

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray_cluster import STORE, eventually, start_cluster  # noqa: E402

# The job file is JSON: what rank R does in attempt A is under "A:R".
PROGRAM = """
import json, os, signal, socket, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
job = json.load(open(sys.argv[1]))
act = job.get(f"{attempt}:{rank}", "wait" if any(name.startswith(f"{attempt}:") for name in job) else "end")
known = {"attempt": attempt, "pid": os.getpid(), "arguments": sys.argv[1:], "environment": dict(os.environ)}
def told(number, frame):
    print("told", number)
    if act != "stubborn":
        sys.exit(128 + number)
signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
if rank == 0:  # as the store does
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
with open("draft-%d" % os.getpid(), "w") as file:
    json.dump(known, file)
os.rename(file.name, f"rank-{attempt}-{rank}")
print("attempt", attempt, "of rank", rank)
if act in ("kill", "actor", "exit 2", "exit 75"):  # when all have begun
    while not all(os.path.exists(f"rank-{attempt}-{other}") for other in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
if act == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if act == "actor":
    os.kill(os.getppid(), signal.SIGKILL)
if act.startswith("exit"):
    sys.exit(int(act.split()[1]))
while act != "end":
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that has a GPU, as far as Ray knows, a node without one, and two that tests may remove."""
    spare = {"num_cpus": 1, "resources": {"spare": 1}}
    made = start_cluster([{"num_cpus": 4, "num_gpus": 1}, {"num_cpus": 2}, spare, spare])
    connect(made.address, None, 0)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def run(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(driver.RAYS_MESSAGES, ".")
    monkeypatch.setattr(driver, "PATIENCE", 0.3)
    forked.default_signals()  # Ray installs a handler when a node starts
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made = Run(cluster, tmp_path, capsys)
    yield made
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert eventually(lambda: not [rank for rank in made.ranks() if psutil.pid_exists(rank["pid"])])


class Run:
    """A job in a folder of its own."""

    def __init__(self, cluster: Cluster, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster, self.home, self._capsys = cluster, home, capsys
        self.output = ""

    def job(self, acts: dict[str, str], cluster: dict[str, Any] | None = None, **options: Any) -> ClusterJob:
        values = {"checkpoints": {"folder": "run"}, "cluster": cluster or {}}
        made = ClusterJob("job.toml", json.dumps(acts), values, self.cluster.address, towers=1, rows=1)
        return replace(made, program=("-S", "-c", PROGRAM), **options)

    def train(self, job: ClusterJob) -> int:
        """Returns the exit code."""
        try:
            return train_on_cluster(job)
        finally:
            self.output = self._capsys.readouterr().out

    def ranks(self, attempt: int | None = None) -> list[dict[str, Any]]:
        """What the ranks knew, in the order of their attempts and numbers."""
        found = sorted(self.home.glob(f"rank-{'*' if attempt is None else attempt}-*"))
        return [json.loads(path.read_text()) for path in found]

    def when_all_run(self, act: Callable[[], object], count: int = 2) -> threading.Thread:
        """Call `act` in a thread as soon as so many ranks have begun."""

        def wait() -> None:
            if eventually(lambda: len(self.ranks()) == count, 60):
                act()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


def test_ranks_start_where_their_resources_are_in_the_environment_of_a_launcher(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HOTROW_JOB_TOKEN", "a token of the driver's environment")
    monkeypatch.setenv("HOTROW_TOKEN", "a server's")
    needs = {"tower_gpus": 1, "tower_cpus": 2}
    job = run.job({}, needs, rows=2, options=("--steps", "7"))
    assert run.train(job) == 0, run.output
    ranks = run.ranks()
    known = [rank["environment"] for rank in ranks]

    def of_all(name: str) -> list[str | None]:
        return [one.get(name) for one in known]

    assert of_all("RANK") == ["0", "1", "2"] and of_all("WORLD_SIZE") == ["3"] * 3
    assert of_all("LOCAL_RANK") == ["0", "0", "1"] and of_all("LOCAL_WORLD_SIZE") == ["1", "2", "2"]  # off the GPU's
    assert of_all("CUDA_VISIBLE_DEVICES") == ["0", "", ""]
    assert of_all("OMP_NUM_THREADS") == ["2", "1", "1"]
    assert of_all("NCCL_DEBUG") == ["WARN"] * 3 and of_all("HOTROW_TOKEN") == [None] * 3
    (token,) = {str(one) for one in of_all("HOTROW_JOB_TOKEN")}
    assert len(token) == 64
    (address,) = set(of_all("MASTER_ADDR"))
    assert address in {node["NodeManagerAddress"] for node in ray.nodes()}
    assert {rank["arguments"][1] for rank in ranks} == {"--steps"}
    copies = [Path(rank["arguments"][0]) for rank in ranks]  # no node has job.toml
    assert not any(copy.exists() for copy in copies) and {copy.name for copy in copies} == {"job.toml"}
    assert "ranks on Ray: tower rank 0 on " in run.output
    assert "\nrow rank 1 | attempt 0 of rank 2\n" in run.output and "\nattempt 0 of rank 0\n" in run.output


def test_every_death_starts_the_job_again_from_its_checkpoint_until_there_are_too_many(run: Run) -> None:
    """A row rank's process, a tower's actor, a rank that has lost another one, and a tower's process."""
    acts = {"0:1": "kill", "1:0": "actor", "2:1": "exit 75", "3:0": "kill"}
    assert run.train(run.job(acts)) == 128 + signal.SIGKILL, run.output
    ranks = run.ranks()
    assert [rank["attempt"] for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert ["--resume" in rank["arguments"] for rank in ranks] == [False, False] + [True] * 6
    assert len({rank["environment"]["HOTROW_JOB_TOKEN"] for rank in ranks}) == 4
    told = [line for line in run.output.splitlines() if line.startswith("rank ")]
    assert "rank 1 (row rank 0) on " in told[0] and "was killed by SIGKILL; starting again from the newest" in told[0]
    assert "rank 0 (tower rank 0) on " in told[1] and "was lost: its actor " in told[1]
    assert "lost another rank; " in told[2] and told[2].endswith("(restart 3 of 3)")
    assert told[3].endswith("was killed by SIGKILL; not started again, after 3 restarts (--max-restarts)")


def test_an_error_of_the_job_itself_is_final(run: Run) -> None:
    assert run.train(run.job({"0:1": "exit 2", "0:0": "stubborn"})) == 2
    assert {rank["attempt"] for rank in run.ranks()} == {0}
    assert "rank 1 (row rank 0) on " in run.output and " ended with an error, see above\n" in run.output


def test_without_checkpoints_a_death_is_final(run: Run) -> None:
    job = replace(run.job({"0:0": "kill"}), values={})
    assert run.train(job) == 128 + signal.SIGKILL
    assert {rank["attempt"] for rank in run.ranks()} == {0}
    assert "the job has no [checkpoints], so it is not started again when a rank dies" in run.output
    with pytest.raises(OptionError, match=r"--max-restarts 2 without checkpoints, so a restart would begin anew"):
        run.train(replace(job, max_restarts=2))


def test_a_lost_node_starts_the_job_again_on_another(run: Run) -> None:
    """The row rank is on one of two nodes that have what it takes."""
    needs = {"row_resources": {"spare": 1}}

    def remove() -> None:
        actor = psutil.Process(run.ranks()[1]["pid"]).ppid()
        node = raylets(run.cluster)[psutil.Process(actor).ppid()]
        run.cluster.remove_node(node, allow_graceful=False)

    thread = run.when_all_run(remove)
    assert run.train(run.job({"0:0": "wait"}, needs)) == 0, run.output
    thread.join()
    assert [rank["attempt"] for rank in run.ranks()] == [0, 0, 1, 1]
    assert " was lost: its " in run.output and "node " in run.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_rank_once(run: Run, number: int, code: int) -> None:
    thread = run.when_all_run(lambda: os.kill(os.getpid(), number))
    assert run.train(run.job({"0:0": "wait"})) == code
    thread.join()
    assert run.output.count(f"told {number}") == 2 and "starting again" not in run.output


def test_a_second_signal_kills_the_ranks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "DUPLICATE_SECONDS", 0)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = run.when_all_run(twice)
    with pytest.raises(KeyboardInterrupt):
        run.train(run.job({"0:0": "stubborn", "0:1": "stubborn"}))
    thread.join()
    assert run.output.count("told 2") == 2


DRIVER = """
import sys
from hotrow.cluster import ClusterJob, train_on_cluster
job = ClusterJob("job.toml", '{"0:0": "wait"}', {}, sys.argv[1], 1, 1, program=("-S", "-c", sys.argv[2]))
sys.exit(train_on_cluster(job))
"""


def test_ranks_do_not_outlive_a_driver_that_is_killed(run: Run) -> None:
    begin = f"import os; os.chdir({str(run.home)!r})\n"
    process = forked.python(begin + DRIVER, run.cluster.address, PROGRAM, log=run.home / "log")
    assert eventually(lambda: len(run.ranks()) == 2, 90), process.text()
    process.kill()  # the fixture waits for the ranks


# What is missing.


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"tower_cpus": 20}, r"the job takes 21 CPUs \(20 CPUs for the tower rank and 1 CPU for the row rank\)"),
        ({"tower_gpus": 2}, r"the job takes 2 GPUs \(2 GPUs for the tower rank\), and its \d nodes have 1 GPU;"),
        ({"row_memory": "900TiB"}, r"the job takes 900\.0 TiB of memory"),
        ({"row_resources": {"fast": 1}}, r"takes 1 of resource fast .* its \d nodes have 0 of resource fast"),
        ({"row_cpus": 5}, "no node has what one row rank takes, 5 CPUs: "),
    ],
)
def test_a_missing_resource_is_an_error_at_once(run: Run, needs: dict[str, Any], message: str) -> None:
    began = time.monotonic()
    with pytest.raises(ClusterError, match=message):
        run.train(run.job({}, needs))
    assert time.monotonic() - began < 5 and not run.ranks()


def test_a_cluster_that_is_in_use_says_so_and_then_what_is_free(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr(driver, "PLACEMENT_SECONDS", 1.5)
    monkeypatch.setattr(placement, "NOTE_SECONDS", 0.1)
    other = placement_group([{"GPU": 1}])
    assert other.wait(30)
    try:
        with pytest.raises(ClusterError, match=r"it was not free within 1\.5 s: free are .*0 GPUs on all nodes"):
            run.train(run.job({}, {"tower_gpus": 1}))
        assert "waiting up to 1.5 s for resources that other jobs have: free are " in run.output

        def signal_soon() -> None:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=signal_soon)
        thread.start()
        assert run.train(run.job({}, {"tower_gpus": 1})) == 143
        thread.join()
        assert "stopped while the ranks were starting" in run.output
    finally:
        remove_placement_group(other)
    assert not run.ranks()


def test_ranks_leave_cpus_for_reading_on_the_cluster(run: Run) -> None:
    job = run.job({}, {"tower_cpus": 4, "row_cpus": 2})
    total = ray.cluster_resources()["CPU"]
    job = replace(job, values={**job.values, "data": {"ray": {"address": "auto", "cpus": total - 5}}})
    with pytest.raises(ClusterError, match=r"the ranks take 6 CPUs of the cluster's .* for reading on it; add nodes"):
        run.train(job)


# Nodes and folders.


def test_checkpoints_of_an_earlier_run_are_refused_before_any_rank_starts(run: Run) -> None:
    """A rank that dies early would let the restart go on from them."""
    (run.home / "run" / "step-000000000040").mkdir(parents=True)
    with pytest.raises(OptionError, match=r"'run' has checkpoints of an earlier run \(the newest is step-0+40\)"):
        run.train(run.job({}))
    assert not run.ranks() and [path.name for path in (run.home / "run").iterdir()] == ["step-000000000040"]
    assert run.train(run.job({}, resume=True)) == 0
    assert all(rank["arguments"][1:] == ["--resume"] for rank in run.ranks())


def test_a_folder_that_cannot_be_written_is_named(run: Run) -> None:
    job = replace(run.job({}), values={"checkpoints": {"folder": "/proc/none"}})
    with pytest.raises(ClusterError, match=r"folder='/proc/none' cannot be written on .*No such file or directory"):
        run.train(job)


def test_a_node_with_another_version_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda name: "99.0")
    with pytest.raises(ClusterError, match=r"the node .* has HotRow .*, and this machine HotRow 99.0; install one"):
        run.train(run.job({}))


def test_ranks_start_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(OptionError, match=r"--on auto inside a rank \(RANK=3 in the environment\)"):
        train_on_cluster(ClusterJob("job.toml", "", {}, "auto", 1, 1))


# Real training.

JOB = """
[data]
examples = {examples}
test_examples = 512
batch_size = 64
keys = 600_000
[embeddings]
dim = 4
optimizer = {{ kind = "Adam", lr = 0.01 }}
[tower]
kind = "dlrm"
bottom = [8]
top = [8]
[checkpoints]
folder = "{folder}"
every = 20
[ranks]
timeout = 30
[cluster]
{cluster}
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


class Training:
    """`hotrow train` of one job, here in one process or on the cluster, in a process of its own."""

    def __init__(self, cluster: Cluster, home: Path, name: str, examples: int, lines: str = "") -> None:
        self.address, self.home, self.name, self.folder = cluster.address, home, name, home / name
        self._job = home / f"{name}.toml"
        self._job.write_text(JOB.format(examples=examples, folder=self.folder, cluster=lines))
        self._process: forked.Forked | None = None

    def start(self, *options: str) -> None:
        """Begin, and leave it running."""
        log = self.home / f"{self.name}.log"
        self._process = forked.hotrow("train", str(self._job), "--quiet", *options, log=log, env=ENVIRONMENT)

    def start_on_ray(self, *options: str) -> None:
        """The same, with its ranks and its readers on the cluster."""
        self.start("--on", self.address, "--ray", self.address, *options)

    def wait_for_checkpoint(self) -> None:
        """Until there is another one."""
        assert self._process is not None
        before, process = list_checkpoints(self.folder), self._process
        assert eventually(lambda: list_checkpoints(self.folder)[:1] != before[:1] or process.poll() is not None, 120)
        assert process.poll() is None, process.text()

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(self._job) in process.cmdline() and process.environ().get("RANK") == str(number):
                    return process
        raise AssertionError(f"there is no rank {number}")

    def signal(self, number: signal.Signals) -> None:
        """Send the command a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Its exit code, and its output without line breaks."""
        assert self._process is not None
        code = self._process.wait(240)
        return code, " ".join(self._process.text().split())

    def learned(self) -> dict[str, Any]:
        """What has been learned. The number of ranks is no part of that."""
        return contents(self.folder, BY_ANYONE)


def test_a_killed_and_stopped_job_learns_what_an_undisturbed_process_learns(cluster: Cluster, tmp_path: Path) -> None:
    here = Training(cluster, tmp_path, "here", 12_800, "tower_cpus = 1")
    here.start()
    there = Training(cluster, tmp_path, "there", 12_800, "towers = 1\nrows = 1")
    there.start_on_ray()
    there.wait_for_checkpoint()
    there.rank(1).kill()
    there.wait_for_checkpoint()
    there.signal(signal.SIGTERM)
    code, said = there.end()
    assert code == 143, said
    assert said.count("starting again from the newest checkpoint") == 1, said
    newest = list_checkpoints(there.folder)[0]
    assert f"saved to {newest}; go on with `hotrow train {tmp_path}/there.toml --on {cluster.address} --resume`" in said
    there.start_on_ray("--resume")
    code, said = there.end()
    assert code == 0 and "resumed after step" in said, said
    assert here.end()[0] == 0
    assert there.learned() == here.learned()
    assert there.learned()["manifest"]["step"] == 200


def raylets(cluster: Cluster) -> dict[int, Any]:
    """The cluster's nodes by the process ids of their raylets."""
    return {node.all_processes["raylet"][0].process.pid: node for node in cluster.list_all_nodes()}


def readers(cluster: Cluster) -> list[psutil.Process]:
    """The cluster's processes that read, or may next."""
    workers = [child for raylet in raylets(cluster) for child in psutil.Process(raylet).children()]
    named = {worker: worker.cmdline()[:1] for worker in workers if worker.is_running()}
    others = ("Rank", "Agent")  # a raylet ends with its agents
    return [
        worker
        for worker, name in named.items()
        if name and name[0].startswith("ray::") and not any(other in name[0] for other in others)
    ]


@pytest.mark.soak
def test_deaths_of_every_kind_change_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    """Processes and actors of rows and towers, readers, and a node, one after another."""
    here = Training(cluster, tmp_path, "here", 64_000, "towers = 2\nrows = 1")
    here.start()
    assert here.end()[0] == 0
    lines = "towers = 2\nrows = 2\nrow_resources = { spare = 0.5 }"
    there = Training(cluster, tmp_path, "there", 64_000, lines)
    for _ in range(2):  # each has room for both row ranks, so either may be removed
        cluster.add_node(num_cpus=2, resources={"spare": 2}, object_store_memory=STORE)
    there.start_on_ray("--max-restarts", "9")
    for rank, kill_actor in ((3, False), (0, False), (2, True), (1, True)):
        there.wait_for_checkpoint()
        process = there.rank(rank)
        (process.parent() if kill_actor else process).kill()  # type: ignore[union-attr]
        psutil.wait_procs([process], 30)
    there.wait_for_checkpoint()
    killed = readers(cluster)
    for reader in killed:
        reader.kill()
    there.wait_for_checkpoint()
    node = there.rank(3).parent().parent()  # type: ignore[union-attr]
    cluster.remove_node(raylets(cluster)[node.pid], allow_graceful=False)
    code, said = there.end()
    assert code == 0 and killed, said
    assert said.count("starting again from the newest checkpoint") == 5, said
    assert there.learned() == here.learned()
