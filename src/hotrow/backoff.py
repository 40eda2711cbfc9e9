"""Backoff: the pauses between attempts. Each is twice as long as the one before, up to a limit.

    backoff = Backoff(0.05, 2.0)
    while not attempt():
        time.sleep(backoff.next())

A Backoff is not thread-safe: one thread retries one thing with it. The caller decides how to wait (sleep, an event, a
time to compare with), when to give up, and when to `reset`.
"""

from __future__ import annotations

import random


class Backoff:
    """Pauses of `first` seconds, then 2 x first, 4 x first ... up to `longest`.

    With `jitter` a pause is shortened by a random part of at most that fraction, so that clients that failed together
    do not try again together.

    >>> backoff = Backoff(0.5, 3.0)
    >>> [backoff.next() for _ in range(4)]
    [0.5, 1.0, 2.0, 3.0]
    """

    def __init__(self, first: float, longest: float, jitter: float = 0.0) -> None:
        self.first, self.longest, self.jitter = first, longest, jitter
        self.pause = first  # the next one, before jitter

    def next(self) -> float:
        """Seconds to wait before the next attempt; the pause after it is twice as long."""
        pause, self.pause = self.pause, min(self.longest, 2 * self.pause)
        return pause * random.uniform(1.0 - self.jitter, 1.0) if self.jitter else pause

    def reset(self) -> None:
        """An attempt succeeded: begin with the first pause again."""
        self.pause = self.first
