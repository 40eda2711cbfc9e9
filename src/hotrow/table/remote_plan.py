"""A collection's tables over one remote store, and one batch's way through them.

    route      deduplicate the batch's keys, table by table (the core's plan)
    prefetch   ask the store for what DRAM lacks, all tables at once: the only thing here that waits, for READ seconds
    read       rows from DRAM and from what prefetch brought; the policy for the others. Never waits
    gather     pool what was read

`prefetch` may be left out: then rows that are not in DRAM are late. After `read`, `lowest` and `highest` say which
publications the rows are from. Rows in a remote store are only read: what would train them is refused.

The store is opened once for all collections of a process that name it (two versions of a model, or a version and the
export that takes its place), because RocksDB lets nobody open a folder twice, and Redis need not be asked by each.

Threads: any number of plans at once, each on one thread; `bring` and `cold` from any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.config import Memory, enough, format_size
from hotrow.errors import ClosedError, LateError, LeftError, MemoryBudgetError, OptionError
from hotrow.table.remote import NEWEST, Brought, RemoteRows
from hotrow.table.rows import TableRows
from hotrow.table.ssd import least_bytes
from hotrow.tiers.host import SHARDS, HostStore
from hotrow.tiers.host_plan import HostPlan, Moved, Update
from hotrow.tiers.remote import RemoteStore, open_remote, write_publication

READ = 1.0  # seconds that a batch which waits gives the store
WAIT = 30.0  # seconds that a request gives it whose policy is to wait
PAUSE = 0.05  # between two tries
AT_ONCE = 8  # tables that are asked for at the same time

Change = tuple[Tensor, Tensor, Tensor]  # keys, values, deleted keys
Jobs = Sequence[tuple[HostStore, Sequence[tuple[Jagged, str]]]]


class _Opened(NamedTuple):
    store: RemoteStore
    users: int


_opened: dict[str, _Opened] = {}
_opening = threading.Lock()


def share_remote(url: str) -> RemoteStore:
    """The store at a URL, one for this process. Give it back with `unshare_remote`."""
    with _opening:
        found = _opened.get(url) or _Opened(open_remote(url), 0)
        _opened[url] = found._replace(users=found.users + 1)
        return found.store


def unshare_remote(url: str) -> None:
    """The last one closes it."""
    with _opening:
        found = _opened.pop(url)
        if found.users > 1:
            _opened[url] = found._replace(users=found.users - 1)
        else:
            found.store.close()


class RemoteTables:
    """The tables of a collection whose last tier is a remote store."""

    def __init__(self, memory: Memory, tables: Sequence[TableRows], seed: int) -> None:
        assert memory.remote is not None
        if memory.dram_bytes < (least := least_bytes(tables)):
            raise MemoryBudgetError(
                f"dram={format_size(memory.dram_bytes)} is too small for a cache of {len(tables)} tables over remote=; "
                f"give at least {enough(least)}"
            )
        self.url = memory.remote
        self.store = share_remote(self.url)
        try:
            if not self.store.marks().filled:
                raise OptionError(
                    f"remote={named(self.url)!r} has no rows yet, or is being filled; fill it first: "
                    "hotrow publish-remote BUS URL --export repository/ctr"
                )
            self.rows = [RemoteRows(rows.table, self.store, seed, rows.budget, rows.store) for rows in tables]
        except BaseException:
            unshare_remote(self.url)
            raise
        self.by_store = {id(rows.store): rows for rows in self.rows}
        for table, rows in zip(tables, self.rows, strict=True):
            table.remote = rows
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hotrow-remote")

    def begin(self, number: int) -> None:
        """The publication that is in service."""
        for rows in self.rows:
            rows.begin(number)

    def cold(self, parts: Sequence[tuple[HostStore, Tensor]]) -> int:
        """How many of some tables' keys must be asked for, duplicates counted."""
        return sum([int(self.by_store[id(store)].cold(keys).sum()) for store, keys in parts])

    def bring(self, parts: Sequence[tuple[HostStore, Tensor]], seconds: float) -> list[Brought | None]:
        """Ask the store for those keys that DRAM lacks; what came, for each part that lacked any."""
        wanted = []
        for store, keys in parts:
            rows = self.by_store[id(store)]
            missing = keys[rows.cold(keys)]
            wanted.append((rows, torch.unique(missing).numpy() if missing.numel() else None))
        deadline = time.monotonic() + seconds
        try:
            waits = [None if keys is None else self._pool.submit(rows.bring, keys, deadline) for rows, keys in wanted]
        except RuntimeError:
            raise ClosedError(f"the tables over {named(self.url)} are closed; open them again") from None
        return [None if one is None else one.result() for one in waits]

    def warm(self, parts: Sequence[tuple[HostStore, Tensor]], patient: bool = False) -> int:
        """Bring rows of these keys; returns how many came. A patient one tries until all have, or WAIT is over."""
        until, came = time.monotonic() + WAIT, 0
        while True:
            brought = [one.answer for one in self.bring(parts, READ) if one is not None]
            came += sum([int(answer.found.sum()) for answer in brought])
            late = any(answer.late.any() for answer in brought)
            if not (patient and late) or time.monotonic() + PAUSE >= until:
                return came
            time.sleep(PAUSE)

    def take(self, number: int, previous: int, changes: Mapping[str, Change]) -> None:
        """A publication is about to be applied here: a store that nobody else can write gets it first."""
        if is_local(self.url):
            rows = {name: (keys.numpy(), values.numpy()) for name, (keys, values, _) in changes.items()}
            deleted = {name: gone.numpy() for name, (_, _, gone) in changes.items()}
            write_publication(self.store, number, rows, deleted, previous)

    def metrics(self) -> dict[str, int]:
        """The sums over all tables (RemoteRows.metrics)."""
        figures = [rows.metrics() for rows in self.rows]
        return {name: sum([one[name] for one in figures]) for name in figures[0]}

    def figures(self) -> dict[str, int]:
        """For metrics: what the cache and the store have done, and how the store is."""
        counts, health = self.metrics(), self.store.health()
        named = {name: counts[name] for name in ("hits", "misses", "absent", "late", "rows", "bytes")}
        return {**named, "up": int(health["ok"]), "publication": self.store.lowest}

    def close(self) -> None:
        """Let go of the store; batches under way must have ended, or find their rows late."""
        self._pool.shutdown(wait=True)
        unshare_remote(self.url)


class RemotePlan:
    """One batch's way through tables over a remote store. See hotrow.table.lookup.Plan."""

    share, over, late = 1.0, False, 0
    examples: int | None = None

    def __init__(self, tables: RemoteTables) -> None:
        self.tables = tables
        self.host = HostPlan()
        self.late_ids = 0
        self.lowest, self.highest = NEWEST, 0
        self._everybody = torch.zeros(SHARDS, dtype=torch.int32)
        self._forget()

    def _forget(self) -> None:
        self._jobs: Jobs = []
        self._keys: list[tuple[RemoteRows, Tensor]] = []
        self._brought: list[Brought | None] = []
        self._late: dict[int, np.ndarray] = {}  # type: ignore[type-arg]  # table number → late keys

    def route(self, jobs: Jobs, ahead: bool = False) -> None:
        """Deduplicate the keys of each table's features."""
        self._forget()
        self.host.route(jobs)
        counts, keys, _ = self.host.deal(self._everybody, 1, len(jobs))
        self._jobs = jobs
        stores = [self.tables.by_store[id(store)] for store, _ in jobs]
        self._keys = list(zip(stores, keys.split(counts[0].tolist()), strict=True))

    def prefetch(self) -> Moved:
        """Ask the store for the rows that are not in DRAM."""
        self._brought = self.tables.bring([(rows.store, keys) for rows, keys in self._keys], READ)
        came = [one.answer for one in self._brought if one is not None]
        return Moved(sum([int(a.found.sum()) for a in came]), sum([a.bytes for a in came]))

    def stage(self) -> Moved:
        """Nothing: there is no tier above DRAM."""
        return Moved()

    def read(self, late: str = "wait") -> None:
        """Rows from DRAM, from what was prefetched, by the policy. With "wait" a row that did not come is an error."""
        amounts = [keys.numel() for _, keys in self._keys]
        ends = np.cumsum([0, *[n * rows.table.dim for n, (rows, _) in zip(amounts, self._keys, strict=True)]]).tolist()
        flat, found = torch.empty(ends[-1]), torch.empty(sum(amounts), dtype=torch.bool)
        founds = found.split(amounts)
        self.lowest, self.highest, self._late = NEWEST, 0, {}
        for number, ((rows, keys), (begin, end)) in enumerate(zip(self._keys, pairwise(ends), strict=True)):
            if not keys.numel():
                continue
            values = flat[begin:end].view(-1, rows.table.dim)
            rows.store.read_into(keys, values, founds[number])
            brought = self._brought[number] if self._brought else None
            seen = rows.look(keys, values, founds[number], late, brought)
            self.lowest, self.highest = min(self.lowest, seen.lowest), max(self.highest, seen.highest)
            if seen.late is not None:
                self._late[number] = keys.numpy()[seen.late]
        if self._late and late == "wait":
            self._refuse()
        self.host.take_rows(flat)
        self.late_ids = int(self.late_by_example(0).sum()) if self._late else 0

    def _refuse(self) -> None:
        """Say why rows that are waited for are not there."""
        count = sum([len(keys) for keys in self._late.values()])
        names = ", ".join([self._keys[number][0].table.name for number in self._late])
        for number, keys in self._late.items():
            brought = self._brought[number] if self._brought else None
            if brought is None or not brought.places(keys)[1].all():
                raise LeftError(f"rows of {names} left memory between being looked for and being read; ask again")
        raise LateError(
            f"{count} rows of {names} did not come from the remote store ({_state(self.tables.store)}); ask again, or "
            "with the policy initial or default"
        )

    def late_by_example(self, examples: int) -> Tensor:
        """After `read`: how many of its ids a policy answered, for each example, int32."""
        counts: Tensor | None = None
        for number, keys in self._late.items():
            for ids, _ in self._jobs[number][1]:
                mask = torch.from_numpy(np.isin(ids.values.numpy(), keys)).to(torch.int64)
                if ids.offsets is not None:
                    sums = torch.cat([mask.new_zeros(1), mask.cumsum(0)])
                    mask = sums[ids.offsets[1:]] - sums[ids.offsets[:-1]]
                counts = mask if counts is None else counts + mask
        return torch.zeros(examples, dtype=torch.int32) if counts is None else counts.to(torch.int32)

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one matrix for each feature."""
        self.host.gather(outputs)

    def release(self) -> None:
        """Let go of the rows."""
        self.host.release()
        self._forget()

    @property
    def unique(self) -> int:
        """Unique keys in the batch, table by table."""
        return self.host.unique

    def fetch(self, step: int = 0) -> None:
        """Refused."""
        raise OptionError("rows over remote= are only read: train with dram= and ssd=, and publish to the remote store")

    def update(
        self,
        gradients: Sequence[Tensor | None],
        checked: Sequence[Tensor],
        updates: Sequence[Update],
        step: int,
        grad_scale: float,
    ) -> None:
        """Refused."""
        self.fetch(step)


def is_local(url: str) -> bool:
    """Whether the store belongs to this process alone, which then must write it."""
    return url.startswith("rocksdb:")


def named(url: str) -> str:
    """A store's URL without what is secret in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if rest else url


def _state(store: RemoteStore) -> str:
    health = store.health()
    down = [f"{name} {state}" for name, state in health["nodes"].items() if state.startswith("down")]
    return ", ".join(down) or "it answers too slowly"
