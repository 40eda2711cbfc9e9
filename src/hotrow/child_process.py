"""Child processes that end when this process ends, however it ends (SIGKILL included).

    server = child_process.start(["redis-server", "--port", "6379"])    # as subprocess.Popen
    done = child_process.run([sys.executable, "-c", code])              # as subprocess.run, with its output

Linux sends a process the signal that it requested by prctl(PR_SET_PDEATHSIG) when its parent ends. Programs such as
redis-server do not request one. So this file is also a program: it makes the request and then becomes the command by
exec. The process id stays the same, and it costs about 20 ms. It imports only the standard library.

Rejected: a pipe on stdin from which the child reads end-of-file works only for our own programs, and not while a child
is stopped. A `preexec_fn` runs Python between fork and exec, which may deadlock in a process with threads, and copies
the page tables of a large process.

Linux treats the end of the *thread* that started a child as the end of its parent. So one thread starts all children,
and it lives as long as this process. Any thread may call `start` and `run`. A process that multiprocessing starts calls
`end_with_parent` itself.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

PR_SET_PDEATHSIG = 1
Popen = subprocess.Popen[Any]


def start(command: Sequence[str], death_signal: signal.Signals = signal.SIGKILL, **options: Any) -> Popen:
    """A subprocess.Popen of `command`, with its options, that gets `death_signal` when this process ends.

    SIGKILL cannot be ignored. Pass SIGTERM for a program that must end its own children or remove files.
    """
    whole = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), *command]
    return _starter().start(whole, options)


def run(command: Sequence[str], timeout: float | None = None, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end; returns exit code and output. It is killed after `timeout` seconds. With `check`, an
    exit code other than 0 raises."""
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(list(command), process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def end_with_parent(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Request `death_signal` for this process when the process `parent` ends; send it now if `parent` has ended.

    Does nothing on systems other than Linux.

    Requires: the thread of the parent that started this process lives as long as the parent.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(death_signal))
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


class _Starter:
    """The thread that starts all children."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._requests: queue.SimpleQueue[tuple[list[str], dict[str, Any], Future[Popen]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="hotrow-child-starter", daemon=True).start()

    def start(self, command: list[str], options: dict[str, Any]) -> Popen:
        future: Future[Popen] = Future()
        self._requests.put((command, options, future))
        return future.result()

    def _run(self) -> None:
        while True:
            command, options, future = self._requests.get()
            try:
                future.set_result(subprocess.Popen(command, **options))
            except BaseException as error:
                future.set_exception(error)


_lock = threading.Lock()
_current: _Starter | None = None


def _starter() -> _Starter:
    """The starter of this process; a forked process creates its own."""
    global _current
    with _lock:
        if _current is None or _current.process != os.getpid():
            _current = _Starter()
        return _current


def _exec_command(parent: str, death_signal: str, *command: str) -> None:
    """The program that `start` runs."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would inherit that
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(int(parent), signal.Signals(int(death_signal)))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    _exec_command(*sys.argv[1:])
