"""Watchdog: ends this process if its device waits for a rank that does not take part, and names that rank.

The host waits for Gloo's exchanges, and gets an error when a rank is gone. The device waits for NCCL's: the host only
enqueues them, and blocks for ever where it next needs a result. torch would end such a process after the group's
timeout, or when NCCL reports an error, by SIGABRT and without naming a rank; that is switched off (`ASYNC_ERRORS`).
Instead, where a channel carries GPU memory, a thread checks the oldest unfinished exchange twice a second. It ends the
process, with the explanation of health.py,

    when that exchange has taken longer than the ranks' timeout,
    when another rank has left a failure report,
    when another channel has failed (Gloo's do at once if a rank dies) and nobody has raised the error for
    GRACE_SECONDS.

An exchange's time runs while the host issues it (the first one of a group makes NCCL's connections and waits for the
others), and from its wait until the device has passed the event behind it. The process ends by os._exit, because the
thread that waits for the device cannot be interrupted. Nothing is lost that is in a checkpoint.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hotrow.errors import RankError
from hotrow.parallel.health import BEAT_SECONDS, CHECK_SECONDS, Health

GRACE_SECONDS = 10.0  # for the thread that found a failure to raise it where the program can see it
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # 0: torch leaves a process alone whose exchange failed


@dataclass(eq=False)
class PendingExchange:
    """An exchange: its channel, since when it is waited for, and the event that the device reaches behind it (None: the
    host is still issuing it)."""

    channel: str
    since: float
    event: Any = None


class Watchdog:
    """Watches exchanges that a device waits for. Calls `end` once, with the error that says why."""

    def __init__(self, health: Health, end: Callable[[RankError], None] | None = None) -> None:
        self.health = health
        self._end = end or end_process
        self._issuing: list[PendingExchange] = []
        self._issued: deque[PendingExchange] = deque()
        self._lock = threading.Lock()
        self._failed: float | None = None  # since when another channel is known to have failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotrow-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching: the ranks leave each other."""
        self._stop.set()

    @contextmanager
    def issuing(self, channel: str) -> Iterator[None]:
        """The context in which the host issues an exchange."""
        exchange = PendingExchange(channel, time.monotonic())
        with self._lock:
            self._issuing.append(exchange)
        try:
            yield
        finally:
            with self._lock:
                self._issuing.remove(exchange)

    def issued(self, channel: str, event: Any) -> None:
        """The device waits for an exchange and reaches `event` when it has ended. Events are reached in order."""
        with self._lock:
            self._issued.append(PendingExchange(channel, time.monotonic(), event))
            self._forget_ended()

    def check(self) -> RankError | None:
        """The error with which this process must end, or None."""
        exchange, now = self._oldest(), time.monotonic()
        if exchange is None:
            self._failed = None
            return None
        waited, timeout = now - exchange.since, self.health.timeout
        if waited > timeout:
            return self._explained(exchange, f"no end after {timeout:g} s")
        if self.health.found is not None:
            self._failed = self._failed or now
            return self.health.found if now - self._failed > GRACE_SECONDS else None
        if waited > CHECK_SECONDS and self.health.failure_reports():
            return self._explained(exchange, "no end")
        return None

    def _explained(self, exchange: PendingExchange, reason: str) -> RankError:
        return self.health.found or self.health.explain(exchange.channel, RuntimeError(reason))

    def _oldest(self) -> PendingExchange | None:
        with self._lock:
            self._forget_ended()
            return min([*self._issuing, *list(self._issued)[:1]], key=lambda exchange: exchange.since, default=None)

    def _forget_ended(self) -> None:
        while self._issued and _reached(self._issued[0].event):
            self._issued.popleft()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                error = self.check()
            except RuntimeError as unreachable:  # the store is gone, with rank 0 or its launcher
                error = self.health.explain("rows", unreachable)
            if error is not None and not self._stop.is_set():
                self._end(error)
                return


def end_process(error: RankError) -> None:
    """Print why, and end the process at once."""
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _reached(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # the device failed: the thread that waits for it gets the error
        return True
