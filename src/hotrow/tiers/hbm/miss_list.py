"""MissFinder: from a batch's keys to its list of missing keys, in one captured launch.

    find keys → positions of misses → their unique keys → slots for them → the rows there now
    and ahead of the batch's turn: insert their keys into the index, write their slots to the missing positions

As separate calls these are about 40 torch and Triton calls, with a wait for the number of missing ids in the middle,
because shapes depend on it. Each call is several times slower while other threads compete for Python's lock. Here the
buffers hold more ids than were missing lately, the actual number is read on the device (launch_arguments.py), and the
host waits once. If a batch misses more than the capacity, its slots are still valid, and the caller continues with
separate calls.

All batches must have one size. After CAPTURE_AFTER batches of it with misses the steps are captured: one graph for
batches ahead of their turn and one for batches at it. Only the training thread captures (kernels/graph_capture.py), so
until then batches ahead launch each step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.device.streams import CapturedSteps, to_host_by_kernel
from hotrow.kernels.index.dedup import Unique, compact_keys, dedup
from hotrow.kernels.index.find import ScorePolicy, find
from hotrow.kernels.index.insert import choose_slots, insert_keys
from hotrow.kernels.index.launch_arguments import BatchArguments
from hotrow.kernels.index.miss_report import SLOTS, MissReport, report_misses, scatter_slots
from hotrow.kernels.launch import cdiv
from hotrow.tiers.hbm.group_cache import GroupCache

CAPTURE_AFTER = 3  # batches of one size before their steps are captured
CAPACITY_STEP = 1024  # missing ids: the capacity is a multiple of it
SHRINK_AFTER = 32  # batches that miss less than half of the capacity before it shrinks


class MissList(NamedTuple):
    """The slots of all ids; positions, unique keys and report of the `missing` ones."""

    slots: Tensor
    positions: Tensor
    unique: Unique
    report: MissReport
    numbers: Tensor  # report.packed, on the host
    missing: int

    @property
    def complete(self) -> bool:
        """Whether all missing ids fit into the capacity."""
        return self.missing <= self.positions.numel()


class MissFinder:
    """Finds the misses of one cache, batch after batch. Requires: the caller holds the cache's lock."""

    def __init__(self, cache: GroupCache) -> None:
        self.cache = cache
        self.ids = 0
        self.capacity = 0
        self._calls = self._small = 0
        self._captures: dict[bool, CapturedSearch] = {}
        self.capture_pending = False  # whether there are steps to capture

    def observe(self, ids: int, missing: int) -> None:
        """Learn from a batch with `ids` ids and `missing` misses."""
        if ids != self.ids:
            self.ids, self._calls, self.capacity = ids, 0, 0
            self._captures.clear()
        self._calls = self._calls + 1 if missing else 0
        self._small = self._small + 1 if missing < self.capacity // 2 else 0
        if missing > self.capacity or self._small > SHRINK_AFTER:
            self.capacity, self._small = min(ids, cdiv(missing * 5 // 4, CAPACITY_STEP) * CAPACITY_STEP), 0
            self._captures.clear()

    def invalidate(self) -> None:
        """Drop captured graphs, because the cache was split anew."""
        self._captures.clear()

    def ready(self, ids: int) -> bool:
        """Whether to use `find_misses` for a batch of this size."""
        return ids == self.ids and self._calls >= CAPTURE_AFTER

    def find_misses(
        self, keys: Tensor, begins: Tensor, batch: int, settled: int, score: float, ahead: bool
    ) -> MissList:
        """Find the misses of a batch. Waits for the device. With `ahead`, inserts the missing keys into the index."""
        if ahead not in self._captures:
            self._captures[ahead] = CapturedSearch(self.cache, keys, begins, self.capacity, ahead)
        search = self._captures[ahead]
        found = search.find_misses(keys, begins, batch, settled, score)
        self.capture_pending |= search.captured is None
        return found

    def capture(self) -> None:
        """Capture the steps of the batches seen so far. Requires: as in graph_capture.py, and no `find_misses`
        meanwhile."""
        self.capture_pending = False
        for search in self._captures.values():
            if search.captured is None:
                search.capture()


class CapturedSearch:
    """The steps over static inputs and outputs."""

    def __init__(self, cache: GroupCache, keys: Tensor, begins: Tensor, capacity: int, ahead: bool) -> None:
        self.cache, self.capacity, self.ahead = cache, capacity, ahead
        self.keys, self.begins = torch.empty_like(keys), torch.empty_like(begins)
        self._last_begins: Tensor | None = None
        self.arguments = BatchArguments(cache.device)
        self.count = torch.zeros(1, dtype=torch.int32, device=cache.device)
        self.captured: CapturedSteps | None = None

    def find_misses(self, keys: Tensor, begins: Tensor, batch: int, settled: int, score: float) -> MissList:
        """As MissFinder.find_misses."""
        self.arguments.set(batch, settled, self.cache.clean, score)
        self.keys.copy_(keys)
        if begins is not self._last_begins:  # usually the tensor of the last batch
            self.begins.copy_(begins)
            self._last_begins = begins
        found = self._steps() if self.captured is None else self.captured.replay(self._steps)
        slots, positions, unique, report = found
        # The next batch may overwrite the static outputs while these are in use.
        slots, report = slots.clone(), report._replace(packed=report.packed.clone())
        numbers = to_host_by_kernel(report.packed)
        return MissList(slots, positions, unique, report, numbers, int(numbers.numpy()[-1]))

    def _steps(self) -> tuple[Tensor, Tensor, Unique, MissReport]:
        cache, index, arguments = self.cache, self.cache.index, self.arguments.load()
        self.count.zero_()
        slots = find(index, self.keys, self.begins, arguments, self.count, ScorePolicy(cache.policy, cache.half_life))
        positions, keys, tables = compact_keys(slots, self.capacity, self.keys, self.begins)
        unique = dedup(keys, tables, tables_sorted=True, count=self.count)
        chosen = choose_slots(index, unique.keys, unique.tables, unique.number, arguments, cache.policy)
        report = report_misses(unique, chosen, cache.hosts, cache.steps, cache.counts, arguments)
        report.packed[-1:] = self.count
        if self.ahead:
            chosen_slots = report.field(SLOTS)
            insert_keys(index, report.keys, chosen_slots, unique.number, arguments)
            scatter_slots(positions, unique.inverse, report.ranks, chosen_slots, slots, self.count)
        return slots, positions, unique, report

    def capture(self) -> None:
        """Requires: the steps ran before, so all kernels are compiled."""
        self.captured = CapturedSteps(self.cache.device, self._steps)
