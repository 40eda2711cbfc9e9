"""RemoteBelow: the host cache and the remote stores as the tiers below a cache in HBM (tiers/hbm/rows_below.py).

HBM has only rows without a stale mark, and a publication refreshes or drops them when it is applied. So a row in HBM is
always as new as the publication in service, and only rows from below can make an answer older.

Threads: RemoteBelow any; a RemoteBatch belongs to one batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hotrow.tiers.batch_values import TransferStats
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import ANY_PUBLICATION
from hotrow.tiers.remote.cached_rows import LoadedRows
from hotrow.tiers.remote.owner import raise_late
from hotrow.tiers.remote.store import Keys
from hotrow.tiers.remote.tables import READ, RemoteTables


class RemoteBelow:
    """The tables of a collection below HBM (hotrow.tiers.hbm.rows_below.RowsBelow)."""

    def __init__(self, tables: RemoteTables) -> None:
        self.tables = tables
        tables.below_hbm = True

    def batch(self) -> RemoteBatch:
        """For one batch."""
        return RemoteBatch(self.tables)

    def read_raw(self, store: HostStore, keys: Tensor, out: Tensor) -> Tensor:
        """Rows in DRAM as stored bytes, without those that have a stale mark."""
        return self.tables.by_store[id(store)].read_raw(keys, out)


class RemoteBatch:
    """One batch's reads (hotrow.tiers.hbm.rows_below.BatchBelow)."""

    def __init__(self, tables: RemoteTables) -> None:
        self.tables = tables
        self._loaded: dict[int, LoadedRows] = {}  # by store
        self._late: dict[int, Keys] = {}
        self._lowest = ANY_PUBLICATION[0]
        self._highest = 0

    @property
    def publications(self) -> tuple[int, int]:
        """The oldest publication of a row from below, and the newest of any row that is cached."""
        return self._lowest, max(self._highest, *[rows.highest for rows in self.tables.rows])

    def begin(self) -> None:
        """Forget what was read; keep what was loaded."""
        self._late, (self._lowest, self._highest) = {}, ANY_PUBLICATION

    def read(self, store: HostStore, keys: Tensor, late: str) -> tuple[Tensor, Tensor]:
        """Values of unique keys, and which of them are late."""
        rows, number = self.tables.by_store[id(store)], id(store)
        keys = keys.contiguous()
        values, found = torch.empty(keys.numel(), store.dim), torch.empty(keys.numel(), dtype=torch.bool)
        rows.read_cached(keys, values, found, late)
        result = rows.finish_read(keys, values, found, late, self._loaded.get(number))
        self._lowest, self._highest = min(self._lowest, result.lowest), max(self._highest, result.highest)
        if result.late is None:
            return values, torch.zeros_like(found)
        self._late[number] = np.union1d(self._late.get(number, np.empty(0, np.int64)), keys.numpy()[result.late])
        return values, torch.from_numpy(result.late)

    def finish(self, late: str) -> None:
        """With "wait", raise if a row is missing."""
        if late == "wait" and self._late:
            names = {number: self.tables.by_store[number].table.name for number in self._late}
            raise_late([(names[n], keys, self._loaded.get(n)) for n, keys in self._late.items()], self.tables.store)

    def load(self, parts: Sequence[tuple[HostStore, Tensor]] = ()) -> TransferStats:
        """Load the rows that `read` lacked, and again those that were loaded before and have left DRAM since."""
        wanted: dict[int, list[Tensor]] = {}
        for number, keys in [*self._late.items(), *[(number, one.keys) for number, one in self._loaded.items()]]:
            wanted.setdefault(number, []).append(torch.from_numpy(keys))
        for store, some in parts:
            wanted.setdefault(id(store), []).append(some)
        stores = [self.tables.by_store[number].store for number in wanted]
        loaded = self.tables.load(list(zip(stores, map(torch.cat, wanted.values()), strict=True)), READ)
        self._loaded = {number: one for number, one in zip(wanted, loaded, strict=True) if one is not None}
        answers = [one.answer for one in self._loaded.values()]
        return TransferStats(sum([int(a.found.sum()) for a in answers]), sum([a.bytes for a in answers]))
