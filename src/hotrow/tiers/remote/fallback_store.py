"""FallbackStore: several stores of the same rows, read in order. A store that fails is passed over for the next.

    read    asks the first store that is up. Keys without an answer are asked of the next one, within the same
            deadline: a store that is not the last gets SHARE of the time that is left
    down    a store that raised an error, or that let requests wait SILENCE seconds in all without any row: `read`
            passes it over at once, so a few requests wait for it and not every one
    up      a thread of each store probes it while it is down, at intervals that double up to a second, and `read` asks
            it again after the first answer. No request is used as a probe

A store may have nodes of its own that fail alone (redis_nodes.py). Their keys are late at once, and the next store
answers them. Each key is answered by one store, and `Answer.lowest_by_key` has that store's publication. So what a
caller says about the age of a row is right whichever store answered.

A store that cannot be opened at the start is tried again in the background, as long as another one could be opened.

Each store is written by itself (`hotrow publish-remote`, or the server for RocksDB). This object is only read.

Threads: any number may read at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotrow.backoff import Backoff
from hotrow.errors import HotRowError, OptionError, StorageError
from hotrow.tiers.remote.read_only import ReadOnlyStore
from hotrow.tiers.remote.store import Answer, Keys, Marks, RemoteStore, TableFormat

SHARE = 0.5  # of the time that is left, for a store that is not the last
SILENCE = 0.25  # seconds of waiting without any row after which a store counts as down
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # between two probes or two attempts to open
PROBE = 1.0  # seconds that a probe waits
CHECK = 0.25  # seconds between two looks at a store's health
WHOLE_AFTER = 1.0  # seconds without a late row until a store counts as whole again
OPEN = 5.0  # seconds that the start waits for a store while another one is open

log = logging.getLogger("hotrow.remote")


@dataclass(frozen=True)
class StoreSource:
    """How to open and close one of the stores. `name` is its address without a login."""

    name: str
    open: Callable[[], RemoteStore]
    close: Callable[[RemoteStore], None] = lambda store: store.close()


class FallbackStore(ReadOnlyStore):
    """Stores in the order in which they are read (hotrow.tiers.remote.store.RemoteStore).

    Every store must have the tables in `dims`, by name, with these dims.
    """

    def __init__(self, sources: Sequence[StoreSource], dims: Mapping[str, int]) -> None:
        self._closing = threading.Event()
        self.members = [_Member(source, dims, self._closing) for source in sources]
        self.counters = {"reads": 0, "rows": 0, "late": 0, "bytes": 0, "fallback": 0}
        self._lock = threading.Lock()
        for member in self.members:
            member.thread.start()
        try:
            self._wait_until_open()
        except HotRowError:
            self.close()
            raise

    def _wait_until_open(self) -> None:
        deadline = time.monotonic() + OPEN
        for member in self.members:
            while not member.tried.wait(0.02):
                if time.monotonic() > deadline and any(other.store is not None for other in self.members):
                    break
            if isinstance(member.error, OptionError):
                raise member.error
        if all(member.store is None for member in self.members):
            why = "; ".join(f"{member.source.name}: {member.error}" for member in self.members)
            raise StorageError(f"none of the stores in remote= can be read: {why}")
        for member in self.members:
            if member.store is None:
                log.warning("%s is passed over: %s", member.source.name, member.error or "it does not answer")

    # --- reading ---

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        """Rows of the keys (duplicates too), until `deadline`: each from the first store that answers for it."""
        whole: Answer | None = None
        left = np.arange(len(keys))  # positions of the keys without an answer
        for member, until in self._in_order(deadline):
            answer = member.read(table, keys[left], until)
            if answer is None:
                continue
            if member is not self.members[0]:
                self._count(fallback=int((~answer.late).sum()))
            whole = answer if len(left) == len(keys) else _merge(whole or self._nothing(table, len(keys)), left, answer)
            left = np.flatnonzero(whole.late)
            if not len(left):
                break
        whole = whole or self._nothing(table, len(keys))
        self._count(reads=1, rows=len(keys), late=int(whole.late.sum()), bytes=whole.bytes)
        return whole

    def _in_order(self, deadline: float) -> Iterator[tuple[_Member, float]]:
        """The stores that are up, and until when each may be waited for."""
        up = [member for member in self.members if member.up]
        for member in up:
            now = time.monotonic()
            last = member is up[-1]
            yield member, deadline if last else now + SHARE * max(0.0, deadline - now)

    def _nothing(self, table: str, count: int) -> Answer:
        dim = self.tables()[table].dim
        late, versions = np.ones(count, np.bool_), np.full(count, -1, np.int64)
        since = np.full(count, self.lowest, np.int64)
        return Answer(np.zeros((count, dim), np.float32), ~late, late, versions, self.lowest, 0, since)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self.counters[name] += count

    @property
    def lowest(self) -> int:
        """The publication of the first store that answers everything. It falls when that store fails and the next one
        is older, and rises when it is back: then CachedTable reads the rows of the older store again."""
        opened = [member for member in self.members if member.store is not None]
        for state in ("whole", "up"):
            for member in opened:
                if getattr(member, state):
                    return member.lowest
        return min([member.lowest for member in opened], default=0)

    def tables(self) -> dict[str, TableFormat]:
        """The tables of the first store that is open. All have the same."""
        return next(member.tables for member in self.members if member.store is not None)

    def marks(self) -> Marks:
        """Those of the first store that is up."""
        member = next((member for member in self.members if member.up), None)
        if member is None or member.store is None:
            raise StorageError(f"no store in remote= answers: {'; '.join(map(str, self.members))}")
        return member.store.marks()

    def opened(self, name: str) -> RemoteStore | None:
        """The store of this name, if it is open."""
        return next((member.store for member in self.members if member.source.name == name), None)

    def health(self) -> dict[str, Any]:
        """Whether all stores are up, and each store's nodes. `stores` has the state of each, in order."""
        nodes: dict[str, str] = {}
        for member in self.members:
            known = {} if member.store is None else member.store.health()["nodes"]
            nodes |= {f"{member.source.name} {node}" if len(known) > 1 else node: text for node, text in known.items()}
            if not member.up:
                nodes[member.source.name] = f"down: {member.error}"
        return {
            "ok": all(member.whole for member in self.members),
            "nodes": nodes,
            "stores": {member.source.name: str(member) for member in self.members},
            "complete": self.lowest,
            **self.counters,
        }

    def close(self) -> None:
        """End the threads and close all stores."""
        self._closing.set()
        for member in self.members:
            member.close()


class _Member:
    """One of the stores, whether it is up, and the thread that opens and probes it."""

    def __init__(self, source: StoreSource, dims: Mapping[str, int], closing: threading.Event) -> None:
        self.source, self._dims, self._closing = source, dims, closing
        self.store: RemoteStore | None = None
        self.tables: dict[str, TableFormat] = {}
        self.up = self.whole = False  # `whole`: up, and no row of it was late for a while
        self.error: Exception | None = None
        self.tried = threading.Event()  # it was tried to open once
        self._wake = threading.Event()
        self._silence = 0.0
        self._late_at = -WHOLE_AFTER
        self.thread = threading.Thread(target=self._run, name="hotrow-store", daemon=True)

    def __str__(self) -> str:
        return "up" if self.whole else "up, with late rows" if self.up else f"down: {self.error or 'not open yet'}"

    @property
    def lowest(self) -> int:
        return 0 if self.store is None else self.store.lowest

    def read(self, table: str, keys: Keys, until: float) -> Answer | None:
        """The store's answer; None if it failed."""
        started = time.monotonic()
        assert self.store is not None
        try:
            answer = self.store.read(table, keys, until)
        except Exception as error:  # also of a store's own library
            if isinstance(error, HotRowError) and not isinstance(error, StorageError):
                raise
            self._mark_down(error)
            return None
        if not answer.late.any():
            self._silence = 0.0
        elif until > started:  # a read without any time says nothing about the store
            self.whole, self._late_at = False, time.monotonic()
            self._silence = self._silence + self._late_at - started if answer.late.all() else 0.0
            if self._silence >= SILENCE:
                self._mark_down(TimeoutError(f"no answer in {SILENCE:g} s"))
        return answer

    def _mark_down(self, error: Exception) -> None:
        if self.up:
            log.warning("%s is passed over: %s", self.source.name, error)
        self.error, self.up, self.whole = error, False, False
        self._wake.set()

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.25)
        while not self._closing.is_set():
            if self.up:
                backoff.reset()
                quiet = time.monotonic() - self._late_at >= WHOLE_AFTER
                self.whole = self.up and quiet and self._healthy()
                self._wake.wait(CHECK)
                self._wake.clear()
            elif not self._try():
                self._closing.wait(backoff.next())
        self._end()

    def _healthy(self) -> bool:
        try:
            return self.store is not None and bool(self.store.health()["ok"])
        except Exception:
            return False

    def _try(self) -> bool:
        """Open the store, or send a probe. Returns whether it is up."""
        try:
            if self.store is None:
                self._open()
            else:
                key = np.zeros(1, np.int64)
                if self.store.read(next(iter(self.tables)), key, time.monotonic() + PROBE).late.any():
                    raise TimeoutError(f"no answer in {PROBE:g} s")
                log.warning("%s is used again", self.source.name)
            self._silence, self._late_at = 0.0, -WHOLE_AFTER
            self.up = self.whole = True
        except Exception as error:
            self.error = error
        self.tried.set()
        return self.up

    def _open(self) -> None:
        store = self.source.open()
        try:
            if not store.marks().filled:
                raise StorageError(
                    f"remote={self.source.name!r} has no rows yet, or is being filled; fill it first: "
                    "hotrow publish-remote BUS URL --export repository/ctr"
                )
            tables = store.tables()
            for name, dim in self._dims.items():
                if name not in tables or tables[name].dim != dim:
                    there = f"has dim {tables[name].dim} there" if name in tables else "is not there"
                    raise OptionError(
                        f"remote={self.source.name!r}: table {name!r} of dim {dim} {there}; fill it from an export of "
                        "this model (hotrow publish-remote)"
                    )
        except BaseException:
            self.source.close(store)
            raise
        self.tables, self.store = {name: tables[name] for name in self._dims}, store

    def _end(self) -> None:
        store, self.up, self.whole = self.store, False, False
        try:
            if store is not None:
                self.source.close(store)
        except Exception as error:
            log.warning("%s did not close: %s", self.source.name, error)

    def close(self) -> None:
        """End the thread, which closes the store."""
        self._wake.set()
        if self.thread.is_alive():
            self.thread.join(timeout=5)


def _merge(base: Answer, positions: Any, more: Answer) -> Answer:
    """`base` with the answers of another store for the keys at these positions, which are late in `base`."""
    values, found, late, versions = base.values.copy(), base.found.copy(), base.late.copy(), base.versions.copy()
    since = np.full(len(found), base.lowest, np.int64) if base.lowest_by_key is None else base.lowest_by_key.copy()
    values[positions], found[positions] = more.values, more.found
    late[positions], versions[positions] = more.late, more.versions
    since[positions] = more.lowest if more.lowest_by_key is None else more.lowest_by_key
    lowest = more.lowest if late.all() else int(since[~late].min())
    return Answer(values, found, late, versions, lowest, base.bytes + more.bytes, since)
