"""Ctrl-C and SIGTERM while training: the first ends the run between two steps, with a checkpoint; the second ends it at
once.

Python raises KeyboardInterrupt wherever the training thread happens to be, which may be between the update of the rows
and that of the dense weights. So while `fit` runs, the signal only leaves a mark (signals.py says where), and the loop
looks at it when a step is whole. A source that never ends is told to end (`ending`).

With ranks the mark is a wish: they stop where all have heard of it (train/distributed.py).
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

PATIENCE = 5.0  # seconds for the rest of a step's batches


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped `fit` at a step boundary. `signal` says which; it is SIGINT for `Trainer.stop`, too.

    `checkpoint` is where it can go on from, or None; `why` says why not. `report` is what the call of `fit` did until
    then.
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


class Interrupts:
    """Holds Ctrl-C and SIGTERM back for as long as the block runs (`held`), and says whether one came."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that came
        self.held = False
        self._asked_at = 0.0
        self._end: Callable[[], None] | None = None
        self._signals = StopSignals(self.ask)

    @property
    def seconds(self) -> float | None:
        """How long ago a signal came, None if none did."""
        return time.monotonic() - self._asked_at if self.number else None

    def __enter__(self) -> Interrupts:
        self.held = True
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._signals.__exit__(kind, error, tb)
        self.number, self.held = 0, False

    @contextmanager
    def ending(self, end: Callable[[], None] | None) -> Iterator[None]:
        """Inside, `end` is called when a signal comes, or at once if one has come."""
        self._end = end
        if self.number and end is not None:
            end()
        try:
            yield
        finally:
            self._end = None

    def ask(self, number: int = signal.SIGINT) -> None:
        """The same as a signal, from any thread. Outside of the block nothing happens."""
        if not self.held:
            return
        if not self.number:
            self._asked_at, self.number = time.monotonic(), number
        if self._end is not None:
            self._end()
