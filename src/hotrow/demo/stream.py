"""The demo's click log as a live stream: examples of a synthetic log, at a rate, with the clock as event time.

The log's own time, in which tastes drift, advances by examples. The event time of an example is the clock's, because
freshness is measured against the clock.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor
from hotrow.data.synthetic_log.clicks import SyntheticClicks


@dataclasses.dataclass
class Live:
    """`log` from its offset on, `rate` examples a second (None: as fast as they are read), for `seconds`."""

    log: SyntheticClicks
    seconds: float
    rate: float | None = None
    examples: int | None = None
    given: int = 0

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """Batches until the time is up."""
        begin, self.given = time.monotonic(), 0
        for batch, after in self.log.batches(cursor):
            if self.rate is not None:  # a batch is complete at the time of its last example
                due = begin + (self.given + batch.size) / self.rate
                time.sleep(max(0.0, min(due - time.monotonic(), 1.0)))
            if time.monotonic() - begin > self.seconds:
                return
            self.given += batch.size
            now = torch.full((batch.size,), int(time.time() * 1000), dtype=torch.int64)
            yield dataclasses.replace(batch, time=now), after

    def describe(self) -> str:
        """One line for a log."""
        return f"{self.log.describe()}, as it happens"
