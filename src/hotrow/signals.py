"""What SIGINT (Ctrl-C) and SIGTERM do.

A command of ours ends in order on SIGTERM: `exit_on_sigterm` raises SystemExit(143) in the main thread, so that `with`
and `finally` blocks end child processes and remove temporary folders. Work that can stop at a better place holds the
signals back for a while (`StopSignals`): the first one calls a function, which leaves a mark to look at. A second
signal does what it would have done without us.

The same signal within SAME_SECONDS is no second one, because it is often sent twice: `timeout` signals its child and
then the child's group; systemd signals every process of a service, of which a launcher passes it on to its ranks.

Only default handlers are replaced, in the main thread, and they are put back. A signal that the process ignores stays
ignored: a shell without job control starts background jobs (`command &` in a script) with SIGINT ignored, and they
would end with the script's Ctrl-C. A program's own handler stays, too.
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

SAME_SECONDS = 1.0
_came: dict[int, float] = {}  # when a signal came


def exit_code(number: int) -> int:
    """The exit code of a command that a signal ended, as shells give it: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


def ignores_ctrl_c() -> bool:
    """Whether this process ignores SIGINT, as its parent did when it started it."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143) in the main thread. A second one kills the process."""
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    _came.clear()
    signal.signal(signal.SIGTERM, _ExitInOrder())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopSignals:
    """While the block runs, the first SIGINT or SIGTERM calls `told` with its number, in the main thread between two
    bytecodes. The second one does what it would have done without this block."""

    def __init__(self, told: Callable[[signal.Signals], object]) -> None:
        self._told = told
        self._before: dict[signal.Signals, Any] = {}
        self._asked = False
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        self._asked, self._process = False, os.getpid()
        if _in_main_thread():
            _came.clear()
            for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                before = signal.getsignal(number)
                if before is default or isinstance(before, _ExitInOrder):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # a process that was forked inside the block, such as a worker of a pool
            _kill_by(number)
        elif _is_the_same(number):
            return
        elif self._asked:
            before = self._before.get(signal.Signals(number), signal.SIG_DFL)
            if isinstance(before, _ExitInOrder):
                before.exit(number)
            elif before is signal.default_int_handler:
                raise KeyboardInterrupt
            _kill_by(number)
        else:
            self._asked = True
            self._told(signal.Signals(number))


class _ExitInOrder:
    """The handler of `exit_on_sigterm`."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # the blocks to leave are those of the process that forked this one
            _kill_by(number)
        if not _is_the_same(number):
            self.exit(number)

    def exit(self, number: int) -> None:
        """In order the first time, at once the second."""
        if self._raised:
            _kill_by(number)
        self._raised = True
        raise SystemExit(exit_code(number))


def _is_the_same(number: int) -> bool:
    """Whether this signal came a moment ago, too."""
    now = time.monotonic()
    same = now - _came.get(number, -SAME_SECONDS) < SAME_SECONDS
    if not same:
        _came[number] = now
    return same


def _kill_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
