"""RemoteTables: a collection's tables over a remote store, or over several that are read in order.

The order of the tiers, stated here alone. A key goes down until a tier has its row. Each tier but DRAM may be left out,
and one that fails is passed over:

    tier            looked up by                                       its copy is refreshed by
    HBM             HbmPlan.read, LaneReader.enqueue_lookup            prepare_refresh, at the cut-over
    DRAM            CachedTable.read_cached                            CachedTable.apply, at the cut-over
    SSD             RemoteTables.load → prefetch_all                   the same
    row servers     the same, first of the stores (--rows)                 the row servers themselves
    store, store …  RemoteTables.load → FallbackStore.read, in order   its writer (hotrow publish-remote); RocksDB: this
                                                                       server, before the cut-over
    export:         the same, last                                     nothing: its rows are named as old
    late policy     CachedTable.finish_read

`load` is the part of that order that waits. It runs before a batch reads its rows and takes no lock that a cut-over
needs. What it loads goes into DRAM; HBM takes rows from DRAM alone, and none that is older than what was applied.

A process opens a store once for all collections that name it (two versions of a model, or a version and its successor),
because RocksDB does not open a folder twice, and one set of connections to Redis is enough.

Threads: any number of plans at once, each on one thread; `load` and `cold` on any.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.config import Memory
from hotrow.credentials import public
from hotrow.errors import ClosedError, MemoryBudgetError, OptionError
from hotrow.tiers.host.store import Budget, HostStore, prefetch_all
from hotrow.tiers.host.stored_table import StoredTable, smallest_dram_bytes
from hotrow.tiers.remote.cached_rows import TOUCH_EVERY, CachedTable, LoadedRows
from hotrow.tiers.remote.export_store import ExportStore
from hotrow.tiers.remote.fallback_store import FallbackStore, StoreSource
from hotrow.tiers.remote.row_server_store import SCHEME, set_publication
from hotrow.tiers.remote.ssd_limit import SsdLimit
from hotrow.tiers.remote.store import RemoteStore, open_remote, write_publication
from hotrow.units import format_size, round_up_size

READ = 1.0  # seconds that a batch waits for the store
WAIT = 30.0  # seconds that a request with the policy "wait" waits for it
PAUSE = 0.05  # between two attempts
EXPORT_LINKS = ".export"  # in the SSD folder: links to the segments of `export:`
AT_ONCE = 8  # tables that are read at the same time

log = logging.getLogger("hotrow.remote")
Change = tuple[Tensor, Tensor, Tensor]  # keys, values, deleted keys


class _Opened(NamedTuple):
    store: RemoteStore
    users: int


_opened: dict[str, _Opened] = {}
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by URL: one that is down delays no other


def open_shared_store(url: str) -> RemoteStore:
    """The store at a URL, one for this process. Close it with `close_shared_store`."""
    with _locks[url]:
        found = _opened.get(url) or _Opened(open_remote(url), 0)
        _opened[url] = found._replace(users=found.users + 1)
        return found.store


def close_shared_store(url: str) -> None:
    """Close the store when its last user calls this."""
    with _locks[url]:
        found = _opened.pop(url)
        if found.users > 1:
            _opened[url] = found._replace(users=found.users - 1)
        else:
            found.store.close()


class RemoteTables:
    """The tables of a collection whose last tier is a remote store."""

    def __init__(self, memory: Memory, tables: Sequence[StoredTable], seed: int) -> None:
        if memory.dram_bytes < (least := smallest_dram_bytes(tables)):
            raise MemoryBudgetError(
                f"dram={format_size(memory.dram_bytes)} is too small for a cache of {len(tables)} tables over remote=; "
                f"give at least {round_up_size(least)}"
            )
        self.urls = memory.remotes
        self.name = ", ".join(map(public, self.urls))
        self.store = self._open(memory, tables)
        try:
            if not isinstance(self.store, FallbackStore) and not self.store.marks().filled:
                raise OptionError(
                    f"remote={self.name!r} has no rows yet, or is being filled; fill it first: "
                    "hotrow publish-remote BUS URL --export repository/ctr"
                )
            self._check_room(memory, tables, least)
            self.rows = [CachedTable(rows.table, self.store, seed, rows.budget, rows.store) for rows in tables]
        except BaseException:
            self._close_store()
            raise
        self.by_store = {id(rows.store): rows for rows in self.rows}
        self.ssd = None if memory.ssd is None else SsdLimit(self.rows, memory.dram_bytes, memory.ssd_limit_bytes)
        self.below_hbm = False  # whether HBM is a cache over these
        self._asked = 0
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hotrow-remote")

    def _open(self, memory: Memory, tables: Sequence[StoredTable]) -> RemoteStore:
        if len(self.urls) == 1 and not is_export(self.urls[0]):
            return open_shared_store(self.urls[0])
        scratch = None if memory.ssd is None else os.path.join(memory.ssd, EXPORT_LINKS)
        sources = [_source(url, tables[0].budget, scratch) for url in self.urls]
        return FallbackStore(sources, {rows.table.name: rows.table.dim for rows in tables})

    def _close_store(self) -> None:
        if isinstance(self.store, FallbackStore):
            self.store.close()
        else:
            close_shared_store(self.urls[0])

    def _check_room(self, memory: Memory, tables: Sequence[StoredTable], least: int) -> None:
        """Check that an export's index has left enough of `dram=` for the cache."""
        used = tables[0].budget.used
        if memory.dram_bytes < used + least:
            raise MemoryBudgetError(
                f"dram={format_size(memory.dram_bytes)} is too small: the index of the export's rows takes "
                f"{format_size(used)} of it; give at least {round_up_size(used + least)}"
            )

    def begin(self, number: int) -> None:
        """This collection serves publication `number`."""
        self.follow(number)
        for rows in self.rows:
            rows.begin(number)

    def follow(self, number: int) -> None:
        """From the next read on, row servers are read at this publication. Called at every cut-over."""
        for url in filter(is_rows, self.urls):
            set_publication(url, number)

    def can_read(self, publication: int) -> bool:
        """Whether a read gives all rows at this publication: they come from row servers, and not from an older store
        because those are gone."""
        return is_rows(self.urls[0]) and (len(self.urls) == 1 or self.store.lowest >= publication)

    def cold(self, parts: Sequence[tuple[HostStore, Tensor]]) -> int:
        """How many of some tables' keys are not in DRAM, duplicates counted."""
        self._asked += 1
        for store, keys in parts if self.below_hbm and self._asked % TOUCH_EVERY == 0 else ():
            store.core.warm(keys.contiguous())  # a row that HBM answers is not read here, and would leave DRAM
        return sum([int(self.by_store[id(store)].cold(keys).sum()) for store, keys in parts])

    def load(self, parts: Sequence[tuple[HostStore, Tensor]], seconds: float) -> list[LoadedRows | None]:
        """Load the rows of some tables' keys, tier by tier. Returns what the store answered for each part, None if no
        key was left for it."""
        tables = [self.by_store[id(store)] for store, _ in parts]
        left = [keys[rows.cold(keys)] for rows, (_, keys) in zip(tables, parts, strict=True)]  # DRAM lacks these
        left = [torch.unique(keys) if keys.numel() else keys for keys in left]
        if self.ssd is not None and any(keys.numel() for keys in left):
            prefetch_all([(rows.store, keys) for rows, keys in zip(tables, left, strict=True)])
            left = [rows.without_ssd(keys) for rows, keys in zip(tables, left, strict=True)]
        deadline = time.monotonic() + seconds
        try:  # the store, or several: FallbackStore.read has their order
            waits = [
                self._pool.submit(rows.load, keys.numpy(), deadline) if keys.numel() else None
                for rows, keys in zip(tables, left, strict=True)
            ]
        except RuntimeError:
            raise ClosedError(f"the tables over {self.name} are closed; open them again") from None
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
        """Write a publication to the stores that no other process can write, before this process applies it.

        With several stores a local one that fails is left behind; its answers say so. It is filled again at the next
        start.
        """
        rows = {name: (keys.numpy(), values.numpy()) for name, (keys, values, _) in changes.items()}
        deleted = {name: gone.numpy() for name, (_, _, gone) in changes.items()}
        for url in filter(is_local, self.urls):
            alone = not isinstance(self.store, FallbackStore)
            store = self.store if alone else self.store.opened(public(url))  # type: ignore[attr-defined]
            try:
                if store is not None:
                    write_publication(store, number, rows, deleted, previous)
            except Exception as error:
                if alone:
                    raise
                log.error("publication %d is not in %s: %s", number, public(url), error)

    def metrics(self) -> dict[str, int]:
        """The sums over all tables (CachedTable.metrics)."""
        figures = [rows.metrics() for rows in self.rows]
        return {name: sum([one[name] for one in figures]) for name in figures[0]}

    def figures(self) -> dict[str, int]:
        """For metrics: counters of the cache, and whether the store is up."""
        counts, health = self.metrics(), self.store.health()
        named = {name: counts[name] for name in ("hits", "misses", "absent", "late", "rows", "bytes")}
        more = {"up": int(health["ok"]), "fallback": int(health.get("fallback", 0)), "publication": self.store.lowest}
        return {**named, **more}

    def close(self) -> None:
        """Close the store. Batches in flight find their rows late."""
        if self.ssd is not None:
            self.ssd.close()
        self._pool.shutdown(wait=True)
        self._close_store()


def _source(url: str, budget: Budget, scratch: str | None) -> StoreSource:
    """One of several stores. An export's index is part of the collection's budget, so it is opened for it alone."""
    if is_export(url):
        return StoreSource(url, lambda: ExportStore(url.partition(":")[2], budget, scratch))
    return StoreSource(public(url), lambda: open_shared_store(url), lambda _: close_shared_store(url))


def is_local(url: str) -> bool:
    """Whether the store belongs to this process alone, so that no other process can write it."""
    return url.startswith("rocksdb:")


def is_rows(url: str) -> bool:
    """Whether the store is row servers."""
    return url.startswith(SCHEME)


def is_export(url: str) -> bool:
    """Whether the store is an exported version's own rows."""
    return url.startswith("export:")
