"""A server's table over a remote store: DRAM is a cache, what it lacks is brought from the store before a deadline.

    DRAM → remote store → the row of an unseen key, or late

`bring` asks the store and keeps what came; `look` answers from DRAM and never waits, so it may run where a switch of
publications waits for it. Rows that have not been used for long are forgotten when DRAM is full (the core's `drops`:
nothing is written, the store has them). Rows are never created or counted here. That a key has no row is remembered
for a second, so that those who look after `bring` can tell it from one of which nothing is known.

A publication that this server applies (`apply`) changes the rows that are cached. The store may get it later, or a read
under way may have seen the row of before: so the keys of every publication that the store does not have whole yet are
remembered, and a row that is older than what was applied is kept with a mark: which publication it is good for, and
which one the store must have before it is asked again. What is remembered is 8 bytes a changed row, for as long as the
store lags behind. So every answer can name a publication that all of its rows are as new as.

Threads: any number may look and bring at once, beside one that applies.
"""

from __future__ import annotations

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
from hotrow.tiers.host.store import Budget, HostStore
from hotrow.tiers.plan import ANY_PUBLICATION
from hotrow.tiers.remote.store import Answer, Keys, RemoteStore

WARM_EVERY = 4  # looks: one in four tells the cache what is used, which is enough and costs a fourth
ABSENT_SECONDS = 1.0  # for which it is believed that a key has no row
MOST_ABSENT = 200_000
NEWEST = ANY_PUBLICATION[0]  # "as new as anything"


@dataclass(frozen=True)
class ReadRows:
    """Values [n, dim] of a batch's keys. Rows not found or late read as unseen keys do; the caller knows which."""

    values: Tensor
    found: Tensor
    late: Tensor
    lowest: int  # of the publications that rows from the store contain
    highest: int


@dataclass(frozen=True)
class Brought:
    """What a store gave for unique keys, rising."""

    keys: Keys
    answer: Answer

    def places(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where keys stand here, and which of them do."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
        at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return at, self.keys[at] == keys


@dataclass(frozen=True)
class Seen:
    """What is known of a batch's keys without asking: which are late, and the publications of the others.

    `lowest` is NEWEST where no row is known to be older than what was applied.
    """

    late: NDArray[np.bool_] | None
    lowest: int
    highest: int


class RemoteRows:
    """One table's rows, cached in DRAM over a remote store; in `store`, or in one of its own within `budget`."""

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
        with tempfile.TemporaryDirectory(prefix="hotrow-cache-") as folder:
            self.store.attach_cache(folder)
        names = ("hits", "misses", "absent", "late", "bytes", "kept", "stale", "full")
        self.counters = dict.fromkeys(names, 0)
        self._lock = threading.Lock()
        self._applied: deque[tuple[int, Keys]] = deque()
        self._forgotten = 0  # the newest publication that was applied and whose keys are not known any more
        self._reading: dict[int, int] = {}  # reads under way → the store's lowest publication when they began
        self._marks: dict[int, tuple[int, int]] = {}  # key → what its row is good for, what the store must have
        self._swept = -1
        self._absent: dict[int, float] = {}  # key → until when it is believed
        self._highest = 0  # of the publications that cached rows are from
        self._looks = 0

    def begin(self, number: int) -> None:
        """What is served is as new as this publication: older rows of the store are marked so."""
        with self._lock:
            self._forgotten = max(self._forgotten, number)

    # --- without waiting ---

    def cold(self, keys: Tensor) -> Tensor:
        """Of which keys nothing is known here: the store has their rows, or nobody."""
        if self._marks and self.remote.lowest > self._swept:
            with self._lock:
                self._forget()
        missing = self.store.find(keys) < 0
        if self._absent and bool(missing.any()):
            places = torch.nonzero(missing).flatten()
            missing[places[torch.from_numpy(self._known_absent(keys[places].numpy()))]] = False
        return missing

    def look(self, keys: Tensor, values: Tensor, found: Tensor, late: str, brought: Brought | None = None) -> Seen:
        """Finish what `store.read_into` found in DRAM: rows that were `brought`, and the policy `late` for the others.

        Keys are unique. With the policy "wait" late rows keep the values of unseen keys; the caller refuses.
        """
        missing = torch.nonzero(~found).flatten()
        self._warm(keys, found, missing.numel())
        lowest, highest = self._good_for(keys), self._highest
        if missing.numel() == 0:
            return Seen(None, lowest, highest)
        asked = keys[missing].numpy()
        unknown = ~self._known_absent(asked)
        if brought is not None:
            at, here = brought.places(asked)
            answer = brought.answer
            came = here & answer.found[at]
            values[missing[torch.from_numpy(came)]] = torch.from_numpy(answer.values[at[came]])
            good, _ = self._missed(asked[here], answer.versions[at[here]], answer.lowest)
            lowest = min(lowest, int(good.min(initial=NEWEST)))
            highest = max(highest, int(answer.versions[at[came]].max(initial=0)))
            unknown &= ~here | answer.late[at]
        if not unknown.any():
            return Seen(None, lowest, highest)
        mask = np.zeros(keys.numel(), np.bool_)
        mask[missing.numpy()[unknown]] = True
        if late == "default":
            values[torch.from_numpy(mask)] = self.store.default_row
        self._count(late=int(unknown.sum()))
        return Seen(mask, lowest, highest)

    def _warm(self, keys: Tensor, found: Tensor, missing: int) -> None:
        self._looks += 1
        self._count(hits=keys.numel() - missing, misses=missing)
        if self._looks % WARM_EVERY == 0:
            self.store.core.warm(keys[found].contiguous())

    def _good_for(self, keys: Tensor) -> int:
        """The oldest publication that one of the cached rows is known to be of."""
        if not self._marks:
            return NEWEST
        with self._lock:
            marks = [self._marks[key][0] for key in keys.tolist() if key in self._marks]
        return min(marks, default=NEWEST)

    def _known_absent(self, keys: Keys) -> NDArray[np.bool_]:
        if not self._absent:
            return np.zeros(len(keys), np.bool_)
        now = time.monotonic()
        with self._lock:
            return np.array([self._absent.get(key, 0.0) > now for key in keys.tolist()], np.bool_)

    # --- from the store ---

    def bring(self, keys: Keys, deadline: float) -> Brought:
        """Ask the store for unique keys (rising), until `deadline` (time.monotonic()); keep what came."""
        ticket = self._begin()
        try:
            answer = self.remote.read(self.table.name, keys, deadline)
            self._keep(keys, answer)
        finally:
            self._end(ticket)
        absent = int((~answer.found & ~answer.late).sum())
        self._count(absent=absent, bytes=answer.bytes)
        return Brought(keys, answer)

    def read(self, keys: Tensor, deadline: float) -> ReadRows:
        """Rows of any keys, until `deadline` where the store must be asked."""
        with self._lock:
            self._forget()
        wanted, where = torch.unique(keys, return_inverse=True)
        values = torch.empty(wanted.numel(), self.table.dim)
        found = torch.empty(wanted.numel(), dtype=torch.bool)
        self.store.read_into(wanted, values, found)
        missing = ~found
        brought = self.bring(wanted[missing].numpy(), deadline) if bool(missing.any()) else None
        seen = self.look(wanted, values, found, "initial", brought)
        late = torch.zeros_like(found) if seen.late is None else torch.from_numpy(seen.late)
        lowest = highest = self.remote.lowest
        if brought is not None:
            found[missing] = torch.from_numpy(brought.answer.found)
            lowest, highest = brought.answer.lowest, brought.answer.highest
        return ReadRows(values[where], found[where], late[where], min(lowest, seen.lowest), highest)

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
        """Publications that every answer to come contains, of reads under way too; and rows that the store has newer.

        Requires: the lock.
        """
        there = self.remote.lowest
        oldest = min([there, *self._reading.values()])
        while self._applied and self._applied[0][0] <= oldest:
            self._forgotten = max(self._forgotten, self._applied.popleft()[0])
        if self._marks and there > self._swept:
            self._swept = there
            over = [key for key, (_, needs) in self._marks.items() if needs <= there]
            self.store.erase(torch.tensor(over, dtype=torch.int64))
            for key in over:
                del self._marks[key]
                self._absent.pop(key, None)

    def _missed(self, keys: Keys, versions: Keys, lowest: int) -> tuple[Keys, Keys]:
        """For rows of a store that was complete up to `lowest`: the publication that each is good for (NEWEST: nothing
        that was applied is missing), and the one that the store must have to be asked again."""
        good, needs = np.full(len(keys), NEWEST), np.zeros(len(keys), np.int64)
        for number, changed in list(self._applied):
            if number > lowest:
                hit = (versions < number) & np.isin(keys, changed, assume_unique=True)
                good[hit] = np.minimum(good[hit], number - 1)
                needs[hit] = number
        if lowest < self._forgotten:  # nobody knows which keys changed in between
            old = versions < self._forgotten
            good[old] = np.minimum(good[old], lowest)
            needs[old] = np.maximum(needs[old], self._forgotten)
        return good, needs

    def _keep(self, keys: Keys, answer: Answer) -> None:
        """Put what came into DRAM, marked where a publication that was applied here is missing in it."""
        until = time.monotonic() + ABSENT_SECONDS
        with self._lock:
            good, needs = self._missed(keys, answer.versions, answer.lowest)
            fresh = torch.from_numpy(keys)
            new = answer.found & (self.store.find(fresh) < 0).numpy()  # another read may have brought it, or `apply`
            try:
                self.store.assign(fresh[torch.from_numpy(new)], torch.from_numpy(answer.values[new]))
            except MemoryBudgetError:  # more rows than the cache takes at once: they serve this batch alone
                new[:] = False
                self.counters["full"] += 1
            gone = ~answer.found & ~answer.late
            if len(self._absent) + int(gone.sum()) > MOST_ABSENT:
                self._absent.clear()
            self._absent.update(dict.fromkeys(keys[gone].tolist(), until))
            stale = (new | gone) & (good != NEWEST)
            if self._marks:
                for key in keys[(new | gone) & ~stale].tolist():
                    self._marks.pop(key, None)
            if stale.any():
                pairs = zip(good[stale].tolist(), needs[stale].tolist(), strict=True)
                self._marks.update(zip(keys[stale].tolist(), pairs, strict=True))
                self._swept = -1
            self._highest = max(self._highest, int(answer.versions[new].max(initial=0)))
        self._count(kept=int(new.sum()), stale=int((stale & answer.found).sum()))

    # --- publications ---

    def apply(self, number: int, keys: Keys, values: Any, deleted: Keys | None = None) -> int:
        """Publication `number` changed these rows (unique keys): those that are cached change now. Returns how many."""
        gone = np.empty(0, np.int64) if deleted is None else deleted
        changed = torch.from_numpy(np.ascontiguousarray(keys))
        rows = torch.from_numpy(np.ascontiguousarray(values))
        touched = np.concatenate([keys, gone])
        with self._lock:
            self._forget()
            self._applied.append((number, touched))
            for known in (self._marks, self._absent):
                if known:
                    for key in touched.tolist():
                        known.pop(key, None)  # type: ignore[attr-defined]
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
