"""What moves between DRAM and SSD, as curves of a trace: rows and bytes a second, and what the budget holds."""

from __future__ import annotations

import time
from types import TracebackType

from hotrow import trace
from hotrow.nn import EmbeddingCollection

INTERVAL = 0.05  # seconds between two points: asking 26 tables takes their locks


class Traffic:
    """Draws the curves, while there is a trace."""

    def __init__(self, embeddings: EmbeddingCollection) -> None:
        self.embeddings = embeddings
        self.tiered = any(rows.store.evicts for rows in embeddings.tables)
        self._at = time.perf_counter()
        self._before = self._totals() if trace.on() else {}

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def show(self) -> None:
        """A point of each curve, if it is time."""
        if not trace.on() or (seconds := time.perf_counter() - self._at) < INTERVAL:
            return
        now = self._totals()
        for name, total in now.items():
            trace.counter(name, per_second=round((total - self._before[name]) / seconds))
        trace.counter("dram: bytes used", bytes=self.embeddings.budget.used)
        self._at, self._before = time.perf_counter(), now

    def _totals(self) -> dict[str, int]:
        if not self.tiered:
            return {}
        tiers = [rows.store.tier() for rows in self.embeddings.tables]
        return {
            "ssd: rows up": sum(tier["arrivals"] + tier["prefetched"] for tier in tiers),
            "ssd: rows down": sum(tier["evicted"] for tier in tiers),
            "ssd: bytes read": sum(tier["bytes_read"] for tier in tiers),
            "ssd: bytes written": sum(tier["bytes_written"] for tier in tiers),
        }
