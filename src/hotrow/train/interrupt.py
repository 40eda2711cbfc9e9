"""Ctrl-C and SIGTERM while training: the first ends the run after a step and saves; the second ends it at once.

Python raises KeyboardInterrupt at any instruction of the training thread, possibly between the update of the rows and
that of the dense weights. So while `fit` runs, a signal only sets a flag (signals.py), and the loop reads it between
two steps. `ending` registers the call that ends an endless source.

With ranks the flag is a request: ranks exchange it in every step and stop after the same one (train/distributed.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hotrow.signals import StopSignals

if TYPE_CHECKING:
    from hotrow.train.report import Report

STEP_TIMEOUT = 5.0  # seconds to wait for the remaining batches of a step


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped `fit` at a step boundary. `signal` says which; it is SIGINT for `Trainer.stop`, too.

    `checkpoint` is the one to resume from, or None; `why` is then the reason. `report` is what `fit` did until then.
    """

    def __init__(
        self,
        step: int,
        checkpoint: Path | None,
        why: str = "",
        report: Report | None = None,
        number: int = signal.SIGINT,
    ) -> None:
        self.signal = signal.Signals(number)
        by = "SIGTERM" if self.signal == signal.SIGTERM else "Ctrl-C or stop()"
        where = f"the checkpoint is {checkpoint}; go on with resume=True (hotrow train --resume)"
        super().__init__(f"stopped by {by} after step {step:,}; {where if checkpoint is not None else why}")
        self.step, self.checkpoint, self.why, self.report = step, checkpoint, why, report


class StopRequests:
    """Intercepts Ctrl-C and SIGTERM while its block runs (`held`), and records the first one."""

    def __init__(self) -> None:
        self.number = 0  # of the signal received; 0: none
        self.held = False
        self._requested_at = 0.0
        self._end: Callable[[], None] | None = None
        self._signals = StopSignals(self.request)

    @property
    def seconds(self) -> float | None:
        """Seconds since the signal was received; None without one."""
        return time.monotonic() - self._requested_at if self.number else None

    def __enter__(self) -> StopRequests:
        self.held = True
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._signals.__exit__(kind, error, tb)
        self.number, self.held = 0, False

    @contextmanager
    def ending(self, end: Callable[[], None] | None) -> Iterator[None]:
        """Inside the block a signal calls `end`; if one was received already, it is called at once."""
        self._end = end
        if self.number and end is not None:
            end()
        try:
            yield
        finally:
            self._end = None

    def request(self, number: int = signal.SIGINT) -> None:
        """Record a stop request as if a signal was received. Any thread; does nothing outside the block."""
        if not self.held:
            return
        if not self.number:
            self._requested_at, self.number = time.monotonic(), number
        if self._end is not None:
            self._end()
