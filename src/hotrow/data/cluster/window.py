"""Window: the units of one pass that are under way, first in, first out.

The trainer takes parts from the front. Behind it a thread keeps the window full: at most `workers` units being decoded,
at most `ahead` decoded or being decoded, and never more of them than fit into `memory`, each taken to be as large as
the largest so far (so the very first one goes alone). The trainer that stops taking stops the workers.

A worker or a node that dies is Ray's business up to a point: it runs the unit again elsewhere, and decodes again what
was lost with a node (submit.py). Which unit comes next is decided here and in order, so nothing is lost or comes
twice.

The thread and the trainer share what is under `_change`; everything else belongs to one of them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hotrow.config import format_size
from hotrow.data.cluster.connect import import_ray
from hotrow.data.cluster.submit import RETRIES, Submitter
from hotrow.data.cluster.worker import Head, unpack_error
from hotrow.data.split import Part, Unit
from hotrow.data.wire import unpack
from hotrow.errors import ClusterError, HotRowError

_POLL_SECONDS = 0.05
_COUNT_SECONDS = 1.0
_UNREACHED_SECONDS = 1.0


@dataclass
class Limits:
    """How much may be under way. workers=None: as many as the cluster has CPUs for. `timeout` seconds without a
    finished unit are an error. `largest` is learned: the bytes of the largest part so far, of all passes."""

    workers: int | None
    ahead: int | None
    memory: int
    timeout: float
    cpus: float
    largest: int = 0


@dataclass
class Tally:
    """Who has decoded how many units, by node and process, and the CPU seconds that took over there."""

    units: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass
class Job:
    """One unit on its way: Ray's references to head and body, and then the head or the error."""

    unit: Unit
    refs: tuple[Any, Any] | None = None
    head: Head | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.head is not None or self.error is not None


class Window:
    """One pass over the units. `units` is None for a source that is read serially after `first`."""

    def __init__(
        self,
        submit: Submitter,
        units: Iterator[Unit] | None,
        first: Unit,
        limits: Limits,
        tally: Tally,
    ) -> None:
        self._ray = import_ray()
        self._submit = submit
        self._units = units
        self._following: deque[Unit] = deque([first])  # of a serial source
        self._limits = limits
        self._tally = tally
        self._change = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._planned = False  # there are no more units
        self._stopped = False
        self._workers = limits.workers or 1
        self._counted = float("-inf")
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hotrow-ray-window", daemon=True)

    def parts(self) -> Iterator[tuple[Unit, Part]]:
        """The parts of all units, in order. A part counts as under way until the next one is asked for."""
        self._thread.start()
        while (job := self._front()) is not None:
            yield job.unit, self._receive(job)
            with self._change:
                if self._jobs:
                    self._jobs.popleft()
                self._change.notify_all()

    def ask(self, unit: Unit) -> Part:
        """Decode one unit now, and wait for it."""
        job = Job(unit, self._submit(unit))
        self._settle(job, self._limits.timeout)
        return self._receive(job)

    def close(self) -> None:
        """Stop the thread and drop what is under way. May be called twice."""
        with self._change:
            self._stopped = True
            jobs = list(self._jobs)
            self._jobs.clear()
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._submit.close([job.refs[0] for job in jobs if job.refs is not None and not job.done])

    # The trainer's side.

    def _front(self) -> Job | None:
        """The first job, done; None after the last one."""
        began = time.monotonic()
        with self._change:
            while True:
                if self._jobs and self._jobs[0].done:
                    return self._jobs[0]
                if self._planned and not self._jobs:
                    return None
                idle = time.monotonic() - max(began, self._progress)
                if idle > self._limits.timeout:
                    raise ClusterError(self._explain_idleness())
                self._change.wait(min(1.0, self._limits.timeout))

    def _receive(self, job: Job) -> Part:
        if job.error is not None:
            raise job.error
        assert job.head is not None and job.refs is not None
        try:
            arrays = self._get(job, 1, self._limits.timeout)
        except self._ray.exceptions.RayError as error:
            raise _translate(error, job.unit) from error
        part = unpack(job.head.text, arrays)
        part.error = unpack_error(job.head)
        return part

    def _get(self, job: Job, which: int, timeout: float) -> Any:
        """A job's head (0) or body (1).

        Before Ray has noticed that an actor died, each of its tries fails at once, and one death may take all of them:
        so an actor that is only not reachable is given time, and asked for the unit again.
        """
        tries = RETRIES
        while True:
            assert job.refs is not None
            try:
                return self._ray.get(job.refs[which], timeout=timeout)
            except self._ray.exceptions.ActorUnavailableError:
                with self._change:
                    if not tries or self._change.wait_for(lambda: self._stopped, _UNREACHED_SECONDS):
                        raise
                    job.refs = self._submit(job.unit)
            tries -= 1

    def _explain_idleness(self) -> str:
        total, free = (
            table.get("CPU", 0.0) for table in (self._ray.cluster_resources(), self._ray.available_resources())
        )
        return (
            f"the Ray cluster has finished nothing in {self._limits.timeout:g} s: it has {total:g} CPUs, {free:g} of "
            f"them free, and a unit needs {self._limits.cpus:g} (and resources=, if given). Add nodes with `ray start "
            "--address=HOST:PORT`, end what keeps them busy (`ray status`), or pass a longer timeout="
        )

    # The thread's side.

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._count_workers()
                self._fill()
                with self._change:
                    running = {job.refs[1]: job for job in self._jobs if not job.done and job.refs is not None}
                    if not running:
                        self._change.wait(_COUNT_SECONDS)
                        continue
                ready, _ = self._ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS, fetch_local=True)
                for body in ready:
                    self._settle(running[body], self._limits.timeout)
        except BaseException as error:
            self._end(error)

    def _fill(self) -> None:
        while True:
            with self._change:
                if self._stopped or self._planned or not self._has_room():
                    return
            unit, failed = None, None
            try:
                unit = self._next_unit()  # without the lock: it may have to look for line ends
            except Exception as error:  # a file that cannot be opened: its turn comes after what is before it
                failed = Job({}, error=error)
            with self._change:
                if failed is not None:
                    self._jobs.append(failed)
                    self._planned = True
                elif unit is not None and not self._stopped:
                    self._jobs.append(Job(unit, self._submit(unit)))
                if self._planned:
                    self._change.notify_all()
                if unit is None:
                    return

    def _next_unit(self) -> Unit | None:
        """The next unit, or None if there is no more or it is not known yet."""
        if self._units is None:
            return self._following.popleft() if self._following else None
        unit = next(self._units, None)
        self._planned = unit is None
        return unit

    def _follow(self, head: Head) -> None:
        """A serial source's next unit begins where this one has ended."""
        notes = json.loads(head.text)["notes"]
        self._planned = notes["ended"] or head.error is not None
        if not self._planned:
            self._following.append({"cursor": notes["cursors"][-1]})

    def _has_room(self) -> bool:
        held = len(self._jobs)
        running = sum(not job.done for job in self._jobs)
        if running >= (1 if self._units is None else self._workers):
            return False
        if held >= (self._limits.ahead or 2 * self._workers):
            return False
        largest = self._limits.largest
        return held == 0 or (largest > 0 and (held + 1) * largest <= self._limits.memory)

    def _settle(self, job: Job, timeout: float) -> None:
        """Wait for the head of a job, and note what it says."""
        try:
            head: Head = self._get(job, 0, timeout)
        except self._ray.exceptions.RayError as error:
            with self._change:
                job.error = _translate(error, job.unit)
                self._change.notify_all()
            return
        with self._change:
            job.head = head
            self._limits.largest = max(self._limits.largest, head.size, 1)
            self._progress = time.monotonic()
            self._tally.units[head.node, head.pid] += 1
            self._tally.seconds += head.seconds
            if self._units is None:
                self._follow(head)
            self._change.notify_all()

    def _count_workers(self) -> None:
        """A cluster that has grown gets more to do."""
        if self._limits.workers is not None:
            self._workers = self._limits.workers
        elif time.monotonic() - self._counted > _COUNT_SECONDS:
            self._workers = max(1, int(self._ray.cluster_resources().get("CPU", 0.0) / self._limits.cpus))
            self._counted = time.monotonic()

    def _end(self, error: BaseException) -> None:
        with self._change:
            self._jobs.append(Job({}, error=error))
            for job in self._jobs:
                job.error = job.error or (None if job.head else error)
            self._planned = True
            self._change.notify_all()


def _translate(error: BaseException, unit: Unit) -> BaseException:
    """Ray's error as one of ours: what the worker raised, or what became of it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HotRowError):
        return cause
    said = str(error).strip().splitlines()
    return ClusterError(
        f"unit {unit} cannot be decoded on the Ray cluster: {type(error).__name__}: {said[-1] if said else ''} "
        f"(workers that die are replaced {RETRIES} times; their logs are in /tmp/ray/session_latest on their nodes)"
    )


def describe_limits(limits: Limits) -> str:
    """For a line in a log."""
    workers = "all" if limits.workers is None else str(limits.workers)
    return f"{workers} workers, up to {format_size(limits.memory)} ahead"
