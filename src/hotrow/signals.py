"""What SIGINT (Ctrl-C) and SIGTERM do in a command of HotRow.

`exit_on_sigterm` raises SystemExit(143) in the main thread on SIGTERM, so that `with` and `finally` blocks end child
processes and remove temporary folders. Code that can stop only at certain points uses `StopSignals`: the first signal
calls a function, which sets a flag that the code polls. A second signal does what it would have done without these
blocks.

The same signal within DUPLICATE_SECONDS does not count as a second one, because it is often sent twice: `timeout`
signals its child and then the child's group; systemd signals every process of a service, and a launcher among them
forwards the signal to its ranks.

Only default handlers are replaced, in the main thread, and they are restored. A signal that the process ignores stays
ignored: a shell without job control starts background jobs (`command &` in a script) with SIGINT ignored. A program's
own handler stays, too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

DUPLICATE_SECONDS = 1.0
_received: dict[int, float] = {}  # when each signal was received last


def exit_code(number: int) -> int:
    """The exit code of a command that a signal ended, as shells give it: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


def ignores_ctrl_c() -> bool:
    """Whether this process ignores SIGINT, which it inherited from its parent."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143) in the main thread. A second one kills the process."""
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    _received.clear()
    signal.signal(signal.SIGTERM, _ExitHandler())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopSignals:
    """While the block runs, the first SIGINT or SIGTERM calls `on_signal` with its number, in the main thread between
    two bytecodes. The second one does what it would have done without this block."""

    def __init__(self, on_signal: Callable[[signal.Signals], object]) -> None:
        self._on_signal = on_signal
        self._before: dict[signal.Signals, Any] = {}
        self._requested = False
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        self._requested, self._process = False, os.getpid()
        if _in_main_thread():
            _received.clear()
            for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                before = signal.getsignal(number)
                if before is default or isinstance(before, _ExitHandler):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # forked inside the block, such as a worker of a pool
            _kill_by(number)
        elif _is_duplicate(number):
            return
        elif self._requested:
            before = self._before.get(signal.Signals(number), signal.SIG_DFL)
            if isinstance(before, _ExitHandler):
                before.exit(number)
            elif before is signal.default_int_handler:
                raise KeyboardInterrupt
            _kill_by(number)
        else:
            self._requested = True
            self._on_signal(signal.Signals(number))


class _ExitHandler:
    """The handler of `exit_on_sigterm`."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # the blocks belong to the parent process
            _kill_by(number)
        if not _is_duplicate(number):
            self.exit(number)

    def exit(self, number: int) -> None:
        """Raise SystemExit the first time; kill the process the second."""
        if self._raised:
            _kill_by(number)
        self._raised = True
        raise SystemExit(exit_code(number))


def _is_duplicate(number: int) -> bool:
    """Whether the same signal was received a moment ago."""
    now = time.monotonic()
    duplicate = now - _received.get(number, -DUPLICATE_SECONDS) < DUPLICATE_SECONDS
    if not duplicate:
        _received[number] = now
    return duplicate


def _kill_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
