"""Window: the units of one pass that are in flight, a bounded FIFO queue.

The trainer takes decoded units from the front. A background thread keeps the window full, within three limits: at most
`workers` units being decoded; at most `ahead` units in the window; and at most `memory` bytes, where every unit counts
as the largest one so far (so the very first unit is decoded alone). When the trainer stops taking units, the workers
stop too.

When a worker or a node dies, Ray runs its unit again elsewhere and rebuilds the results that were lost (submit.py). The
window fixes the order of the units, so none is lost or repeated.

The thread and the trainer share the fields guarded by `_change`; every other field belongs to one of them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hotrow.data.cluster.connect import import_ray
from hotrow.data.cluster.submit import RETRIES, Submitter
from hotrow.data.cluster.wire_format import unpack
from hotrow.data.cluster.worker import ResultHeader, unpack_error
from hotrow.data.split import DecodedUnit, Unit
from hotrow.errors import ClusterError, HotRowError
from hotrow.units import format_size

_POLL_SECONDS = 0.05
_COUNT_SECONDS = 1.0
_UNREACHED_SECONDS = 1.0


@dataclass
class Limits:
    """How much may be in flight. workers=None: as many as the cluster has CPUs for. `timeout` seconds without a
    finished unit are an error. `largest` is measured: the bytes of the largest decoded unit so far, over all passes."""

    workers: int | None
    ahead: int | None
    memory: int
    timeout: float
    cpus: float
    largest: int = 0


@dataclass
class WorkerStats:
    """How many units each worker process has decoded, by node and process id, and the CPU seconds that they spent."""

    units: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass
class InFlightUnit:
    """One submitted unit: Ray's references to its header and body, and later the header or the error."""

    unit: Unit
    refs: tuple[Any, Any] | None = None
    header: ResultHeader | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.header is not None or self.error is not None


class Window:
    """One pass over the units. `units` is None for a serial source, which is read from the unit `first` on."""

    def __init__(
        self,
        submit: Submitter,
        units: Iterator[Unit] | None,
        first: Unit,
        limits: Limits,
        stats: WorkerStats,
    ) -> None:
        self._ray = import_ray()
        self._submit = submit
        self._units = units
        self._next_serial: deque[Unit] = deque([first])  # of a serial source
        self._limits = limits
        self._stats = stats
        self._change = threading.Condition()
        self._in_flight: deque[InFlightUnit] = deque()
        self._exhausted = False  # there are no more units
        self._stopped = False
        self._workers = limits.workers or 1
        self._counted = float("-inf")
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hotrow-ray-window", daemon=True)

    def parts(self) -> Iterator[tuple[Unit, DecodedUnit]]:
        """The decoded units, in order. A unit counts as in flight until the caller takes the next one."""
        self._thread.start()
        while (entry := self._wait_for_first()) is not None:
            yield entry.unit, self._receive(entry)
            with self._change:
                if self._in_flight:
                    self._in_flight.popleft()
                self._change.notify_all()

    def decode_now(self, unit: Unit) -> DecodedUnit:
        """Decode one unit now, and wait for it."""
        entry = InFlightUnit(unit, self._submit(unit))
        self._complete(entry, self._limits.timeout)
        return self._receive(entry)

    def close(self) -> None:
        """Stop the thread and cancel what is in flight. May be called twice."""
        with self._change:
            self._stopped = True
            entries = list(self._in_flight)
            self._in_flight.clear()
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._submit.close([entry.refs[0] for entry in entries if entry.refs is not None and not entry.done])

    # Called by the trainer.

    def _wait_for_first(self) -> InFlightUnit | None:
        """Block until the first unit is done and return it; None after the last one."""
        began = time.monotonic()
        with self._change:
            while True:
                if self._in_flight and self._in_flight[0].done:
                    return self._in_flight[0]
                if self._exhausted and not self._in_flight:
                    return None
                idle = time.monotonic() - max(began, self._progress)
                if idle > self._limits.timeout:
                    raise ClusterError(self._timeout_message())
                self._change.wait(min(1.0, self._limits.timeout))

    def _receive(self, entry: InFlightUnit) -> DecodedUnit:
        if entry.error is not None:
            raise entry.error
        assert entry.header is not None and entry.refs is not None
        try:
            arrays = self._get(entry, 1, self._limits.timeout)
        except self._ray.exceptions.RayError as error:
            raise _translate(error, entry.unit) from error
        part = unpack(entry.header.text, arrays)
        part.error = unpack_error(entry.header)
        return part

    def _get(self, entry: InFlightUnit, which: int, timeout: float) -> Any:
        """A unit's header (0) or body (1).

        Until Ray notices that an actor died, each of Ray's own retries fails at once, so one death can use up all of
        them. So when an actor is unreachable this waits a second and submits the unit again.
        """
        tries = RETRIES
        while True:
            assert entry.refs is not None
            try:
                return self._ray.get(entry.refs[which], timeout=timeout)
            except self._ray.exceptions.ActorUnavailableError:
                with self._change:
                    if not tries or self._change.wait_for(lambda: self._stopped, _UNREACHED_SECONDS):
                        raise
                    entry.refs = self._submit(entry.unit)
            tries -= 1

    def _timeout_message(self) -> str:
        total, free = (
            table.get("CPU", 0.0) for table in (self._ray.cluster_resources(), self._ray.available_resources())
        )
        return (
            f"the Ray cluster has finished nothing in {self._limits.timeout:g} s: it has {total:g} CPUs, {free:g} of "
            f"them free, and a unit needs {self._limits.cpus:g} (and resources=, if given). Add nodes with `ray start "
            "--address=HOST:PORT`, end what keeps them busy (`ray status`), or pass a longer timeout="
        )

    # Called by the window's thread.

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._count_workers()
                self._fill()
                with self._change:
                    running = {
                        entry.refs[1]: entry for entry in self._in_flight if not entry.done and entry.refs is not None
                    }
                    if not running:
                        self._change.wait(_COUNT_SECONDS)
                        continue
                ready, _ = self._ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS, fetch_local=True)
                for body in ready:
                    self._complete(running[body], self._limits.timeout)
        except BaseException as error:
            self._fail_all(error)

    def _fill(self) -> None:
        while True:
            with self._change:
                if self._stopped or self._exhausted or not self._can_submit():
                    return
            unit, failed = None, None
            try:
                unit = self._next_unit()  # without the lock, because it may scan a file for line ends
            except Exception as error:  # a file that cannot be opened: the error is raised after the units before it
                failed = InFlightUnit({}, error=error)
            with self._change:
                if failed is not None:
                    self._in_flight.append(failed)
                    self._exhausted = True
                elif unit is not None and not self._stopped:
                    self._in_flight.append(InFlightUnit(unit, self._submit(unit)))
                if self._exhausted:
                    self._change.notify_all()
                if unit is None:
                    return

    def _next_unit(self) -> Unit | None:
        """The next unit, or None if there is none or it is not known yet."""
        if self._units is None:
            return self._next_serial.popleft() if self._next_serial else None
        unit = next(self._units, None)
        self._exhausted = unit is None
        return unit

    def _queue_next_serial(self, header: ResultHeader) -> None:
        """Queue a serial source's next unit, which begins where this one ended."""
        notes = json.loads(header.text)["notes"]
        self._exhausted = notes["ended"] or header.error is not None
        if not self._exhausted:
            self._next_serial.append({"cursor": notes["cursors"][-1]})

    def _can_submit(self) -> bool:
        held = len(self._in_flight)
        running = sum(not entry.done for entry in self._in_flight)
        if running >= (1 if self._units is None else self._workers):
            return False
        if held >= (self._limits.ahead or 2 * self._workers):
            return False
        largest = self._limits.largest
        return held == 0 or (largest > 0 and (held + 1) * largest <= self._limits.memory)

    def _complete(self, entry: InFlightUnit, timeout: float) -> None:
        """Wait for a unit's header and record it."""
        try:
            header: ResultHeader = self._get(entry, 0, timeout)
        except self._ray.exceptions.RayError as error:
            with self._change:
                entry.error = _translate(error, entry.unit)
                self._change.notify_all()
            return
        with self._change:
            entry.header = header
            self._limits.largest = max(self._limits.largest, header.size, 1)
            self._progress = time.monotonic()
            self._stats.units[header.node, header.pid] += 1
            self._stats.seconds += header.seconds
            if self._units is None:
                self._queue_next_serial(header)
            self._change.notify_all()

    def _count_workers(self) -> None:
        """Update how many units may run at once: a cluster may have grown."""
        if self._limits.workers is not None:
            self._workers = self._limits.workers
        elif time.monotonic() - self._counted > _COUNT_SECONDS:
            self._workers = max(1, int(self._ray.cluster_resources().get("CPU", 0.0) / self._limits.cpus))
            self._counted = time.monotonic()

    def _fail_all(self, error: BaseException) -> None:
        with self._change:
            self._in_flight.append(InFlightUnit({}, error=error))
            for entry in self._in_flight:
                entry.error = entry.error or (None if entry.header else error)
            self._exhausted = True
            self._change.notify_all()


def _translate(error: BaseException, unit: Unit) -> BaseException:
    """Ray's error as a HotRowError: the one that the worker raised, or a ClusterError."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HotRowError):
        return cause
    lines = str(error).strip().splitlines()
    return ClusterError(
        f"unit {unit} cannot be decoded on the Ray cluster: {type(error).__name__}: {lines[-1] if lines else ''} "
        f"(workers that die are replaced {RETRIES} times; their logs are in /tmp/ray/session_latest on their nodes)"
    )


def describe_limits(limits: Limits) -> str:
    """The limits in a few words, for a log line."""
    workers = "all" if limits.workers is None else str(limits.workers)
    return f"{workers} workers, up to {format_size(limits.memory)} ahead"
