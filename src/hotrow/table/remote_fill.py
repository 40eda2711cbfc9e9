"""Fill a remote store with the rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hotrow.progress import ProgressBar
from hotrow.table.rows import TableRows
from hotrow.tiers.remote.store import Keys, RemoteStore, TableFormat, bits_for, fill


def fill_table(remote: RemoteStore, rows: TableRows, number: int, value: str = "fp32", show: bool = True) -> int:
    """Write all rows of a table (a collection's, or an export's) into a store as publication `number` has them.

    It holds one chunk of rows in memory. After the last table call `remote.finish(number)`.
    """
    name, dim = rows.table.name, rows.table.dim
    remote.create(name, TableFormat(dim, value, bits_for(len(rows))))

    def chunks() -> Iterator[tuple[Keys, Any]]:
        for chunk in rows.scan():
            yield chunk.keys.numpy(), chunk.values[:, :dim].numpy()

    with ProgressBar(f"filling {name}", len(rows), enabled=show) as bar:
        return fill(remote, name, chunks(), number, bar.update)
