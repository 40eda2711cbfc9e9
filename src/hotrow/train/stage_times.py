"""Busy time, waiting time and bytes moved of each stage: for the table after a run and the live bar.

A `Clock` belongs to one stage on one thread and only that thread writes it. A reader on another thread may see values
of one batch earlier, which is enough for a progress bar. The stage `fetch` has two clocks, added up by `Stages`:
prefetch runs ahead on its own thread, fetch itself on the training thread (pipeline.py). With ranks, waiting for others
in an exchange does not count as work, and the table after a run covers all ranks (`merge_ranks`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.table import Table as View

from hotrow import trace
from hotrow.parallel.exchange import waited
from hotrow.units import format_size

NAMES = ("read", "route", "fetch", "stage", "compute")
EXCHANGE = "exchange"  # not a stage: a report's last line, with all waits for other ranks and the bytes sent


class Moment(NamedTuple):
    """A time of time.perf_counter(), and the seconds that this thread had waited for other ranks until then."""

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
    waited_output: float = 0.0  # until fewer batches were in flight
    waited_ranks: float = 0.0
    batches: int = 0
    bytes: int = 0

    def record(self, begin: Moment, end: Moment, bytes: int, batch: int, track: str | None = None) -> None:
        """Add the work on one batch, from `begin` to `end`, and the bytes it moved."""
        ranks = end.waited - begin.waited
        self.busy += end.at - begin.at - ranks
        self.waited_ranks += ranks
        self.bytes += bytes
        self.batches += 1
        trace.add(track or self.name, f"batch {batch}", begin.at, end.at, bytes=bytes)

    @property
    def elapsed(self) -> Moment:
        """The total seconds of all batches, and how many of these were spent waiting for other ranks."""
        return Moment(self.busy + self.waited_ranks, self.waited_ranks)

    @contextmanager
    def waiting(self, output: bool = False) -> Iterator[None]:
        """The stage waits inside the block: for its input, or with `output` for later stages."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if output:
                self.waited_output += time.perf_counter() - begin
            else:
                self.waited_input += time.perf_counter() - begin


@dataclass(frozen=True)
class StageReport:
    """Figures of one stage in a run. `share` is the part of the run's time in which it was busy.

    `waited_room` are seconds in which the stage waited because `lookahead` batches were in flight already. With ranks,
    seconds and shares are means and bytes are sums; `busiest` is the rank that was busy the longest, with its seconds.
    The stages are then followed by "exchange": the seconds that all stages waited for other ranks, and the bytes sent.
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
        self.fetch_on_turn = Clock("fetch")  # on the training thread
        self.started = self._sampled_at = time.perf_counter()
        self._busy_before = dict.fromkeys((*NAMES, EXCHANGE), 0.0)

    def __getitem__(self, name: str) -> Clock:
        return self.clocks[name]

    def utilisation(self) -> dict[str, float]:
        """The busy share of each stage since the last call; "exchange" is the time that training waited for ranks."""
        at = time.perf_counter()
        seconds, busy = max(1e-9, at - self._sampled_at), {name: self._busy(name) for name in NAMES}
        busy[EXCHANGE] = self.clocks["compute"].waited_ranks + self.fetch_on_turn.waited_ranks
        shares = {name: min(1.0, (total - self._busy_before[name]) / seconds) for name, total in busy.items()}
        self._sampled_at, self._busy_before = at, busy
        return shares

    def report(self, seconds: float) -> list[StageReport]:
        """What each stage did in a run of `seconds`."""
        return [
            StageReport(
                name,
                self._busy(name),
                clock.waited_input,
                clock.waited_output,
                clock.bytes + (self.fetch_on_turn.bytes if name == "fetch" else 0),
                self._busy(name) / max(1e-9, seconds),
                clock.waited_ranks + (self.fetch_on_turn.waited_ranks if name == "fetch" else 0.0),
            )
            for name, clock in self.clocks.items()
        ]

    def _busy(self, name: str) -> float:
        return self.clocks[name].busy + (self.fetch_on_turn.busy if name == "fetch" else 0.0)


def add_exchange(stages: list[StageReport], sent: int) -> list[StageReport]:
    """One rank's stages, then its exchange: the seconds that the stages waited for other ranks, and the bytes sent."""
    return [*stages, StageReport(EXCHANGE, 0.0, 0.0, 0.0, sent, 0.0, sum(stage.waited_ranks for stage in stages))]


def merge_ranks(reports: Mapping[int, list[StageReport]]) -> list[StageReport]:
    """One report of several ranks' reports, by rank: means of seconds and shares, sums of bytes, and the busiest rank.

    Requires: the same stages on every rank.
    """
    merged = []
    for stage in zip(*reports.values(), strict=True):
        seconds = {rank: one.busy for rank, one in zip(reports, stage, strict=True)}
        means = {
            name: sum(getattr(one, name) for one in stage) / len(stage)
            for name in ("busy", "waited_input", "waited_room", "waited_ranks", "share")
        }
        rank = max(seconds, key=lambda rank: seconds[rank])
        busiest = (rank, seconds[rank]) if seconds[rank] else None
        merged.append(replace(stage[0], **means, bytes=sum(one.bytes for one in stage), busiest=busiest))
    return merged


def waiting_share(stages: list[StageReport], seconds: float) -> float:
    """The part of a run in which the training thread of these ranks waited for other ranks, on average."""
    waited = sum(stage.waited_ranks for stage in stages if stage.name in ("compute", "fetch"))
    return min(1.0, waited / max(1e-9, seconds))


def advice(towers: list[StageReport], rows: list[StageReport], row_ranks: int, seconds: float) -> str:
    """Which role waited for the other, and what to add."""
    of_towers, of_rows = waiting_share(towers, seconds), waiting_share(rows, seconds)
    waits = f"tower ranks waited {of_towers:.0%} of the time for other ranks, row ranks {of_rows:.0%}"
    if of_towers < 0.1:
        return f"{waits}: towers are the limit; more tower ranks would make it faster"
    if of_rows < 0.5:
        more = max(1, round(row_ranks * of_towers / (1 - min(of_towers, 0.9))))
        return f'{waits}: rows are the limit; add {more} row rank{"s" if more > 1 else ""}, or set wire = "bf16"'
    return f'{waits}: the network and its delay are the limit; set wire = "bf16", or use larger batches'


def overlapped_share(stages: list[StageReport]) -> float:
    """The part of the first four stages' work that overlapped with compute: 1 is all of it."""
    ahead = sum(stage.busy for stage in stages if stage.name != "compute")
    waited = sum(stage.waited_input for stage in stages if stage.name == "compute")
    return max(0.0, 1.0 - waited / ahead) if ahead else 0.0


def mean_busy_stages(stages: list[StageReport], seconds: float) -> float:
    """How many stages were busy at the same time, on average."""
    return sum(stage.busy for stage in stages) / max(1e-9, seconds)


def table(stages: list[StageReport], seconds: float, role: str = "") -> View:
    """The stages as a table for people; with ranks (all, or those of a role) also how long each waited for others."""
    ranks = any(stage.name == EXCHANGE for stage in stages)
    of_role, on_a_rank = f"{role}: " if role else "", " on a rank" if ranks else ""
    view = View(
        title=f"{of_role}{mean_busy_stages(stages, seconds):.2f} stages busy at a time{on_a_rank}; "
        f"{overlapped_share(stages):.0%} of the work before compute ran beside it",
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
    """The busy shares of stages in a few characters.

    >>> format_shares({"read": 0.31, "route": 0.02, "fetch": 0.84, "stage": 0.0, "compute": 1.0})
    'read 31% route 2% fetch 84% compute 100%'
    """
    return " ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005 or name == "compute")
