"""The path of an update: poll the bus → prepare while batches run → cut over between two batches → acknowledge.

A Follower applies a bus's publications to a served version, in order and each once, on a thread of its own:

    _poll           read the next complete publications from the bus                publish/subscriber.py
    prepare_update  check and convert the rows and weights, while requests run      Engine.prepare_update, cut_over.py
    cut_over()      replace rows, weights and number between two batches            Engine, cut_over.py
    _acknowledge    record the position on the bus, count the rows

Its state is one of:

    catching up   applying publications between the one that the version was exported at and the newest on the bus.
                  Applying them takes time, in which others arrive; it ends when that time is short
    following     applying each new publication; heartbeats advance the watermark
    behind        retention has removed the next publication. The newest snapshot that the bus names, or a newer export
                  in the repository, is loaded while the old rows serve, and replaces them; following continues there
    away          the bus is unreachable. The data in service stays, and the follower retries with backoff
    stuck         a publication does not match the model, because the trainer trains another one. Publications are never
                  skipped, so nothing more is applied until a matching version is loaded

Applied rows are kept only in this process. A server that restarts, even after a kill in the middle of a publication,
starts at its export and catches up, so it needs no other state on disk.

While it catches up, the follower pauses after each publication as long as applying it took, so at least half of the
time is left for requests. Any thread may read the figures.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hotrow.credentials import public
from hotrow.errors import BusError, HotRowError, PublishError
from hotrow.publish.bus import open_bus
from hotrow.publish.history import newest_commit
from hotrow.publish.publication import DELTA, ROLLBACK, SNAPSHOT, Publication, SnapshotPlace
from hotrow.publish.subscriber import Behind, Subscriber
from hotrow.serve.repository.manifest import list_versions, open_version
from hotrow.serve.updates.cut_over import MixedPublicationsError
from hotrow.serve.updates.freshness import Freshness

log = logging.getLogger("hotrow.serve")

POLL = 0.2  # seconds that one poll of the bus waits
REST = 0.05  # the longest pause in seconds between two publications that are on the bus already
CLOSE = 0.5  # seconds that the last round of catching up may take: the data in service is that much older
RETRY = (0.1, 5.0)  # backoff after an error: first and longest pause in seconds
STARTING, CATCHING_UP, FOLLOWING = "starting", "catching up", "following"
BEHIND, AWAY, STUCK = "behind", "away", "stuck"


class UpdateTarget(Protocol):
    """A version or a remote store to which publications are applied."""

    @property
    def fresh(self) -> Freshness:
        """The publication in service."""

    def prepare_update(self, publication: Publication) -> Callable[[], None]:
        """Check a publication while requests run; returns the function that puts it in service."""

    def reopen(self, path: Path) -> None:
        """Serve another export's rows and weights instead."""


@dataclass
class FollowerCounts:
    """Totals since the start."""

    publications: int = 0
    rows: int = 0
    switch_seconds: float = 0.0
    corrupt: int = 0  # messages in quarantine
    bus_errors: int = 0
    reloads: int = 0


class Follower:
    """Follows `bus` for a version. `exports` is the model's folder in the repository, if there is one."""

    def __init__(self, served: UpdateTarget, bus: str, exports: Path | None, quarantine: Path | None = None) -> None:
        open_bus(bus).close()  # report a wrong address here
        self.served, self.bus, self.exports, self.quarantine = served, bus, exports, quarantine
        self.where = public(bus)
        self.counts = FollowerCounts()
        self.state, self.why = STARTING, ""
        self._last_received = time.time()  # of the last complete publication or heartbeat
        self._position: tuple[int, int] | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()  # set once it has caught up, or cannot for now
        self._thread = threading.Thread(target=self._run, name="hotrow-follower", daemon=True)

    def start(self, wait: float = 0.0) -> bool:
        """Start the thread and wait up to `wait` seconds for it to catch up; returns whether it has."""
        self._thread.start()
        self._settled.wait(wait)
        return self.state == FOLLOWING

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def age(self, now: float) -> float:
        """Seconds since the watermark in service; without event times, since the last publication or heartbeat."""
        age = self.served.fresh.age(now)
        return now - self._last_received if age is None else age

    def figures(self) -> dict[str, Any]:
        """Totals and the current state."""
        return {**asdict(self.counts), "state": self.state, "why": self.why}

    # --- the thread: the path of an update, then what happens when it fails ---

    def _run(self) -> None:
        wait = RETRY[0]
        while not self._stop.is_set():
            before = self.served.fresh.publication
            try:
                self._follow()
            except Behind as error:
                self._set_state(BEHIND, str(error))
                self._reload(error.snapshot, error.oldest)
            except MixedPublicationsError as error:
                self._set_state(BEHIND, str(error))
                self._reload(None, None, everything=True)
            except (BusError, OSError) as error:
                self.counts.bus_errors += 1
                self._set_state(AWAY, str(error))
            except (PublishError, HotRowError) as error:
                self._set_state(STUCK, str(error))
            except Exception as error:
                log.exception("following %s failed", self.where)
                self._set_state(STUCK, f"{type(error).__name__}: {error}")
            wait = RETRY[0] if self.served.fresh.publication != before else min(2 * wait, RETRY[1])
            self._stop.wait(wait)

    def _follow(self) -> None:
        after = self.served.fresh.publication
        position = self._position if self._position is not None and self._position[0] == after else None
        reader = Subscriber(self.bus, after, position=position, quarantine=self.quarantine)
        try:
            target, looked, before = _newest(reader), time.monotonic(), math.inf
            while not self._stop.is_set():
                if self.state != FOLLOWING and after >= target:
                    took = time.monotonic() - looked
                    target, looked = _newest(reader), time.monotonic()
                    if after >= target or took <= CLOSE or took >= before:  # or it does not get any closer
                        self._set_state(FOLLOWING)
                    before = took
                if self.state != FOLLOWING:
                    self._set_state(CATCHING_UP)
                for publication in self._poll(reader):
                    self._apply(publication)
                after = self.served.fresh.publication
        finally:
            reader.close()

    def _poll(self, reader: Subscriber) -> list[Publication]:
        """Publications that are complete now. If the bus is unreachable, the same reader polls again, because it has
        parts of later publications."""
        wait = RETRY[0]
        corrupt = reader.counters.corrupt
        while True:
            try:
                found = reader.poll(POLL)
                break
            except BusError as error:
                self.counts.bus_errors += 1
                self._set_state(AWAY, str(error))
                if self._stop.wait(wait):
                    return []
                wait = min(2 * wait, RETRY[1])
        if self.state == AWAY:
            self._set_state(CATCHING_UP)
        self.counts.corrupt += reader.counters.corrupt - corrupt
        return found

    def _apply(self, publication: Publication) -> None:
        if self._stop.is_set():
            return
        self._last_received = time.time()
        if publication.kind == SNAPSHOT:
            return
        begin = time.monotonic()
        cut_over = self.served.prepare_update(publication)  # while batches run
        cut_over()  # between two batches
        if publication.kind in (DELTA, ROLLBACK):
            self._acknowledge(publication, time.monotonic() - begin)

    def _acknowledge(self, publication: Publication, seconds: float) -> None:
        """Record that the publication is in service: a reader that reconnects continues after it."""
        self._position = publication.resume
        self.counts.publications += 1
        self.counts.rows += publication.rows
        self.counts.switch_seconds += seconds
        self._stop.wait(min(REST, seconds))

    # --- starting again from a snapshot ---

    def _reload(self, announced: SnapshotPlace | None, oldest: int | None, everything: bool = False) -> None:
        """Replace the data in service by the newest snapshot or export from which the bus can be followed."""
        have = -1 if everything else self.served.fresh.publication
        for place in sorted(self._places(announced), key=lambda place: -place.number):
            if place.number <= have or (oldest is not None and place.number < oldest - 1):
                continue
            try:
                self.served.reopen(Path(place.path))
            except (HotRowError, OSError) as error:
                log.warning("the snapshot of publication %d at %s cannot be used: %s", place.number, place.path, error)
                continue
            log.warning("%s: started again from publication %d at %s", self.why, place.number, place.path)
            self.counts.reloads += 1
            self._position = None
            return

    def _places(self, announced: SnapshotPlace | None) -> Iterator[SnapshotPlace]:
        if announced is not None:
            yield announced
        exports = self.exports
        if exports is None:
            return
        for number in list_versions(exports):
            try:
                manifest = open_version(exports / str(number)).manifest
            except (HotRowError, OSError):
                continue
            yield SnapshotPlace(int(manifest["publication"]), str(exports / str(number)))

    def _set_state(self, state: str, why: str = "") -> None:
        if state != self.state or why != self.why:
            level = logging.WARNING if state in (BEHIND, AWAY, STUCK) else logging.INFO
            at = self.served.fresh.publication
            log.log(level, "bus %s: %s at publication %d%s", self.where, state, at, _why(why))
        self.state, self.why = state, why
        if state not in (STARTING, CATCHING_UP, BEHIND):
            self._settled.set()


def _newest(reader: Subscriber) -> int:
    newest = newest_commit(reader.bus)
    return 0 if newest is None else newest.number


def _why(why: str) -> str:
    return f": {why}" if why else ""
