"""Follower: takes a bus's publications into a served version, in order, each once, for as long as the version serves.

    catching up   from the publication that the version was exported at (its manifest says) to the newest on the bus
    following     each as it comes; heartbeats bring the watermark forward
    behind        what comes next is gone from the bus: the newest snapshot that the bus tells of, or a newer export in
                  the repository, is opened beside the old rows and takes their place; then from there
    away          the bus does not answer: what is in service stays, and it is tried again
    stuck         a publication does not fit the model: the trainer trains another one. Nothing is skipped, so nothing
                  more is applied until a version that fits is loaded

Rows that were applied live as long as the process. So a server that comes back, killed in the middle of a publication
or not, begins at its export and catches up; nothing else needs to be remembered.

Between two publications that wait the follower rests as long as the switch took, so that a server which catches up has
half of its time for requests at least.

One thread, its own. Figures may be read from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
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
from hotrow.serve.updates.cut_over import Fresh, TornError

log = logging.getLogger("hotrow.serve")

POLL = 0.2  # seconds
REST = 0.05  # the longest between two that wait
RETRY = (0.1, 5.0)  # seconds between two tries: at first, at most
STARTING, CATCHING_UP, FOLLOWING = "starting", "catching up", "following"
BEHIND, AWAY, STUCK = "behind", "away", "stuck"


class Served(Protocol):
    """What a follower feeds: a version that takes publications."""

    @property
    def fresh(self) -> Fresh:
        """What is in service."""

    def apply(self, publication: Publication) -> None:
        """Put a publication in service."""

    def reopen(self, path: Path) -> None:
        """Serve another export's rows and weights instead."""


@dataclass
class FollowerCounts:
    """What has happened so far."""

    publications: int = 0
    rows: int = 0
    switch_seconds: float = 0.0
    corrupt: int = 0  # messages in quarantine
    bus_errors: int = 0
    reloads: int = 0


class Follower:
    """Follows `bus` for a version. `exports` is the model's folder in the repository, if there is one."""

    def __init__(self, served: Served, bus: str, exports: Path | None, quarantine: Path | None = None) -> None:
        open_bus(bus).close()  # a wrong address is an error now
        self.served, self.bus, self.exports, self.quarantine = served, bus, exports, quarantine
        self.where = public(bus)
        self.counts = FollowerCounts()
        self.state, self.why = STARTING, ""
        self.heard = time.time()  # of anything whole on the bus
        self._target = 0
        self._position: tuple[int, int] | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()  # caught up, or cannot now
        self._thread = threading.Thread(target=self._run, name="hotrow-follower", daemon=True)

    def start(self, wait: float = 0.0) -> bool:
        """Begin; waits up to so many seconds until it has caught up. False: it has not, or cannot now."""
        self._thread.start()
        self._settled.wait(wait)
        return self.state == FOLLOWING

    def close(self) -> None:
        """End."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    def age(self, now: float) -> float:
        """Seconds that what is in service is behind: by its watermark, or without event times since anything came."""
        age = self.served.fresh.age(now)
        return now - self.heard if age is None else age

    def figures(self) -> dict[str, Any]:
        """Counts and the state of now."""
        return {**asdict(self.counts), "state": self.state, "why": self.why}

    # --- the thread ---

    def _run(self) -> None:
        wait = RETRY[0]
        while not self._stop.is_set():
            before = self.served.fresh.publication
            try:
                self._follow()
            except Behind as error:
                self._be(BEHIND, str(error))
                self._reload(error.snapshot, error.oldest)
            except TornError as error:
                self._be(BEHIND, str(error))
                self._reload(None, None, whole=True)
            except (BusError, OSError) as error:
                self.counts.bus_errors += 1
                self._be(AWAY, str(error))
            except (PublishError, HotRowError) as error:
                self._be(STUCK, str(error))
            except Exception as error:
                log.exception("following %s failed", self.where)
                self._be(STUCK, f"{type(error).__name__}: {error}")
            wait = RETRY[0] if self.served.fresh.publication != before else min(2 * wait, RETRY[1])
            self._stop.wait(wait)

    def _follow(self) -> None:
        after = self.served.fresh.publication
        position = self._position if self._position is not None and self._position[0] == after else None
        reader = Subscriber(self.bus, after, position=position, quarantine=self.quarantine)
        try:
            newest = newest_commit(reader.bus)
            self._target = 0 if newest is None else newest.number
            while not self._stop.is_set():
                if after >= self._target:
                    self._be(FOLLOWING)
                elif self.state != FOLLOWING:
                    self._be(CATCHING_UP)
                for publication in self._poll(reader):
                    self._take(publication)
                after = self.served.fresh.publication
        finally:
            reader.close()

    def _poll(self, reader: Subscriber) -> list[Publication]:
        """What is whole now. A bus that went away is asked again by the same reader: it knows what it has."""
        wait = RETRY[0]
        corrupt = reader.counters.corrupt
        while True:
            try:
                found = reader.poll(POLL)
                break
            except BusError as error:
                self.counts.bus_errors += 1
                self._be(AWAY, str(error))
                if self._stop.wait(wait):
                    return []
                wait = min(2 * wait, RETRY[1])
        if self.state == AWAY:
            self._be(CATCHING_UP)
        self.counts.corrupt += reader.counters.corrupt - corrupt
        return found

    def _take(self, publication: Publication) -> None:
        if self._stop.is_set():
            return
        self.heard = time.time()
        if publication.kind == SNAPSHOT:
            return
        begin = time.monotonic()
        self.served.apply(publication)
        if publication.kind in (DELTA, ROLLBACK):
            took = time.monotonic() - begin
            self._position = publication.resume
            self.counts.publications += 1
            self.counts.rows += publication.rows
            self.counts.switch_seconds += took
            self._stop.wait(min(REST, took))

    # --- beginning anew ---

    def _reload(self, told: SnapshotPlace | None, oldest: int | None, whole: bool = False) -> None:
        """Open the newest snapshot or export that helps."""
        have = -1 if whole else self.served.fresh.publication
        for place in sorted(self._places(told), key=lambda place: -place.number):
            if place.number <= have or (oldest is not None and place.number < oldest - 1):
                continue
            try:
                self.served.reopen(Path(place.path))
            except (HotRowError, OSError) as error:
                log.warning("the snapshot of publication %d at %s cannot be used: %s", place.number, place.path, error)
                continue
            log.warning("%s: began again from publication %d at %s", self.why, place.number, place.path)
            self.counts.reloads += 1
            self._position = None
            return

    def _places(self, told: SnapshotPlace | None) -> Iterator[SnapshotPlace]:
        if told is not None:
            yield told
        exports = self.exports
        if exports is None:
            return
        for number in list_versions(exports):
            try:
                manifest = open_version(exports / str(number)).manifest
            except (HotRowError, OSError):
                continue
            yield SnapshotPlace(int(manifest["publication"]), str(exports / str(number)))

    def _be(self, state: str, why: str = "") -> None:
        if state != self.state or why != self.why:
            level = logging.WARNING if state in (BEHIND, AWAY, STUCK) else logging.INFO
            at = self.served.fresh.publication
            log.log(level, "bus %s: %s at publication %d%s", self.where, state, at, _why(why))
        self.state, self.why = state, why
        if state not in (STARTING, CATCHING_UP, BEHIND):
            self._settled.set()


def _why(why: str) -> str:
    return f": {why}" if why else ""
