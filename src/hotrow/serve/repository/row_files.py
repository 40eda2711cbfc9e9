"""A table's rows as files of their values alone (docs/formats/segments.md): what a server opens.

Rows stream in, in any order, each key once, and leave through a store of their own that keeps little in memory: a few
chunks of rows, and the index of what is on disk (16 bytes a row at most). Its log is inside the folder that is being
written, so that the finished segments are links to it and every row is written once.

Values are converted on the way (core/rows/row_type.h): fp16 by rounding, int8 with a scale and an offset for each row.
Optimizer state stays behind; counts and last steps stay, for they say which rows are hot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from hotrow.errors import OptionError, choices
from hotrow.optim import SGD
from hotrow.table import Table
from hotrow.tiers.host.store import VALUES, Budget, HostStore, Rows
from hotrow.train.checkpoint import durable_files

CHUNK = 16384  # rows at a time
_FIXED, _INDEX = 16 << 20, 24  # bytes of buffers, and for each row


def check_values(values: str) -> None:
    """Whether rows can be stored so."""
    if values not in VALUES:
        raise OptionError(f"values={values!r}: {choices(values, VALUES)}")


def write_rows(
    table: Table, count: int, source: Iterable[Rows], folder: Path, values: str, wrote: Callable[[int], object]
) -> int:
    """Write about `count` rows of a table into `folder` as `values`; `wrote` hears of every chunk. Returns how many.

    Requires: `folder` is not there. What is written is on the disk afterwards, the folder's own name is not.
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
            wrote(rows.keys[part].numel())
    snapshot = store.begin_snapshot()
    written = snapshot.finish(str(folder))["rows"]
    del snapshot, store
    durable_files.remove(log)
    return written
