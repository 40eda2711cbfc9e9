"""HbmPlan: one batch through the caches in HBM (tiers/plan.py has the verbs).

    prefetch   find the batch's keys; assign slots to the missing ones and evict the rows there
    stage      upload the rows of those slots
    fetch      at the batch's turn: find the keys, upload what is missing, pin the rows
    gather, update, release

prefetch and stage run ahead of the batch's turn and may be left out. With all rows in HBM, the host waits for the
device once, for the number of missing ids, and nothing else happens between keys and vectors. Missing keys are
deduplicated on the device and copied to the host. Their rows are uploaded into slots that the device has chosen, and
the rows in these slots are written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hotrow.device.streams import follow, on
from hotrow.errors import GradientError, OptionError
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.rows import finite
from hotrow.tiers.batch_values import ALL_EXAMPLES, BatchUpdate, RoutedBatch, TransferStats
from hotrow.tiers.hbm.batch_layout import join
from hotrow.tiers.hbm.cache import HbmCache
from hotrow.tiers.hbm.group_batch import GroupBatch
from hotrow.tiers.hbm.rows_below import ONLY_READ, BatchBelow
from hotrow.tiers.hbm.staging_queue import DeferredFetch, StagedBatch
from hotrow.tiers.host.plan import HostPlan
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import ANY_PUBLICATION, Feature, TableInputs


class HbmPlan:
    """One batch in all table groups."""

    def __init__(self, cache: HbmCache) -> None:
        self.cache = cache
        self.below: BatchBelow | None = None  # this batch's reads of a remote store below
        self.parts: list[GroupBatch] = []
        self._jobs: list[tuple[HostStore, list[Feature]]] = []
        self._batch_numbers: list[int] = []  # this batch's number in each group
        self._keys_ready: Any = None  # event: keys that were given on the device are written
        self._seen: list[Tensor] | None = None  # how often each of a feature's ids occurs, if they are unique
        self._reads_only, self._late, self.late_ids = False, "wait", 0
        self._host_plan: HostPlan | None = None  # pins rows in DRAM that were read from SSD
        self._slots_assigned = False  # whether `_assign_slots` has run
        self.staged: StagedBatch | None = None  # its rows have slots, ahead of its turn
        self.deferred: DeferredFetch | None = None  # its turn has come; rows may still be missing

    def route(self, jobs: TableInputs, ahead: bool = False, examples: int | None = None) -> RoutedBatch:
        """Take the keys. They are copied to the device at the lookup."""
        self.release()
        self.below = None if self.cache.below is None else self.cache.below.batch()
        self._jobs = [(store, list(features)) for store, features in jobs]
        self._batch_numbers = [group.cache.begin() for group in self.cache.groups]
        values = [jagged.values for _, features in self._jobs for jagged, _ in features]
        on_device = self.cache.stages_ahead and any(keys.device.type == "cuda" for keys in values)
        self._keys_ready = current_stream(self.cache.device).record_event() if on_device else None
        return ALL_EXAMPLES

    def prefetch(self) -> TransferStats:
        """If rows never leave DRAM, find the keys in HBM and assign slots to the missing ones. Otherwise read the rows
        that are on SSD into DRAM and pin them there until `fetch`.

        Rows over SSD are uploaded at the batch's turn, because earlier they would have to stay pinned in DRAM.
        """
        if self.below is not None:  # after a `read` that lacked rows, those alone
            keys = [(store, jagged.values.cpu()) for store, features in self._jobs for jagged, _ in features]
            return self.below.load(() if self._reads_only else keys)
        if self.cache.stages_ahead:
            self._assign_slots()
            return TransferStats()
        on_host = all(jagged.values.device.type == "cpu" for _, features in self._jobs for jagged, _ in features)
        if not on_host or not any(store.evicts for store, _ in self._jobs):
            return TransferStats()
        self._host_plan = HostPlan()
        self._host_plan.route(self._jobs)
        return self._host_plan.prefetch()

    def stage(self) -> TransferStats:
        """Upload the rows that exist and got a slot, ahead of the batch's turn. `fetch` does the others."""
        if not self.cache.stages_ahead:
            return TransferStats()
        if not self._slots_assigned:
            self._assign_slots()
        if self.staged is not None:
            self.cache.queue.finish(self.staged)
        rows = [(part.staged_rows, part.group.width) for part in self.parts]
        return TransferStats(sum(count for count, _ in rows), sum(4 * count * width for count, width in rows))

    def _assign_slots(self) -> None:
        """Find the missing keys and assign slots to them, ahead of the batch's turn."""
        cache, self._slots_assigned = self.cache, True
        if cache.queue.skip_next() or any(group.cache.frozen for group in cache.groups):
            return
        with cache.budget_errors, cache.lock, on(cache.prefetch_stream):
            cache.finish_deferred()
            generation = cache.generation.number  # read first: slots invalidated from here on invalidate this batch
            cache.erase_invalid()
            if self._keys_ready is not None:
                self._keys_ready.wait()
            self._lay_out_keys()
            try:
                self._find(ahead=True)
                found = [part.prefetch(count) for part, count in zip(self.parts, self._count_missing(), strict=True)]
            except BaseException as error:
                for part in self.parts:
                    part.prefetch_failed(error)
                raise
            self.staged = StagedBatch(self.parts, generation if all(found) else -1, keep_alive=self)
            for part in self.parts:
                follow(part.group.upload_stream)
            cache.queue.add(self.staged)

    def fetch(self, step: int = 0) -> None:
        """Find the rows and pin them. Missing rows are uploaded now, or once the host knows of them.

        After a batch without misses, the next batch is assumed to have none: the gather is enqueued before the host has
        the number of misses, and repeated if there were any.
        """
        if self.below is not None:
            raise OptionError(ONLY_READ)
        for group in self.cache.groups:
            if group.cache.frozen:
                for store in group.stores:
                    store.check_trainable()
        cache, staged = self.cache, self.staged
        cache.capture_pending_steps()
        if staged is not None:
            cache.queue.finish(staged)
        if staged is not None and staged.generation == cache.generation.number:
            for event in staged.ready:
                event.wait()
        else:
            with cache.budget_errors, cache.exclusive():
                cache.finish_deferred()
                self._lay_out_keys()
                at_once = cache.has_lookahead or any(part.group.last_batch_missed for part in self.parts)
                self._find(ahead=False if at_once else None)
                self.deferred = cache.deferred = DeferredFetch(self.parts, step, keep_alive=self)
                if at_once:
                    cache.finish_deferred(self.deferred)
        self.staged = None
        for part in self.parts:
            part.use_on_current_stream()
            part.group.cache.take(part.batch)
        self._release_host_plan()

    def _find(self, ahead: bool | None) -> None:
        for part, number in zip(self.parts, self._batch_numbers, strict=True):
            part.find(number, ahead)

    def _lay_out_keys(self) -> None:
        """Copy the keys to the device, group by group."""
        if self.parts:
            return
        features = {id(store): of_table for store, of_table in self._jobs}
        starts, at = {}, 0
        for store, of_table in self._jobs:
            starts[id(store)] = at
            at += len(of_table)
        self.parts = [
            GroupBatch(
                group,
                [features[id(store)] for store in group.stores],
                [starts[id(store)] + i for store in group.stores for i in range(len(features[id(store)]))],
            )
            for group in self.cache.groups
        ]
        if self.below is not None and self.cache.below is not None:
            for part in self.parts:
                part.below = self.cache.below, self.below
        if self._seen is not None:
            for part in self.parts:
                part.seen = join([self._seen[number] for number in part.numbers], self.cache.device)

    def route_unique(self, jobs: TableInputs, seen: Sequence[Tensor]) -> None:
        """As `route`, for unique keys with their numbers of occurrences: int32 for each feature's ids."""
        self.route(jobs)
        self._seen = list(seen)

    def read(self, late: str = "wait") -> None:
        """Only read. Rows are not pinned, so `gather` finds them. It reads rows that are on SSD, or answers them by the
        policy `late`. Over a remote store this call reads them, because it may raise LeftError; then `prefetch` loads
        what is missing, and this is called again."""
        self._reads_only, self._late = True, late
        if self.below is not None:
            self.below.begin()
            self._read(None)
            self.below.finish(late)

    @property
    def publications(self) -> tuple[int, int]:
        """Over a remote store, those of the rows."""
        return ANY_PUBLICATION if self.below is None else self.below.publications

    def _read(self, outputs: Sequence[Tensor] | None) -> None:
        """Find the rows, and gather them if there are outputs.

        Missing rows are copied for this batch alone; those of read-only tables that are in DRAM are inserted into the
        cache. Requires: no row changes meanwhile.

        Lanes call this one after another, each on its own stream. `last_read` is the event after the previous gather.
        """
        with self.cache.budget_errors, self.cache.exclusive():
            self.cache.finish_deferred()
            if self.cache.last_read is not None:
                self.cache.last_read.wait()
            self._lay_out_keys()
            for part, number in zip(self.parts, self._batch_numbers, strict=True):
                part.find(number if part.group.cache.frozen else 0)
            for part, count in zip(self.parts, self._count_missing(), strict=True):
                if part.group.cache.frozen:
                    part.read_into_cache(count, self._late)
                else:
                    part.read_without_caching(count, self._late)
                part.use_on_current_stream()
                if outputs is not None:
                    part.gather([outputs[number] for number in part.numbers])
            self.late_ids = sum(part.late.numel() for part in self.parts)
            if self.cache.device.type == "cuda":
                self.cache.last_read = current_stream(self.cache.device).record_event()

    def late_by_example(self, examples: int) -> Tensor:
        """The number of each example's ids that a policy answered, int32."""
        counts = torch.zeros(examples, dtype=torch.int32)
        for part in self.parts:
            part.count_late(counts)
        return counts

    def _count_missing(self) -> list[int]:
        """The number of missing ids in each group. Waits for the device."""
        return [part.count_missing(learn=not self._reads_only) for part in self.parts]

    def _release_host_plan(self) -> None:
        if self._host_plan is not None:
            self._host_plan.release()
            self._host_plan = None

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool rows into one matrix per feature."""
        if self._reads_only and self.below is None:
            self._read(outputs)
            return
        if self._reads_only:
            with self.cache.budget_errors, self.cache.exclusive():
                for part in self.parts:
                    part.gather([outputs[number] for number in part.numbers])
                if self.cache.device.type == "cuda":
                    self.cache.last_read = current_stream(self.cache.device).record_event()
            return
        with self.cache.budget_errors:
            for part in self.parts:
                part.gather([outputs[number] for number in part.numbers])
            if self._finish():
                self.gather(outputs)

    def _finish(self) -> bool:
        """Finish the deferred fetch, if any. Returns whether rows were missing."""
        return self.deferred is not None and self.cache.finish_deferred(self.deferred)

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """Not supported: the gather kernel writes one output per feature."""
        return False

    def update(self, update: BatchUpdate) -> None:
        """Apply gradients in place. A NaN or infinity in `checked` raises, and no row has changed."""
        with self.cache.budget_errors:
            self._finish()
            flag = self.cache.flag.number
            for columns in sorted({matrix.shape[1] for matrix in update.checked}):
                finite.check_finite([matrix for matrix in update.checked if matrix.shape[1] == columns], flag)
            self.cache.flag.send()
            by_store = {id(store): rule for store, rule in zip(self.cache.stores, update.rules, strict=True)}
            for part in self.parts:
                part.update(
                    [update.gradients[number] for number in part.numbers],
                    [by_store[id(store)] for store in part.group.stores],
                    update.step,
                    update.scale,
                    flag,
                )
            if self.cache.flag.wait():
                flag.zero_()
                raise GradientError(
                    "a gradient is NaN or infinite; no row was changed. Lower the learning rate, clip gradients, or "
                    "find the bad input with torch.autograd.set_detect_anomaly(True)"
                )
            with self.cache.lock if any(part.writes_back_extra for part in self.parts) else nullcontext():
                for part in self.parts:
                    part.commit()

    def release(self) -> None:
        """Unpin the rows and drop unfinished uploads. Any thread."""
        if self.deferred is not None and self.cache.deferred is self.deferred:
            self.cache.deferred = None
            self.deferred.cancel()
        if self.staged is not None:
            self.cache.queue.cancel(self.staged)
        for part in self.parts:
            part.cancel()  # also slots that were assigned before an error prevented staging
            part.release()
        for group, number in zip(self.cache.groups, self._batch_numbers, strict=False):
            group.cache.settle(number)
        self.parts, self._batch_numbers, self.staged, self.deferred = [], [], None, None
        self._reads_only, self._late, self._seen, self.late_ids = False, "wait", None, 0
        self._slots_assigned = False
        self._release_host_plan()

    @property
    def prefetch_misses(self) -> int:
        """Rows that got no slot ahead of the batch's turn."""
        return sum(part.unplaced_rows for part in self.parts)

    def __del__(self) -> None:
        self.release()
