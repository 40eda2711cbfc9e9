"""Child: a process of the server, as its supervisor keeps it: started, listened to, started again when it dies.

A child writes lines of JSON on its stdout, read by a thread here and kept (`said`, `figures`); its stdin is a pipe that
only the supervisor holds, so that its end tells the child that the supervisor is gone, however it went. A child that
dies is started again after a pause that doubles from half a second to ten, and is half a second again once it has lived
for a minute.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

FIRST_PAUSE, LONGEST_PAUSE, LONG_LIFE = 0.5, 10.0, 60.0  # seconds


def spare_collection() -> None:
    """Keep the garbage collector from all that is there now (torch's modules above all): looking through it takes a
    tenth of a second and more, in the middle of some requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class Child:
    """One process, over all its lives."""

    def __init__(
        self, name: str, module: str, arguments: dict[str, Any], heard: Callable[[Child, dict[str, Any]], None]
    ) -> None:
        self.name, self.module, self.arguments = name, module, arguments
        self.restarts = 0
        self.ready = False
        self.failed: str | None = None  # why it says that it cannot work
        self.figures: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}  # beside ours
        self._heard = heard
        self._pause, self._started, self._again = FIRST_PAUSE, 0.0, 0.0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """A new life."""
        self.ready, self._started, self._again = False, time.monotonic(), 0.0
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, json.dumps(self.arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it once, through us
            env={**os.environ, **self.environment},
        )
        threading.Thread(target=self._listen, args=(self.process,), name=f"hear {self.name}", daemon=True).start()

    def tend(self) -> str | None:
        """Start it again if it is dead and its pause is over; returns what to tell people, if anything."""
        if self.process is None or self.process.poll() is None:
            return None
        now = time.monotonic()
        if not self._again:
            self.ready = False
            lived = now - self._started
            self._pause = FIRST_PAUSE if lived > LONG_LIFE else self._pause
            self._again = now + self._pause
            pause, self._pause = self._pause, min(LONGEST_PAUSE, 2 * self._pause)
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

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a library that prints
            if process is self.process and isinstance(said, dict):
                self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        event = said.get("event")
        if event == "ready":
            self.ready = True
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
