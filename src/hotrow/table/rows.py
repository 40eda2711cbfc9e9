"""TableRows: read, assign, erase and scan one table's rows by key.

It is for importing weights, inspecting, exporting and tests. Training and serving use `Lookup`, a whole batch at a
time. Rows are looked up in tier order: DRAM, then SSD.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hotrow.optim import Optimizer
from hotrow.row_policies import Clock
from hotrow.table_definition import Table
from hotrow.tiers.host.store import Budget, HostStore, PrefetchHandle, Rows
from hotrow.units import parse_milliseconds

if TYPE_CHECKING:
    from hotrow.tiers.remote.cached_rows import CachedTable
    from hotrow.tiers.rows.tables import RemoteRows


@dataclass(frozen=True)
class HotKey:
    """A key that was seen often."""

    key: int
    count: int
    last_step: int


class Hot(Protocol):
    """The HBM cache over the store (tiers/hbm/cache.py)."""

    def exclusive(self) -> AbstractContextManager[None]: ...
    def flush(self) -> None: ...
    def drop(self) -> None: ...


class TableRows:
    """The rows of one table.

    >>> from hotrow.optim import SGD
    >>> rows = TableRows(Table("user", dim=4), SGD(lr=0.1), seed=0, budget=Budget())
    >>> rows.assign(torch.tensor([7, -1]), torch.ones(2, 4))
    >>> len(rows), rows.read(torch.tensor([-1])).tolist()
    (2, [[1.0, 1.0, 1.0, 1.0]])
    """

    def __init__(self, table: Table, optimizer: Optimizer, seed: int, budget: Budget) -> None:
        self.table = table
        self.optimizer = table.optimizer or optimizer
        self.store = HostStore(
            table.name, table.dim, self.optimizer, table.initial, seed, budget, table.values, table.dtype
        )
        if table.default is not None:
            self.store.default_row = torch.tensor(table.default)
        self.budget = budget
        # The cache over a remote store, or that rows are on row servers; set by the collection.
        self.remote: CachedTable | RemoteRows | None = None
        self.clock = Clock(self._span())
        self.hbm_cache: Hot | None = None  # set by the collection
        # With ranks, set by the collection: adds up one number of each rank.
        self.sum_over_ranks: Callable[[int], int] | None = None
        if table.admission is not None:
            self.store.set_admission(table.admission.after, table.admission.probability, table.admission.sketch_bytes)

    def __len__(self) -> int:
        return len(self.store)

    def __repr__(self) -> str:
        return f"TableRows({self.table.name!r}, dim={self.table.dim}, rows={len(self):,})"

    def read(self, keys: Tensor) -> Tensor:
        """Values [n, dim]. A key without a row reads its initial values and gets no row."""
        self.flush()
        return self.store.read(keys)[0]

    def contains(self, keys: Tensor) -> Tensor:
        """Which keys have a row."""
        return self.store.read(keys)[1]

    def create(self, keys: Tensor) -> None:
        """Create the initial row of every key that has none."""
        self.store.create(keys)

    def assign(
        self, keys: Tensor, values: Tensor, counts: Tensor | None = None, last_steps: Tensor | None = None
    ) -> None:
        """Set rows: `values` is [n, dim], or [n, width] with the optimizer's state after the values."""
        with self._exclusive():
            self.flush_and_drop()
            self.store.assign(keys, values, counts, last_steps)

    def erase(self, keys: Tensor) -> int:
        """Remove rows; returns how many there were. A later batch with such a key creates its initial row."""
        with self._exclusive():
            self.flush_and_drop()
            return self.store.erase(keys)

    def scan(self, chunk: int = 65536) -> Iterator[Rows]:
        """All rows with their optimizer state, counts and last steps, chunk by chunk."""
        self.flush()
        return self.store.scan(chunk)

    def _exclusive(self) -> AbstractContextManager[None]:
        """Inside the block, no row is uploaded to HBM."""
        return nullcontext() if self.hbm_cache is None else self.hbm_cache.exclusive()

    def flush(self) -> None:
        """Write back the rows that are newer in HBM. Call it before reading the store directly."""
        if self.hbm_cache is not None:
            self.hbm_cache.flush()

    def flush_and_drop(self) -> None:
        """Write back newer rows and empty the HBM cache. Call it before changing the store directly."""
        if self.hbm_cache is not None:
            self.hbm_cache.flush()
            self.hbm_cache.drop()

    def prefetch(self, keys: Tensor) -> PrefetchHandle:
        """Start loading the rows of these keys from SSD into DRAM, in the background. The handle's `wait()` blocks
        until they are loaded.

        No result depends on it: a batch whose rows are not loaded yet reads them itself.
        """
        return PrefetchHandle(self.store, keys)

    def cold(self, keys: Tensor) -> Tensor:
        """Which keys may have a row outside DRAM only. Never waits for a slower tier, so it may include unseen keys."""
        return self.store.cold(keys) if self.remote is None else self.remote.cold(keys)

    def after_load(self) -> None:
        """Restore the clock after a snapshot was loaded into the store."""
        self.clock = Clock.from_json(self.store.notes, self._span())

    def sweeps_at(self, step: int) -> bool:
        """Whether rows may be removed after that update."""
        return self.table.expiry is not None and step % self.table.expiry.every == 0

    def after_step(self, step: int, watermark: int | None) -> int:
        """After update `step`, with event times up to `watermark`: remove expired rows if a sweep is due.

        Returns how many rows were removed at once. Expired rows on SSD are removed when they are next read.
        """
        rules = self.table.expiry
        if rules is None:
            return 0
        if rules.time is not None and self.clock.note(step, watermark):
            self.store.notes = self.clock.to_json()
        if step % rules.every:
            return 0
        cutoffs = [step - rules.steps] if rules.steps is not None else []
        if rules.time is not None and (old := self.clock.last_before()):
            cutoffs.append(old + 1)
        grace = max(0, step - (rules.grace if rules.grace is not None else rules.every))
        sweep = {
            "cutoff": max([0, *cutoffs]),
            "count_cutoff": grace if rules.min_count is not None else 0,
            "min_count": rules.min_count or 0,
            "norm_cutoff": grace if rules.min_norm is not None else 0,
            "min_norm": rules.min_norm or 0.0,
            "max_rows": rules.max_rows or 0,
        }
        return self.store.sweep(elsewhere=self._elsewhere(sweep), **sweep)

    def _elsewhere(self, rules: dict[str, float]) -> int:
        """How many rows the other ranks keep in this sweep; 0 if all ranks' rows together are within `max_rows`."""
        if self.sum_over_ranks is None or not rules["max_rows"] or self.sum_over_ranks(len(self)) <= rules["max_rows"]:
            return 0
        here = self.store.staying(**rules)
        return self.sum_over_ranks(here) - here

    def _span(self) -> int:
        return (
            0
            if self.table.expiry is None or self.table.expiry.time is None
            else parse_milliseconds(self.table.expiry.time)
        )

    def state(self, rows: Rows) -> dict[str, Tensor]:
        """The optimizer state of scanned rows, by name."""
        if self.table.values is not None:
            return {}
        parts = {part.name: part.width for part in self.optimizer.state(self.table.dim)}
        pieces = rows.values[:, self.table.dim :].split(list(parts.values()), dim=1) if parts else ()
        return dict(zip(parts, pieces, strict=True))

    def hottest(self, count: int = 10) -> list[HotKey]:
        """The keys that training saw most often."""
        top: list[tuple[int, int, int]] = []
        for rows in self.scan():
            best = torch.topk(rows.counts, min(count, rows.counts.numel())).indices
            found = zip(
                rows.counts[best].tolist(), rows.keys[best].tolist(), rows.last_steps[best].tolist(), strict=True
            )
            top = heapq.nlargest(count, [*top, *found])
        return [HotKey(key, seen, step) for seen, key, step in top]

    def memory(self) -> dict[str, Any]:
        """Rows and bytes: payload_bytes (values and state), row_bytes, header_bytes, index_bytes, total_bytes."""
        return self.store.memory()
