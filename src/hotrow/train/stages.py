"""What the stages did: busy, waiting for input, waiting for room, bytes; for the table at the end and the live bar.

A `Clock` is one thread's account of one stage and is written by that thread alone; a reader on another thread may be a
batch behind, which a progress bar can bear. A stage whose work is done in two places (fetch: ahead on its own thread,
and what is left of it on the training thread) has two clocks, which `Stages` adds up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.table import Table as View

from hotrow import trace
from hotrow.config import format_size

NAMES = ("read", "route", "fetch", "stage", "compute")


@dataclass
class Clock:
    """Seconds and bytes of one stage on one thread."""

    name: str
    busy: float = 0.0
    waited_input: float = 0.0
    waited_room: float = 0.0
    batches: int = 0
    bytes: int = 0

    def worked(self, begin: float, end: float, bytes: int, batch: int, track: str | None = None) -> None:
        """The stage worked on a batch from `begin` to `end` (time.perf_counter()) and moved so many bytes."""
        self.busy += end - begin
        self.bytes += bytes
        self.batches += 1
        trace.add(track or self.name, f"batch {batch}", begin, end, bytes=bytes)

    @contextmanager
    def waiting(self, room: bool = False) -> Iterator[None]:
        """The stage waits, for a batch or for room."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if room:
                self.waited_room += time.perf_counter() - begin
            else:
                self.waited_input += time.perf_counter() - begin


@dataclass(frozen=True)
class StageReport:
    """What one stage did in a run. `share` is the part of the run's time in which it was busy."""

    name: str
    busy: float
    waited_input: float
    waited_room: float
    bytes: int
    share: float


class Stages:
    """The clocks of a run."""

    def __init__(self) -> None:
        self.clocks = {name: Clock(name) for name in NAMES}
        self.landing = Clock("fetch")  # what fetch does on the training thread
        self.started = self._sampled = time.perf_counter()
        self._before = dict.fromkeys(NAMES, 0.0)

    def __getitem__(self, name: str) -> Clock:
        return self.clocks[name]

    def utilisation(self) -> dict[str, float]:
        """The busy share of each stage since the last call."""
        now = time.perf_counter()
        seconds, busy = max(1e-9, now - self._sampled), {name: self._busy(name) for name in NAMES}
        shares = {name: min(1.0, (busy[name] - self._before[name]) / seconds) for name in NAMES}
        self._sampled, self._before = now, busy
        return shares

    def report(self, seconds: float) -> list[StageReport]:
        """What each stage did in a run of so many seconds."""
        return [
            StageReport(
                name,
                self._busy(name),
                clock.waited_input,
                clock.waited_room,
                clock.bytes + (self.landing.bytes if name == "fetch" else 0),
                self._busy(name) / max(1e-9, seconds),
            )
            for name, clock in self.clocks.items()
        ]

    def _busy(self, name: str) -> float:
        return self.clocks[name].busy + (self.landing.busy if name == "fetch" else 0.0)


def hidden(stages: list[StageReport]) -> float:
    """How much of the first four stages' work ran behind compute's back: 1 is all of it."""
    ahead = sum(stage.busy for stage in stages if stage.name != "compute")
    waited = sum(stage.waited_input for stage in stages if stage.name == "compute")
    return max(0.0, 1.0 - waited / ahead) if ahead else 0.0


def overlap(stages: list[StageReport], seconds: float) -> float:
    """How many stages were busy at the same moment, on average."""
    return sum(stage.busy for stage in stages) / max(1e-9, seconds)


def table(stages: list[StageReport], seconds: float) -> View:
    """The stages for people."""
    view = View(
        title=f"{overlap(stages, seconds):.2f} stages busy at a time; {hidden(stages):.0%} of the work before compute "
        "ran beside it",
        title_justify="left",
        title_style="",
    )
    view.add_column("stage")
    for column in ("busy", "waits for input", "waits for room", "bytes", "share"):
        view.add_column(column, justify="right")
    for stage in stages:
        view.add_row(
            stage.name,
            f"{stage.busy:.2f} s",
            f"{stage.waited_input:.2f} s",
            f"{stage.waited_room:.2f} s",
            format_size(stage.bytes) if stage.bytes else "",
            f"{stage.share:.0%}",
        )
    return view


def brief(shares: dict[str, float]) -> str:
    """The stages in a few characters.

    >>> brief({"read": 0.31, "route": 0.02, "fetch": 0.84, "stage": 0.0, "compute": 1.0})
    'read 31% route 2% fetch 84% compute 100%'
    """
    return " ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005 or name == "compute")
