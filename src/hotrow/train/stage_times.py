"""What the stages did: busy, waiting for input, waiting for room, bytes; for the table at the end and the live bar.

A `Clock` is one thread's account of one stage and is written by that thread alone; a reader on another thread may be a
batch behind, which a progress bar can bear. A stage whose work is done in two places (fetch: ahead on its own thread,
and what is left of it on the training thread) has two clocks, which `Stages` adds up. With ranks, a stage that waits
for others in an exchange is not busy meanwhile, and the table at the end is that of all ranks (`of_ranks`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.table import Table as View

from hotrow import trace
from hotrow.parallel.exchange import waited
from hotrow.units import format_size

NAMES = ("read", "route", "fetch", "stage", "compute")
EXCHANGE = "exchange"  # not a stage: what all of them waited for other ranks, and what was sent


class Moment(NamedTuple):
    """A time (time.perf_counter()), and how long this thread had waited for other ranks until then."""

    at: float
    waited: float


def now() -> Moment:
    """This moment."""
    return Moment(time.perf_counter(), waited())


@dataclass
class Clock:
    """Seconds and bytes of one stage on one thread."""

    name: str
    busy: float = 0.0
    waited_input: float = 0.0
    waited_room: float = 0.0
    waited_ranks: float = 0.0
    batches: int = 0
    bytes: int = 0

    def worked(self, begin: Moment, end: Moment, bytes: int, batch: int, track: str | None = None) -> None:
        """The stage worked on a batch from `begin` to `end`, both on its thread, and moved so many bytes."""
        ranks = end.waited - begin.waited
        self.busy += end.at - begin.at - ranks
        self.waited_ranks += ranks
        self.bytes += bytes
        self.batches += 1
        trace.add(track or self.name, f"batch {batch}", begin.at, end.at, bytes=bytes)

    @property
    def took(self) -> Moment:
        """How long its batches took in all, and what of it was waiting for other ranks."""
        return Moment(self.busy + self.waited_ranks, self.waited_ranks)

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
    """What one stage did in a run. `share` is the part of the run's time in which it was busy.

    With ranks, seconds and shares are means over them and bytes are sums; `busiest` is the rank that was busy the
    longest, with its seconds. Behind the stages is then one more, "exchange", with what all of them together waited for
    other ranks and the bytes that were sent.
    """

    name: str
    busy: float
    waited_input: float
    waited_room: float
    bytes: int
    share: float
    waited_ranks: float = 0.0
    busiest: tuple[int, float] | None = None


class Stages:
    """The clocks of a run."""

    def __init__(self) -> None:
        self.clocks = {name: Clock(name) for name in NAMES}
        self.landing = Clock("fetch")  # what fetch does on the training thread
        self.started = self._sampled = time.perf_counter()
        self._before = dict.fromkeys((*NAMES, EXCHANGE), 0.0)

    def __getitem__(self, name: str) -> Clock:
        return self.clocks[name]

    def utilisation(self) -> dict[str, float]:
        """The busy share of each stage since the last call; as "exchange", that in which training waited for ranks."""
        at = time.perf_counter()
        seconds, busy = max(1e-9, at - self._sampled), {name: self._busy(name) for name in NAMES}
        busy[EXCHANGE] = self.clocks["compute"].waited_ranks + self.landing.waited_ranks
        shares = {name: min(1.0, (total - self._before[name]) / seconds) for name, total in busy.items()}
        self._sampled, self._before = at, busy
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
                clock.waited_ranks + (self.landing.waited_ranks if name == "fetch" else 0.0),
            )
            for name, clock in self.clocks.items()
        ]

    def _busy(self, name: str) -> float:
        return self.clocks[name].busy + (self.landing.busy if name == "fetch" else 0.0)


def with_exchange(stages: list[StageReport], sent: int) -> list[StageReport]:
    """One rank's stages, and its exchanges behind them: what the stages waited for others, bytes sent."""
    return [*stages, StageReport(EXCHANGE, 0.0, 0.0, 0.0, sent, 0.0, sum(stage.waited_ranks for stage in stages))]


def of_ranks(everyones: list[list[StageReport]]) -> list[StageReport]:
    """The stages of all ranks as one: means of seconds and shares, sums of bytes, and who was busy the longest.

    Requires: the same names on every rank.
    """
    whole = []
    for of_stage in zip(*everyones, strict=True):
        one, most = of_stage[0], max(of_stage, key=lambda stage: stage.busy)
        means = {
            name: sum(getattr(stage, name) for stage in of_stage) / len(of_stage)
            for name in ("busy", "waited_input", "waited_room", "waited_ranks", "share")
        }
        busiest = (of_stage.index(most), most.busy) if most.busy else None
        whole.append(replace(one, **means, bytes=sum(stage.bytes for stage in of_stage), busiest=busiest))
    return whole


def hidden(stages: list[StageReport]) -> float:
    """How much of the first four stages' work ran behind compute's back: 1 is all of it."""
    ahead = sum(stage.busy for stage in stages if stage.name != "compute")
    waited = sum(stage.waited_input for stage in stages if stage.name == "compute")
    return max(0.0, 1.0 - waited / ahead) if ahead else 0.0


def overlap(stages: list[StageReport], seconds: float) -> float:
    """How many stages were busy at the same moment, on average."""
    return sum(stage.busy for stage in stages) / max(1e-9, seconds)


def table(stages: list[StageReport], seconds: float) -> View:
    """The stages for people; with ranks, what each waited for them, too."""
    ranks = any(stage.name == EXCHANGE for stage in stages)
    view = View(
        title=f"{overlap(stages, seconds):.2f} stages busy at a time{' on a rank' if ranks else ''}; "
        f"{hidden(stages):.0%} of the work before compute ran beside it",
        title_justify="left",
        title_style="",
    )
    view.add_column("stage")
    for column in (
        "busy",
        *(["busiest rank"] if ranks else []),
        "waits for input",
        "waits for room",
        *(["waits for ranks"] if ranks else []),
        "bytes",
        "share",
    ):
        view.add_column(column, justify="right")
    for stage in stages:
        busiest = "" if stage.busiest is None else f"{stage.busiest[1]:.2f} s, {stage.busiest[0]}"
        own = stage.name != EXCHANGE
        view.add_row(
            stage.name,
            f"{stage.busy:.2f} s" if own else "",
            *([busiest] if ranks else []),
            f"{stage.waited_input:.2f} s" if own else "",
            f"{stage.waited_room:.2f} s" if own else "",
            *([f"{stage.waited_ranks:.2f} s"] if ranks else []),
            format_size(stage.bytes) if stage.bytes else "",
            f"{stage.share:.0%}" if own else "",
        )
    return view


def format_shares(shares: dict[str, float]) -> str:
    """The stages in a few characters.

    >>> brief({"read": 0.31, "route": 0.02, "fetch": 0.84, "stage": 0.0, "compute": 1.0})
    'read 31% route 2% fetch 84% compute 100%'
    """
    return " ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005 or name == "compute")
