"""TensorBatch: joins concurrent requests into batches counted in rows, and refuses requests that would miss their
deadline.

**Queues.** Requests that may share a batch (same model, signature and policy) wait in one queue, in order of arrival.
Each queue belongs to a group: a model. A free lane serves the group that has used the least lane time, so a busy model
does not starve a quiet one. A request larger than `max_rows` becomes several pieces of almost equal size.

**When a batch is released** to a free lane: the first rule that holds.

1. *full*: the queue has `max_rows` rows. The batch takes as many whole pieces as it can hold.
2. *all here*: no more requests are expected. The queue holds at least 0.9 of the recent maximum of rows in the engine,
   so hardly any client can still add a request: in a closed loop all clients have sent theirs.
3. *spent*: the oldest piece has waited `wait` seconds, which is the time that a larger batch may save:
        min(max_wait, fixed cost of a batch) x load
   where the load rises from 0 at half-busy lanes to 1 at lanes that are nine tenths busy. If lanes are idle, the load
   and so the wait are 0: an idle server answers at once. If all lanes are busy, requests queue up without this rule.
   In between, waiting longer than the fixed cost that it may save never pays. A deadline shortens the wait.

**Admission control.** A request is admitted if the queued work of all groups and its own run, as estimated by
ServiceTime, take less than `deadline_fraction` of the time to its deadline. Otherwise it is refused with 429
and the time after which to retry. The rows and bytes in the engine are bounded whatever the deadlines (429), and
nothing is admitted while the engine drains (503). A piece whose deadline passes in the queue is not run but refused
with 503, unless its policy is to wait.

Threads: connection readers call `admit` and `enqueue`, miss workers `enqueue`, lanes `take` and `done`. One lock guards
everything and is held for microseconds. A lane without a batch runs `background` work, which is no part of this
accounting (shadow.py). `next_batch` takes the time as an argument, so that tests can set it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotrow.serve.load_estimate import Peak, ServiceTime, Utilization
from hotrow.serve.protocol.request import RefusedError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueueLimits:
    """Limits on the rows and bytes in the engine, and on how long a batch may wait for more requests."""

    max_rows: int = 1024  # of a batch
    max_wait: float = 0.002  # seconds
    queue_rows: int = 262_144
    queue_bytes: int = 512 << 20
    deadline_fraction: float = 0.8  # admit if the answer is expected within this part of the time to the deadline


class QueuedRequest:
    """A request inside the engine. It ends exactly once, with an answer or with an error."""

    __slots__ = (
        "admitted",
        "arrived",
        "content",
        "deadline",
        "fresh",
        "late",
        "logits",
        "patient",
        "pieces_left",
        "rows",
        "size",
        "whole",
    )

    def __init__(
        self, content: Any, rows: int, size: int, deadline: float, patient: bool = False, whole: bool = False
    ) -> None:
        self.content, self.rows, self.size = content, rows, size
        self.deadline = deadline
        self.patient = patient  # its policy is to wait for rows: it does not expire
        self.whole = whole  # never split: one batch, and so one publication, answers it
        self.arrived = 0.0
        self.pieces_left = 1  # not yet run
        self.logits: Any = None  # of all pieces, if there are several
        self.late = 0  # summed over the pieces
        self.fresh: Any = None  # Freshness of all pieces, combined by `merged`
        self.admitted = False


@dataclass(slots=True)
class Piece:
    """A range of a request's rows that runs in one batch."""

    request: QueuedRequest
    first: int
    rows: int


class Group:
    """A model. Groups share the lanes fairly."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.service_time = ServiceTime()
        self.lane_seconds = 0.0  # used so far; the group with the least goes next
        self.rows = 0  # waiting in its queues
        self.pieces = 0
        self.shed = {"deadline": 0, "full": 0, "draining": 0, "expired": 0}


@dataclass(eq=False)
class BatchQueue:
    """Pieces that may share a batch, in order of arrival."""

    group: Group
    key: Any
    pieces: deque[Piece] = field(default_factory=deque)
    rows: int = 0


@dataclass(slots=True)
class Batch:
    """Pieces of one queue that run together."""

    queue: BatchQueue
    pieces: list[Piece]
    rows: int
    why: str
    taken: float
    seconds: float = 0.0  # expected
    began: float = 0.0  # when its lane became free; so a busy lane's time between two batches counts for the second


@dataclass
class Counts:
    """Totals since the start."""

    admitted: int = 0
    admitted_rows: int = 0
    batches: int = 0
    batch_rows: int = 0
    batch_requests: int = 0
    wait_seconds: float = 0.0  # summed over pieces
    busy_seconds: float = 0.0
    why: dict[str, int] = field(default_factory=lambda: {"full": 0, "all here": 0, "spent": 0})


class TensorBatch:
    """The queues between connection readers and lanes.

    >>> group = Group("ctr")
    >>> batch = TensorBatch(QueueLimits(max_rows=64), lanes=1)
    >>> queue = batch.queue_of(group, "ctr")
    >>> batch.admit(group, requests := [QueuedRequest(name, 20, 1000, time.monotonic() + 1) for name in "ab"])
    []
    >>> batch.enqueue(queue, requests)
    >>> taken = batch.take()
    >>> [piece.request.content for piece in taken.pieces], taken.rows
    (['a', 'b'], 40)
    """

    def __init__(
        self,
        limits: QueueLimits,
        lanes: int,
        refuse: Callable[[QueuedRequest, RefusedError], None] = lambda request, refused: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.lanes, self.clock = limits, lanes, clock
        self.counts = Counts()
        self.draining = False
        self._refuse = refuse
        self._queues: dict[Any, BatchQueue] = {}
        self._groups: dict[int, Group] = {}  # of the queues, by id
        self._rows = self._bytes = 0  # admitted and not yet answered
        self._running: dict[int, Batch] = {}
        self._closed = False
        self.background: Callable[[float], Callable[[], None] | None] = lambda load: None  # work for an idle lane
        self._in_background = 0  # lanes that do it
        self._lane = threading.local()  # when the calling lane last became free
        self._changed = threading.Condition(threading.Lock())
        now = clock()
        self.load = Utilization(lanes, now)
        self.recent_load = Utilization(lanes, now, memory=1.0)
        self._peak = Peak(now)

    # --- called by connection readers ---

    def queue_of(self, group: Group, key: Any) -> BatchQueue:
        """The queue of `key`, created at its first use."""
        queue = self._queues.get(key)
        if queue is None:
            with self._changed:
                queue = self._register(BatchQueue(group, key))
        return queue

    def admit(self, group: Group, requests: list[QueuedRequest]) -> list[tuple[QueuedRequest, RefusedError]]:
        """Admission control: returns the refused requests with their errors, and removes them from the list."""
        now = self.clock()
        refused: list[tuple[QueuedRequest, RefusedError]] = []
        with self._changed:
            ahead = 0.0  # lane time of the requests that this call has admitted
            for request in requests:
                try:
                    ahead += self._check(group, request, now, ahead)
                except RefusedError as error:
                    refused.append((request, error))
                    continue
                request.arrived, request.admitted = now, True
                self._rows += request.rows
                self._bytes += request.size
                self.counts.admitted += 1
                self.counts.admitted_rows += request.rows
            self._peak.note(self._rows, now)
        if refused:
            requests[:] = [request for request in requests if request.admitted]
        return refused

    def enqueue(self, queue: BatchQueue, requests: Sequence[QueuedRequest]) -> None:
        """Append admitted requests to their queue."""
        with self._changed:
            queue = self._register(queue)
            if not queue.group.rows:  # an idle model earns no credit of lane time
                queue.group.lane_seconds = max(queue.group.lane_seconds, self._least_lane_seconds())
            for request in requests:
                pieces = [Piece(request, 0, request.rows)] if request.whole else split(request, self.limits.max_rows)
                request.pieces_left = len(pieces)
                queue.pieces.extend(pieces)
                queue.rows += request.rows
                queue.group.rows += request.rows
                queue.group.pieces += len(pieces)
            self._changed.notify()

    def drop_empty_queues(self, stale: Callable[[Any], bool]) -> None:
        """Drop empty queues whose keys are stale, so that a retired version and its rows can be freed."""
        with self._changed:
            self._queues = {key: queue for key, queue in self._queues.items() if queue.pieces or not stale(key)}
            self._groups = {id(queue.group): queue.group for queue in self._queues.values()}

    def busy(self, group: Group) -> bool:
        """Whether any request of the group is queued or runs."""
        with self._changed:
            return bool(group.rows) or any(batch.queue.group is group for batch in self._running.values())

    def finish(self, request: QueuedRequest) -> bool:
        """End a request and free its share of the limits. Only the call that returns True may answer it."""
        with self._changed:
            return self._finish(request)

    # --- called by lanes ---

    def take(self) -> Batch | None:
        """Wait for the next batch; None after `close`. Meanwhile it may run `background` work."""
        free: float | None = getattr(self._lane, "free", None)
        while True:
            expired: list[QueuedRequest] = []
            work: Callable[[], None] | None = None
            with self._changed:
                now = self.clock()
                batch, until = self.next_batch(now, expired)
                if batch is None and not expired:
                    if self._closed:
                        return None
                    free = None
                    if (work := self._background_work(now)) is None:
                        self._changed.wait(None if until is None else max(0.0, until - now))
                elif batch is not None and self._any_waiting():
                    self._changed.notify()  # for another lane
            if work is not None:
                self._do(work)
            for request in expired:
                why = "its deadline passed while it waited for a lane; send fewer rows at once, or start more lanes"
                self._refuse(request, RefusedError(503, why, self.backlog_seconds()))
            if batch is not None:
                batch.began = batch.taken if free is None else free
                return batch

    def wake(self) -> None:
        """There is background work for an idle lane."""
        with self._changed:
            self._changed.notify()

    def _background_work(self, now: float) -> Callable[[], None] | None:
        """Background work for this lane, if no request waits and another lane stays free (or there is only one)."""
        if self.draining or self._any_waiting() or len(self._running) + self._in_background >= max(1, self.lanes - 1):
            return None
        work = self.background(self.recent_load.now(now))
        self._in_background += work is not None
        return work

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a bug: the lane continues
            log.exception("background work failed")
        finally:
            with self._changed:
                self._in_background -= 1

    def next_batch(self, now: float, expired: list[QueuedRequest]) -> tuple[Batch | None, float | None]:
        """The batch that a free lane should run now, or the time to wait until (None: until a request comes)."""
        until: float | None = None
        for queue in sorted((x for x in self._queues.values() if x.pieces), key=_fair_share_order):
            self._drop_expired(queue, now, expired)
            if not queue.pieces:
                continue
            why, at = self._release_reason(queue, now)
            if why:
                return self._release(queue, why, now), None
            until = at if until is None else min(until, at)
        return None, until

    def finish_pieces(
        self, pieces: Sequence[Piece], logits: Any, lates: Sequence[int], fresh: Any = None
    ) -> list[Piece]:
        """Record that pieces were run; returns those that complete a request which is still to be answered.

        The results of a request with several pieces are collected in its `logits`, `late` and `fresh`.
        """
        ready, row = [], 0
        with self._changed:
            for piece, late in zip(pieces, lates, strict=True):
                request = piece.request
                if request.rows != piece.rows:
                    if request.logits is None:
                        request.logits = np.empty((request.rows, *logits.shape[1:]), np.float32)
                    request.logits[piece.first : piece.first + piece.rows] = logits[row : row + piece.rows]
                    request.late += late
                    request.fresh = fresh if request.fresh is None else request.fresh.merged(fresh)
                row += piece.rows
                request.pieces_left -= 1
                if request.pieces_left == 0 and self._finish(request):
                    ready.append(piece)
        return ready

    def done(self, batch: Batch, ok: bool = True) -> None:
        """The calling lane has run the batch and is free."""
        now = self._lane.free = self.clock()
        seconds = now - (batch.began or batch.taken)
        with self._changed:
            del self._running[id(batch)]
            self.load.change(-1, now)
            self.recent_load.change(-1, now)
            self.counts.busy_seconds += seconds
            group = batch.queue.group
            group.lane_seconds += seconds - batch.seconds
            if ok:
                group.service_time.note(batch.rows, seconds)

    # --- rules of release and admission ---

    def _release_reason(self, queue: BatchQueue, now: float) -> tuple[str | None, float]:
        """Why the queue's batch is released now, or None and when it will be."""
        if queue.rows >= self.limits.max_rows:
            return "full", now
        if queue.rows >= 0.9 * self._peak.note(self._rows, now):
            return "all here", now
        oldest = queue.pieces[0].request
        at = oldest.arrived + self.wait(queue, now)
        at = min(at, oldest.deadline - 2 * queue.group.service_time.of(queue.rows))
        return ("spent", now) if at <= now else (None, at)

    def wait(self, queue: BatchQueue, now: float) -> float:
        """How many seconds the oldest piece may wait for more requests."""
        load = min(1.0, max(0.0, (self.load.now(now) - 0.5) / 0.4))
        return min(self.limits.max_wait, queue.group.service_time.fixed) * load

    def _release(self, queue: BatchQueue, why: str, now: float) -> Batch:
        pieces = [queue.pieces.popleft()]
        rows = pieces[0].rows
        while queue.pieces and rows + queue.pieces[0].rows <= self.limits.max_rows:
            pieces.append(queue.pieces.popleft())
            rows += pieces[-1].rows
        queue.rows -= rows
        queue.group.rows -= rows
        queue.group.pieces -= len(pieces)
        batch = Batch(queue, pieces, rows, why, now, queue.group.service_time.of(rows))
        queue.group.lane_seconds += batch.seconds
        self._running[id(batch)] = batch
        self.load.change(1, now)
        self.recent_load.change(1, now)
        counts = self.counts
        counts.batches += 1
        counts.batch_rows += rows
        counts.batch_requests += len(pieces)
        counts.why[why] += 1
        counts.wait_seconds += sum([now - piece.request.arrived for piece in pieces])
        return batch

    def _drop_expired(self, queue: BatchQueue, now: float, expired: list[QueuedRequest]) -> None:
        """Remove requests whose deadline has passed, with all their pieces, from the front of the queue."""
        while queue.pieces and (request := queue.pieces[0].request).deadline <= now and not request.patient:
            piece = queue.pieces.popleft()
            queue.rows -= piece.rows
            queue.group.rows -= piece.rows
            queue.group.pieces -= 1
            if self._finish(request):
                queue.group.shed["expired"] += 1
                expired.append(request)

    def _check(self, group: Group, request: QueuedRequest, now: float, ahead: float) -> float:
        """Raise RefusedError, or return the lane time that the request will take."""
        if self.draining:
            group.shed["draining"] += 1
            raise RefusedError(503, "the server is draining; send the request to another one", 1.0)
        before = self._backlog(now) + ahead / self.lanes
        if self._rows + request.rows > self.limits.queue_rows or self._bytes + request.size > self.limits.queue_bytes:
            group.shed["full"] += 1
            raise RefusedError(429, f"the queue is full ({self._rows} rows, {self._bytes} bytes)", max(0.001, before))
        needed = before + group.service_time.queue(request.rows, self.limits.max_rows)
        if needed > (request.deadline - now) * self.limits.deadline_fraction and group.service_time.known:
            group.shed["deadline"] += 1
            left = max(0.0, request.deadline - now)
            raise RefusedError(
                429,
                f"an answer would take about {needed * 1e3:.1f} ms and the deadline is in {left * 1e3:.1f} ms",
                max(0.001, before),
            )
        return group.service_time.of(self.limits.max_rows) / self.limits.max_rows * request.rows

    # --- statistics ---

    def backlog_seconds(self) -> float:
        """How long a request that arrives now would wait for a lane."""
        with self._changed:
            return self._backlog(self.clock())

    def figures(self) -> dict[str, float]:
        """The current state of the queues, and the load."""
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

    # --- shutdown ---

    def drain(self, timeout: float) -> bool:
        """Admit nothing more and wait for the requests inside; returns whether all were answered."""
        self.draining = True
        until = time.monotonic() + timeout
        while self._rows and time.monotonic() < until:
            time.sleep(0.002)
        return not self._rows

    def close(self) -> None:
        """End `take` in all lanes with None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _finish(self, request: QueuedRequest) -> bool:
        if not request.admitted:
            return False
        request.admitted = False
        self._rows -= request.rows
        self._bytes -= request.size
        return True

    def _backlog(self, now: float) -> float:
        waiting = sum([g.service_time.queue(g.rows, self.limits.max_rows) for g in self._groups.values() if g.rows])
        running = sum([max(0.0, b.seconds - (now - b.taken)) for b in self._running.values()])
        if len(self._running) < self.lanes and not waiting:
            return 0.0
        return (waiting + running) / self.lanes

    def _register(self, queue: BatchQueue) -> BatchQueue:
        """The registered queue of this key. A queue that was dropped while a reader held it is registered again."""
        self._groups[id(queue.group)] = queue.group
        return self._queues.setdefault(queue.key, queue)

    def _least_lane_seconds(self) -> float:
        return min([group.lane_seconds for group in self._groups.values() if group.rows], default=0.0)

    def _any_waiting(self) -> bool:
        return any(queue.pieces for queue in self._queues.values())


def split(request: QueuedRequest, max_rows: int) -> list[Piece]:
    """The fewest pieces of at most `max_rows` rows, of almost equal size.

    >>> [piece.rows for piece in split(QueuedRequest(None, 10, 0, 0.0), 4)]
    [4, 3, 3]
    """
    count = -(-request.rows // max_rows)
    if count == 1:
        return [Piece(request, 0, request.rows)]
    each, extra = divmod(request.rows, count)
    pieces, first = [], 0
    for number in range(count):
        rows = each + (number < extra)
        pieces.append(Piece(request, first, rows))
        first += rows
    return pieces


def _fair_share_order(queue: BatchQueue) -> tuple[float, float]:
    return queue.group.lane_seconds, queue.pieces[0].request.arrived
