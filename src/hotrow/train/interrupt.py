"""Ctrl-C while training: the first ends the run between two steps, with a checkpoint; the second ends it at once.

Python raises KeyboardInterrupt wherever the training thread happens to be, which may be between the update of the rows
and that of the dense weights. So while `fit` runs, the signal only leaves a mark, at which the loop looks when a step
is whole. Outside of the main thread, and where a program has its own handler, nothing is installed: the signal is
theirs. Where the source never ends, SIGTERM is how such a run is ended, and does the same; `stop` tells the source.

With ranks the mark is a wish: they stop where all have heard of it (team.py).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotrow.train.report import Report

PATIENCE = 5.0  # seconds for the rest of a step's batches


class Interrupted(KeyboardInterrupt):
    """Ctrl-C stopped `fit` at a step boundary. `checkpoint` is where it can go on from, or None; `why` says why not.

    `report` is what the call of `fit` did until then.
    """

    def __init__(self, step: int, checkpoint: Path | None, why: str = "", report: Report | None = None) -> None:
        at = f"stopped by Ctrl-C or SIGTERM after step {step:,}"
        where = f"the checkpoint is {checkpoint}; go on with resume=True (hotrow train --resume)"
        super().__init__(f"{at}; {where if checkpoint is not None else why}")
        self.step, self.checkpoint, self.why, self.report = step, checkpoint, why, report


class Interrupts:
    """Holds Ctrl-C back for as long as the block runs; `asked` says whether it came."""

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self._asked_at: float | None = None
        self._installed: dict[signal.Signals, Any] = {}
        self._stop = stop

    @property
    def asked(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._asked_at is not None

    @property
    def seconds(self) -> float | None:
        """How long ago."""
        return None if self._asked_at is None else time.monotonic() - self._asked_at

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        wanted: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler}
        if self._stop is not None:
            wanted[signal.SIGTERM] = signal.SIG_DFL
        for number, default in wanted.items():
            if signal.getsignal(number) is default:
                signal.signal(number, self._mark)
                self._installed[number] = default
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, default in self._installed.items():
            signal.signal(number, default)
        self._asked_at = None

    def ask(self) -> None:
        """The same as a signal, from any thread."""
        self._asked_at = self._asked_at or time.monotonic()
        if self._stop is not None:
            self._stop()

    def _mark(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.ask()
