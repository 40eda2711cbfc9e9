"""Hot rows of a collection: the tables' caches in HBM, and the way between them and the rows below.

Tables with one row layout and one rule share a cache (hot_group.Group), so that a batch takes one launch for all of
them.

Two threads come here: the one that trains, and with a lookahead one that brings rows up for later batches, on a stream
of its own (`ahead`). `lock` is held by whoever looks for keys or changes what is here; a batch that was staged takes it
no more. The index is changed on one stream after the other; what is evicted for a staged batch follows from the batches
alone, and no result depends on it in any case. `generation` counts what makes slots that were found before worthless.
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
from hotrow.tiers.hbm.pinned_ring import WRITE_BACK_BUFFERS, DRAM_SHARE, UPLOAD_BUFFERS, PinnedRing, buffer_bytes
from hotrow.tiers.hbm.group_cache import LEAST_SETS, GroupCache, free_bytes, slot_bytes
from hotrow.tiers.hbm.staging_queue import DeferredFetch, StagingQueue
from hotrow.tiers.hbm.table_group import Generation, TableGroup, AsyncCounter
from hotrow.tiers.host.store import Budget, HostStore
from hotrow.tiers.host.stored_table import StoredTable, smallest_dram_bytes
from hotrow.units import format_size, round_up_size

SPARE_CORES, CORE_NICE = 4, 10  # cores that the core's threads leave, and by how much these give way


class HbmCache:
    """The caches of all tables of a collection."""

    def __init__(
        self, tables: Sequence[StoredTable], memory: Memory, device: torch.device, budget: Budget | None = None
    ) -> None:
        self.device, self.budget = device, budget or Budget()
        self.budget_errors = BudgetErrors(memory.hbm_bytes, device)
        self.budget_errors.check()
        if device.type == "cuda" and _core.threads() == len(os.sched_getaffinity(0)) > 4:
            # Launching, looking ahead and what waits for the device want cores at once: all others wait for them.
            _core.set_threads(_core.threads() - SPARE_CORES, nice=CORE_NICE)
        self.flag = AsyncCounter(device)  # whether a gradient was not finite
        self.lock = threading.RLock()
        self.ahead = new_stream(device, urgent=True)
        self.has_lookahead = False  # whether batches may be in flight ahead of the one in work
        self.staging = False  # whether rows may come up ahead, on another thread and stream
        self.generation = Generation()
        self.queue = StagingQueue(self.budget_errors)
        self.deferred: DeferredFetch | None = None  # of the batch in work, until it is finished
        self.stores = [rows.store for rows in tables]  # not the tables, which know their cache
        self.last_read: Any = None  # when the last batch that was only read has been
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
            _check_dram(memory, max(held, smallest_dram_bytes(tables)), buffer * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS) * len(trained))
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
        """Sets of each table: every table gets the same number of rows."""
        layouts = [layout for layout, _, _ in kinds]
        of_one = sum(WAYS * slot_bytes(layout) * count for layout, count in zip(layouts, members, strict=True))
        if memory.hbm_bytes < LEAST_SETS * of_one:
            raise MemoryBudgetError(
                f"hbm={format_size(memory.hbm_bytes)} is too small for {sum(members)} tables; give at least "
                f"{format_size(LEAST_SETS * of_one)}, better room for the rows of a batch"
            )
        # The allocator rounds each tensor up to a megabyte or so.
        rounding = min(memory.hbm_bytes // 64, len(layouts) * (6 << 20))
        return max(LEAST_SETS, (memory.hbm_bytes - rounding) // of_one)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside it no other thread works here, and this stream comes after all that was done here and before the
        rest."""
        with self.lock:
            if self.staging:
                self.queue.finish_all()
                for stream in (self.ahead, *(group.up for group in self.groups)):
                    wait_for(stream)
                self.erase_invalid()
            try:
                yield
            finally:
                if self.staging:
                    follow(self.ahead)

    def finish_deferred(self, deferred: DeferredFetch | None = None) -> bool:
        """Finish this deferred fetch, or the one under way: only one batch at a time has rows to come. Returns whether
        any rows were missing."""
        deferred = self.deferred if deferred is None else deferred
        if deferred is None:
            return False
        if self.deferred is deferred:
            self.deferred = None
        return deferred.finish()

    def erase_invalid(self) -> None:
        """Empty slots whose rows never came. Requires: the lock."""
        for group in self.groups:
            group.erase_invalid()

    def set_max_in_flight(self, batches: int) -> None:
        """So many batches may have been begun and not have landed."""
        with self.exclusive():
            for group in self.groups:
                group.cache.window = batches
            self.has_lookahead = batches > 0
            if self.has_lookahead and all(group.dram_only for group in self.groups):
                self.staging = True
                follow(self.ahead)

    def record(self) -> None:
        """Have the device remember what is asked of it again and again. The thread that trains, at a batch's turn."""
        if any(group.miss_finder.unrecorded for group in self.groups):
            with self.lock:
                for group in self.groups:
                    group.miss_finder.record()

    def flush(self) -> None:
        """Bring down every row that is newer here, so that what is below is all there is."""
        with self.exclusive():
            for group in self.groups:
                group.flush()

    def drop(self) -> None:
        """Forget every row. What is newer here than below is lost: flush first, if it is wanted."""
        with self.exclusive():
            self.generation.advance()
            for group in self.groups:
                group.drop()

    def prune(self) -> None:
        """Rows were removed below: remove them here."""
        with self.exclusive():
            self.generation.advance()
            for group in self.groups:
                group.prune()

    def rebalance(self) -> None:
        """Between two steps: see whether the caches are well divided between their tables."""
        for group in self.groups:
            if group.rebalance_due():
                with self.exclusive():
                    if group.rebalance():
                        self.generation.advance()

    def report(self) -> dict[str, int]:
        """Slots and bytes, pinned bytes of `dram=` that rows pass through, and what happened so far: ids found, ids
        missed, evictions, rows without room."""
        tiers = [group.cache for group in self.groups]
        return {
            "slots": sum(cache.capacity for cache in tiers),
            "bytes": sum(cache.bytes() for cache in tiers),
            "pinned_bytes": sum(group.row_transfer.ring.bytes for group in self.groups),
            **self.figures(),
        }

    def figures(self) -> dict[str, int]:
        """What happened so far."""
        return {name: sum(getattr(group.cache, name) for group in self.groups) for name in FIGURES}


def _dram_bytes_below(kinds: Sequence[tuple[RowLayout, int, bool]], members: Sequence[int], sets: int) -> int:
    """Bytes of DRAM for the rows that may be in HBM, and some beside."""
    rows = sum(
        WAYS * sets * count * (layout.width * 4 + 24)
        for (layout, _, frozen), count in zip(kinds, members, strict=True)
        if not frozen
    )
    return rows * 5 // 4


def _check_dram(memory: Memory, rows: int, pinned: int) -> None:
    """Whether `dram=` over `ssd=` has room for so many bytes of rows beside what they pass through."""
    if memory.dram_bytes < rows + pinned:
        least = round_up_size((rows + pinned) * DRAM_SHARE // (DRAM_SHARE - 1))  # what is pinned grows with it
        raise MemoryBudgetError(
            f"dram={format_size(memory.dram_bytes)} over ssd= is too small below hbm={format_size(memory.hbm_bytes)}: "
            f"a row in HBM keeps its place in DRAM. Give dram= at least {least}, or lower hbm="
        )


def layout_of(rows: StoredTable) -> RowLayout:
    """How a table's rows lie in HBM: as they lie below, so that they are copied as they are."""
    if rows.table.values is not None:
        return RowLayout(rows.table.dim, (2,) if rows.table.values == "int8" else (), rows.table.values)
    state = tuple(part.width for part in rows.optimizer.state(rows.table.dim))
    return RowLayout(rows.table.dim, state, rows.table.dtype)


FIGURES = ("hits", "misses", "evictions", "overflows")


class BudgetErrors:
    """Inside it, HBM that runs out is an error which says which budget to change to what."""

    def __init__(self, given: int, device: torch.device) -> None:
        self.given, self.device = given, device

    def check(self) -> None:
        """Whether the budget is there at all."""
        if (free := free_bytes(self.device)) < self.given:
            raise MemoryBudgetError(
                f"hbm={format_size(self.given)} does not fit on {self.device}, where {format_size(free)} is free; give "
                f"hbm= at most {format_size(free * 7 / 8)} (a batch and the tower want some too), or free memory there"
            )

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise MemoryBudgetError(
                f"{self.device} has no room for a batch beside hbm={format_size(self.given)}: "
                f"{str(error).split('. GPU ')[0]}. Give hbm= at most {format_size(self.given * 7 / 8)}, or smaller "
                "batches, or a lower lookahead="
            ) from error
