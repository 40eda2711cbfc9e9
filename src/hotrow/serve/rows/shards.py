"""Rows of some shards: the part of an export, and of a publication, that a row server holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hotrow.publish.publication import Publication
from hotrow.serve.repository.manifest import TableOnDisk
from hotrow.table import TableRows
from hotrow.tiers.host.store import SHARDS, scan_snapshot
from hotrow.tiers.rows.topology import shards_of

Shards = tuple[int, int]  # from begin to before end
ALL: Shards = (0, SHARDS)


def in_shards(keys: Tensor, shards: Shards) -> Tensor:
    """Which keys (int64) are in these shards.

    >>> int(in_shards(torch.arange(1000), (0, 512)).sum() + in_shards(torch.arange(1000), (512, 1024)).sum())
    1000
    """
    found = shards_of(keys.numpy())
    return torch.from_numpy((found >= shards[0]) & (found < shards[1]))


def load_rows(on_disk: TableOnDisk, rows: TableRows, shards: Shards) -> None:
    """Load a version's rows of some shards into an empty table.

    Only these take memory, except in an int8 table: a row that is decoded and encoded again may differ in its last bit,
    so there all rows are loaded as they are, and the others removed.
    """
    folder, keeps_bytes = str(on_disk.folder), on_disk.table.values != "int8"
    if shards == ALL or not keeps_bytes:
        rows.store.load_snapshot(folder)
    if shards == ALL:
        return
    for keys, values in scan_snapshot(folder, on_disk.table.dim):
        mine = in_shards(keys, shards)
        if keeps_bytes:
            rows.store.assign(keys[mine], values[mine])
        else:
            rows.store.erase(keys[~mine])


def part_of(publication: Publication, shards: Shards) -> Publication:
    """A publication with the rows of some shards alone."""
    if shards == ALL:
        return publication
    tables = {}
    for name, change in publication.tables.items():
        mine = in_shards(change.keys, shards)
        deleted = change.deleted[in_shards(change.deleted, shards)]
        tables[name] = replace(change, keys=change.keys[mine], values=change.values[mine], deleted=deleted)
    return replace(publication, tables=tables, dense=None)
