"""Heartbeats and failure reports: which rank has failed, and why.

Every rank writes a heartbeat into the store at which the ranks met, from a thread of its own: a count that rises, and
how many exchanges it has begun. A rank that ends with an error writes a failure report there. When an exchange fails or
takes longer than the timeout, the other ranks read the store. A rank with a failure report has failed. A rank whose
heartbeat does not rise is dead or stopped. If every heartbeat rises, the rank that has begun the fewest exchanges
hangs.

Heartbeats are read only after an exchange has failed, and by a thread that waits in an exchange that may take long
(HeartbeatMonitor). Somebody who reaches the store can overwrite them. An entry that no rank of this job wrote counts as
none, so it neither explains a failure nor ends a job; the rank writes its next heartbeat over it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hotrow.errors import RankError
from hotrow.parallel.job_token import ForgedEntryError

BEAT_SECONDS = 0.5
CHECK_SECONDS = 4 * BEAT_SECONDS  # between two reads of the others' heartbeats: several beats, for busy machines
NO_BEAT = -1
REPORT_SECONDS = 1.0  # a failing rank gets this long to write its report


class Health:
    """Writes this rank's heartbeat, and explains failures by the others'. Any thread may call."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float, exchanges: Callable[[], int]) -> None:
        self.rank, self.world, self.timeout, self.exchanges = rank, world, timeout, exchanges
        self.broken = threading.Event()  # an exchange has failed: this rank cannot go on
        self.found: RankError | None = None  # the explanation
        self._store = store.clone() if hasattr(store, "clone") else store
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=5))
        self._stop = threading.Event()
        self._explaining = threading.Lock()
        self._beats = 0
        self._places: dict[int, str] = {}  # process and machine of the ranks whose heartbeat was read
        self._beat()
        self._thread = threading.Thread(target=self._run, name="hotrow-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat: this rank is done."""
        self._stop.set()
        self._thread.join(timeout=5)

    def report_failure(self, error: BaseException) -> None:
        """Write why this rank ends, for the other ranks. A rank that ends because of another one writes nothing."""
        if isinstance(error, RankError):
            return
        report = f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):
            self._store.set(f"hotrow/words/{self.rank}", report[:2000])

    def explain(self, what: str, error: BaseException) -> RankError:
        """The error to raise when an exchange has failed.

        Several may fail at once, on several threads, and any of them may end the run. So the second thread waits for
        the first one's explanation and raises the same.
        """
        self.broken.set()
        with self._explaining:
            if self.found is None:
                self.found = RankError(self._find(what, error))
            return RankError(str(self.found))

    def _find(self, what: str, error: BaseException) -> str:
        cure = "start the job again with --resume: it goes on from the newest checkpoint"
        try:
            found = self._diagnose()
        except RuntimeError as unreachable:
            return (
                f"{self._me()} lost the others in the exchange {what!r} ({_first_line(error)}), and the store at which "
                f"ranks meet (rank 0, or its launcher) does not answer: {_first_line(unreachable)}; {cure}"
            )
        return f"{self._me()} stops, because {found} (exchange {what!r}: {_first_line(error)}); {cure}"

    def failure_reports(self) -> dict[int, str]:
        """The reports of other ranks that have failed."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        return {rank: report for rank in others if (report := self._report(rank)) is not None}

    def _diagnose(self) -> str:
        others = [rank for rank in range(self.world) if rank != self.rank]
        time.sleep(REPORT_SECONDS)
        reports = self.failure_reports()
        if reports:
            return "; ".join(f"rank {rank} failed: {report}" for rank, report in reports.items())
        before = {rank: self._read(rank) for rank in others}
        time.sleep(CHECK_SECONDS)
        after = {rank: self._read(rank) for rank in others}
        stopped = [rank for rank in others if before[rank]["beats"] == after[rank]["beats"]]
        if stopped:
            which = " and ".join(f"rank {rank} ({after[rank]['where']})" for rank in stopped)
            return f"{which} died or was stopped: no sign of life"
        fewest = min(after[rank]["exchanges"] for rank in others)
        if fewest < self.exchanges():
            behind = [f"rank {rank} ({after[rank]['where']})" for rank in others if after[rank]["exchanges"] == fewest]
            return (
                f"{' and '.join(behind)} hangs: it lives but has not come to the exchange for {self.timeout:g} s "
                "(raise the ranks' timeout= where it is only slow)"
            )
        return "the connection to another rank broke, though all ranks are alive"

    def _report(self, rank: int) -> str | None:
        report = self._entry(f"hotrow/words/{rank}")
        return None if report is None else report.decode()

    def _read(self, rank: int) -> dict[str, Any]:
        beat = self._entry(f"hotrow/beat/{rank}")
        if beat is None:
            return {"beats": NO_BEAT, "exchanges": 0, "where": self._places.get(rank, "it never began")}
        read = dict(json.loads(beat))
        self._places[rank] = read["where"]
        return read

    def _entry(self, name: str) -> bytes | None:
        if not self._store.check([name]):
            return None
        try:
            return bytes(self._store.get(name))
        except ForgedEntryError:
            return None

    def _beat(self) -> None:
        self._beats += 1
        where = f"process {os.getpid()} on {socket.gethostname()}"
        value = json.dumps({"beats": self._beats, "exchanges": self.exchanges(), "where": where})
        self._store.set(f"hotrow/beat/{self.rank}", value)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(RuntimeError):  # the store is gone: the thread that needs it raises
                self._beat()
                self._learn_places()

    def _learn_places(self) -> None:
        """Read every other rank's heartbeat once, so that a later error can name a rank whose entry is overwritten."""
        for rank in range(self.world):
            if rank != self.rank and rank not in self._places:
                self._read(rank)

    def _me(self) -> str:
        return f"rank {self.rank}"


class HeartbeatMonitor:
    """Checks the other ranks' heartbeats while this rank waits: one that does not rise for the timeout is an error.

    A store that does not answer for a while is none: its link may be down.
    """

    def __init__(self, health: Health) -> None:
        self.health = health
        now = time.monotonic()
        self._seen = dict.fromkeys(range(health.world), (NO_BEAT, now))  # beats, and since when
        self._answered, self._next = now, now + 2 * BEAT_SECONDS

    def check(self) -> None:
        """Read the heartbeats, if it is time. Raises RuntimeError for a rank without one."""
        now = time.monotonic()
        if now < self._next:
            return
        timeout = self.health.timeout
        try:
            beats = [self.health._read(rank)["beats"] for rank in self._seen]
        except RuntimeError as error:
            if time.monotonic() - self._answered > timeout:
                raise RuntimeError(f"the store has not answered for {timeout:g} s: {_first_line(error)}") from error
            return
        self._answered = now = time.monotonic()
        self._next = now + 2 * BEAT_SECONDS
        for rank, beat in enumerate(beats):
            before, since = self._seen[rank]
            if beat not in (before, NO_BEAT):
                self._seen[rank] = (beat, now)
            elif now - since > timeout:
                raise RuntimeError(f"no heartbeat of rank {rank} for {timeout:g} s")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
