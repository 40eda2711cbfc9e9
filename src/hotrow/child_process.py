"""Child processes that end when this process ends, in whatever way it ends (SIGKILL included).

    server = child_process.start(["redis-server", "--port", "6379"])    # as subprocess.Popen
    done = child_process.run([sys.executable, "-c", code])              # as subprocess.run, with its output

Linux sends a child the signal that it asked for (PR_SET_PDEATHSIG) when its parent is gone. The child must ask, and
programs such as redis-server do not. So this file is also a program: it asks, and then becomes the command by exec. The
process id stays, and it costs about 20 ms. It imports the standard library alone.

What else was considered. A pipe on stdin, whose end the child reads, works for programs of ours only, and never for a
process that is stopped. A `preexec_fn` that asks is Python between fork and exec, which may deadlock in a process with
threads, and copies the page tables of a large one.

The system takes the end of the *thread* that started a child for the end of its parent. So one thread starts all of
them, and it lives as long as this process. Any thread may call `start` and `run`.

A process that multiprocessing starts calls `end_with_parent` itself.
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
    """A subprocess.Popen of `command`, with its options, that gets `death_signal` when this process is gone.

    SIGKILL is certain. A program that has children or files of its own to remove on SIGTERM gets SIGTERM.
    """
    whole = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), *command]
    return _starter().start(whole, options)


def run(command: Sequence[str], timeout: float | None = None, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end; its exit code and its text. It is killed after `timeout` seconds. With `check`, an exit
    code other than 0 raises."""
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
    """This process gets `death_signal` when the process `parent` is gone, or now if it is gone already. Where the
    system is not Linux, nothing happens.

    Requires: the thread of the parent that started this process lives as long as the parent.
    """
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(death_signal))
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


class _Starter:
    """The thread that starts children."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._asked: queue.SimpleQueue[tuple[list[str], dict[str, Any], Future[Popen]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="hotrow-child-starter", daemon=True).start()

    def start(self, command: list[str], options: dict[str, Any]) -> Popen:
        future: Future[Popen] = Future()
        self._asked.put((command, options, future))
        return future.result()

    def _run(self) -> None:
        while True:
            command, options, future = self._asked.get()
            try:
                future.set_result(subprocess.Popen(command, **options))
            except BaseException as error:
                future.set_exception(error)


_lock = threading.Lock()
_current: _Starter | None = None


def _starter() -> _Starter:
    """The starter of this process; a process that was forked makes its own."""
    global _current
    with _lock:
        if _current is None or _current.process != os.getpid():
            _current = _Starter()
        return _current


def _become(parent: str, death_signal: str, *command: str) -> None:
    """The program: what `start` runs."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so over exec
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(int(parent), signal.Signals(int(death_signal)))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    _become(*sys.argv[1:])
