"""Traffic between tiers: curves of a trace (rows and bytes per second, ids found in HBM), and a run's HBM counters.

The curves cover HBM to DRAM and DRAM to SSD, and the bytes that the DRAM budget holds. They are drawn by the training
thread while a trace is recorded.
"""

from __future__ import annotations

import time
from types import TracebackType

from hotrow import trace
from hotrow.device import stream_trace
from hotrow.nn import EmbeddingCollection

INTERVAL = 0.05  # seconds between two points: reading the counters of 26 tables takes their locks


class TierTraffic:
    """Draws the curves while its block runs, if a trace is recorded."""

    def __init__(self, embeddings: EmbeddingCollection) -> None:
        self.embeddings = embeddings
        self.tiered = any(rows.store.evicts for rows in embeddings.tables)
        self._at = time.perf_counter()
        self._before = self._totals() if trace.on() else {}

    def __enter__(self) -> TierTraffic:
        stream_trace.begin(self.embeddings.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        stream_trace.end(whole=kind is None)

    def draw(self) -> None:
        """Draw a point of each curve, if INTERVAL has passed."""
        if not trace.on() or (seconds := time.perf_counter() - self._at) < INTERVAL:
            return
        now = self._totals()
        for name, total in now.items():
            trace.counter(name, per_second=round((total - self._before[name]) / seconds))
        trace.counter("dram: bytes used", bytes=self.embeddings.budget.used)
        stream_trace.resolve()
        self._at, self._before = time.perf_counter(), now

    def _totals(self) -> dict[str, int]:
        return self._hbm_totals() | self._ssd_totals()

    def _hbm_totals(self) -> dict[str, int]:
        if self.embeddings.hbm_cache is None:
            return {}
        figures = self.embeddings.hbm_cache.report()
        transfers = [group.row_transfer for group in self.embeddings.hbm_cache.groups]
        return {
            "hbm: rows up": sum(transfer.rows_uploaded for transfer in transfers),
            "hbm: rows down": sum(transfer.rows_written_back for transfer in transfers),
            "hbm: bytes up": sum(4 * transfer.width * transfer.rows_uploaded for transfer in transfers),
            "hbm: bytes down": sum(4 * transfer.width * transfer.rows_written_back for transfer in transfers),
            "hbm: ids found": figures["hits"],
            "hbm: ids missed": figures["misses"],
            "hbm: rows without room": figures["overflows"],
        }

    def _ssd_totals(self) -> dict[str, int]:
        if not self.tiered:
            return {}
        tiers = [rows.store.tier() for rows in self.embeddings.tables]
        return {
            "ssd: rows up": sum(tier["arrivals"] + tier["prefetched"] for tier in tiers),
            "ssd: rows down": sum(tier["evicted"] for tier in tiers),
            "ssd: bytes read": sum(tier["bytes_read"] for tier in tiers),
            "ssd: bytes written": sum(tier["bytes_written"] for tier in tiers),
        }


class HbmCounters:
    """Hits, misses, evictions and overflows of the HBM cache in a run; empty without a cache."""

    def __init__(self, embeddings: EmbeddingCollection) -> None:
        self.embeddings = embeddings
        self._first = self.totals

    @property
    def totals(self) -> dict[str, int]:
        """The counters since the collection was made."""
        cache = self.embeddings.hbm_cache
        return {} if cache is None else cache.figures()

    def since_start(self) -> dict[str, int]:
        """The counters since this object was made."""
        return {name: count - self._first[name] for name, count in self.totals.items()}


def hit_rate(figures: dict[str, int]) -> float:
    """The share of ids whose rows were in HBM."""
    return figures["hits"] / max(1, figures["hits"] + figures["misses"])
