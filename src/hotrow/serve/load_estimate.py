"""Load estimates for TensorBatch: the duration of a batch as a function of its rows, and the utilization of lanes.

`ServiceTime` fits a line, `fixed + per_row * rows`, to the measured batches. It keeps one point (a moving average) for
each power of two of rows, so that many batches of one size do not displace the measurements of other sizes. `fixed` is
the time saved by joining two batches, so waiting longer than that for another request never pays. The line also
estimates the duration of a queue, for admission control.

`Utilization` is the fraction of lanes that was busy recently, `Peak` the recent maximum of rows in the engine, and
`Histogram` counts durations by size.

No class here locks; its owner must (a Histogram may lose a count). Times are seconds on the owner's clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FRESH = 0.2  # weight of a new measurement in a moving average
_OUTLIER = 20.0  # a measurement this many times the mean counts as that many


class ServiceTime:
    """Seconds that a batch takes on a lane, as a function of its rows.

    >>> time = ServiceTime()
    >>> for rows in (1, 10, 100): time.note(rows, 1e-3 + 1e-5 * rows)
    >>> round(time.of(1000), 4), round(time.fixed, 4)
    (0.011, 0.001)
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self.per_row = 0.0
        self._points: dict[int, tuple[float, float]] = {}  # power of two -> mean rows, mean seconds

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._points)

    def note(self, rows: int, seconds: float) -> None:
        """Record a batch of `rows` rows that took `seconds`."""
        power = rows.bit_length()
        if (old := self._points.get(power)) is not None:
            seconds = min(seconds, _OUTLIER * old[1])
            rows_mean, seconds_mean = old
            self._points[power] = (
                rows_mean + _FRESH * (rows - rows_mean),
                seconds_mean + _FRESH * (seconds - seconds_mean),
            )
        else:
            self._points[power] = (float(rows), seconds)
        self._fit()

    def of(self, rows: float) -> float:
        """The expected seconds of a batch of `rows` rows; 0 if nothing was measured."""
        return self.fixed + self.per_row * rows if rows > 0 else 0.0

    def queue(self, rows: float, max_rows: int) -> float:
        """The expected seconds of a queue of `rows` rows on one lane, in batches of `max_rows`."""
        full, rest = divmod(rows, max_rows)
        return full * self.of(max_rows) + self.of(rest)

    def _fit(self) -> None:
        """Least squares of the relative error, so that small and large batches have equal weight; never negative."""
        w = wx = wxx = wy = wxy = 0.0
        for x, y in self._points.values():
            weight = 1.0 / max(y, 1e-9) ** 2
            w, wx, wxx = w + weight, wx + weight * x, wxx + weight * x * x
            wy, wxy = wy + weight * y, wxy + weight * x * y
        spread = w * wxx - wx * wx
        if len(self._points) > 1 and spread > 1e-12 * w * wxx:
            self.per_row = max(0.0, (w * wxy - wx * wy) / spread)
            self.fixed = max(0.0, (wy - self.per_row * wx) / w)
            if self.fixed == 0.0:
                self.per_row = wxy / wxx
        else:
            self.fixed, self.per_row = 0.0, wxy / wxx


class Utilization:
    """The fraction of lanes that was busy in about the last `memory` seconds, 0 to 1."""

    def __init__(self, lanes: int, now: float, memory: float = 0.05) -> None:
        self.lanes, self.memory = lanes, memory
        self.busy = 0
        self._mean, self._at = 0.0, now

    def change(self, by: int, now: float) -> None:
        """`by` more lanes (fewer, if negative) are busy from now on."""
        self._mean, self._at = self.now(now), now
        self.busy += by

    def now(self, now: float) -> float:
        """The utilization at this time."""
        busy = self.busy / self.lanes
        return busy + (self._mean - busy) * math.exp(-max(0.0, now - self._at) / self.memory)


class Peak:
    """The recent maximum of a value. It decays to the current value in about `memory` seconds."""

    def __init__(self, now: float, memory: float = 0.05) -> None:
        self.memory = memory
        self._value, self._at = 0.0, now

    def note(self, value: float, now: float) -> float:
        """Record the current value; returns the peak."""
        decayed = self._value * math.exp(-max(0.0, now - self._at) / self.memory)
        self._value, self._at = max(decayed, value), now
        return self._value


class Histogram:
    """Durations from a microsecond up, counted in steps of a factor 2^(1/4): percentiles are accurate to about 10%.

    >>> times = Histogram()
    >>> for milliseconds in range(1, 101): times.note(milliseconds / 1000)
    >>> round(percentile(times.counts, 0.5), 3), round(percentile(times.counts, 0.99), 3)
    (0.05, 0.108)
    """

    STEPS = 4 * 30

    def __init__(self) -> None:
        self.counts = [0] * self.STEPS

    def note(self, seconds: float, times: int = 1) -> None:
        """Count a duration, `times` times."""
        step = int(4 * math.log2(seconds * 1e6)) if seconds > 1e-6 else 0
        self.counts[min(step, self.STEPS - 1)] += times


def percentile(counts: Sequence[int], part: float) -> float:
    """The percentile: a fraction `part` of the durations is shorter. 0 for an empty histogram."""
    left = part * sum(counts)
    for step, count in enumerate(counts):
        if count and left <= count:
            return 1e-6 * 2 ** ((step + left / count) / 4)
        left -= count
    return 0.0
