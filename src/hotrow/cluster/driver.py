"""The driver: starts the ranks on the cluster, shows their output, and starts the job anew when one dies.

An attempt reserves resources (placement.py), starts one actor for each rank (rank_actor.py), lets each start its
process, and waits for their ends. Rank 0's node is where ranks meet: its actor chooses address and port. Tower ranks
come first, so rank 0 has a tower.

A death (of a process by a signal, of an actor, of a node) or the loss of another rank ends the attempt: every rank is
killed, and the job starts anew with --resume. That repeats no example and loses none, because a checkpoint has rows,
weights and cursor of one step, and ranks that remain cannot publish another one alone. An error of the job itself (exit
code 2: a bad file, an option) is final. It would come again.

The first SIGINT or SIGTERM goes to all ranks, once each. They stop together and save. A second one kills them.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType, TracebackType
from typing import Any

from hotrow.cluster import rank_actor
from hotrow.cluster.placement import nodes_of, reserve
from hotrow.cluster.rank_actor import RankActor, RankStart
from hotrow.cluster.resources import RankGroup, check_capacity, describe, rank_groups
from hotrow.cluster.terminal import Terminal
from hotrow.data.cluster.connect import connect, import_ray
from hotrow.errors import ClusterError, OptionError
from hotrow.parallel.job_token import TOKEN_VARIABLE, new_job_token
from hotrow.parallel.meeting import AGENT_STORE
from hotrow.parallel.ownership import Roles
from hotrow.signals import StopSignals, exit_code
from hotrow.units import parse_size

MAX_RESTARTS = 3
PLACEMENT_SECONDS = 60.0  # until reserved resources are free; also how long a lost node may take to come back
START_SECONDS = 120.0  # until actors answer
END_SECONDS = 15.0  # until a rank that was killed is gone
READ_SECONDS = 5.0  # one call to a rank for its output waits so long
POLL_SECONDS = 0.2
PATIENCE = 20.0  # after a rank has failed, for the others to say why
OWN_ERROR = 2  # exit code of a rank for an error of the job itself
LOST_RANK = 75  # and where another rank was lost (hotrow/cli)
PASSED_ON = ("HOTROW_", "NCCL_", "TORCH_", "CUBLAS_", "GLOO_")  # variables of the driver's environment
NOT_PASSED_ON = ("HOTROW_TOKEN",)  # a server's secret
OF_TERMINAL = ("TERM", "COLORTERM", "NO_COLOR")
RAYS_MESSAGES = "RAY_DEDUP_LOGS_SKIP_REGEX"  # which of Ray's messages the driver does not print


@dataclass(frozen=True)
class ClusterJob:
    """A job for a cluster. `options` are those of `hotrow train` for every rank, without --resume. `rows` is 0 where
    each rank has both roles. `program` is what a rank's Python runs."""

    path: str
    text: str
    values: Mapping[str, Any]
    address: str
    towers: int
    rows: int = 0
    options: tuple[str, ...] = ()
    resume: bool = False
    max_restarts: int | None = None
    program: tuple[str, ...] = ("-m", "hotrow", "train")

    @property
    def folder(self) -> str | None:
        """Where its checkpoints are."""
        found = self.values.get("checkpoints", {}).get("folder")
        return None if found is None else str(found)

    @property
    def reading(self) -> Mapping[str, Any] | None:
        """[data] ray, if the job reads on Ray."""
        given = self.values.get("data", {}).get("ray")
        return {"address": given} if isinstance(given, str) else given


@dataclass(frozen=True)
class _End:
    """How an attempt ended: with which exit code, why, and whether another one may do better."""

    code: int
    why: str = ""
    again: bool = False


class _LostError(Exception):
    """A rank's actor does not answer any more."""

    def __init__(self, rank: int, error: Exception, died: bool) -> None:
        super().__init__(str(error))
        self.rank, self.died = rank, died


class _StoppedError(Exception):
    """A signal came before the ranks ran."""


def train_on_cluster(job: ClusterJob) -> int:
    """Train a job on the cluster at its address; returns the exit code. Requires: the main thread."""
    if "RANK" in os.environ:
        raise OptionError(
            f"--on {job.address} inside a rank (RANK={os.environ['RANK']} in the environment): --on starts the ranks "
            "itself; leave it out, or do not start it by torchrun"
        )
    groups = rank_groups(job.values, job.towers, job.rows)
    restarts = _restarts(job)
    cpus = math.ceil(sum(group.count * group.needs.get("CPU", 0) for group in groups))
    # At a death Ray prints pages of a node's log into the progress bar; the driver says what died in a line.
    os.environ.setdefault(RAYS_MESSAGES, ".")
    address = connect(job.address, max(os.cpu_count() or 1, cpus + _reader_cpus(job)), _object_store(job))
    ray = import_ray()
    check_capacity(groups, nodes_of(ray))
    _check_readers(job, cpus, address, ray)
    terminal = Terminal([f"{group.role} {number}" for group in groups for number in range(group.count)])
    if job.max_restarts is None and job.folder is None:
        terminal.note("the job has no [checkpoints], so it is not started again when a rank dies")
    received: list[int] = []
    with StopSignals(received.append):
        number = 0
        while True:
            with _Attempt(ray, job, groups, terminal, number, received, address) as attempt:
                end = attempt.run()
            if received or not end.again:
                if end.why:
                    terminal.note(end.why)
                return end.code
            if number == restarts:
                terminal.note(f"{end.why}; not started again, after {restarts} restarts (--max-restarts)")
                return end.code
            number += 1
            terminal.note(f"{end.why}; starting again from the newest checkpoint (restart {number} of {restarts})")


class _Attempt:
    """One start of all ranks. On exit of the block no rank is left."""

    def __init__(
        self,
        ray: ModuleType,
        job: ClusterJob,
        groups: Sequence[RankGroup],
        terminal: Terminal,
        number: int,
        received: Sequence[int],
        address: str,
    ) -> None:
        self.ray, self.job, self.groups, self.terminal, self.number = ray, job, groups, terminal, number
        self.received = received  # signals
        self.address = address  # of the cluster
        self.roles = Roles.apart(job.towers + job.rows, job.rows)
        self.nodes: list[dict[str, Any]] = []  # of each rank
        self._group: Any = None
        self._actors: list[Any] = []
        self._lost: set[int] = set()

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._end_ranks()
        finally:
            for actor in self._actors:
                self.ray.kill(actor)
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
            self.terminal.end_ranks()

    def run(self) -> _End:
        """Start the ranks and wait for their ends."""
        try:
            self._reserve()
            self._inspect_nodes()
            self._start_ranks()
            return self._watch()
        except _StoppedError:
            return _End(exit_code(self.received[0]), "stopped while the ranks were starting")
        except _LostError as lost:
            return self._end_by_loss(lost)

    # Starting.

    def _reserve(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = reserve(self.ray, self.groups, PLACEMENT_SECONDS, lambda: bool(self.received), self.terminal.note)
        if self._group is None:
            raise _StoppedError
        self.ray.cloudpickle.register_pickle_by_value(rank_actor)
        try:
            remote = self.ray.remote(RankActor)
            every = [group.needs for group in self.groups for _ in range(group.count)]
            for number, needs in enumerate(every):
                others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU", "memory")}
                options = {
                    "num_cpus": needs.get("CPU", 0),
                    "num_gpus": needs.get("GPU", 0),
                    "memory": int(needs.get("memory", 0)) or None,
                    "resources": others,
                    "max_concurrency": rank_actor.METHODS,
                    "max_restarts": 0,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number),
                }
                self._actors.append(remote.options(**options).remote())
        finally:
            self.ray.cloudpickle.unregister_pickle_by_value(rank_actor)

    def _inspect_nodes(self) -> None:
        """Raise for a node on which a rank could not run: another version, no such folder."""
        self.nodes = self._ask("where")
        mine, here = version("hotrow"), os.getcwd()
        for node in self.nodes:
            if node["version"] != mine:
                theirs = "no HotRow" if node["version"] is None else f"HotRow {node['version']}"
                raise ClusterError(
                    f"the node {_place(node)} has {theirs}, and this machine HotRow {mine}; install one version on all "
                    "nodes: pip install 'hotrow[ray]'"
                )
        for node, found in zip(self.nodes, self._ask("sees", here, "."), strict=True):
            if not found:
                raise ClusterError(
                    f"the node {_place(node)} has no folder {here}, where relative paths of the job begin; start "
                    "`hotrow train` in a folder that every node has"
                )
        if self.job.folder is not None:
            self._check_checkpoints(here, self.job.folder)

    def _check_checkpoints(self, here: str, folder: str) -> None:
        """Raise unless all nodes have one and the same folder for checkpoints, without those of an earlier run.

        A restart would go on from an earlier run's checkpoint, if a rank died before this run has written one.
        """
        mark = f".hotrow-{secrets.token_hex(8)}"
        error, names = self._ask("leave_mark", here, folder, mark, ranks=[0])[0]
        if error is not None:
            raise ClusterError(f"[checkpoints] folder={folder!r} cannot be written on {_place(self.nodes[0])}: {error}")
        try:
            earlier = sorted(name for name in names if name.startswith("step-"))
            if earlier and not self.job.resume and self.number == 0:
                raise OptionError(
                    f"[checkpoints] folder={folder!r} has checkpoints of an earlier run (the newest is {earlier[-1]}); "
                    "go on from there with --resume, or give another folder to begin anew"
                )
            for node, found in zip(self.nodes, self._ask("sees", here, os.path.join(folder, mark)), strict=True):
                if not found:
                    raise ClusterError(
                        f"the node {_place(node)} does not see the files that {_place(self.nodes[0])} writes into "
                        f"[checkpoints] folder={folder!r}; give a folder on a file system that all nodes share"
                    )
        finally:
            self._actors[0].remove_mark.remote(here, folder, mark)

    def _start_ranks(self) -> None:
        address = self.nodes[0]["address"]
        (port,) = self._ask("reserve_port", address, ranks=[0])
        shared = {
            **{
                name: value
                for name, value in os.environ.items()
                if name.startswith(PASSED_ON) and name not in NOT_PASSED_ON
            },
            "RAY_ADDRESS": self.address,  # for reading on Ray
            "HOTROW_TRAIN_COMMAND": f"hotrow train {self.job.path} --on {self.job.address}",
            "WORLD_SIZE": str(self.roles.world),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "HOTROW_LOST_RANK_EXIT_CODE": str(LOST_RANK),
            AGENT_STORE: "False",  # rank 0 opens the store
            TOKEN_VARIABLE: new_job_token(),
        }
        starts = []
        for rank in range(self.roles.world):
            starts.append(self._actors[rank].start.remote(self._rank_start(rank, shared)))
        self._results(list(range(self.roles.world)), starts)
        places = [f"{self.terminal.names[rank]} on {_place(node)}" for rank, node in enumerate(self.nodes)]
        self.terminal.note(f"ranks on Ray: {', '.join(places[:16])}{' ...' if len(places) > 16 else ''}")

    def _rank_start(self, rank: int, shared: Mapping[str, str]) -> RankStart:
        needs = [group.needs for group in self.groups for _ in range(group.count)][rank]
        here = [other for other, node in enumerate(self.nodes) if node["node"] == self.nodes[rank]["node"]]
        variables = {
            "OMP_NUM_THREADS": str(max(1, int(needs.get("CPU", 0)))),
            **({} if needs.get("GPU") else {"CUDA_VISIBLE_DEVICES": ""}),
            **shared,
            "RANK": str(rank),
            "LOCAL_RANK": str(here.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(here)),
        }
        terminal = self.terminal.size if rank == 0 else None
        if terminal is not None:
            variables |= {name: os.environ[name] for name in OF_TERMINAL if name in os.environ}
        elif rank > 0:
            variables["COLUMNS"] = str(self.terminal.columns(rank))
        resume = ("--resume",) if self.job.resume or self.number > 0 else ()
        return RankStart(
            program=self.job.program,
            options=(*self.job.options, *resume),
            job_path=self.job.path,
            job_text=self.job.text,
            folder=os.getcwd(),
            variables=tuple(variables.items()),
            terminal=terminal,
        )

    # Running.

    def _watch(self) -> _End:
        """Show output until all ranks have ended, or one has died."""
        codes: dict[int, int] = {}
        calls = {self._read(rank): rank for rank in range(self.roles.world)}
        forwarded, deadline = False, math.inf
        while calls and time.monotonic() < deadline:
            if self.received and not forwarded:
                forwarded = True
                for actor in self._actors:
                    actor.send_signal.remote(int(self.received[0]))
            for call in self.ray.wait(list(calls), num_returns=1, timeout=POLL_SECONDS)[0]:
                rank = calls.pop(call)
                output, code = self._result(rank, call)
                self.terminal.write(rank, output)
                if code is None:
                    calls[self._read(rank)] = rank
                    continue
                codes[rank] = code
                if code < 0 and not forwarded:
                    return _End(exit_code(-code), f"{self._name(rank)} was killed by {_signal(-code)}", again=True)
                if code != 0 and not forwarded:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
        return self._end_of(codes)

    def _end_of(self, codes: Mapping[int, int]) -> _End:
        """The end of an attempt whose ranks ended by themselves, by their exit codes."""
        failed = {rank: code for rank, code in sorted(codes.items()) if code}
        if not failed:
            return _End(0)
        if self.received:
            code = next(iter(failed.values()))
            return _End(code if code > 0 else exit_code(-code))
        for rank, code in failed.items():
            if code == OWN_ERROR:
                return _End(code, f"{self._name(rank)} ended with an error, see above")
        rank, code = next(iter(failed.items()))
        why = "lost another rank" if code == LOST_RANK else f"ended with exit code {code}"
        return _End(1 if code == LOST_RANK else code, f"{self._name(rank)} {why}", again=True)

    def _end_by_loss(self, lost: _LostError) -> _End:
        """The end of an attempt by the death of an actor."""
        text = str(lost)
        if "creation task" in text:  # it could not even be made there
            last = [line for line in text.splitlines() if line.strip()][-1].strip()
            raise ClusterError(f"a rank's actor cannot start on its node: {last}; look at the installation there")
        where = self.nodes[lost.rank]["node"] if self.nodes else None
        if where is not None and all(node.number != where for node in nodes_of(self.ray)):
            why = "its node left the cluster"
        else:
            why = "its actor died" if lost.died else "its actor or its node died"  # Ray notices a lost node later
        return _End(1, f"{self._name(lost.rank)} was lost: {why}", again=True)

    def _end_ranks(self) -> None:
        """Kill every rank that can be reached, and wait until it is gone."""
        ends = [actor.end.remote() for rank, actor in enumerate(self._actors) if rank not in self._lost]
        if ends:
            self.ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)

    # Calls to actors.

    def _read(self, rank: int) -> Any:
        return self._actors[rank].read.remote(READ_SECONDS)

    def _ask(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a method of all actors or of some, and wait for the results."""
        chosen = list(range(len(self._actors))) if ranks is None else list(ranks)
        return self._results(chosen, [getattr(self._actors[rank], method).remote(*arguments) for rank in chosen])

    def _results(self, ranks: Sequence[int], calls: Sequence[Any]) -> list[Any]:
        deadline = time.monotonic() + START_SECONDS
        waiting = list(calls)
        while waiting:
            if self.received:
                raise _StoppedError
            _, waiting = self.ray.wait(waiting, num_returns=len(waiting), timeout=POLL_SECONDS)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{len(waiting)} of {len(calls)} actors do not answer within {START_SECONDS:.0f} s; look at "
                    "`ray status` and at the nodes' logs in /tmp/ray/session_latest/logs"
                )
        return [self._result(rank, call) for rank, call in zip(ranks, calls, strict=True)]

    def _result(self, rank: int, call: Any) -> Any:
        try:
            return self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            self._lost.add(rank)
            raise _LostError(rank, error, isinstance(error, self.ray.exceptions.ActorDiedError)) from error
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if getattr(error, "cause", None) is not None else error
            raise ClusterError(f"{self._name(rank)} cannot be started: {cause}") from error

    def _name(self, rank: int) -> str:
        where = f" on {_place(self.nodes[rank])}" if self.nodes else ""
        return f"{self.roles.name(rank)}{where}"


def _restarts(job: ClusterJob) -> int:
    """How often the job may be started again."""
    if job.max_restarts is None:
        return 0 if job.folder is None else MAX_RESTARTS
    if job.max_restarts > 0 and job.folder is None:
        raise OptionError(
            f"--max-restarts {job.max_restarts} without checkpoints, so a restart would begin anew: give the job "
            '[checkpoints] with folder = "runs/ctr", or --max-restarts 0'
        )
    return job.max_restarts


def _reader_cpus(job: ClusterJob) -> int:
    """CPUs that one worker takes which reads on Ray; 0 if the job does not."""
    return 0 if job.reading is None else math.ceil(float(job.reading.get("cpus", 1)))


def _check_readers(job: ClusterJob, cpus: int, address: str, ray: ModuleType) -> None:
    """Raise if ranks take all CPUs of the cluster at `address`, on which they also read."""
    if job.reading is None or job.reading.get("address") not in (None, "auto", job.address, address):
        return
    total = ray.cluster_resources().get("CPU", 0)
    if total - cpus < _reader_cpus(job):
        raise ClusterError(
            f"the ranks take {describe({'CPU': cpus})} of the cluster's {total:g}, which leaves {total - cpus:g} for "
            f"reading on it; add nodes, ask for less in [cluster], or read without --ray"
        )


def _object_store(job: ClusterJob) -> int:
    """Bytes of object store of a local cluster: batches need room if the job reads on it."""
    return (100 << 20) + (0 if job.reading is None else 2 * parse_size(job.reading.get("memory", "1GiB"), "memory"))


def _place(node: Mapping[str, Any]) -> str:
    return f"{node['host']} ({node['address']})"


def _signal(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
