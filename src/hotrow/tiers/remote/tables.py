"""RemoteTables: a collection's tables over one remote store.

A process opens a store once for all collections that name it (two versions of a model, or a version and its successor),
because RocksDB does not open a folder twice, and one set of connections to Redis is enough.

Threads: any number of plans at once, each on one thread; `load` and `cold` on any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.config import Memory
from hotrow.credentials import public
from hotrow.errors import ClosedError, MemoryBudgetError, OptionError
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.host.stored_table import StoredTable, smallest_dram_bytes
from hotrow.tiers.remote.cached_rows import CachedTable, LoadedRows
from hotrow.tiers.remote.store import RemoteStore, open_remote, write_publication
from hotrow.units import format_size, round_up_size

READ = 1.0  # seconds that a batch waits for the store
WAIT = 30.0  # seconds that a request with the policy "wait" waits for it
PAUSE = 0.05  # between two attempts
AT_ONCE = 8  # tables that are read at the same time

Change = tuple[Tensor, Tensor, Tensor]  # keys, values, deleted keys


class _Opened(NamedTuple):
    store: RemoteStore
    users: int


_opened: dict[str, _Opened] = {}
_opening = threading.Lock()


def open_shared_store(url: str) -> RemoteStore:
    """The store at a URL, one for this process. Close it with `close_shared_store`."""
    with _opening:
        found = _opened.get(url) or _Opened(open_remote(url), 0)
        _opened[url] = found._replace(users=found.users + 1)
        return found.store


def close_shared_store(url: str) -> None:
    """Close the store when its last user calls this."""
    with _opening:
        found = _opened.pop(url)
        if found.users > 1:
            _opened[url] = found._replace(users=found.users - 1)
        else:
            found.store.close()


class RemoteTables:
    """The tables of a collection whose last tier is a remote store."""

    def __init__(self, memory: Memory, tables: Sequence[StoredTable], seed: int) -> None:
        assert memory.remote is not None
        if memory.dram_bytes < (least := smallest_dram_bytes(tables)):
            raise MemoryBudgetError(
                f"dram={format_size(memory.dram_bytes)} is too small for a cache of {len(tables)} tables over remote=; "
                f"give at least {round_up_size(least)}"
            )
        self.url = memory.remote
        self.store = open_shared_store(self.url)
        try:
            if not self.store.marks().filled:
                raise OptionError(
                    f"remote={public(self.url)!r} has no rows yet, or is being filled; fill it first: "
                    "hotrow publish-remote BUS URL --export repository/ctr"
                )
            self.rows = [CachedTable(rows.table, self.store, seed, rows.budget, rows.store) for rows in tables]
        except BaseException:
            close_shared_store(self.url)
            raise
        self.by_store = {id(rows.store): rows for rows in self.rows}
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hotrow-remote")

    def begin(self, number: int) -> None:
        """This collection serves publication `number`."""
        for rows in self.rows:
            rows.begin(number)

    def cold(self, parts: Sequence[tuple[HostStore, Tensor]]) -> int:
        """How many of some tables' keys are not in DRAM, duplicates counted."""
        return sum([int(self.by_store[id(store)].cold(keys).sum()) for store, keys in parts])

    def load(self, parts: Sequence[tuple[HostStore, Tensor]], seconds: float) -> list[LoadedRows | None]:
        """Load the keys that DRAM lacks from the store. Returns what was loaded for each part, None if DRAM lacked
        nothing."""
        wanted = []
        for store, keys in parts:
            rows = self.by_store[id(store)]
            missing = keys[rows.cold(keys)]
            wanted.append((rows, torch.unique(missing).numpy() if missing.numel() else None))
        deadline = time.monotonic() + seconds
        try:
            waits = [None if keys is None else self._pool.submit(rows.load, keys, deadline) for rows, keys in wanted]
        except RuntimeError:
            raise ClosedError(f"the tables over {public(self.url)} are closed; open them again") from None
        return [None if one is None else one.result() for one in waits]

    def prefetch(self, parts: Sequence[tuple[HostStore, Tensor]], until_complete: bool = False) -> int:
        """Load rows of these keys; returns how many. With `until_complete` try again until no key is late, or WAIT has
        passed."""
        deadline, loaded = time.monotonic() + WAIT, 0
        while True:
            answers = [one.answer for one in self.load(parts, READ) if one is not None]
            loaded += sum([int(answer.found.sum()) for answer in answers])
            late = any(answer.late.any() for answer in answers)
            if not (until_complete and late) or time.monotonic() + PAUSE >= deadline:
                return loaded
            time.sleep(PAUSE)

    def write_if_local(self, number: int, previous: int, changes: Mapping[str, Change]) -> None:
        """Write a publication to the store before this process applies it, if no other process can write the store."""
        if is_local(self.url):
            rows = {name: (keys.numpy(), values.numpy()) for name, (keys, values, _) in changes.items()}
            deleted = {name: gone.numpy() for name, (_, _, gone) in changes.items()}
            write_publication(self.store, number, rows, deleted, previous)

    def metrics(self) -> dict[str, int]:
        """The sums over all tables (CachedTable.metrics)."""
        figures = [rows.metrics() for rows in self.rows]
        return {name: sum([one[name] for one in figures]) for name in figures[0]}

    def figures(self) -> dict[str, int]:
        """For metrics: counters of the cache, and whether the store is up."""
        counts, health = self.metrics(), self.store.health()
        named = {name: counts[name] for name in ("hits", "misses", "absent", "late", "rows", "bytes")}
        return {**named, "up": int(health["ok"]), "publication": self.store.lowest}

    def close(self) -> None:
        """Close the store. Batches in flight find their rows late."""
        self._pool.shutdown(wait=True)
        close_shared_store(self.url)


def is_local(url: str) -> bool:
    """Whether the store belongs to this process alone, so that no other process can write it."""
    return url.startswith("rocksdb:")
