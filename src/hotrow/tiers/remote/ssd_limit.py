"""SsdLimit: bounds the SSD folder of a cache over a remote store.

The folder has the rows that left DRAM, so it would grow up to all rows that were ever read. Two numbers bound it:

    rows   the index of rows on SSD is in DRAM. It may take INDEX_SHARE of `dram=`, at ROW_BYTES a row
    bytes  `ssd_limit=`, if given. Compaction leaves a log at most half dead, so the rows may take half of the limit

When one is exceeded, a thread drops the rows of one shard after another (of 1,024, by the keys' hashes) until LEAVE of
the bound is left: rows that are on SSD alone, so the hot ones, which are in DRAM, stay. They are read from the store
when they are requested again. If rows come faster than that and the folder reaches the limit itself, no new row is
cached until there is room: such a row serves its batch alone.

(Dropped: an order by age. The log's index has 10 bytes a row and no room for one, and the rows that matter are the ones
in DRAM.)

Threads: one of its own. `check` may be called by one thread at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from hotrow.tiers.host.store import SHARDS
from hotrow.tiers.remote.cached_rows import CachedTable

INDEX_SHARE, ROW_BYTES = 0.25, 16
LEAVE = 7 / 8
PAUSE = 0.25  # seconds between two checks

log = logging.getLogger("hotrow.remote")


class SsdLimit:
    """Keeps the SSD rows of some tables below the bounds. `limit` is in bytes; 0 is none."""

    def __init__(self, tables: Sequence[CachedTable], dram_bytes: int, limit: int) -> None:
        self.tables, self.limit = tables, limit
        self.most_rows = int(dram_bytes * INDEX_SHARE) // ROW_BYTES
        self._next_shard = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotrow-ssd-limit", daemon=True)
        self._thread.start()

    def check(self) -> int:
        """Drop rows if a bound is exceeded; returns how many."""
        dropped = 0
        if self._exceeds(1.0):
            for _ in range(SHARDS):
                if self._closing.is_set() or not self._exceeds(LEAVE):
                    break
                dropped += sum([rows.drop_cold(self._next_shard) for rows in self.tables])
                self._next_shard = (self._next_shard + 1) % SHARDS
        full = bool(self.limit) and self._sum("disk_bytes") >= self.limit
        for rows in self.tables:
            rows.ssd_is_full = full
        return dropped

    def _exceeds(self, share: float) -> bool:
        if self._sum("cold_rows") > share * self.most_rows:
            return True
        return bool(self.limit) and self._sum("live_bytes") > share * self.limit / 2

    def _sum(self, figure: str) -> int:
        return sum([rows.store.tier()[figure] for rows in self.tables])

    def _run(self) -> None:
        while not self._closing.wait(PAUSE):
            try:
                self.check()
            except Exception:  # a disk that fails: requests get the error, and rows come from the store
                log.exception("rows on SSD could not be dropped")

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()
