"""Watch: the end of a process whose device waits for a rank that does not come, with that rank's name.

Gloo's exchanges are waited for by the host, which gets an error when a rank is gone. NCCL's are waited for by the
device: the host only asks for them, and stands still without end where it next looks at a result. torch would end such
a process after the group's timeout, or when NCCL reports an error, by SIGABRT and without a name; so that is switched
off (`ASYNC_ERRORS`), and where a channel carries GPU memory a thread looks here, twice a second, at the oldest exchange
that has not come to its end. It ends the process, as health.py explains it,

    when that exchange has taken longer than the ranks' timeout,
    when another rank has left last words,
    when another channel has failed, as Gloo's do at once if a rank dies, and nobody could raise that for GRACE_SECONDS.

What counts is the time in which the host asks (the first exchange of a group makes NCCL's connections, and waits for
the others), and from its wait on until the device has passed the event behind it. It ends by os._exit: the thread that
waits for the device cannot be reached. Nothing is lost that a checkpoint had.
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
from hotrow.parallel.health import BEAT_SECONDS, LOOK_SECONDS, Health

GRACE_SECONDS = 10.0  # for whoever has found a failure to raise it where the program can see it
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # 0: torch leaves a process alone whose exchange failed


@dataclass(eq=False)
class Mark:
    """An exchange: its channel, since when it is waited for, and what the device reaches behind it (None: the host is
    still asking)."""

    channel: str
    since: float
    event: Any = None


class Watch:
    """Looks after the exchanges that devices wait for. `end` is called with what to say, once."""

    def __init__(self, health: Health, end: Callable[[RankError], None] | None = None) -> None:
        self.health = health
        self._end = end or end_process
        self._asking: list[Mark] = []
        self._asked: deque[Mark] = deque()
        self._lock = threading.Lock()
        self._failed: float | None = None  # since when it is known that another channel has
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotrow-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more looking: the ranks part."""
        self._stop.set()

    @contextmanager
    def asking(self, channel: str) -> Iterator[None]:
        """Inside it, the host asks for an exchange."""
        mark = Mark(channel, time.monotonic())
        with self._lock:
            self._asking.append(mark)
        try:
            yield
        finally:
            with self._lock:
                self._asking.remove(mark)

    def asked(self, channel: str, event: Any) -> None:
        """An exchange was waited for; the device reaches `event` when it is there. Events are reached in order."""
        with self._lock:
            self._asked.append(Mark(channel, time.monotonic(), event))
            self._forget_ended()

    def look(self) -> RankError | None:
        """What this rank must end with, if it must."""
        mark, now = self._oldest(), time.monotonic()
        if mark is None:
            self._failed = None
            return None
        waited, timeout = now - mark.since, self.health.timeout
        if waited > timeout:
            return self._explained(mark, f"no end after {timeout:g} s")
        if self.health.found is not None:
            self._failed = self._failed or now
            return self.health.found if now - self._failed > GRACE_SECONDS else None
        if waited > LOOK_SECONDS and self.health.spoken():
            return self._explained(mark, "no end")
        return None

    def _explained(self, mark: Mark, words: str) -> RankError:
        return self.health.found or self.health.explain(mark.channel, RuntimeError(words))

    def _oldest(self) -> Mark | None:
        with self._lock:
            self._forget_ended()
            return min([*self._asking, *list(self._asked)[:1]], key=lambda mark: mark.since, default=None)

    def _forget_ended(self) -> None:
        while self._asked and _reached(self._asked[0].event):
            self._asked.popleft()

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                error = self.look()
            except RuntimeError as unreachable:  # the store is gone, with rank 0 or its launcher
                error = self.health.explain("rows", unreachable)
            if error is not None and not self._stop.is_set():
                self._end(error)
                return


def end_process(error: RankError) -> None:
    """Say why, and end at once."""
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _reached(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # the device failed, which whoever waits for it hears
        return True
