"""CachedTable: a server's table over a remote store. DRAM is a cache; misses are loaded from the store by a deadline.

    DRAM → SSD, if there is a folder → remote store → the row of an unseen key, or late

`load` reads the store and keeps the rows that arrive. `finish_read` answers from DRAM and from what `load` returned,
and never waits, so it may run where a cut-over to a new publication waits for it. When DRAM is full the core drops rows
that have not been used for long (`drops`: it writes nothing, the store has them), or writes them to the SSD folder,
where they are part of the cache: `apply` and stale marks reach them too. Rows are never created or counted
here. A key without a row is remembered as absent for a second, so that a read after `load` can tell it from an unknown
key.

`apply` changes cached rows to a publication that the server applies. The store may get that publication later, or a
read in flight may return the row from before it. So CachedTable remembers the keys of every publication that the store
does not have completely yet. It keeps a row that is older than what was applied, with a stale mark: the publication
that the row is good for, and the one that the store must have before the row is read again. This takes 8 bytes a
changed row until the store has caught up. So every answer can name a publication that all its rows are as new as.

Threads: any number may read and load at once, beside one that applies.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.errors import MemoryBudgetError, OptionError
from hotrow.optim import SGD
from hotrow.table_definition import Table
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import LATE, Budget, HostStore
from hotrow.tiers.plan import ANY_PUBLICATION
from hotrow.tiers.remote.store import Answer, Keys, RemoteStore

TOUCH_EVERY = 4  # reads: one in four records its rows as used, which is enough and costs a fourth
ABSENT_SECONDS = 1.0  # seconds for which a key without a row is remembered as absent
MOST_ABSENT = 200_000
MOST_ERASED = 1024  # stale rows that are erased together, if they may be on SSD
DROPPED_TOGETHER = 64  # rows that are dropped from SSD under the lock
MOST_APPLIED = 1024  # publications whose keys are remembered, and ...
MOST_APPLIED_KEYS = 8 << 20  # ... keys: with a store that does not catch up, rows count as older than they may be
NEWEST = ANY_PUBLICATION[0]  # "as new as anything"


@dataclass(frozen=True)
class ReadRows:
    """Values [n, dim] of a batch's keys. A row that is not found or late has the values of an unseen key."""

    values: Tensor
    found: Tensor
    late: Tensor
    lowest: int  # every row from the store is as new as this publication
    highest: int


@dataclass(frozen=True)
class LoadedRows:
    """A store's answer for unique keys in ascending order."""

    keys: Keys
    answer: Answer

    def positions(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The position of each key in `self.keys`, and whether it is there."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return at, self.keys[at] == keys


@dataclass(frozen=True)
class ReadResult:
    """Which keys of a batch are late, and the publications of the other rows.

    `lowest` is NEWEST where no row is known to be older than what was applied.
    """

    late: NDArray[np.bool_] | None
    lowest: int
    highest: int


class CachedTable:
    """One table's rows, cached in DRAM over a remote store. The cache is `store`, or a new one within `budget`."""

    def __init__(
        self, table: Table, remote: RemoteStore, seed: int, budget: Budget, store: HostStore | None = None
    ) -> None:
        form = remote.tables().get(table.name)
        if form is None or form.dim != table.dim:
            there = "is not in the remote store" if form is None else f"has dim {form.dim} in the remote store"
            raise OptionError(
                f"table {table.name!r} of dim {table.dim} {there}; fill it first (hotrow publish-remote, or "
                "hotrow.table.remote_fill.fill_table)"
            )
        self.table = table
        self.remote = remote
        if store is None:
            store = HostStore(table.name, table.dim, SGD(), table.initial, seed, budget)
        self.store = store
        self.over_ssd = store.has_log  # whether rows that leave DRAM go to an SSD folder
        self.ssd_is_full = False  # no row is cached that the store has; set by SsdLimit
        if not self.over_ssd:
            with tempfile.TemporaryDirectory(prefix="hotrow-cache-") as folder:
                self.store.attach_cache(folder)
        names = ("hits", "misses", "absent", "late", "bytes", "kept", "stale", "full", "dropped")
        self.counters = dict.fromkeys(names, 0)
        self._lock = threading.Lock()
        self._applied: deque[tuple[int, Keys]] = deque()
        self._applied_keys = 0
        self._forgotten = 0  # the newest applied publication whose keys are no longer remembered
        self._reading: dict[int, int] = {}  # reads in flight → the store's lowest publication when they began
        self._stale: dict[
            int, tuple[int, int]
        ] = {}  # key → (publication its row is good for, publication the store must have)
        self._swept = -1
        self._absent: dict[int, float] = {}  # key → until when it counts as absent
        self._highest = 0  # publication of any cached row, or of any key that was absent
        self._reads = 0

    def begin(self, number: int) -> None:
        """The server serves publication `number`: rows of the store that are older get a stale mark."""
        with self._lock:
            self._forgotten = max(self._forgotten, number)

    # --- without waiting for the store ---

    def cold(self, keys: Tensor) -> Tensor:
        """Which keys must be loaded from the store: neither in DRAM nor known to be absent."""
        if self._stale and self.remote.lowest > self._swept:
            with self._lock:
                self._forget()
        missing = self.store.find(keys) < 0
        if self._absent and bool(missing.any()):
            positions = torch.nonzero(missing).flatten()
            missing[positions[torch.from_numpy(self._known_absent(keys[positions].numpy()))]] = False
        return missing

    def read_cached(self, keys: Tensor, values: Tensor, found: Tensor, late: str) -> None:
        """Copy the rows that are in DRAM into `values` [n, dim] and set `found`. With the policy "wait" also those on
        SSD; with the others these are not found, and no disk is read."""
        if late == "wait" or not self.over_ssd:
            self.store.read_into(keys, values, found)
            return
        on_ssd = torch.empty(keys.numel(), dtype=torch.uint8)
        with self._lock:  # under which no row is erased: one in DRAM stays there or goes to SSD
            in_dram = self.store.find(keys) >= 0
            self.store.core.read_warm(keys, LATE["initial"], values, on_ssd)
        torch.logical_and(in_dram, on_ssd == 0, out=found)

    def read_raw(self, keys: Tensor, out: Tensor) -> Tensor:
        """As HostStore.read_raw: which keys are in DRAM, without those that have a stale mark."""
        with self._lock:
            found = self.store.read_raw(keys, out)
            if self._stale:
                found &= torch.tensor([key not in self._stale for key in keys.tolist()], dtype=torch.bool)
        return found

    @property
    def highest(self) -> int:
        """No row that was ever cached is newer than this publication."""
        return self._highest

    def without_ssd(self, keys: Tensor) -> Tensor:
        """Those of the keys, which DRAM lacked, that are neither there by now nor on SSD. Reads the disk."""
        keys = keys[self.store.find(keys) < 0]
        return keys[~self._on_ssd(keys)]

    def _on_ssd(self, keys: Tensor) -> Tensor:
        """Which keys have a row on SSD, or in DRAM. The index knows a part of a key, so it is compared on the disk."""
        there = self.store.cold(keys)
        if bool(there.any()):
            there[there.clone()] = self.store.read(keys[there])[1]
        return there

    def drop_cold(self, shard: int) -> int:
        """Drop the rows of a shard that are on SSD only; returns how many."""
        with core_errors():
            keys = torch.from_numpy(self.store.core.scan_cold(shard)[0])
        for some in keys.split(DROPPED_TOGETHER):
            with self._lock:
                self.store.erase(some)
                for key in some.tolist() if self._stale else ():
                    self._stale.pop(key, None)
        self._count(dropped=keys.numel())
        return keys.numel()

    def finish_read(
        self, keys: Tensor, values: Tensor, found: Tensor, late: str, loaded: LoadedRows | None = None
    ) -> ReadResult:
        """Complete what `read_cached` found: with `loaded` rows, and by the policy `late` for the others.

        Keys are unique. With the policy "wait" late rows keep the values of unseen keys, and the caller raises.
        """
        missing = torch.nonzero(~found).flatten()
        self._record_use(keys, found, missing.numel())
        lowest, highest = self._good_for(keys), self._highest
        if missing.numel() == 0:
            return ReadResult(None, lowest, highest)
        wanted = keys[missing].numpy()
        unknown = ~self._known_absent(wanted)
        if loaded is not None:
            at, here = loaded.positions(wanted)
            answer = loaded.answer
            arrived = here & answer.found[at]
            values[missing[torch.from_numpy(arrived)]] = torch.from_numpy(answer.values[at[arrived]])
            good, _ = self._stale_for(wanted[here], answer.versions[at[here]], answer.lowest_of(at[here]))
            lowest = min(lowest, int(good.min(initial=NEWEST)))
            highest = max(highest, answer.newest(at[here]))
            unknown &= ~here | answer.late[at]
        if not unknown.any():
            return ReadResult(None, lowest, highest)
        mask = np.zeros(keys.numel(), np.bool_)
        mask[missing.numpy()[unknown]] = True
        if late == "default":
            values[torch.from_numpy(mask)] = self.store.default_row
        self._count(late=int(unknown.sum()))
        return ReadResult(mask, lowest, highest)

    def _record_use(self, keys: Tensor, found: Tensor, missing: int) -> None:
        self._reads += 1
        self._count(hits=keys.numel() - missing, misses=missing)
        if self._reads % TOUCH_EVERY == 0:
            self.store.core.warm(keys[found].contiguous())

    def _good_for(self, keys: Tensor) -> int:
        """The oldest publication that a cached row of these keys is good for."""
        if not self._stale:
            return NEWEST
        with self._lock:
            marks = [self._stale[key][0] for key in keys.tolist() if key in self._stale]
        return min(marks, default=NEWEST)

    def _known_absent(self, keys: Keys) -> NDArray[np.bool_]:
        if not self._absent:
            return np.zeros(len(keys), np.bool_)
        now = time.monotonic()
        with self._lock:
            return np.array([self._absent.get(key, 0.0) > now for key in keys.tolist()], np.bool_)

    # --- reading the store ---

    def load(self, keys: Keys, deadline: float) -> LoadedRows:
        """Read unique ascending keys from the store until `deadline` (time.monotonic()); cache what arrives."""
        ticket = self._begin()
        try:
            answer = self.remote.read(self.table.name, keys, deadline)
            self._keep(keys, answer)
        finally:
            self._end(ticket)
        absent = int((~answer.found & ~answer.late).sum())
        self._count(absent=absent, bytes=answer.bytes)
        return LoadedRows(keys, answer)

    def read(self, keys: Tensor, deadline: float) -> ReadRows:
        """Rows of any keys. Waits for the store until `deadline`."""
        with self._lock:
            self._forget()
        wanted, where = torch.unique(keys, return_inverse=True)
        values = torch.empty(wanted.numel(), self.table.dim)
        found = torch.empty(wanted.numel(), dtype=torch.bool)
        self.read_cached(wanted, values, found, "wait")
        missing = ~found
        loaded = self.load(wanted[missing].numpy(), deadline) if bool(missing.any()) else None
        result = self.finish_read(wanted, values, found, "initial", loaded)
        late = torch.zeros_like(found) if result.late is None else torch.from_numpy(result.late)
        lowest = highest = self.remote.lowest
        if loaded is not None:
            found[missing] = torch.from_numpy(loaded.answer.found)
            lowest, highest = loaded.answer.lowest, loaded.answer.highest
        return ReadRows(values[where], found[where], late[where], min(lowest, result.lowest), highest)

    def _begin(self) -> int:
        with self._lock:
            self._forget()
            ticket = max(self._reading, default=0) + 1
            self._reading[ticket] = self.remote.lowest
            return ticket

    def _end(self, ticket: int) -> None:
        with self._lock:
            del self._reading[ticket]
            self._forget()

    def _forget(self) -> None:
        """Forget publications that every future answer contains, and erase stale rows that the store has newer by now.

        Requires: the lock.
        """
        complete = self.remote.lowest
        oldest = min([complete, *self._reading.values()])
        while self._applied and (
            self._applied[0][0] <= oldest or len(self._applied) > MOST_APPLIED or self._applied_keys > MOST_APPLIED_KEYS
        ):
            number, keys = self._applied.popleft()
            self._applied_keys -= len(keys)
            self._forgotten = max(self._forgotten, number)
        if self._stale and complete > self._swept:
            ready = (key for key, (_, needs) in self._stale.items() if needs <= complete)
            over = list(itertools.islice(ready, MOST_ERASED if self.over_ssd else None))
            if not (self.over_ssd and len(over) == MOST_ERASED):
                self._swept = complete  # else the next call erases more: each row on SSD costs a read of the disk
            self.store.erase(torch.tensor(over, dtype=torch.int64))
            for key in over:
                del self._stale[key]
                self._absent.pop(key, None)

    def _stale_for(self, keys: Keys, versions: Keys, lowest: Keys | int) -> tuple[Keys, Keys]:
        """For rows from stores that were complete up to `lowest`: the publication that each is good for (NEWEST: the
        row lacks nothing that was applied), and the one that the store must have before the row is read again."""
        good, needs = np.full(len(keys), NEWEST), np.zeros(len(keys), np.int64)
        since = np.broadcast_to(np.asarray(lowest, np.int64), len(keys))
        behind = int(since.min(initial=NEWEST))
        for number, changed in list(self._applied):
            if number > behind:
                hit = (versions < number) & (since < number) & np.isin(keys, changed, assume_unique=True)
                good[hit] = np.minimum(good[hit], number - 1)
                needs[hit] = number
        if behind < self._forgotten:  # the keys that changed in between are forgotten
            old = (versions < self._forgotten) & (since < self._forgotten)
            good[old] = np.minimum(good[old], since[old])
            needs[old] = np.maximum(needs[old], self._forgotten)
        return good, needs

    def _keep(self, keys: Keys, answer: Answer) -> None:
        """Put rows that arrived into DRAM, with a stale mark where a row lacks an applied publication."""
        until = time.monotonic() + ABSENT_SECONDS
        with self._lock:
            good, needs = self._stale_for(keys, answer.versions, answer.lowest_of(np.arange(len(keys))))
            fresh = torch.from_numpy(keys)
            here = self.store.find(fresh) >= 0
            if self.over_ssd:
                here |= self._on_ssd(fresh)
            new = answer.found & ~here.numpy()  # another read or `apply` may have cached it meanwhile
            try:
                if self.ssd_is_full:
                    raise MemoryBudgetError("the SSD folder is full")
                self.store.assign(fresh[torch.from_numpy(new)], torch.from_numpy(answer.values[new]))
            except MemoryBudgetError:  # more rows than the cache can take: they serve this batch only
                new[:] = False
                self.counters["full"] += 1
            gone = ~answer.found & ~answer.late
            if len(self._absent) + int(gone.sum()) > MOST_ABSENT:
                self._absent.clear()
            self._absent.update(dict.fromkeys(keys[gone].tolist(), until))
            stale = (new | gone) & (good != NEWEST)
            if self._stale:
                for key in keys[(new | gone) & ~stale].tolist():
                    self._stale.pop(key, None)
            if stale.any():
                pairs = zip(good[stale].tolist(), needs[stale].tolist(), strict=True)
                self._stale.update(zip(keys[stale].tolist(), pairs, strict=True))
                self._swept = -1
            self._highest = max(self._highest, answer.newest(new | gone))
        self._count(kept=int(new.sum()), stale=int((stale & answer.found).sum()))

    # --- publications ---

    def apply(self, number: int, keys: Keys, values: Any, deleted: Keys | None = None) -> int:
        """Change cached rows to publication `number` (unique keys). Returns how many were cached."""
        gone = np.empty(0, np.int64) if deleted is None else deleted
        changed = torch.from_numpy(np.ascontiguousarray(keys))
        rows = torch.from_numpy(np.ascontiguousarray(values))
        touched = np.concatenate([keys, gone])
        with self._lock:
            self._forget()
            self._applied.append((number, touched))
            self._applied_keys += len(touched)
            for known in (self._stale, self._absent):
                if known:
                    for key in touched.tolist():
                        known.pop(key, None)  # type: ignore[attr-defined]
            cached = self.store.find(changed) >= 0
            if self.over_ssd:
                cached |= self.store.cold(changed)  # and a few that are not cached: they are as new as these
            self.store.assign(changed[cached], rows[cached])
            self.store.erase(torch.from_numpy(gone))
            return int(cached.sum())

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self.counters[name] += count

    def metrics(self) -> dict[str, int]:
        """Hits and misses of DRAM, absent keys, late rows, bytes, rows cached (`kept`), cached as stale, evicted."""
        return {**self.counters, "rows": len(self.store), "evicted": self.store.tier()["evicted"]}
