"""Freshness: how old the data was that requests were answered from, lately; and an alarm when it grows too old.

Freshness is now minus the event-time watermark of the publication that answered. `Ages` has its percentiles over the
last half to whole minute, in two histograms that take turns. `Alarm` says when an age passes a limit, and when it is
back, once each.

An age is noted for each answered request, by lanes, without a lock: a count may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hotrow.serve.load_estimate import Histogram, percentile
from hotrow.serve.updates.cut_over import Fresh

SPAN = 30.0  # seconds of one histogram
QUANTILES = (0.5, 0.9, 0.99)


class Ages:
    """Ages of answers."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._now, self._before = Histogram(), Histogram()
        self._since = clock()

    def note(self, fresh: Fresh, requests: int) -> None:
        """So many requests were answered from it."""
        now = self._clock()
        if (age := fresh.age(now)) is None:
            return
        if now - self._since > SPAN:
            self._turn(now)
        self._now.note(age, requests)

    def percentiles(self) -> dict[str, float]:
        """Seconds by quantile; empty where nothing was answered lately.

        >>> ages = Ages(lambda: 10.0)
        >>> ages.note(Fresh.of(1, 9_500), 3)
        >>> sorted(ages.percentiles())
        ['0.5', '0.9', '0.99']
        """
        now = self._clock()
        if now - self._since > SPAN:
            self._turn(now)
        counts = [a + b for a, b in zip(self._now.counts, self._before.counts, strict=True)]
        return {str(q): percentile(counts, q) for q in QUANTILES} if any(counts) else {}

    def _turn(self, now: float) -> None:
        old = now - self._since > 2 * SPAN
        self._before, self._now, self._since = Histogram() if old else self._now, Histogram(), now


class Alarm:
    """Tells once when an age passes `limit` seconds, and once when it is below again.

    >>> alarm = Alarm(5.0)
    >>> [alarm.look(age) for age in (1.0, 6.0, 7.0, 2.0)]
    [None, True, None, False]
    """

    def __init__(self, limit: float | None) -> None:
        self.limit, self.on = limit, False

    def look(self, age: float | None) -> bool | None:
        """True: it begins. False: it is over. None: no news."""
        stale = self.limit is not None and age is not None and age > self.limit
        if stale == self.on:
            return None
        self.on = stale
        return stale
