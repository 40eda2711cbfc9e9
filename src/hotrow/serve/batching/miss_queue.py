"""The miss queue: holds requests whose rows are only on SSD or in a remote store, so that other requests do not wait.

`defer_cold` finds the new requests with cold keys; the caller queues the others at once. A small pool of workers loads
the rows of a cold request. The request is queued when its rows are in memory, or when `deadline_fraction` of the time
to its deadline has passed; then its policy decides the values of the rows that are still cold. With the policy `wait`
there is no such limit, because the rows matter more than the deadline.

A worker whose request was queued early still finishes its read, so the next request finds the rows in memory. If rows
are evicted again before the batch runs, they count as late.

Connection readers call `defer_cold`; workers and one timer thread queue requests. `_enqueue` queues each exactly once.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hotrow.serve.batching import lookups
from hotrow.serve.batching.lanes import BatchKey
from hotrow.serve.batching.tensorbatch import BatchQueue, Piece, QueuedRequest, TensorBatch
from hotrow.serve.batching.versions import Version

log = logging.getLogger(__name__)


@dataclass
class MissCounts:
    """Totals since the start."""

    cold: int = 0  # requests that were held
    spent: int = 0  # held requests that were queued before all their rows were loaded
    seconds: float = 0.0  # total time that requests were held


class MissQueue:
    """Holds requests with cold rows while a pool of workers loads the rows."""

    def __init__(self, tensorbatch: TensorBatch, workers: int = 4, deadline_fraction: float = 0.5) -> None:
        self.tensorbatch, self.deadline_fraction = tensorbatch, deadline_fraction
        self.counts = MissCounts()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="hotrow-miss")
        self._deferred: dict[int, tuple[BatchQueue, QueuedRequest]] = {}
        self._numbers = itertools.count()
        self._timeouts: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._clock = threading.Thread(target=self._run_timer, name="hotrow-miss-clock", daemon=True)
        self._clock.start()

    @property
    def waiting(self) -> int:
        """How many requests are held now."""
        return len(self._deferred)

    def defer_cold(self, queue: BatchQueue, requests: list[QueuedRequest], version: Version) -> list[QueuedRequest]:
        """Hold the requests with cold rows; returns the others."""
        key: BatchKey = queue.key
        cold = version.servable.cold(lookups.join(_pieces(requests), version, key))
        if cold is None or not cold.any():
            return requests
        bounds = np.cumsum([0, *[request.rows for request in requests]])
        counts = np.add.reduceat(np.asarray(cold, np.int64), bounds[:-1])
        warm = []
        for request, cold_rows in zip(requests, counts.tolist(), strict=True):
            if cold_rows:
                self._defer(queue, request, version)
            else:
                warm.append(request)
        return warm

    def close(self) -> None:
        """Queue all requests that are held now, and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for number in list(self._deferred):
            self._enqueue(number, spent=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _defer(self, queue: BatchQueue, request: QueuedRequest, version: Version) -> None:
        self.counts.cold += 1
        now = self.tensorbatch.clock()
        number = next(self._numbers)
        with self._changed:
            self._deferred[number] = (queue, request)
            if not request.patient:
                heapq.heappush(
                    self._timeouts, (now + self.deadline_fraction * max(0.0, request.deadline - now), number)
                )
                self._changed.notify()
        self._pool.submit(self._fetch, number, queue, request, version)

    def _fetch(self, number: int, queue: BatchQueue, request: QueuedRequest, version: Version) -> None:
        try:
            if not self._closed:
                version.servable.prefetch(lookups.join(_pieces([request]), version, queue.key), request.patient)
        except Exception:
            log.exception("the rows could not be loaded; the request's policy decides their values")
        finally:
            self._enqueue(number, spent=False)

    def _enqueue(self, number: int, spent: bool) -> None:
        with self._changed:
            found = self._deferred.pop(number, None)
            if found is None:
                return
            queue, request = found
            self.counts.spent += spent
            self.counts.seconds += self.tensorbatch.clock() - request.arrived
        self.tensorbatch.enqueue(queue, [request])

    def _run_timer(self) -> None:
        while True:
            due = []
            with self._changed:
                if self._closed:
                    return
                now = self.tensorbatch.clock()
                while self._timeouts and self._timeouts[0][0] <= now:
                    due.append(heapq.heappop(self._timeouts)[1])
                if not due:
                    self._changed.wait(self._timeouts[0][0] - now if self._timeouts else None)
            for number in due:
                self._enqueue(number, spent=True)


def _pieces(requests: Sequence[QueuedRequest]) -> list[Piece]:
    return [Piece(request, 0, request.rows) for request in requests]
