"""TensorBatch: concurrent requests are joined into batches counted in rows; what cannot make it is refused at the door.

**Lines.** Requests that may share a batch (same model, signature, policy) wait in one line, first come first served. A
line belongs to a group, the model: free lanes go to the group that has used the least lane time, so that a busy model
does not starve a quiet one. A request larger than `max_rows` is several pieces of almost equal size.

**When a batch leaves**, asked by a free lane; the first rule that holds:

1. *full*: the line has `max_rows` rows. As many pieces as fit go.
2. *all here*: nothing more is on its way. The line holds (almost) as many rows as the engine held at once lately, so
   those who could still join are not there: a closed loop of clients has all asked.
3. *spent*: the oldest piece has waited `wait`. And `wait` is what joining may be worth:
        min(max_wait, fixed cost of a batch) x load
   with load rising from 0 at half-busy lanes to 1 at lanes nine tenths busy. While lanes are busy, requests pile up
   anyway and nobody waits for company. While they are idle, the load is 0 and so is the wait: an idle server answers
   at once. Between the two, a wait longer than the fixed cost that it may save never pays.
   A deadline cuts it short.

**Admission.** A request is admitted if what is before it (by the measured line of ServiceTime, over all groups) and its
own run fit in a share of the time to its deadline; else it is refused with 429 and the time after which to come again.
Rows and bytes in the engine are bounded whatever the deadlines (429), and while it drains nothing is admitted (503). A
piece whose deadline passed in line is refused with 503 rather than run, unless its policy is to wait.

Threads: readers `admit` and `put`, miss workers `put`, lanes `take` and `done`; one lock, held for microseconds. The
rules themselves (`next_batch`) take the time as an argument, so that tests bring their own clock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotrow.serve.load_estimate import Peak, ServiceTime, Utilization
from hotrow.serve.protocol.request import RefusedError


@dataclass(frozen=True)
class QueueLimits:
    """What the engine may hold, and how long a batch may wait for company."""

    max_rows: int = 1024  # of a batch
    max_wait: float = 0.002  # seconds
    queue_rows: int = 262_144
    queue_bytes: int = 512 << 20
    share: float = 0.8  # of the time to a deadline that may be planned with


class Ask:
    """A request inside the engine. Whoever made it gets `answer` or `refuse` called, once."""

    __slots__ = (
        "admitted",
        "arrived",
        "content",
        "deadline",
        "fresh",
        "late",
        "left",
        "logits",
        "patient",
        "rows",
        "size",
    )

    def __init__(self, content: Any, rows: int, size: int, deadline: float, patient: bool = False) -> None:
        self.content, self.rows, self.size = content, rows, size
        self.deadline = deadline
        self.patient = patient  # rows are worth more than the deadline
        self.arrived = 0.0
        self.left = 1  # pieces not yet answered
        self.logits: Any = None  # where the pieces' answers are put together
        self.late = 0  # summed over its pieces
        self.fresh: Any = None  # what its pieces were answered from, put together by `merged`
        self.admitted = False


@dataclass(slots=True)
class Piece:
    """Some rows of a request."""

    ask: Ask
    first: int
    rows: int


class Group:
    """What shares lanes fairly: a model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.time = ServiceTime()
        self.used = 0.0  # lane seconds, for fairness
        self.rows = 0  # waiting in its lines
        self.pieces = 0
        self.shed = {"deadline": 0, "full": 0, "draining": 0, "expired": 0}


@dataclass(eq=False)
class Line:
    """Pieces that may share a batch."""

    group: Group
    key: Any
    pieces: deque[Piece] = field(default_factory=deque)
    rows: int = 0


@dataclass(slots=True)
class Batch:
    """Pieces of one line that leave together."""

    line: Line
    pieces: list[Piece]
    rows: int
    why: str
    taken: float
    seconds: float = 0.0  # expected
    began: float = 0.0  # when its lane was free: what lies between two batches of a busy lane belongs to the second


@dataclass
class Counts:
    """What happened, since the start."""

    admitted: int = 0
    admitted_rows: int = 0
    batches: int = 0
    batch_rows: int = 0
    batch_requests: int = 0
    wait_seconds: float = 0.0  # summed over pieces
    busy_seconds: float = 0.0
    why: dict[str, int] = field(default_factory=lambda: {"full": 0, "all here": 0, "spent": 0})


class TensorBatch:
    """The queue between readers and lanes.

    >>> group = Group("ctr")
    >>> batch = TensorBatch(QueueLimits(max_rows=64), lanes=1)
    >>> line = batch.line(group, "ctr")
    >>> batch.admit(group, asks := [Ask(name, 20, 1000, time.monotonic() + 1) for name in "ab"])
    []
    >>> batch.put(line, asks)
    >>> taken = batch.take()
    >>> [piece.ask.content for piece in taken.pieces], taken.rows
    (['a', 'b'], 40)
    """

    def __init__(
        self,
        limits: QueueLimits,
        lanes: int,
        refuse: Callable[[Ask, RefusedError], None] = lambda ask, refused: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.lanes, self.clock = limits, lanes, clock
        self.counts = Counts()
        self.draining = False
        self._refuse = refuse
        self._lines: dict[Any, Line] = {}
        self._groups: dict[int, Group] = {}  # those of the lines, by id
        self._rows = self._bytes = 0  # admitted and not yet answered
        self._running: dict[int, Batch] = {}
        self._closed = False
        self._lane = threading.local()  # when the calling lane was last free
        self._changed = threading.Condition(threading.Lock())
        now = clock()
        self.load = Utilization(lanes, now)
        self._peak = Peak(now)

    # --- readers ---

    def line(self, group: Group, key: Any) -> Line:
        """The line of `key`, made when it is first asked for."""
        line = self._lines.get(key)
        if line is None:
            with self._changed:
                line = self._known(Line(group, key))
        return line

    def admit(self, group: Group, asks: list[Ask]) -> list[tuple[Ask, RefusedError]]:
        """Let requests in; returns those that are refused, and takes them out of the list."""
        now = self.clock()
        refused: list[tuple[Ask, RefusedError]] = []
        with self._changed:
            ahead = 0.0  # of those let in by this call
            for ask in asks:
                try:
                    ahead += self._check(group, ask, now, ahead)
                except RefusedError as error:
                    refused.append((ask, error))
                    continue
                ask.arrived, ask.admitted = now, True
                self._rows += ask.rows
                self._bytes += ask.size
                self.counts.admitted += 1
                self.counts.admitted_rows += ask.rows
            self._peak.note(self._rows, now)
        if refused:
            asks[:] = [ask for ask in asks if ask.admitted]
        return refused

    def put(self, line: Line, asks: Sequence[Ask]) -> None:
        """Requests that were admitted join the line."""
        with self._changed:
            line = self._known(line)
            if not line.group.rows:  # time that a model did not ask for is not owed to it
                line.group.used = max(line.group.used, self._least_used())
            for ask in asks:
                pieces = split(ask, self.limits.max_rows)
                ask.left = len(pieces)
                line.pieces.extend(pieces)
                line.rows += ask.rows
                line.group.rows += ask.rows
                line.group.pieces += len(pieces)
            self._changed.notify()

    def forget(self, stale: Callable[[Any], bool]) -> None:
        """Let go of empty lines whose keys are stale, and what they hold: a version that was retired, its rows."""
        with self._changed:
            self._lines = {key: line for key, line in self._lines.items() if line.pieces or not stale(key)}
            self._groups = {id(line.group): line.group for line in self._lines.values()}

    def busy(self, group: Group) -> bool:
        """Whether any of the group's requests waits in line or runs."""
        with self._changed:
            return bool(group.rows) or any(batch.line.group is group for batch in self._running.values())

    def finish(self, ask: Ask) -> bool:
        """The request's end: its room is free. Returns whether it is this call that ended it, and so may answer it."""
        with self._changed:
            return self._finish(ask)

    # --- lanes ---

    def take(self) -> Batch | None:
        """The next batch, when there is one; None when closed. Waits."""
        free: float | None = getattr(self._lane, "free", None)
        while True:
            expired: list[Ask] = []
            with self._changed:
                now = self.clock()
                batch, until = self.next_batch(now, expired)
                if batch is None and not expired:
                    if self._closed:
                        return None
                    free = None
                    self._changed.wait(None if until is None else max(0.0, until - now))
                elif batch is not None and self._lines_wait():
                    self._changed.notify()  # for another lane
            for ask in expired:
                late = "its deadline passed while it waited for a lane; ask for fewer rows at once, or more lanes"
                self._refuse(ask, RefusedError(503, late, self.backlog_seconds()))
            if batch is not None:
                batch.began = batch.taken if free is None else free
                return batch

    def next_batch(self, now: float, expired: list[Ask]) -> tuple[Batch | None, float | None]:
        """What a free lane should run now, or until when to wait for it (None: until something comes)."""
        until: float | None = None
        for line in sorted((x for x in self._lines.values() if x.pieces), key=_turn):
            self._drop_expired(line, now, expired)
            if not line.pieces:
                continue
            why, at = self._release(line, now)
            if why:
                return self._leave(line, why, now), None
            until = at if until is None else min(until, at)
        return None, until

    def finish_pieces(
        self, pieces: Sequence[Piece], logits: Any, lates: Sequence[int], fresh: Any = None
    ) -> list[Piece]:
        """The pieces were run: those with which a request is complete and still to be answered.

        What belongs to a request of several pieces is put together in its `logits`, `late` and `fresh`.
        """
        ready, row = [], 0
        with self._changed:
            for piece, late in zip(pieces, lates, strict=True):
                ask = piece.ask
                if ask.rows != piece.rows:
                    if ask.logits is None:
                        ask.logits = np.empty((ask.rows, *logits.shape[1:]), np.float32)
                    ask.logits[piece.first : piece.first + piece.rows] = logits[row : row + piece.rows]
                    ask.late += late
                    ask.fresh = fresh if ask.fresh is None else ask.fresh.merged(fresh)
                row += piece.rows
                ask.left -= 1
                if ask.left == 0 and self._finish(ask):
                    ready.append(piece)
        return ready

    def done(self, batch: Batch, ok: bool = True) -> None:
        """A lane has run the batch and is free."""
        now = self._lane.free = self.clock()
        seconds = now - (batch.began or batch.taken)
        with self._changed:
            del self._running[id(batch)]
            self.load.change(-1, now)
            self.counts.busy_seconds += seconds
            group = batch.line.group
            group.used += seconds - batch.seconds
            if ok:
                group.time.note(batch.rows, seconds)

    # --- the rules ---

    def _release(self, line: Line, now: float) -> tuple[str | None, float]:
        """Why the line's batch leaves now, or when it will."""
        if line.rows >= self.limits.max_rows:
            return "full", now
        if line.rows >= 0.9 * self._peak.note(self._rows, now):
            return "all here", now
        oldest = line.pieces[0].ask
        at = oldest.arrived + self.wait(line, now)
        at = min(at, oldest.deadline - 2 * line.group.time.of(line.rows))
        return ("spent", now) if at <= now else (None, at)

    def wait(self, line: Line, now: float) -> float:
        """How long the oldest may wait for company, in seconds."""
        load = min(1.0, max(0.0, (self.load.now(now) - 0.5) / 0.4))
        return min(self.limits.max_wait, line.group.time.fixed) * load

    def _leave(self, line: Line, why: str, now: float) -> Batch:
        pieces = [line.pieces.popleft()]
        rows = pieces[0].rows
        while line.pieces and rows + line.pieces[0].rows <= self.limits.max_rows:
            pieces.append(line.pieces.popleft())
            rows += pieces[-1].rows
        line.rows -= rows
        line.group.rows -= rows
        line.group.pieces -= len(pieces)
        batch = Batch(line, pieces, rows, why, now, line.group.time.of(rows))
        line.group.used += batch.seconds
        self._running[id(batch)] = batch
        self.load.change(1, now)
        counts = self.counts
        counts.batches += 1
        counts.batch_rows += rows
        counts.batch_requests += len(pieces)
        counts.why[why] += 1
        counts.wait_seconds += sum([now - piece.ask.arrived for piece in pieces])
        return batch

    def _drop_expired(self, line: Line, now: float, expired: list[Ask]) -> None:
        """Requests that are too late already leave the front of the line, whole."""
        while line.pieces and (ask := line.pieces[0].ask).deadline <= now and not ask.patient:
            piece = line.pieces.popleft()
            line.rows -= piece.rows
            line.group.rows -= piece.rows
            line.group.pieces -= 1
            if self._finish(ask):
                line.group.shed["expired"] += 1
                expired.append(ask)

    def _check(self, group: Group, ask: Ask, now: float, ahead: float) -> float:
        """Raise RefusedError, or return the lane time that the request will take."""
        if self.draining:
            group.shed["draining"] += 1
            raise RefusedError(503, "the server is draining; ask another one", 1.0)
        before = self._backlog(now) + ahead / self.lanes
        if self._rows + ask.rows > self.limits.queue_rows or self._bytes + ask.size > self.limits.queue_bytes:
            group.shed["full"] += 1
            raise RefusedError(429, f"the queue is full ({self._rows} rows, {self._bytes} bytes)", max(0.001, before))
        needed = before + group.time.queue(ask.rows, self.limits.max_rows)
        if needed > (ask.deadline - now) * self.limits.share and group.time.known:
            group.shed["deadline"] += 1
            left = max(0.0, ask.deadline - now)
            raise RefusedError(
                429,
                f"an answer would take about {needed * 1e3:.1f} ms and the deadline is in {left * 1e3:.1f} ms",
                max(0.001, before),
            )
        return group.time.of(self.limits.max_rows) / self.limits.max_rows * ask.rows

    # --- figures ---

    def backlog_seconds(self) -> float:
        """How long a request that comes now would wait for a lane."""
        with self._changed:
            return self._backlog(self.clock())

    def figures(self) -> dict[str, float]:
        """Queue and load, now."""
        with self._changed:
            now = self.clock()
            return {
                "queue_rows": self._rows,
                "queue_bytes": self._bytes,
                "waiting_rows": sum(group.rows for group in self._groups.values()),
                "running_batches": len(self._running),
                "backlog_seconds": self._backlog(now),
                "load": self.load.now(now),
            }

    # --- the end ---

    def drain(self, timeout: float) -> bool:
        """Admit nothing more and wait for what is inside; returns whether all of it was answered."""
        self.draining = True
        until = time.monotonic() + timeout
        while self._rows and time.monotonic() < until:
            time.sleep(0.002)
        return not self._rows

    def close(self) -> None:
        """Lanes that wait get None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _finish(self, ask: Ask) -> bool:
        if not ask.admitted:
            return False
        ask.admitted = False
        self._rows -= ask.rows
        self._bytes -= ask.size
        return True

    def _backlog(self, now: float) -> float:
        waiting = sum([g.time.queue(g.rows, self.limits.max_rows) for g in self._groups.values() if g.rows])
        running = sum([max(0.0, b.seconds - (now - b.taken)) for b in self._running.values()])
        if len(self._running) < self.lanes and not waiting:
            return 0.0
        return (waiting + running) / self.lanes

    def _known(self, line: Line) -> Line:
        """The line of this key: one that was forgotten while somebody held it is back with its next request."""
        self._groups[id(line.group)] = line.group
        return self._lines.setdefault(line.key, line)

    def _least_used(self) -> float:
        return min([group.used for group in self._groups.values() if group.rows], default=0.0)

    def _lines_wait(self) -> bool:
        return any(line.pieces for line in self._lines.values())


def split(ask: Ask, most: int) -> list[Piece]:
    """The request's rows in as few pieces as can be, almost equal.

    >>> [piece.rows for piece in split(Ask(None, 10, 0, 0.0), 4)]
    [4, 3, 3]
    """
    count = -(-ask.rows // most)
    if count == 1:
        return [Piece(ask, 0, ask.rows)]
    each, extra = divmod(ask.rows, count)
    pieces, first = [], 0
    for number in range(count):
        rows = each + (number < extra)
        pieces.append(Piece(ask, first, rows))
        first += rows
    return pieces


def _turn(line: Line) -> tuple[float, float]:
    return line.group.used, line.pieces[0].ask.arrived
