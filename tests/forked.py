"""Processes for tests, forked from one that has torch and hotrow imported: a new interpreter takes five to ten seconds
of a core to get there, and the whole suite starts a hundred. All of them end when this process ends, SIGKILL included.

    process = forked.python(code, "argument", log=tmp_path / "log")    # as python -c
    process = forked.hotrow("train", str(job), log=tmp_path / "log")   # as python -m hotrow

A process has as many torch threads as we have, for the same bits, or OMP_NUM_THREADS of them. What it says, stdout
and stderr, is in its log; with `pipes=True` its stdin and stdout are ours. What depends on how an interpreter starts
(SIMD, memory from the beginning on) needs a real one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

# An optimizer imports torch._dynamo, which takes as long as torch.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "hotrow.cli",
    "hotrow.job",
    "hotrow.serve.processes.supervisor",
    "hotrow.serve.processes.engine_process",
]


_forkserver = multiprocessing.get_context("forkserver")  # one server, started with the first process
_forkserver.set_forkserver_preload(PRELOADED)
Pipe, Queue = _forkserver.Pipe, _forkserver.Queue


class Process(_forkserver.Process):
    """multiprocessing's, that ends when this process is gone. The server is no sign of that: it lives as long as any
    process that it has forked."""

    def run(self) -> None:
        threading.Thread(target=_end_with_tests, daemon=True).start()
        super().run()


def _end_with_tests() -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)


def default_signals() -> None:
    """Undo what this process has inherited: a shell starts background jobs of a script with SIGINT and SIGQUIT ignored,
    and our children would inherit that again. Requires: the main thread, before it starts processes.

    SIGHUP is left as it is: a process that ignores it (nohup) should outlive a terminal, and no test sends it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})


class Forked:
    """One process, much as subprocess has it."""

    def __init__(self, process: Any, log: Path, pipes: tuple[TextIO, TextIO] | None = None) -> None:
        self._process, self.log = process, log
        self.pid = int(process.pid)
        self.stdin, self.stdout = pipes or (None, None)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return None if self._process.exitcode is None else int(self._process.exitcode)

    def wait(self, seconds: float) -> int:
        """Its exit code, once it has ended."""
        self._process.join(seconds)
        code = self.poll()
        assert code is not None, f"after {seconds:g} s it still runs, and has said: {self.text()}"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self._process.kill()
        self._process.join()

    def text(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def python(code: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None, pipes: bool = False) -> Forked:
    """A process with this program."""
    return _start(code, ["-c", *arguments], log, env, pipes)


def hotrow(*words: str, log: Path, env: Mapping[str, str] | None = None) -> Forked:
    """A process with this command of ours."""
    return _start("from hotrow.cli import main; main()", ["hotrow", *words], log, env)


def _start(code: str, argv: list[str], log: Path, env: Mapping[str, str] | None, pipes: bool = False) -> Forked:
    env = {"OMP_NUM_THREADS": str(torch.get_num_threads()), **(env or {})}
    theirs: tuple[Any, ...] = ()
    ours: tuple[Any, ...] = ()
    if pipes:
        (their_in, our_in), (our_out, their_out) = Pipe(False), Pipe(False)
        theirs, ours = (their_in, their_out), (our_in, our_out)
    process = Process(target=_work, args=(code, argv, log, env, theirs), daemon=True)
    process.start()
    if not pipes:
        return Forked(process, log)
    files = [os.fdopen(os.dup(end.fileno()), mode) for end, mode in zip(ours, "wr", strict=True)]
    for end in (*ours, *theirs):
        end.close()
    return Forked(process, log, (files[0], files[1]))


def _work(code: str, argv: list[str], log: Path, env: dict[str, str], pipes: tuple[Any, ...]) -> None:
    os.environ.update(env)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    if pipes:
        sys.stdin = open(os.dup(pipes[0].fileno()))  # noqa: SIM115 (until the end; the server's was closed)
        os.dup2(pipes[0].fileno(), 0)
        os.dup2(pipes[1].fileno(), 1)
        for end in pipes:
            end.close()
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = argv
    try:
        exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
    except Exception:  # as an interpreter ends: ranks print their last errors then
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
