"""Delivery: the background thread that sends a trainer's publications to the bus, in order, and retries.

The trainer's thread claims a number, cuts, and queues the rows with `put`. Everything slow happens on the delivery
thread: encoding, sending, waiting for the other ranks, retrying. Cuts are queued in memory up to `memory` bytes, and in
the spool while the bus is unreachable. Publications are sent strictly in order, so a delayed one delays all later ones.

Numbers have no gaps. A publication that cannot be sent under its number is *withdrawn*, together with all later ones.
Its keys are carried over: the next cut claims the number again and adds the current values of the carried keys. So a
full spool, a hold (rollback.py) and a replay that differs lose no change.

Replay: after a crash the trainer repeats steps whose publications are on the bus. They are cut again and compared with
the bus by checksum. Equal ones are dropped; the keys of others are carried over.

With ranks, each rank sends its part. Rank 0 waits until the parts of all are on the bus and then commits. A rank keeps
its sent parts until `acknowledge` reports their commit, because they may have to be withdrawn.

Threads: the trainer's thread calls `claim_number`, `put`, `acknowledge`, `flush` and `close`. One lock guards what both
threads use; it is never held while waiting for the bus.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hotrow import trace
from hotrow.backoff import Backoff
from hotrow.errors import BusError
from hotrow.publish.bus import Bus
from hotrow.publish.cut import Cut, Keys, keys_of, keys_on_bus
from hotrow.publish.history import Commit, commits_after
from hotrow.publish.message import checksum, note, parts
from hotrow.publish.publication import (
    HEARTBEAT,
    SNAPSHOT,
    SnapshotPlace,
    content_checksum,
    decode_body,
)
from hotrow.publish.rank_parts import RankParts
from hotrow.publish.spool import EncodedPublication, Spool, SpoolFull

HOLD, HELD = "hold", "held"  # marks: a rollback tells the publisher to stop; the publisher has stopped
_HOLD_INTERVAL = 0.2  # seconds between two checks of the hold
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts
_GIVE_UP = 1.0  # seconds of failed attempts after which the end of a run does not wait for the bus any more


@dataclass(frozen=True)
class SenderIdentity:
    """The run (the same after every restart), the session (this process), and the rank."""

    run: str
    session: int
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank commits."""
        return self.rank == 0


@dataclass
class Counters:
    """Totals since the start; `waiting` and `spooled` are current values."""

    published: int = 0
    rows: int = 0
    bytes: int = 0
    replayed: int = 0
    differed: int = 0  # replayed publications that were not equal to those on the bus
    withdrawn: int = 0
    retries: int = 0
    heartbeats: int = 0
    committed: int = 0  # the newest number on the bus
    spooled: int = 0  # bytes
    waiting: int = 0
    last_error: str = ""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1024))  # from a cut to its commit


class Delivery:
    """Sends a trainer's cuts to a bus, in order."""

    def __init__(
        self,
        open_bus: Callable[[], Bus],
        spool: Spool,
        sender: SenderIdentity,
        *,
        memory: int,
        heartbeat: float,
    ) -> None:
        self.sender, self.counters = sender, Counters()
        self.held = False  # a rollback holds the publisher
        self.lost = False  # a spooled publication was truncated, so the next one must have every row
        self._open, self._bus = open_bus, None  # type: tuple[Callable[[], Bus], Bus | None]
        self._spool, self._memory, self._heartbeat = spool, memory, heartbeat
        self._lock = threading.Condition()
        self._queue: deque[Cut] = deque()
        self._sent: list[EncodedPublication] = []  # not yet committed; on ranks that do not commit
        self._carried: Keys = {}
        self._next = 1
        self._known: dict[int, Commit] = {}  # the commits on the bus that a replay is compared with
        self._replayed_to = 0
        self._notes: deque[tuple[int, SnapshotPlace]] = deque()
        self._snapshot: SnapshotPlace | None = None
        self._latest: dict[str, Any] = {}  # the fields of the next heartbeat
        self._last_heartbeat = self._hold_checked = 0.0
        self._away_since = math.inf
        self._others = RankParts(sender.session, sender.world)
        self._stop = False
        self._busy = False
        self._thread: threading.Thread | None = None

    # --- called by the trainer's thread ---

    def start(self, after: int, known: dict[int, Commit], newest: int, place: SnapshotPlace | None, head: int) -> None:
        """Start the thread. The trainer is at publication `after`, the bus at `newest`; those between are replayed."""
        self._next, self._known, self._replayed_to, self._snapshot = after + 1, known, newest, place
        self._others.offset = head
        self.counters.committed = newest
        for number in self._spool.numbers:
            if number <= newest or number > after:  # it is on the bus, or will be cut again
                self._spool.drop(number)
        self._thread = threading.Thread(target=self._run, name="hotrow-publish", daemon=True)
        self._thread.start()

    def next_number(self) -> int:
        """The number of the next cut."""
        with self._lock:
            return self._next

    def claim_number(self, number: int) -> Keys:
        """Assign this number to the next cut; returns the carried keys, which it must include besides changed ones."""
        with self._lock:
            if number < self._next:
                self._withdraw(number)
            self._next = number + 1
            carried, self._carried = self._carried, {}
            return carried

    def carry_over(self, keys: Keys) -> None:
        """Add keys that the next cut must include."""
        with self._lock:
            self._carry_over(keys)

    def put(self, cut: Cut) -> None:
        """Queue a cut. Blocks only while more than `memory` bytes are queued and the disk is slow."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._stop or not self._queue or self._waiting() + cut.bytes <= self._memory, 60
            )
            if self.held or cut.number >= self._next:  # withdrawn while it was being cut
                self._carry_over(keys_of(cut.tables))
                return
            self._queue.append(cut)
            self.counters.waiting = self._waiting()
            self._lock.notify_all()

    def set_heartbeat(self, fields: dict[str, Any]) -> None:
        """Set the step and watermark of later heartbeats, unless a newer publication is queued."""
        with self._lock:
            if self._next == self.counters.committed + 1 and self._latest:
                self._latest = fields

    def announce_snapshot(self, place: SnapshotPlace) -> None:
        """Announce a complete snapshot to readers, after its publication was sent."""
        with self._lock:
            self._notes.append((place.number, place))
            self._lock.notify_all()

    def acknowledge(self, committed: int) -> None:
        """Record that publications up to this number are committed: their parts need not be kept."""
        with self._lock:
            self._sent = [publication for publication in self._sent if publication.number > committed]
            self.counters.committed = max(self.counters.committed, committed)

    def flush(self, seconds: float, kept: bool = False) -> bool:
        """Wait until everything is sent. With `kept`, publications spooled for an unreachable bus count as sent."""

        def done() -> bool:
            spooled = kept and not self._queue and time.monotonic() - self._away_since > _GIVE_UP
            return self._idle() or self.held or self._stop or spooled

        with self._lock:
            return bool(self._lock.wait_for(done, seconds))

    def close(self, seconds: float = 5.0) -> None:
        """Send the queued publications, or move them to the spool, and end the thread."""
        if self._thread is None:
            return
        self.flush(seconds)
        with self._lock:
            self._stop = True
            self._lock.notify_all()
        self._thread.join(15)
        self._thread = None

    def _idle(self) -> bool:
        return not (self._queue or self._busy or self._spool.numbers or self._notes)

    def _waiting(self) -> int:
        return sum(cut.bytes for cut in self._queue)

    # --- withdrawing: the keys are carried over to the next cut ---

    def _withdraw(self, number: int) -> None:
        """Withdraw all publications from this number on. Requires: the lock is held."""
        for cut in [cut for cut in self._queue if cut.number >= number]:
            self._queue.remove(cut)
            self._carry_over(keys_of(cut.tables))
            self.counters.withdrawn += 1
        for spooled in [spooled for spooled in self._spool.numbers if spooled >= number]:
            publication = self._spool.get(spooled)
            if publication is not None:
                self._carry_over(keys_of(decode_body(publication.body)[0]))
            self._spool.drop(spooled)
            self.counters.withdrawn += 1
        for publication in [publication for publication in self._sent if publication.number >= number]:
            self._sent.remove(publication)
            self._carry_over(keys_of(decode_body(publication.body)[0]))
        self._notes = deque(one for one in self._notes if one[0] < number)
        self._next = min(self._next, number)
        self._lock.notify_all()

    def _carry_over(self, keys: Keys) -> None:
        for table, tensors in keys.items():
            self._carried.setdefault(table, []).extend(tensors)

    # --- the thread ---

    def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            with self._lock:
                work = self._queue or self._notes or self._spool.numbers
                if not self._stop and (self.held or not work):
                    self._lock.wait(_HOLD_INTERVAL)
                if self._stop:
                    break
            try:
                self._busy = True
                self._check_hold()
                if not self.held:
                    self._deliver_all()
                backoff.reset()
                self.counters.last_error, self._away_since = "", math.inf
            except BusError as error:
                self._on_bus_error(error)
                self._busy = False
                self._sleep(backoff.next())
            except Exception as error:
                self.counters.last_error = f"{type(error).__name__}: {error}"
                warnings.warn(f"publishing: {self.counters.last_error}; it will be retried", stacklevel=2)
                self._sleep(_LONGEST_PAUSE)
            finally:
                self._busy = False
                with self._lock:
                    self.counters.spooled, self.counters.waiting = self._spool.bytes, self._waiting()
                    self._lock.notify_all()
        self._spill()
        if self._bus is not None:
            self._bus.close()

    def _sleep(self, seconds: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stop, seconds)

    def bus(self) -> Bus:
        """The thread's own connection."""
        if self._bus is None:
            self._bus = self._open()
        return self._bus

    def _on_bus_error(self, error: BusError) -> None:
        self.counters.retries += 1
        self._away_since = min(self._away_since, time.monotonic())
        self.counters.last_error = str(error)
        bus, self._bus = self._bus, None
        if bus is not None:
            with suppress(Exception):  # the connection is broken
                bus.close()
        self._spill()

    def _spill(self) -> None:
        """Move the queued cuts to the spool. If it is full, they are withdrawn."""
        while True:
            with self._lock:
                cut = self._queue[0] if self._queue else None
            if cut is None:
                return
            if cut.number <= self._replayed_to:
                return  # a replay, which is on the bus already
            publication = cut.encode()
            with self._lock:
                if not self._queue or self._queue[0] is not cut:
                    continue  # withdrawn meanwhile
                try:
                    self._spool.put(publication, self.sender.session)
                    self._queue.popleft()
                except SpoolFull as error:
                    self.counters.last_error = str(error)
                    self._withdraw(cut.number)
                self._lock.notify_all()

    def _deliver_all(self) -> None:
        """Send everything that is spooled or queued, oldest first; then snapshots' places and a heartbeat."""
        while not self._stop and not self.held:
            with self._lock:
                spooled = self._spool.numbers[:1]
                publication = self._spool.get(spooled[0]) if spooled else None
                cut = None if spooled or not self._queue else self._queue[0]
                if spooled and publication is None:  # its file was truncated, so its keys are unknown
                    self._withdraw(spooled[0])
                    self.lost = True
                    continue
            if cut is not None:
                with trace.span("publish", "encode", number=cut.number):
                    publication = cut.encode()
            if publication is None:
                break
            if publication.number <= self._replayed_to:
                self._compare_replay(publication)
            elif not self._send(publication):
                continue  # withdrawn
            with self._lock:
                if spooled:
                    self._spool.drop(publication.number)
                elif self._queue and self._queue[0] is cut:
                    self._queue.popleft()
                self._lock.notify_all()
            self._check_hold()
        self._send_notes()

    def _compare_replay(self, publication: EncodedPublication) -> None:
        """Compare a replayed publication with the one on the bus; if they differ, its keys are carried over."""
        known = self._known.get(publication.number)
        body_checksum, rank = checksum(publication.body), self.sender.rank
        if known is not None and len(known.parts) == self.sender.world and known.parts[rank] == body_checksum:
            self.counters.replayed += 1
            return
        self.counters.differed += 1
        with self._lock:
            self._carry_over(keys_of(decode_body(publication.body)[0]))

    def _send(self, publication: EncodedPublication) -> bool:
        """Send the messages of a part, and on rank 0 the commit. False if it was withdrawn meanwhile."""
        bus, sender = self.bus(), self.sender
        with trace.span("publish", "send", number=publication.number, bytes=len(publication.body)):
            for message in parts(
                publication.number, sender.session, sender.rank, sender.world, publication.body, bus.limit
            ):
                bus.append(message.encode())
            if not sender.first:
                with self._lock:
                    self._sent.append(publication)
                return True
            checksums = [checksum(publication.body)]
            if sender.world > 1:
                found = self._wait_for_others(publication)
                if found is None:
                    return False
                checksums += found
            self._commit(publication, checksums)
        return True

    def _commit(self, publication: EncodedPublication, checksums: list[int]) -> None:
        fields = {**publication.fields, "parts": checksums, "run": self.sender.run}
        if self._snapshot is not None:
            fields["snapshot"] = self._snapshot.to_dict()
        fields["checksum"] = content_checksum(publication.number, fields)
        self.bus().append(note(publication.number, self.sender.session, fields).encode())
        counters = self.counters
        self._latest = {"step": fields["step"], "watermark": fields["watermark"]}
        counters.published += 1
        counters.committed = publication.number
        counters.bytes += len(publication.body)
        counters.rows += int(publication.fields.get("rows", 0))
        counters.seconds.append(time.time() - float(fields["cut"]))
        self._last_heartbeat = time.monotonic()

    def _wait_for_others(self, publication: EncodedPublication) -> list[int] | None:
        """The checksums of the other ranks' parts when all are on the bus; None if the publication is withdrawn."""
        while not self._stop:
            checksums = self._others.checksums(publication.number)
            if checksums is not None:
                return checksums
            with self._lock:
                if self._next <= publication.number:
                    return None
            self._others.read(self.bus(), wait=0.1)
        return None

    # --- hold, heartbeats, snapshots ---

    def _check_hold(self) -> None:
        """Stop while a rollback holds the publisher, and resume after its publications when it is released."""
        if time.monotonic() - self._hold_checked < _HOLD_INTERVAL:
            return
        hold = self.bus().mark(HOLD)
        self._hold_checked = time.monotonic()
        if hold is not None and not self.held:
            with self._lock:
                self._withdraw(self.counters.committed + 1)
                self.held = True
            if self.sender.first:
                self.bus().set_mark(HELD, hold)
        elif hold is None and self.held:
            self._resume()

    def _resume(self) -> None:
        """The hold was released: the next publication must include every row that others published meanwhile."""
        bus, committed = self.bus(), self.counters.committed
        commits = commits_after(bus, committed)
        newest = max(commits, default=committed)
        keys = keys_on_bus(bus, [commit for number, commit in commits.items() if number > committed])
        with self._lock:
            self._carry_over(keys)
            self._next, self.counters.committed = newest + 1, newest
            self.held = False
            self._lock.notify_all()

    def _send_notes(self) -> None:
        """Send the places of complete snapshots, and a heartbeat if nothing was sent for a while."""
        if not self.sender.first:
            return
        while self._notes and self._notes[0][0] <= self.counters.committed:
            place = self._notes[0][1]
            self._snapshot = place
            self._append_note(SNAPSHOT)
            with self._lock:
                self._notes.popleft()
        if self._latest and self.counters.committed and time.monotonic() - self._last_heartbeat >= self._heartbeat:
            self._append_note(HEARTBEAT)
            self.counters.heartbeats += 1

    def _append_note(self, kind: str) -> None:
        fields = {"kind": kind, "run": self.sender.run, "cut": time.time(), **self._latest}
        if self._snapshot is not None:
            fields["snapshot"] = self._snapshot.to_dict()
        self.bus().append(note(self.counters.committed, self.sender.session, fields).encode())
        self._last_heartbeat = time.monotonic()
