"""Writes a table's rows as files with values only (docs/formats/segments.md), for servers.

Rows are streamed in, in any order, each key once. They pass through a temporary store that keeps little in memory: a
few chunks of rows, and the index of rows on disk (at most 16 bytes per row). Its log is inside the folder that is being
written, so the finished segments are hard links to it and every row is written once.

Values are converted meanwhile (core/rows/row_type.h): fp16 by rounding, int8 with a scale and an offset per row.
Optimizer state is left out. Counts and last steps are kept, because they show which rows are hot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hotrow.errors import OptionError, choices
from hotrow.optim import SGD
from hotrow.table import Table
from hotrow.tiers.host.store import VALUES, Budget, HostStore, Rows
from hotrow.train.checkpoint import durable_files

CHUNK = 16384  # rows written at a time
_FIXED, _INDEX = 16 << 20, 24  # bytes of buffers, bytes per row


def check_values(values: str) -> None:
    """Raise an error unless rows can be stored as `values`."""
    if values not in VALUES:
        raise OptionError(f"values={values!r}: {choices(values, VALUES)}")


def write_rows(
    table: Table, count: int, source: Iterable[Rows], folder: Path, values: str, on_rows: Callable[[int], object]
) -> int:
    """Write about `count` rows of a table into `folder` as `values`, and return how many.

    `on_rows` is called with the number of rows of each chunk. Requires: `folder` does not exist. The files are synced,
    but not the entry of the folder in its parent.
    """
    check_values(values)
    log = folder.with_name(f".log-{folder.name}")
    budget = Budget(_FIXED + 8 * CHUNK * (4 * table.dim + 64) + _INDEX * count)
    store = HostStore(table.name, table.dim, SGD(), table.initial, 0, budget, values)
    store.attach(str(log), evicts=True)
    for rows in source:
        for begin in range(0, rows.keys.numel(), CHUNK):
            part = slice(begin, begin + CHUNK)
            store.assign(
                rows.keys[part], rows.values[part, : table.dim], rows.counts[part], rows.last_steps[part].clamp(min=0)
            )
            on_rows(rows.keys[part].numel())
    snapshot = store.begin_snapshot()
    written = snapshot.finish(str(folder))["rows"]
    del snapshot, store
    durable_files.remove(log)
    return written
