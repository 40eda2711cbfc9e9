"""Filling a remote store from an export: all rows of a version, as the publication that it was made at.

The memory it takes is a chunk's, whatever the size of the tables. Rows that the store has and the export has not are
removed when all others are in, and `complete` rises last: a reader never takes a store that is half filled for one
that has no such rows, and a fill that broke off is simply repeated.

Two may fill one store at the same time. Rows carry the publication's number, and a write never replaces a higher one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from hotrow.credentials import public
from hotrow.serve.repository.manifest import Version
from hotrow.tiers.host.store import scan_snapshot
from hotrow.tiers.remote.store import Keys, RemoteStore, TableFormat, bits_for, fill
from hotrow.tiers.remote.tables import is_local, share_remote, unshare_remote

__all__ = ["fill_from_export", "fill_local", "is_local"]
log = logging.getLogger("hotrow.serve")


def fill_from_export(
    store: RemoteStore,
    version: Version,
    values: str | None = None,
    wrote: Callable[[str, int, int], object] = lambda table, rows, of: None,
) -> int:
    """Write every row of a version; `wrote` hears table, rows so far and rows in all. Returns how many.

    `values` is how the store keeps them (fp32, fp16 or int8); by default as the export does.
    """
    number, total = int(version.manifest["publication"]), 0
    there = store.tables()
    for on_disk in version.tables:
        table, count = on_disk.table, on_disk.rows
        known = there.get(table.name)
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
    """Bring a store that belongs to this process to the publication of an export, unless it is there or beyond."""
    store = share_remote(url)
    try:
        marks = store.marks()
        if not marks.filled or marks.complete < int(version.manifest["publication"]):
            rows = fill_from_export(store, version)
            log.info("filled %s with %d rows of %s", public(url), rows, version.path)
    finally:
        unshare_remote(url)
