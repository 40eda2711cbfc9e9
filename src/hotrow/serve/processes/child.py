"""Child: a process of the server, as its supervisor keeps it: started, listened to, started again when it dies.

A child reads its options from its stdin, a line of JSON (its arguments would show tokens and passwords to every user of
the machine), and further lines as they come. Only the supervisor holds that pipe, so that its end tells the child that
the supervisor is gone, however it went. It writes lines of JSON on its stdout, read by a thread here and kept (`ready`,
`figures`). Its stderr goes to ours, and the last lines of it are kept to say why it died.

A child that dies is started again after a pause that doubles from half a second to ten, and is half a second again once
it has lived for a minute. One that has never been ready is given up after `TRIES`: what is wrong will not mend itself.

The supervisor's thread calls everything here.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

FIRST_PAUSE, LONGEST_PAUSE, LONG_LIFE = 0.5, 10.0, 60.0  # seconds
TRIES = 3
LAST_LINES = 5  # of stderr
NOT_FOR_CHILDREN = ("HOTROW_TOKEN",)  # who needs the token gets it with the options


def freeze_garbage_collector() -> None:
    """Keep the garbage collector from all that is there now (torch's modules above all): looking through it takes a
    tenth of a second and more, in the middle of some requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def read_options() -> tuple[dict[str, Any], BinaryIO]:
    """In a child: its options, and the file of what the supervisor says after them."""
    lines = os.fdopen(os.dup(0), "rb")
    first = lines.readline()
    if not first:
        raise SystemExit("the supervisor went away before it gave options")
    options: dict[str, Any] = json.loads(first)
    return options, lines


class Child:
    """One process, over all its lives."""

    def __init__(
        self, name: str, module: str, options: dict[str, Any], heard: Callable[[Child, dict[str, Any]], None]
    ) -> None:
        self.name, self.module, self.options = name, module, options
        self.restarts = 0
        self.ready = False
        self.failed: str | None = None  # why it cannot work: it says so, or it keeps dying
        self.figures: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}  # beside ours
        self._heard = heard
        self._backoff, self._started, self._again = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0.0, 0.0
        self._was_ready = False
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._threads: list[threading.Thread] = []  # that read what this life says

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """A new life."""
        self.ready, self.failed, self._started, self._again = False, None, time.monotonic(), 0.0
        self._last_lines.clear()
        environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, self.name],  # the name is for whoever looks at `ps`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it once, through us
            env={**environment, **self.environment},
        )
        self._threads = [
            threading.Thread(target=read, args=(self.process,), name=f"hear {self.name}", daemon=True)
            for read in (self._listen, self._forward)
        ]
        for thread in self._threads:
            thread.start()
        self.send(self.options)

    def restart_if_due(self) -> str | None:
        """Start it again if it is dead and its pause is over; returns what to tell people, if anything."""
        if self.process is None or self.process.poll() is None:
            return None
        now = time.monotonic()
        if not self._again:
            self.ready = False
            if not self._was_ready and self._hopeless():
                return None
            lived = now - self._started
            if lived > LONG_LIFE:
                self._backoff.reset()
            pause = self._backoff.next()
            self._again = now + pause
            return f"{self.name} ended with {self.process.returncode}; it starts again in {pause:g} s"
        if now >= self._again:
            self.restarts += 1
            self.start()
        return None

    def send(self, content: Any) -> None:
        """A line on its stdin."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):
                self.process.stdin.write(json.dumps(content).encode() + b"\n")
                self.process.stdin.flush()

    def _hopeless(self) -> bool:
        """Whether it died for the last time without ever having been ready; `failed` then says why."""
        assert self.process is not None
        for thread in self._threads:  # perhaps it said that it is ready, and what it said last
            thread.join(1.0)
        if self._was_ready or self.restarts + 1 < TRIES:
            return False
        code = self.process.returncode
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        last = "\n".join(["it said last:", *self._last_lines]) if self._last_lines else "it said nothing on stderr"
        self.failed = self.failed or f"{self.name} ended {how} before it was ready, {TRIES} times in a row; {last}"
        return True

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a library that prints
            if process is self.process and isinstance(said, dict):
                self._hear(said)

    def _forward(self, process: subprocess.Popen[bytes]) -> None:
        """Its stderr to ours, line by line."""
        assert process.stderr is not None
        for line in process.stderr:
            with suppress(OSError):
                os.write(2, line)
            if process is self.process and line.strip():
                self._last_lines.append(line.decode(errors="replace").rstrip())

    def _hear(self, said: dict[str, Any]) -> None:
        event = said.get("event")
        if event == "ready":
            self.ready = self._was_ready = True
        elif event == "failed":
            self.failed = str(said.get("why"))
        elif event == "figures":
            self.figures = said
        self._heard(self, said)


def end(children: Sequence[Child], patience: float) -> bool:
    """Tell them to stop, wait, and kill what is left; whether all ended by themselves with 0."""
    alive = [child.process for child in children if child.process is not None and child.alive]
    for process in alive:
        process.terminate()
    until = time.monotonic() + patience
    good = True
    for process in alive:
        try:
            good = process.wait(max(0.0, until - time.monotonic())) == 0 and good
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            good = False
    return good
