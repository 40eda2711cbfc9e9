"""A server's table over a remote store: DRAM is a cache, what it lacks is read from the store before a deadline.

    DRAM → remote store → the row of an unseen key, or late

Rows that come are put into DRAM, and rows that have not been used for long are forgotten when it is full (the core's
`drops`: nothing is written, the store has them). Rows are never created or counted here.

A publication that this server applies (`apply`) changes the rows that are cached. The store may get it later, or a read
under way may have seen the row of before: so the keys of every publication that the store does not have whole yet are
remembered, and a row that is older than what was applied is answered but not kept. What is remembered is 8 bytes a
changed row, for as long as the store lags behind; a store that stays away stops the cache from growing stale, not from
answering.

A key that has no row anywhere is asked for at the store each time. Serving has few of them; a filter of such keys would
have to learn of every publication first.

Threads: any number may read at once, beside one that applies.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.optim import SGD
from hotrow.table.definition import Table
from hotrow.table.rows import TableRows
from hotrow.tiers.host import Budget, HostStore
from hotrow.tiers.remote import Keys, RemoteStore, TableFormat, bits_for, fill

WARM_EVERY = 4  # reads: one in four tells the cache what is used, which is enough and costs a fourth


@dataclass(frozen=True)
class ReadRows:
    """Values [n, dim] of a batch's keys. Rows not found or late read as unseen keys do; the caller knows which."""

    values: Tensor
    found: Tensor
    late: Tensor
    lowest: int  # of the publications that rows from the store contain
    highest: int


class RemoteRows:
    """One table's rows, cached in DRAM over a remote store."""

    def __init__(self, table: Table, remote: RemoteStore, seed: int, budget: Budget) -> None:
        form = remote.tables().get(table.name)
        if form is None or form.dim != table.dim:
            there = "is not in the remote store" if form is None else f"has dim {form.dim} in the remote store"
            raise OptionError(
                f"table {table.name!r} of dim {table.dim} {there}; fill it first (hotrow.table.remote.fill_table)"
            )
        self.table = table
        self.remote = remote
        self.store = HostStore(table.name, table.dim, SGD(), table.initial, seed, budget)
        with tempfile.TemporaryDirectory(prefix="hotrow-cache-") as folder:
            self.store.attach_cache(folder)
        self.counters = {"hits": 0, "misses": 0, "absent": 0, "late": 0, "bytes": 0, "kept": 0, "stale": 0}
        self._lock = threading.Lock()
        self._applied: deque[tuple[int, Keys]] = deque()
        self._reading: dict[int, int] = {}  # reads under way → the store's lowest publication when they began
        self._reads = 0

    def read(self, keys: Tensor, deadline: float) -> ReadRows:
        """Rows of any keys, until `deadline` (time.monotonic()) where the store must be asked."""
        values, found = self.store.read(keys)
        late = torch.zeros_like(found)
        missing = torch.nonzero(~found).flatten()
        self._warm(keys, found)
        self._count(hits=keys.numel() - missing.numel(), misses=missing.numel())
        if missing.numel() == 0:
            lowest = self.remote.lowest
            return ReadRows(values, found, late, lowest, lowest)
        wanted, where = torch.unique(keys[missing], return_inverse=True)
        ticket = self._begin()
        try:
            answer = self.remote.read(self.table.name, wanted.numpy(), deadline)
            self._keep(wanted.numpy(), answer)
        finally:
            self._end(ticket)
        came = torch.from_numpy(answer.found)[where]
        values[missing[came]] = torch.from_numpy(answer.values)[where[came]]
        found[missing] = came
        late[missing] = torch.from_numpy(answer.late)[where]
        absent = int((~answer.found & ~answer.late).sum())
        self._count(late=int(answer.late.sum()), absent=absent, bytes=answer.bytes)
        return ReadRows(values, found, late, answer.lowest, answer.highest)

    def _warm(self, keys: Tensor, found: Tensor) -> None:
        self._reads += 1
        if self._reads % WARM_EVERY == 0:
            self.store.core.warm(keys[found].contiguous())

    def _begin(self) -> int:
        with self._lock:
            ticket = max(self._reading, default=0) + 1
            self._reading[ticket] = self.remote.lowest
            return ticket

    def _end(self, ticket: int) -> None:
        with self._lock:
            del self._reading[ticket]
            self._forget()

    def _forget(self) -> None:
        """Publications that every answer to come contains, of reads under way too."""
        oldest = min([self.remote.lowest, *self._reading.values()])
        while self._applied and self._applied[0][0] <= oldest:
            self._applied.popleft()

    def _keep(self, keys: Keys, answer: Any) -> None:
        """Put what came into DRAM, unless a publication that was applied here changed it since."""
        good = answer.found.copy()
        with self._lock:
            for number, changed in self._applied:
                if number > answer.lowest:
                    good &= ~((answer.versions < number) & np.isin(keys, changed, assume_unique=True))
            fresh = torch.from_numpy(keys[good])
            new = self.store.find(fresh) < 0  # another read may have brought it, or `apply` changed it since
            self.store.assign(fresh[new], torch.from_numpy(answer.values[good])[new])
        self._count(kept=int(new.sum()), stale=int(answer.found.sum() - good.sum()))

    def apply(self, number: int, keys: Keys, values: Any, deleted: Keys | None = None) -> int:
        """Publication `number` changed these rows (unique keys): those that are cached change now. Returns how many."""
        gone = np.empty(0, np.int64) if deleted is None else deleted
        changed = torch.from_numpy(np.ascontiguousarray(keys))
        rows = torch.from_numpy(np.ascontiguousarray(values))
        with self._lock:
            self._forget()
            self._applied.append((number, np.concatenate([keys, gone])))
            cached = self.store.find(changed) >= 0
            self.store.assign(changed[cached], rows[cached])
            self.store.erase(torch.from_numpy(gone))
            return int(cached.sum())

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self.counters[name] += count

    def metrics(self) -> dict[str, int]:
        """Hits and misses of DRAM, keys absent everywhere, late rows, bytes, rows kept and left as stale, evicted."""
        return {**self.counters, "rows": len(self.store), "evicted": self.store.tier()["evicted"]}


def fill_table(remote: RemoteStore, rows: TableRows, number: int, value: str = "fp32", show: bool = True) -> int:
    """Write all rows of a table (a collection's, or an export's) into a store as publication `number` has them.

    The memory it takes is a chunk's. Call `remote.finish(number)` when all tables are in.
    """
    name, dim = rows.table.name, rows.table.dim
    remote.create(name, TableFormat(dim, value, bits_for(len(rows))))

    def chunks() -> Iterator[tuple[Keys, Any]]:
        for chunk in rows.scan():
            yield chunk.keys.numpy(), chunk.values[:, :dim].numpy()

    with Progress(disable=not show) as progress:
        task = progress.add_task(f"filling {name}", total=len(rows))
        return fill(remote, name, chunks(), number, lambda done: progress.update(task, completed=done))
