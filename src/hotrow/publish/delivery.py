"""Delivery: the thread that takes publications from the trainer to the bus, in order, whatever the bus does.

The trainer's thread asks for a number (`claim`), cuts, and hands the rows over (`put`); everything slow happens here:
making the bytes, sending them, waiting for the other ranks, trying again. What waits is kept in memory up to `memory`
bytes, and in the spool while the bus is away. In order, always: a publication that waits keeps all later ones waiting.

Numbers have no gaps, so what cannot be sent under its number is *withdrawn*, with all that came after it: its keys are
carried over, the number is claimed again by the next cut, and that one brings the carried rows as they are by then.
That is how a full spool, a hold (rollback.py) and a replay that came out different lose nothing.

A replay: after a crash the trainer repeats steps whose publications are on the bus. They are made again and compared
with what is there by checksum: equal ones are done with, others are carried over.

With ranks, each sends its part; rank 0 looks for the parts of all on the bus and then commits. A rank keeps what it has
sent until it hears that it was committed (`settle`), for it may have to be withdrawn.

Threads: `claim`, `put`, `withdraw`, `settle`, `flush` and `close` are the trainer's; one lock guards what both sides
see, and is never held while the bus is waited for.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotrow import trace
from hotrow.errors import BusError, PublishError
from hotrow.publish.bus import Bus
from hotrow.publish.history import Commit, commits_after
from hotrow.publish.message import NOTE, BadMessage, Message, checksum, note, parts
from hotrow.publish.publication import (
    HEARTBEAT,
    SNAPSHOT,
    SnapshotPlace,
    TableChange,
    content_checksum,
    decode_body,
    encode_body,
)
from hotrow.publish.spool import EncodedPublication, Spool, SpoolFull

HOLD, HELD = "hold", "held"  # marks
_TICK = 0.2  # seconds between looks at the hold
_LONGEST_PAUSE = 2.0  # between two tries
_GIVE_UP = 1.0  # seconds of tries after which nobody waits for a bus at the end of a run
Keys = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Sender:
    """Who sends: the same run over all its restarts, this process of it, and its place among the ranks."""

    run: str
    session: int
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this one commits."""
        return self.rank == 0


@dataclass
class Cut:
    """What was cut at a step: rows as they were then, to be made into bytes here."""

    number: int
    words: dict[str, Any]
    tables: dict[str, TableChange]
    dense: dict[str, Tensor] | None
    values: str

    @property
    def bytes(self) -> int:
        """About what it takes."""
        tables = sum(8 * c.rows + c.values.numel() * 4 for c in self.tables.values())
        return tables + sum(t.numel() * t.element_size() for t in (self.dense or {}).values())

    def parcel(self) -> EncodedPublication:
        """As bytes."""
        return EncodedPublication(self.number, self.words, encode_body(self.tables, self.dense, self.values))


@dataclass
class Counters:
    """What has happened so far; `waiting` and `spooled` are of now."""

    published: int = 0
    rows: int = 0
    bytes: int = 0
    replayed: int = 0
    differed: int = 0  # replays that did not come out the same
    withdrawn: int = 0
    retries: int = 0
    heartbeats: int = 0
    committed: int = 0  # the newest number on the bus
    spooled: int = 0  # bytes
    waiting: int = 0
    last_error: str = ""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1024))  # from a cut to its commit


class Delivery:
    """A trainer's way to a bus."""

    def __init__(
        self,
        open_bus: Callable[[], Bus],
        spool: Spool,
        sender: Sender,
        *,
        memory: int,
        heartbeat: float,
    ) -> None:
        self.sender, self.counters = sender, Counters()
        self.held = False  # by a rollback
        self.lost = False  # a publication is gone for good: the next one must bring every row
        self._open, self._bus = open_bus, None  # type: tuple[Callable[[], Bus], Bus | None]
        self._spool, self._memory, self._heartbeat = spool, memory, heartbeat
        self._lock = threading.Condition()
        self._queue: deque[Cut] = deque()
        self._sent: list[EncodedPublication] = []  # of a rank that does not commit
        self._carried: Keys = {}
        self._next = 1
        self._known: dict[int, Commit] = {}  # what a replay must come out as
        self._replayed_to = 0
        self._notes: deque[tuple[int, SnapshotPlace]] = deque()
        self._snapshot: SnapshotPlace | None = None
        self._latest: dict[str, Any] = {}  # what a heartbeat says
        self._beat = self._looked = 0.0
        self._away_since = math.inf
        self._others: dict[tuple[int, int], dict[int, set[int]]] = {}  # number, rank: by body, chunks still to come
        self._seen_to = 0
        self._stop = False
        self._busy = False
        self._thread: threading.Thread | None = None

    # --- the trainer's side ---

    def start(self, after: int, known: dict[int, Commit], newest: int, place: SnapshotPlace | None, head: int) -> None:
        """The trainer is at publication `after`, the bus at `newest`; what is between is a replay."""
        self._next, self._known, self._replayed_to, self._snapshot = after + 1, known, newest, place
        self._seen_to = head
        self.counters.committed = newest
        for number in self._spool.numbers:
            if number <= newest or number > after:  # on the bus, or to be made again
                self._spool.drop(number)
        self._thread = threading.Thread(target=self._run, name="hotrow-publish", daemon=True)
        self._thread.start()

    def next_number(self) -> int:
        """Of the publication that is cut next."""
        with self._lock:
            return self._next

    def claim(self, number: int) -> Keys:
        """The next cut gets this number; returns the keys that it must bring besides those that changed."""
        with self._lock:
            if number < self._next:
                self._withdraw(number)
            self._next = number + 1
            carried, self._carried = self._carried, {}
            return carried

    def carry(self, keys: Keys) -> None:
        """Keys that the next cut must bring."""
        with self._lock:
            self._carry(keys)

    def put(self, cut: Cut) -> None:
        """A cut is ready. Waits only where more than `memory` bytes wait already and the disk is slow."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._stop or not self._queue or self._waiting() + cut.bytes <= self._memory, 60
            )
            if self.held or cut.number >= self._next:  # withdrawn while it was cut
                self._carry(_keys(cut.tables))
                return
            self._queue.append(cut)
            self.counters.waiting = self._waiting()
            self._lock.notify_all()

    def say(self, words: dict[str, Any]) -> None:
        """What heartbeats say from now on, step and watermark; not while something newer is on its way."""
        with self._lock:
            if self._next == self.counters.committed + 1 and self._latest:
                self._latest = words

    def announce(self, place: SnapshotPlace) -> None:
        """A snapshot is complete: tell readers, after the publication that it is of."""
        with self._lock:
            self._notes.append((place.number, place))
            self._lock.notify_all()

    def settle(self, committed: int) -> None:
        """Publications up to this number are on the bus, all ranks' parts and the commit."""
        with self._lock:
            self._sent = [parcel for parcel in self._sent if parcel.number > committed]
            self.counters.committed = max(self.counters.committed, committed)

    def flush(self, seconds: float, kept: bool = False) -> bool:
        """Wait until nothing waits; with `kept`, what the spool keeps for a bus that is away does not count."""

        def done() -> bool:
            safe = kept and not self._queue and time.monotonic() - self._away_since > _GIVE_UP
            return self._idle() or self.held or self._stop or safe

        with self._lock:
            return bool(self._lock.wait_for(done, seconds))

    def close(self, seconds: float = 5.0) -> None:
        """Deliver what is left, or keep it in the spool, and end."""
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

    # --- withdrawing ---

    def _withdraw(self, number: int) -> None:
        """Requires: the lock. Nothing from this number on will be sent as it is."""
        for cut in [cut for cut in self._queue if cut.number >= number]:
            self._queue.remove(cut)
            self._carry(_keys(cut.tables))
            self.counters.withdrawn += 1
        for waiting in [waiting for waiting in self._spool.numbers if waiting >= number]:
            parcel = self._spool.get(waiting)
            if parcel is not None:
                self._carry(_keys(decode_body(parcel.body)[0]))
            self._spool.drop(waiting)
            self.counters.withdrawn += 1
        for parcel in [parcel for parcel in self._sent if parcel.number >= number]:
            self._sent.remove(parcel)
            self._carry(_keys(decode_body(parcel.body)[0]))
        self._notes = deque(one for one in self._notes if one[0] < number)
        self._next = min(self._next, number)
        self._lock.notify_all()

    def _carry(self, keys: Keys) -> None:
        for table, tensors in keys.items():
            self._carried.setdefault(table, []).extend(tensors)

    # --- the thread ---

    def _run(self) -> None:
        pause = 0.05
        while True:
            with self._lock:
                work = self._queue or self._notes or self._spool.numbers
                if not self._stop and (self.held or not work):
                    self._lock.wait(_TICK)
                if self._stop:
                    break
            try:
                self._busy = True
                self._look_at_hold()
                if not self.held:
                    self._deliver()
                pause, self.counters.last_error, self._away_since = 0.05, "", math.inf
            except BusError as error:
                self._away(error)
                self._busy = False
                self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except Exception as error:
                self.counters.last_error = f"{type(error).__name__}: {error}"
                warnings.warn(f"publishing: {self.counters.last_error}; it is tried again", stacklevel=2)
                self._sleep(_LONGEST_PAUSE)
            finally:
                self._busy = False
                with self._lock:
                    self.counters.spooled, self.counters.waiting = self._spool.bytes, self._waiting()
                    self._lock.notify_all()
        self._keep()
        if self._bus is not None:
            self._bus.close()

    def _sleep(self, seconds: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stop, seconds)

    def bus(self) -> Bus:
        """This thread's own connection."""
        if self._bus is None:
            self._bus = self._open()
        return self._bus

    def _away(self, error: BusError) -> None:
        self.counters.retries += 1
        self._away_since = min(self._away_since, time.monotonic())
        self.counters.last_error = str(error)
        bus, self._bus = self._bus, None
        if bus is not None:
            with suppress(Exception):  # it is broken anyway
                bus.close()
        self._keep()

    def _keep(self) -> None:
        """What is in memory goes to the spool; where that is full, it is withdrawn."""
        while True:
            with self._lock:
                cut = self._queue[0] if self._queue else None
            if cut is None:
                return
            if cut.number <= self._replayed_to:
                return  # nothing to keep: it is on the bus
            parcel = cut.parcel()
            with self._lock:
                if not self._queue or self._queue[0] is not cut:
                    continue  # withdrawn meanwhile
                try:
                    self._spool.put(parcel, self.sender.session)
                    self._queue.popleft()
                except SpoolFull as error:
                    self.counters.last_error = str(error)
                    self._withdraw(cut.number)
                self._lock.notify_all()

    def _deliver(self) -> None:
        """Everything that waits, oldest first; then what is to be said."""
        while not self._stop and not self.held:
            with self._lock:
                spooled = self._spool.numbers[:1]
                parcel = self._spool.get(spooled[0]) if spooled else None
                cut = None if spooled or not self._queue else self._queue[0]
                if spooled and parcel is None:  # torn: nobody knows any more what was in it
                    self._withdraw(spooled[0])
                    self.lost = True
                    continue
            if cut is not None:
                with trace.span("publish", "encode", number=cut.number):
                    parcel = cut.parcel()
            if parcel is None:
                break
            if parcel.number <= self._replayed_to:
                self._compare(parcel)
            elif not self._send(parcel):
                continue  # it was withdrawn
            with self._lock:
                if spooled:
                    self._spool.drop(parcel.number)
                elif self._queue and self._queue[0] is cut:
                    self._queue.popleft()
                self._lock.notify_all()
            self._look_at_hold()
        self._say()

    def _compare(self, parcel: EncodedPublication) -> None:
        """A replay: is it what the bus has?"""
        known = self._known.get(parcel.number)
        here, rank = checksum(parcel.body), self.sender.rank
        if known is not None and len(known.parts) == self.sender.world and known.parts[rank] == here:
            self.counters.replayed += 1
            return
        self.counters.differed += 1
        with self._lock:
            self._carry(_keys(decode_body(parcel.body)[0]))

    def _send(self, parcel: EncodedPublication) -> bool:
        """Part by part, then the commit. False if it was withdrawn meanwhile."""
        bus, sender = self.bus(), self.sender
        with trace.span("publish", "send", number=parcel.number, bytes=len(parcel.body)):
            for message in parts(parcel.number, sender.session, sender.rank, sender.world, parcel.body, bus.limit):
                bus.append(message.encode())
            if not sender.first:
                with self._lock:
                    self._sent.append(parcel)
                return True
            sums = [checksum(parcel.body)]
            if sender.world > 1:
                found = self._wait_for_others(parcel)
                if found is None:
                    return False
                sums += found
            self._commit(parcel, sums)
        return True

    def _commit(self, parcel: EncodedPublication, sums: list[int]) -> None:
        words = {**parcel.words, "parts": sums, "run": self.sender.run}
        if self._snapshot is not None:
            words["snapshot"] = self._snapshot.to_dict()
        words["checksum"] = content_checksum(parcel.number, words)
        self.bus().append(note(parcel.number, self.sender.session, words).encode())
        counters = self.counters
        self._latest = {"step": words["step"], "watermark": words["watermark"]}
        counters.published += 1
        counters.committed = parcel.number
        counters.bytes += len(parcel.body)
        counters.rows += int(parcel.words.get("rows", 0))
        counters.seconds.append(time.time() - float(words["cut"]))
        self._beat = time.monotonic()

    def _wait_for_others(self, parcel: EncodedPublication) -> list[int] | None:
        """Checksums of the parts of ranks 1 and up, when they are all on the bus."""
        sender = self.sender
        while not self._stop:
            whole = [self._whole_part(parcel.number, rank) for rank in range(1, sender.world)]
            if all(one is not None for one in whole):
                for rank in range(1, sender.world):
                    self._others.pop((parcel.number, rank), None)
                return [int(one) for one in whole if one is not None]
            with self._lock:
                if self._next <= parcel.number:
                    return None
            for entry in self.bus().read(self._seen_to, wait=0.1):
                self._seen_to = entry.offset + 1
                self._note_part(entry.data)
        return None

    def _note_part(self, data: bytes) -> None:
        try:
            message = Message.decode(data)
        except BadMessage:
            return  # readers will tell
        if message.kind == NOTE or message.session != self.sender.session or message.rank == 0:
            return
        bodies = self._others.setdefault((message.number, message.rank), {})
        bodies.setdefault(message.body_checksum, set(range(message.chunks))).discard(message.chunk)

    def _whole_part(self, number: int, rank: int) -> int | None:
        """The checksum of the newest part of a rank that is there with all its chunks."""
        bodies = self._others.get((number, rank), {})
        return next((body for body, missing in reversed(bodies.items()) if not missing), None)

    # --- hold, heartbeats, snapshots ---

    def _look_at_hold(self) -> None:
        """Stop while somebody has put an older publication back, and go on from there when it is released."""
        if time.monotonic() - self._looked < _TICK:
            return
        words = self.bus().mark(HOLD)
        self._looked = time.monotonic()
        if words is not None and not self.held:
            with self._lock:
                self._withdraw(self.counters.committed + 1)
                self.held = True
            if self.sender.first:
                self.bus().set_mark(HELD, words)
        elif words is None and self.held:
            self._go_on()

    def _go_on(self) -> None:
        """Released: what was put on the bus meanwhile is to be set right by the next publication."""
        bus, mine = self.bus(), self.counters.committed
        fresh = commits_after(bus, mine)
        newest = max(fresh, default=mine)
        keys = keys_on_bus(bus, [commit for number, commit in fresh.items() if number > mine])
        with self._lock:
            self._carry(keys)
            self._next, self.counters.committed = newest + 1, newest
            self.held = False
            self._lock.notify_all()

    def _say(self) -> None:
        """Snapshots that are complete, and a sign of life where nothing else was sent for a while."""
        if not self.sender.first:
            return
        while self._notes and self._notes[0][0] <= self.counters.committed:
            place = self._notes[0][1]
            self._snapshot = place
            self._append_note(SNAPSHOT)
            with self._lock:
                self._notes.popleft()
        if self._latest and self.counters.committed and time.monotonic() - self._beat >= self._heartbeat:
            self._append_note(HEARTBEAT)
            self.counters.heartbeats += 1

    def _append_note(self, kind: str) -> None:
        words = {"kind": kind, "run": self.sender.run, "cut": time.time(), **self._latest}
        if self._snapshot is not None:
            words["snapshot"] = self._snapshot.to_dict()
        self.bus().append(note(self.counters.committed, self.sender.session, words).encode())
        self._beat = time.monotonic()


def keys_on_bus(bus: Bus, commits: Iterable[Commit]) -> Keys:
    """Keys of publications that somebody else put on a bus."""
    from hotrow.publish.subscriber import bodies_of

    keys: Keys = {}
    for commit in commits:
        for body in bodies_of(bus, commit):
            for table, tensors in _keys(decode_body(body)[0]).items():
                keys.setdefault(table, []).extend(tensors)
    return keys


def _keys(tables: dict[str, TableChange]) -> Keys:
    return {name: [torch.cat([change.keys, change.deleted])] for name, change in tables.items()}


def held_by(words: bytes) -> dict[str, Any]:
    """What a hold says about itself."""
    try:
        said = json.loads(words)
    except ValueError:
        raise PublishError("the hold on the bus is not readable; remove it with hotrow release") from None
    return said if isinstance(said, dict) else {}
