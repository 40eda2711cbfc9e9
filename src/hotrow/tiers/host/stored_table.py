"""StoredTable: the interface of a table that tiers use. `TableRows` implements it; tiers never import TableRows.

A tier needs the table's definition for its name and row layout, the optimizer for the state in a row, and the store
that holds the rows. `smallest_dram_bytes` is the smallest `dram=` for some tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hotrow.optim import Optimizer
from hotrow.table_definition import Table
from hotrow.tiers.host.store import Budget, HostStore

SMALLEST_BUFFER = 64 << 10  # bytes of a table's write buffer
READ_BUFFERS = 2 << 20  # bytes of reads in flight
SLOTS_AT_A_TIME, SLOT_BYTES = 4096, 24  # rows of DRAM that a table takes at a time; bytes of one beside its values


class StoredTable(Protocol):
    """A table and the store of its rows."""

    @property
    def table(self) -> Table: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def store(self) -> HostStore: ...
    @property
    def budget(self) -> Budget: ...
    def memory(self) -> dict[str, Any]: ...


def smallest_dram_bytes(tables: Sequence[StoredTable]) -> int:
    """The smallest `dram=` with which DRAM can be a cache for these tables, over any tier."""
    buffers = READ_BUFFERS + SMALLEST_BUFFER * len(tables)
    slots = sum(SLOTS_AT_A_TIME * (rows.store.row_bytes + SLOT_BYTES) for rows in tables)
    sketches: int = sum(rows.memory()["sketch_bytes"] for rows in tables)
    return buffers + slots + sketches
