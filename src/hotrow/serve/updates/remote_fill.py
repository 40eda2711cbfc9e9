"""Fills a remote store from an export: all rows of a version, with the number of the publication they are from.

It needs the memory of one chunk, whatever the size of the tables. All rows of the export are written first, then rows
that the export lacks are removed from the store, and the mark `complete` is set last. So readers can distinguish a
partly filled store from a complete one without those rows, and an interrupted fill is simply repeated.

Two processes may fill one store at the same time: rows carry their publication's number, and a write never replaces a
higher one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from hotrow.credentials import public
from hotrow.serve.repository.manifest import Version
from hotrow.tiers.host.store import scan_snapshot
from hotrow.tiers.remote.store import Keys, RemoteStore, TableFormat, bits_for, fill
from hotrow.tiers.remote.tables import close_shared_store, is_local, open_shared_store

__all__ = ["fill_from_export", "fill_local", "is_local"]
log = logging.getLogger("hotrow.serve")


def fill_from_export(
    store: RemoteStore,
    version: Version,
    values: str | None = None,
    wrote: Callable[[str, int, int], object] = lambda table, rows, of: None,
) -> int:
    """Write every row of a version and return how many. `wrote(table, rows so far, rows of the table)` reports
    progress.

    `values` is the type that the store keeps rows in (fp32, fp16 or int8); the export's own by default.
    """
    number, total = int(version.manifest["publication"]), 0
    stored = store.tables()
    for on_disk in version.tables:
        table, count = on_disk.table, on_disk.rows
        known = stored.get(table.name)
        kind = values or (known.value if known is not None else table.values or "fp32")
        store.create(table.name, TableFormat(table.dim, kind, bits_for(count) if known is None else known.bits))

        def chunks(folder: str = str(on_disk.folder), dim: int = table.dim) -> Iterator[tuple[Keys, Any]]:
            for keys, rows in scan_snapshot(folder, dim):
                yield keys.numpy(), rows.numpy()

        total += fill(
            store, table.name, chunks(), number, lambda rows, name=table.name, of=count: wrote(name, rows, of)
        )
    store.finish(number)
    return total


def fill_local(version: Version, url: str) -> None:
    """Fill a store that this process owns from an export, unless it has that publication or a newer one."""
    store = open_shared_store(url)
    try:
        marks = store.marks()
        if not marks.filled or marks.complete < int(version.manifest["publication"]):
            rows = fill_from_export(store, version)
            log.info("filled %s with %d rows of %s", public(url), rows, version.path)
    finally:
        close_shared_store(url)
