"""Load: how long a batch takes by its rows, and how busy the lanes are. What TensorBatch decides by.

`ServiceTime` is a line, `fixed + per_row * rows`, through what was measured: one point per power of two of the rows (a
mean that forgets), so that a long run of one size does not wash out what is known about the others. `fixed` is what
joining two batches saves, and so the most that waiting can be worth; the whole line says how long a queue takes, and so
which request cannot make its deadline.

`Utilization` is the part of the lanes that was busy lately; `Peak` the most rows in the engine lately; `Histogram`
counts durations by size.

None of them locks: their owner does (a Histogram may lose a count). Times are seconds on the owner's clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FRESH = 0.2  # of a mean is its newest measurement
_OUTLIER = 20.0  # a measurement this many times the mean counts as that many


class ServiceTime:
    """Seconds that a batch takes on a lane, by its rows.

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
        """A batch of so many rows took so long."""
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
        """How long so many rows should take; 0 if nothing is known."""
        return self.fixed + self.per_row * rows if rows > 0 else 0.0

    def queue(self, rows: float, most: int) -> float:
        """How long a queue takes on one lane in batches of `most` rows."""
        full, rest = divmod(rows, most)
        return full * self.of(most) + self.of(rest)

    def _fit(self) -> None:
        """Least squares of the relative error, so that small batches count as much as large ones; never negative."""
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
    """The part of the lanes that was busy in about the last `memory` seconds, 0 to 1."""

    def __init__(self, lanes: int, now: float, memory: float = 0.05) -> None:
        self.lanes, self.memory = lanes, memory
        self.busy = 0
        self._mean, self._at = 0.0, now

    def change(self, by: int, now: float) -> None:
        """So many lanes more (or fewer) are busy from now on."""
        self._mean, self._at = self.now(now), now
        self.busy += by

    def now(self, now: float) -> float:
        """The figure."""
        share = self.busy / self.lanes
        return share + (self._mean - share) * math.exp(-max(0.0, now - self._at) / self.memory)


class Peak:
    """The highest value lately: it falls back to the present one in about `memory` seconds."""

    def __init__(self, now: float, memory: float = 0.05) -> None:
        self.memory = memory
        self._value, self._at = 0.0, now

    def note(self, value: float, now: float) -> float:
        """The value is this now; returns the peak."""
        faded = self._value * math.exp(-max(0.0, now - self._at) / self.memory)
        self._value, self._at = max(faded, value), now
        return self._value


class Histogram:
    """Durations, counted in steps of a quarter of an octave from a microsecond on: percentiles to a tenth.

    >>> times = Histogram()
    >>> for milliseconds in range(1, 101): times.note(milliseconds / 1000)
    >>> round(percentile(times.counts, 0.5), 3), round(percentile(times.counts, 0.99), 3)
    (0.05, 0.108)
    """

    STEPS = 4 * 30

    def __init__(self) -> None:
        self.counts = [0] * self.STEPS

    def note(self, seconds: float, times: int = 1) -> None:
        """So many more."""
        step = int(4 * math.log2(seconds * 1e6)) if seconds > 1e-6 else 0
        self.counts[min(step, self.STEPS - 1)] += times


def percentile(counts: Sequence[int], part: float) -> float:
    """Seconds under which that part of a histogram's durations lies; 0 without any."""
    left = part * sum(counts)
    for step, count in enumerate(counts):
        if count and left <= count:
            return 1e-6 * 2 ** ((step + left / count) / 4)
        left -= count
    return 0.0
