"""Freshness: the age of the data that requests are answered from, and an alarm when it is too old.

Freshness is the time now minus the event-time watermark of the publication that answered. `AnswerAges` has its
percentiles over the last 30 to 60 seconds, from two histograms used in turn. `StalenessAlarm` reports once when an age
exceeds a limit, and once when it is below the limit again.

Lanes note an age for each answered request without a lock, so a count may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hotrow.serve.load_estimate import Histogram, percentile

SPAN = 30.0  # seconds of one histogram
QUANTILES = (0.5, 0.9, 0.99)


class Freshness(NamedTuple):
    """The publication that a batch was answered from, and its event-time watermark in milliseconds.

    `highest` is the newest publication that any of its rows may be from. It differs from `publication` only with a
    remote store.
    """

    publication: int = 0
    watermark: int | None = None
    highest: int = 0

    @staticmethod
    def of(publication: int, watermark: int | None) -> Freshness:
        """All rows are from this publication."""
        return Freshness(publication, watermark, publication)

    def of_rows(self, publications: tuple[int, int], watermarks: Iterable[tuple[int, int | None]]) -> Freshness:
        """The freshness of an answer over a remote store, with rows from the oldest to the newest of `publications`,
        which may be older or newer than this one, that in service. `watermarks` are those of earlier publications."""
        lowest, highest = publications
        highest = max(self.publication, highest)
        if lowest >= self.publication:
            return self._replace(highest=highest)
        known = [watermark for number, watermark in watermarks if number <= lowest]
        return Freshness(lowest, known[-1] if known else None, highest)

    def merged(self, other: Freshness) -> Freshness:
        """The freshness of an answer with parts of both.

        >>> Freshness.of(7, 100).merged(Freshness.of(8, 200))
        Freshness(publication=7, watermark=100, highest=8)
        """
        older = self if self.publication <= other.publication else other
        return older._replace(highest=max(self.highest, other.highest))

    def age(self, now: float) -> float | None:
        """Seconds from the watermark to `now` (time.time()); None if events have no time."""
        return None if self.watermark is None else max(0.0, now - self.watermark / 1000)


class AnswerAges:
    """Ages of the data in recent answers."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._now, self._before = Histogram(), Histogram()
        self._since = clock()

    def note(self, fresh: Freshness, requests: int) -> None:
        """Count `requests` that were answered from this data."""
        now = self._clock()
        if (age := fresh.age(now)) is None:
            return
        if now - self._since > SPAN:
            self._rotate(now)
        self._now.note(age, requests)

    def percentiles(self) -> dict[str, float]:
        """Seconds by quantile; empty if nothing was answered lately.

        >>> ages = AnswerAges(lambda: 10.0)
        >>> ages.note(Freshness.of(1, 9_500), 3)
        >>> sorted(ages.percentiles())
        ['0.5', '0.9', '0.99']
        """
        now = self._clock()
        if now - self._since > SPAN:
            self._rotate(now)
        counts = [a + b for a, b in zip(self._now.counts, self._before.counts, strict=True)]
        return {str(q): percentile(counts, q) for q in QUANTILES} if any(counts) else {}

    def _rotate(self, now: float) -> None:
        old = now - self._since > 2 * SPAN
        self._before, self._now, self._since = Histogram() if old else self._now, Histogram(), now


class StalenessAlarm:
    """Reports when an age passes `limit` seconds, and when it is back below.

    >>> alarm = StalenessAlarm(5.0)
    >>> [alarm.update(age) for age in (1.0, 6.0, 7.0, 2.0)]
    [None, True, None, False]
    """

    def __init__(self, limit: float | None) -> None:
        self.limit, self.on = limit, False

    def update(self, age: float | None) -> bool | None:
        """True if the alarm starts now, False if it ends now, None if nothing changed."""
        stale = self.limit is not None and age is not None and age > self.limit
        if stale == self.on:
            return None
        self.on = stale
        return stale
