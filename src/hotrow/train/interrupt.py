"""Ctrl-C while training: the first ends the run between two steps, with a checkpoint; the second ends it at once.

Python raises KeyboardInterrupt wherever the training thread happens to be, which may be between the update of the rows
and that of the dense weights. So while `fit` runs, the signal only leaves a mark, at which the loop looks when a step
is whole. Outside of the main thread, and where a program has its own handler, nothing is installed: the signal is
theirs.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

PATIENCE = 5.0  # seconds for the rest of a step's batches


class Interrupted(KeyboardInterrupt):
    """Ctrl-C stopped `fit` at a step boundary. `checkpoint` is where it can go on from, or None; `why` says why not."""

    def __init__(self, step: int, checkpoint: Path | None, why: str = "") -> None:
        at = f"stopped by Ctrl-C after step {step:,}"
        where = f"the checkpoint is {checkpoint}; go on with resume=True (hotrow train --resume)"
        super().__init__(f"{at}; {where if checkpoint is not None else why}")
        self.step, self.checkpoint, self.why = step, checkpoint, why


class Interrupts:
    """Holds Ctrl-C back for as long as the block runs; `asked` says whether it came."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._installed = False

    @property
    def asked(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._asked_at is not None

    @property
    def seconds(self) -> float | None:
        """How long ago."""
        return None if self._asked_at is None else time.monotonic() - self._asked_at

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._mark)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self._asked_at = time.monotonic()
