"""RemoteOwner: the owner's half of a plan, for rows of a remote store with a cache in DRAM. It only reads.

    prefetch   loads from SSD and the store what DRAM lacks, all tables at once: the only verb that waits, for READ
               seconds
    read       copies rows from DRAM (with the policy "wait" also from SSD) and from what prefetch loaded; the late
               policy answers the others. Never waits for the store

Without `prefetch` rows that are not in DRAM are late. After an error `read` and `prefetch` may be called again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from hotrow.errors import LateError, LeftError, OptionError
from hotrow.tiers.batch_values import BatchUpdate, ReceivedGradients, TransferStats
from hotrow.tiers.plan import ANY_PUBLICATION, RequestedRows
from hotrow.tiers.remote.cached_rows import CachedTable, LoadedRows
from hotrow.tiers.remote.store import Keys, RemoteStore
from hotrow.tiers.remote.tables import READ, RemoteTables

ONLY_READ = "rows over remote= are only read: train with dram= and ssd=, and publish to the remote store"
NO_ROWS = torch.empty(0)


class RemoteOwner:
    """Rows of unique keys in a remote store (hotrow.tiers.plan.RowOwner)."""

    prefetch_misses = 0

    def __init__(self, tables: RemoteTables) -> None:
        self.tables = tables
        self.publications = ANY_PUBLICATION
        self.release()

    def release(self) -> None:
        """Forget the batch."""
        self.late_keys: dict[int, np.ndarray[Any, Any]] = {}
        self._keys: list[tuple[CachedTable, Tensor]] = []
        self._loaded: list[LoadedRows | None] = []
        self._rows = NO_ROWS

    def route(self, requests: Sequence[RequestedRows]) -> None:
        """Take the keys that this process requests."""
        self.release()
        for request in requests:
            tables = [self.tables.by_store[id(store)] for store in request.stores]
            for keys, counts in zip(request.keys, request.counts, strict=True):
                self._keys += zip(tables, keys.split(counts), strict=True)

    def prefetch(self) -> TransferStats:
        """Load the rows that are not in DRAM from the store."""
        self._loaded = self.tables.load([(rows.store, keys) for rows, keys in self._keys], READ)
        answers = [one.answer for one in self._loaded if one is not None]
        return TransferStats(sum([int(a.found.sum()) for a in answers]), sum([a.bytes for a in answers]))

    def stage(self) -> TransferStats:
        """Do nothing: there is no tier above DRAM."""
        return TransferStats()

    def fetch(self, step: int = 0) -> None:
        """Raise: rows of a remote store are only read."""
        raise OptionError(ONLY_READ)

    def read(self, late: str = "wait") -> None:
        """Copy rows from DRAM, from what `prefetch` loaded, or by the late policy. With "wait" a late row raises."""
        amounts = [keys.numel() for _, keys in self._keys]
        ends = np.cumsum([0, *[n * rows.table.dim for n, (rows, _) in zip(amounts, self._keys, strict=True)]]).tolist()
        flat, found = torch.empty(ends[-1]), torch.empty(sum(amounts), dtype=torch.bool)
        founds = found.split(amounts)
        (lowest, highest), self.late_keys = ANY_PUBLICATION, {}
        for number, ((rows, keys), (begin, end)) in enumerate(zip(self._keys, pairwise(ends), strict=True)):
            if not keys.numel():
                continue
            values = flat[begin:end].view(-1, rows.table.dim)
            rows.read_cached(keys, values, founds[number], late)
            loaded = self._loaded[number] if self._loaded else None
            result = rows.finish_read(keys, values, founds[number], late, loaded)
            lowest, highest = min(lowest, result.lowest), max(highest, result.highest)
            if result.late is not None:
                self.late_keys[number] = keys.numpy()[result.late]
        self.publications = lowest, highest
        if self.late_keys and late == "wait":
            raise_late(
                [
                    (self._keys[number][0].table.name, late_keys, self._loaded[number] if self._loaded else None)
                    for number, late_keys in self.late_keys.items()
                ],
                self.tables.store,
            )
        self._rows = flat

    def gather_rows(self) -> Iterator[Tensor]:
        """The rows that were read. There is one requester: this process."""
        yield self._rows

    def apply_gradients(self, received: Iterable[ReceivedGradients], update: BatchUpdate) -> None:
        """Raise: rows of a remote store are only read."""
        raise OptionError(ONLY_READ)


def raise_late(late: Sequence[tuple[str, Keys, LoadedRows | None]], store: RemoteStore) -> NoReturn:
    """Raise the error that says why rows with the policy "wait" are late: for each table its name, its late keys, and
    what was loaded."""
    names = ", ".join([name for name, _, _ in late])
    for _, keys, loaded in late:
        if loaded is None or not loaded.positions(keys)[1].all():
            raise LeftError(f"rows of {names} were evicted between being found and being read; send the request again")
    raise LateError(
        f"{sum([len(keys) for _, keys, _ in late])} rows of {names} did not come from the remote store "
        f"({_state(store)}); send the request again, or use the policy initial or default"
    )


def _state(store: RemoteStore) -> str:
    health = store.health()
    down = [f"{name} {state}" for name, state in health["nodes"].items() if state.startswith("down")]
    return ", ".join(down) or "it answers too slowly"
