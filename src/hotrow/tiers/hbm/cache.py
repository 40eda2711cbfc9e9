"""HbmCache: the HBM caches of all tables of a collection, and what they share.

Tables with one row layout and one optimizer share a cache (table_group.py), so a batch takes one launch for all of
them.

Threads: the training thread, and with a lookahead one thread that prefetches later batches on `prefetch_stream`. A
thread holds `lock` while it looks keys up or changes the index. A batch that is fully staged does not need the lock at
its turn. All changes of an index are ordered across streams. Which rows a staged batch evicts is a function of the
batches alone, and no result depends on it.

`generation` increases whenever slots that were found before become invalid.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hotrow import _core
from hotrow.config import Memory
from hotrow.device.streams import follow, new_stream, wait_for
from hotrow.errors import MemoryBudgetError
from hotrow.kernels.index.sets import WAYS
from hotrow.kernels.rows.layout import RowLayout
from hotrow.tiers.hbm.group_cache import MIN_SETS, GroupCache, free_bytes, slot_bytes
from hotrow.tiers.hbm.pinned_ring import DRAM_SHARE, UPLOAD_BUFFERS, WRITE_BACK_BUFFERS, PinnedRing, buffer_bytes
from hotrow.tiers.hbm.rows_below import RowsBelow
from hotrow.tiers.hbm.staging_queue import DeferredFetch, StagingQueue
from hotrow.tiers.hbm.table_group import AsyncCounter, Generation, TableGroup
from hotrow.tiers.host.store import Budget, HostStore
from hotrow.tiers.host.stored_table import StoredTable, smallest_dram_bytes
from hotrow.units import format_size, round_up_size

SPARE_CORES, CORE_NICE = 4, 10  # CPU cores left to Python threads, and the nice value of the pool's threads


class HbmCache:
    """The caches of all tables of a collection."""

    def __init__(
        self, tables: Sequence[StoredTable], memory: Memory, device: torch.device, budget: Budget | None = None
    ) -> None:
        self.device, self.budget = device, budget or Budget()
        self.budget_errors = BudgetErrors(memory.hbm_bytes, device)
        self.budget_errors.check()
        if device.type == "cuda" and _core.threads() == len(os.sched_getaffinity(0)) > 4:
            # Threads that launch kernels, prefetch or wait for the device must get a core at once: everything waits for
            # them.
            _core.set_threads(_core.threads() - SPARE_CORES, nice=CORE_NICE)
        self.flag = AsyncCounter(device)  # whether a gradient was not finite
        self.lock = threading.RLock()
        self.prefetch_stream = new_stream(device, urgent=True)
        self.has_lookahead = False  # whether batches may be in flight ahead of the current one
        self.stages_ahead = False  # whether rows may be uploaded ahead, on another thread and stream
        self.generation = Generation()
        self.queue = StagingQueue(self.budget_errors)
        self.deferred: DeferredFetch | None = None  # the current batch's fetch, until it is finished
        self.stores = [rows.store for rows in tables]  # not the tables: they refer to this cache
        self.below: RowsBelow | None = None  # set by the collection; None: the stores have all rows
        self.last_read: Any = None  # event: the last read-only batch has gathered its rows
        kinds: dict[tuple[RowLayout, int, bool], list[HostStore]] = {}
        for rows in tables:
            kinds.setdefault((layout_of(rows), rows.optimizer.code, rows.table.values is not None), []).append(
                rows.store
            )
        trained = [4 * layout.width for layout, _, frozen in kinds if not frozen]
        buffer = buffer_bytes(memory.dram_bytes if trained else 0, trained)
        members = [len(members) for members in kinds.values()]
        sets = self._sets_per_table(list(kinds), members, memory)
        if memory.ssd is not None:
            held = _dram_bytes_below(list(kinds), members, sets)
            _check_dram(
                memory,
                max(held, smallest_dram_bytes(tables)),
                buffer * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS) * len(trained),
            )
        self.groups = [
            TableGroup(
                members,
                GroupCache(layout, [sets] * len(members), device, memory.hbm_policy, frozen=frozen),
                code,
                PinnedRing(Budget() if frozen else self.budget, buffer, device.type == "cuda"),
                self.generation,
            )
            for (layout, code, frozen), members in kinds.items()
        ]

    @staticmethod
    def _sets_per_table(kinds: Sequence[tuple[RowLayout, int, bool]], members: Sequence[int], memory: Memory) -> int:
        """The number of sets of each table: all tables get the same number of rows."""
        layouts = [layout for layout, _, _ in kinds]
        of_one = sum(WAYS * slot_bytes(layout) * count for layout, count in zip(layouts, members, strict=True))
        if memory.hbm_bytes < MIN_SETS * of_one:
            raise MemoryBudgetError(
                f"hbm={format_size(memory.hbm_bytes)} is too small for {sum(members)} tables; give at least "
                f"{format_size(MIN_SETS * of_one)}, better enough for all rows of a batch"
            )
        # The allocator rounds each tensor up to a megabyte or so.
        rounding = min(memory.hbm_bytes // 64, len(layouts) * (6 << 20))
        return max(MIN_SETS, (memory.hbm_bytes - rounding) // of_one)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclusive use of the cache. All earlier work on it precedes the block on the current stream, and later work
        follows it."""
        with self.lock:
            if self.stages_ahead:
                self.queue.finish_all()
                for stream in (self.prefetch_stream, *(group.upload_stream for group in self.groups)):
                    wait_for(stream)
                self.erase_invalid()
            try:
                yield
            finally:
                if self.stages_ahead:
                    follow(self.prefetch_stream)

    def finish_deferred(self, deferred: DeferredFetch | None = None) -> bool:
        """Finish `deferred`, or the deferred fetch in flight. At most one batch has one. Returns whether rows were
        missing."""
        deferred = self.deferred if deferred is None else deferred
        if deferred is None:
            return False
        if self.deferred is deferred:
            self.deferred = None
        return deferred.finish()

    def erase_invalid(self) -> None:
        """Empty the slots whose rows were never uploaded. Requires: the caller holds `lock`."""
        for group in self.groups:
            group.erase_invalid()

    def set_max_in_flight(self, batches: int) -> None:
        """Allow this many batches in flight: begun, and their update not complete."""
        with self.exclusive():
            for group in self.groups:
                group.cache.window = batches
            self.has_lookahead = batches > 0
            if self.has_lookahead and all(group.dram_only for group in self.groups):
                self.stages_ahead = True
                follow(self.prefetch_stream)

    def capture_pending_steps(self) -> None:
        """Capture the steps that are worth a CUDA graph. Training thread, at a batch's turn."""
        if any(group.miss_finder.capture_pending for group in self.groups):
            with self.lock:
                for group in self.groups:
                    group.miss_finder.capture()

    def flush(self) -> None:
        """Write back every row that is newer here than in DRAM."""
        with self.exclusive():
            for group in self.groups:
                group.flush()

    def drop(self) -> None:
        """Drop every row. Rows newer than in DRAM are lost; call `flush` first to keep them."""
        with self.exclusive():
            self.generation.advance()
            for group in self.groups:
                group.drop()

    def prune(self) -> None:
        """Drop the rows that were removed in DRAM."""
        with self.exclusive():
            self.generation.advance()
            for group in self.groups:
                group.prune()

    def rebalance(self) -> None:
        """Split capacity between the tables anew where it is due. Call between two steps."""
        for group in self.groups:
            if group.rebalance_due():
                with self.exclusive():
                    if group.rebalance():
                        self.generation.advance()

    def report(self) -> dict[str, int]:
        """Slots, bytes, pinned bytes charged to `dram=`, and the counters of `figures`."""
        tiers = [group.cache for group in self.groups]
        return {
            "slots": sum(cache.capacity for cache in tiers),
            "bytes": sum(cache.bytes() for cache in tiers),
            "pinned_bytes": sum(group.row_transfer.ring.bytes for group in self.groups),
            **self.figures(),
        }

    def figures(self) -> dict[str, int]:
        """Counters since the start: hits and misses in ids, evictions, and overflows (rows that got no slot)."""
        return {name: sum(getattr(group.cache, name) for group in self.groups) for name in COUNTERS}


def _dram_bytes_below(kinds: Sequence[tuple[RowLayout, int, bool]], members: Sequence[int], sets: int) -> int:
    """Bytes of DRAM for all rows that may be in HBM, and a quarter more."""
    rows = sum(
        WAYS * sets * count * (layout.width * 4 + 24)
        for (layout, _, frozen), count in zip(kinds, members, strict=True)
        if not frozen
    )
    return rows * 5 // 4


def _check_dram(memory: Memory, rows: int, pinned: int) -> None:
    """Check that `dram=` over `ssd=` holds this many bytes of rows and the pinned buffers."""
    if memory.dram_bytes < rows + pinned:
        least = round_up_size((rows + pinned) * DRAM_SHARE // (DRAM_SHARE - 1))  # the pinned bytes grow with dram=
        raise MemoryBudgetError(
            f"dram={format_size(memory.dram_bytes)} over ssd= is too small below hbm={format_size(memory.hbm_bytes)}: "
            f"a row in HBM keeps its slot in DRAM. Give dram= at least {least}, or lower hbm="
        )


def layout_of(rows: StoredTable) -> RowLayout:
    """The layout of a table's rows in HBM. It equals their layout in DRAM, so rows are copied unchanged."""
    if rows.table.values is not None:
        return RowLayout(rows.table.dim, (2,) if rows.table.values == "int8" else (), rows.table.values)
    state = tuple(part.width for part in rows.optimizer.state(rows.table.dim))
    return RowLayout(rows.table.dim, state, rows.table.dtype)


COUNTERS = ("hits", "misses", "evictions", "overflows")


class BudgetErrors:
    """A context that turns a device's out-of-memory error into one that names the budget to change and its new
    value."""

    def __init__(self, given: int, device: torch.device) -> None:
        self.given, self.device = given, device

    def check(self) -> None:
        """Check that the device has this much free memory."""
        if (free := free_bytes(self.device)) < self.given:
            raise MemoryBudgetError(
                f"hbm={format_size(self.given)} does not fit on {self.device}, where {format_size(free)} is free; give "
                f"hbm= at most {format_size(free * 7 / 8)} (a batch and the tower need some too), or free memory there"
            )

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise MemoryBudgetError(
                f"{self.device} has no memory for a batch beside hbm={format_size(self.given)}: "
                f"{str(error).split('. GPU ')[0]}. Give hbm= at most {format_size(self.given * 7 / 8)}, or smaller "
                "batches, or a lower lookahead="
            ) from error
