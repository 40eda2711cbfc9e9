"""The SSD folder of a collection: one lock, a folder with a log for each table.

Its content belongs to the running process. A process that dies leaves it behind, and the next one starts it anew from a
checkpoint: checkpoints hold links to the segments they need, so nothing that was committed is lost with it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

from hotrow import _core
from hotrow.config import Memory, format_size
from hotrow.errors import MemoryBudgetError
from hotrow.table.rows import TableRows
from hotrow.tiers.host import core_errors

LEAST_BUFFER, MOST_BUFFER = 64 << 10, 1 << 20
LEAST_FIXED = 2 << 20  # buffers of reads in flight
LEAST_SLOTS, SLOT_BYTES = 4096, 24  # rows of DRAM that a table takes at a time; what one takes beside its values


class SsdFolder:
    """Holds the folder for as long as the collection lives."""

    def __init__(self, memory: Memory, tables: Sequence[TableRows]) -> None:
        self.path = os.path.abspath(os.fspath(memory.ssd or "."))
        least = LEAST_FIXED + sum(LEAST_BUFFER + LEAST_SLOTS * (rows.store.width * 4 + SLOT_BYTES) for rows in tables)
        least += sum(rows.memory()["sketch_bytes"] for rows in tables)
        if memory.dram_bytes < least:
            raise MemoryBudgetError(
                f"dram={format_size(memory.dram_bytes)} is too small for {len(tables)} tables over ssd=; "
                f"give at least {format_size(least)} (beside the rows of a batch, and 10 bytes for each row on SSD)"
            )
        with core_errors():
            lock = _core.lock_folder(self.path)
        # Write buffers are part of the budget: a hundredth of it for all of them.
        buffer = min(MOST_BUFFER, max(LEAST_BUFFER, memory.dram_bytes // 100 // len(tables) // 4096 * 4096))
        _allow_many_files()
        for rows in tables:
            rows.store.attach(os.path.join(self.path, rows.table.name), evicts=True, buffer=buffer, lock=lock)


def _allow_many_files() -> None:
    """A log keeps one descriptor for each segment of 64 MiB: as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
