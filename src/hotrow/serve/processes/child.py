"""Child: the supervisor's handle of one process of the server: start, watch, restart when it dies.

The child's side is child_runtime.py. A child reads its options from stdin, a line of JSON, and then further lines. (As
arguments, tokens and passwords would be visible to every user of the machine.) Only the supervisor has the other end of
that pipe, so if the supervisor ends for any reason, the child reads end-of-file. The child writes events as lines of
JSON on stdout; a thread here reads them and updates `ready` and `figures`. Its stderr is forwarded to the supervisor's,
and the last lines are kept for the error message if it dies.

A child that dies is restarted after a backoff, from half a second up to ten. After a minute of running the backoff
starts again at half a second. A child that has never been ready is not started again after `MAX_STARTS` starts.

The supervisor's thread calls every method.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hotrow.backoff import Backoff

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds before a restart
STABLE_SECONDS = 60.0  # of running reset the backoff
MAX_STARTS = 3  # of a child that has never been ready
LAST_LINES = 5  # of stderr
NOT_FOR_CHILDREN = ("HOTROW_TOKEN",)  # a front end gets the token with its options


class Child:
    """One process and its restarts."""

    def __init__(
        self, name: str, module: str, options: dict[str, Any], on_event: Callable[[Child, dict[str, Any]], None]
    ) -> None:
        self.name, self.module, self.options = name, module, options
        self.restarts = 0
        self.ready = False
        self.failed: str | None = None  # why it cannot work: its own report, or that it dies at every start
        self.figures: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}  # in addition to the supervisor's
        self._on_event = on_event
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._started_at, self._restart_at = 0.0, 0.0
        self._was_ready = False
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._readers: list[threading.Thread] = []  # of the running process's stdout and stderr

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process."""
        self.ready, self.failed, self._started_at, self._restart_at = False, None, time.monotonic(), 0.0
        self._last_lines.clear()
        environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, self.name],  # the name is only shown by `ps`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it once, through the supervisor
            env={**environment, **self.environment},
        )
        self._readers = [
            threading.Thread(target=read, args=(self.process,), name=f"read {self.name}", daemon=True)
            for read in (self._read_events, self._forward_stderr)
        ]
        for reader in self._readers:
            reader.start()
        self.send(self.options)

    def restart_if_due(self) -> str | None:
        """Restart the process if it has died and its backoff is over; returns a message for the user, if any."""
        if self.process is None or self.process.poll() is None:
            return None
        now = time.monotonic()
        if not self._restart_at:
            self.ready = False
            if not self._was_ready and self._is_given_up():
                return None
            if now - self._started_at > STABLE_SECONDS:
                self._backoff.reset()
            pause = self._backoff.next()
            self._restart_at = now + pause
            return f"{self.name} ended with {self.process.returncode}; it starts again in {pause:g} s"
        if now >= self._restart_at:
            self.restarts += 1
            self.start()
        return None

    def send(self, content: Any) -> None:
        """Write a line of JSON to its stdin."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):
                self.process.stdin.write(json.dumps(content).encode() + b"\n")
                self.process.stdin.flush()

    def _is_given_up(self) -> bool:
        """Whether this was its last start without ever being ready; `failed` then says why."""
        assert self.process is not None
        for reader in self._readers:  # the last events and lines of stderr may not be read yet
            reader.join(1.0)
        if self._was_ready or self.restarts + 1 < MAX_STARTS:
            return False
        code = self.process.returncode
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        last = "\n".join(["it said last:", *self._last_lines]) if self._last_lines else "it said nothing on stderr"
        self.failed = self.failed or f"{self.name} ended {how} before it was ready, {MAX_STARTS} times in a row; {last}"
        return True

    def _read_events(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                content = json.loads(line)
            except ValueError:
                continue  # printed by some library
            if process is self.process and isinstance(content, dict):
                self._handle_event(content)

    def _forward_stderr(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            with suppress(OSError):
                os.write(2, line)
            if process is self.process and line.strip():
                self._last_lines.append(line.decode(errors="replace").rstrip())

    def _handle_event(self, content: dict[str, Any]) -> None:
        event = content.get("event")
        if event == "ready":
            self.ready = self._was_ready = True
        elif event == "failed":
            self.failed = str(content.get("why"))
        elif event == "figures":
            self.figures = content
        self._on_event(self, content)


def stop_all(children: Sequence[Child], timeout: float) -> bool:
    """Terminate the children, wait for `timeout` seconds, kill the rest; returns whether all exited with 0."""
    alive = [child.process for child in children if child.process is not None and child.alive]
    for process in alive:
        process.terminate()
    until = time.monotonic() + timeout
    clean = True
    for process in alive:
        try:
            clean = process.wait(max(0.0, until - time.monotonic())) == 0 and clean
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            clean = False
    return clean
