"""Misses: requests whose rows are on SSD alone, or in a remote store, wait aside, so that nothing waits behind them.

`look` asks the version which of the new requests have cold keys; the others join their line at once. A cold one goes to
a small pool of workers that bring its rows up, and joins its line when they are there, or when its share of the time to
its deadline is spent, whichever is first: then its policy says what the rows that are still cold read as. With the
policy `wait` the rows are worth more than the deadline and there is no second.

The worker that is still reading when its request has gone on reads to the end: the rows are there for the next one.
Rows may leave memory again before the batch runs; then they are late, like others.

Any reader may call `look`; workers and one clock thread call `put`. A request joins its line exactly once (`_waiting`).
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

from hotrow.serve.batching.lanes import LineKey
from hotrow.serve.batching.tensorbatch import Ask, Line, TensorBatch
from hotrow.serve.batching.versions import Version
from hotrow.serve.protocol import frames

log = logging.getLogger(__name__)


@dataclass
class MissCounts:
    """Since the start."""

    cold: int = 0  # requests that waited aside
    spent: int = 0  # of them, those that went on without all their rows
    seconds: float = 0.0  # that they waited


class Misses:
    """The place aside."""

    def __init__(self, queue: TensorBatch, workers: int = 4, share: float = 0.5) -> None:
        self.queue, self.share = queue, share
        self.counts = MissCounts()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="hotrow-miss")
        self._waiting: dict[int, tuple[Line, Ask]] = {}
        self._numbers = itertools.count()
        self._alarms: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._clock = threading.Thread(target=self._watch, name="hotrow-miss-clock", daemon=True)
        self._clock.start()

    @property
    def waiting(self) -> int:
        """Requests aside."""
        return len(self._waiting)

    def look(self, line: Line, asks: list[Ask], version: Version) -> list[Ask]:
        """Those with all rows in memory; the others are on their way."""
        key: LineKey = line.key
        cold = version.servable.cold(frames.join(_pieces(asks), version.signature, key.fingerprint))
        if cold is None or not cold.any():
            return asks
        bounds = np.cumsum([0, *[ask.rows for ask in asks]])
        counts = np.add.reduceat(np.asarray(cold, np.int64), bounds[:-1])
        warm = []
        for ask, some in zip(asks, counts.tolist(), strict=True):
            if some:
                self._set_aside(line, ask, version)
            else:
                warm.append(ask)
        return warm

    def close(self) -> None:
        """Whoever is aside joins its line now."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for number in list(self._waiting):
            self._join(number, spent=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _set_aside(self, line: Line, ask: Ask, version: Version) -> None:
        self.counts.cold += 1
        now = self.queue.clock()
        number = next(self._numbers)
        with self._changed:
            self._waiting[number] = (line, ask)
            if not ask.patient:
                heapq.heappush(self._alarms, (now + self.share * max(0.0, ask.deadline - now), number))
                self._changed.notify()
        self._pool.submit(self._fetch, number, line, ask, version)

    def _fetch(self, number: int, line: Line, ask: Ask, version: Version) -> None:
        try:
            if not self._closed:
                batch = frames.join(_pieces([ask]), version.signature, line.key.fingerprint)
                version.servable.prefetch(batch, ask.patient)
        except Exception:
            log.exception("rows did not come; the request goes on by its policy")
        finally:
            self._join(number, spent=False)

    def _join(self, number: int, spent: bool) -> None:
        with self._changed:
            found = self._waiting.pop(number, None)
            if found is None:
                return
            line, ask = found
            self.counts.spent += spent
            self.counts.seconds += self.queue.clock() - ask.arrived
        self.queue.put(line, [ask])

    def _watch(self) -> None:
        while True:
            due = []
            with self._changed:
                if self._closed:
                    return
                now = self.queue.clock()
                while self._alarms and self._alarms[0][0] <= now:
                    due.append(heapq.heappop(self._alarms)[1])
                if not due:
                    self._changed.wait(self._alarms[0][0] - now if self._alarms else None)
            for number in due:
                self._join(number, spent=True)


def _pieces(asks: Sequence[Ask]) -> list[frames.Piece]:
    return [(c.chunk, c.offset, c.length, 0, ask.rows) for ask in asks for c in [ask.content]]
