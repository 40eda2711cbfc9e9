"""GroupBatch: one batch in one table group: its slots in HBM, and the transfers that it needs.

At the batch's turn, `fetch` does everything: it assigns slots to the missing keys, writes back the rows in those slots
and uploads the missing rows. Ahead of its turn the same work is split over two threads, so that one batch's slots are
found while the rows of the batch before it are in flight:

    prefetch   assigns slots, inserts the keys into the index, starts writing back the evicted rows
    stage      uploads the rows

Between the two, the index names rows that are not uploaded yet. The staging queue uploads them before anything else
changes the cache. Only rows that exist and get a slot are staged. A slot that was assigned to a key without a row (or
whose upload failed) is invalid and is emptied before the next lookup.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.device.streams import to_device, to_host, to_host_by_kernel, used_on, wait_for
from hotrow.kernels.current_stream import current_stream, raw_stream
from hotrow.kernels.index.dedup import Unique, compact_keys, dedup
from hotrow.kernels.index.find import ScorePolicy, find
from hotrow.kernels.index.insert import Chosen, choose_slots, erase, insert_keys
from hotrow.kernels.index.miss_report import (
    FIELDS,
    SLOTS,
    TABLES,
    MissReport,
    insert_fetched,
    report_misses,
    scatter_slots,
)
from hotrow.kernels.index.touch import initial_score
from hotrow.kernels.rows import transfer
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import Source
from hotrow.kernels.rows.runs import Runs
from hotrow.kernels.rows.runs import group as group_runs
from hotrow.kernels.rows.update import Coefficients, RowMetadata, update
from hotrow.tiers.batch_values import TableRule
from hotrow.tiers.hbm.batch_layout import lay_out
from hotrow.tiers.hbm.miss_list import MissList
from hotrow.tiers.hbm.row_transfer import UploadTarget
from hotrow.tiers.hbm.rows_below import BatchBelow, RowsBelow
from hotrow.tiers.hbm.table_group import BegunUpload, TableGroup
from hotrow.tiers.host.row_staging import HostRowFetch, RowLocations
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import Feature


class AssignedSlots(NamedTuple):
    """For each missing key: how often it occurs, and its assigned slot (-1: none)."""

    seen: Tensor
    slots: Tensor


class Misses(NamedTuple):
    """A batch's missing ids: positions, unique keys, the report to the host, the evicted rows, and the upload's
    target."""

    positions: Tensor
    unique: Unique
    report: MissReport
    keys: Tensor
    assigned: AssignedSlots
    victims: RowLocations
    target: UploadTarget
    keys_inserted: bool  # whether the keys are in the index already (ahead of the turn)


class GroupBatch:
    """One batch in one table group. Its calls come one after another."""

    def __init__(self, group: TableGroup, features: Sequence[Sequence[Feature]], numbers: Sequence[int]) -> None:
        self.group = group
        self.numbers = numbers  # its features' numbers in the collection
        self.keys, self.begins, self.items = lay_out(features, group.cache.device)
        self._layout_stream = raw_stream(group.cache.device)
        self.ids = [jagged for of_table in features for jagged, _ in of_table]
        self.late = torch.zeros(0, dtype=torch.int64)  # positions of ids that a policy answered
        self.below: tuple[RowsBelow, BatchBelow] | None = None  # where missing rows may be beside the stores
        self.batch = 0
        self.seen: Tensor | None = None  # occurrences by position, if keys are unique already
        self.extra: Tensor | None = None
        self._extra_is_read_only = False  # whether extra rows are values that were only read
        self.extra_locations: RowLocations | None = None  # of extra rows, which are written back after the update
        self._host_rows: HostRowFetch | None = None
        self._runs: Runs | None = None
        self._miss_list: MissList | None = None  # the result of the captured search, if used
        self.writes_back_extra = False
        self.staged_rows = self.unplaced_rows = self.unseen_rows = (
            0  # of rows ahead of the turn: uploaded; without a slot; without a row
        )
        self._counted = False
        self._misses: Misses | None = None  # rows that have slots and are not uploaded yet
        self._keys_inserted = False  # whether keys are in the index whose slots still have other rows
        self._pending_write_back: Future[None] | None = None  # must be in DRAM before the rows are looked up there

    def find(self, batch: int, ahead: bool | None = None) -> None:
        """Find the slots of the ids, -1 for a miss. `ahead` says that the caller handles misses at once, and whether
        that is ahead of the batch's turn. None: it handles them later."""
        self.batch = batch
        self._runs = self._miss_list = None
        ids = self.keys.numel()
        # While a batch has extra rows to write back, `prefetch` assigns no slots, so none may be assigned here either.
        waits = ahead is None or (ahead and self.group.batches_with_extra > 0)
        if ahead is not None and not waits and self.seen is None and self.group.miss_finder.ready(ids):
            cache = self.group.cache
            settled = cache.settled_before(batch) if ahead else cache.settled
            cache.wait(settled)
            self._keys_inserted = ahead
            self._miss_list = self.group.miss_finder.find_misses(
                self.keys, self.begins, batch, settled, self._score(), ahead
            )
            self._keys_inserted = ahead and self._miss_list.complete
            self.slots = self._miss_list.slots
            return
        missing = self.group.miss_counter
        missing.catch_up()
        cache = self.group.cache
        self.slots = find(
            cache.index, self.keys, self.begins, batch, missing.number, ScorePolicy(cache.policy, cache.half_life)
        )
        missing.send()

    def count_missing(self, learn: bool = True) -> int:
        """The number of missing ids. Waits for the device. Read-only batches have other sizes, so they pass
        learn=False."""
        missing = self._miss_list.missing if self._miss_list is not None else self.group.miss_counter.increase()
        if learn:
            self.group.miss_finder.observe(self.keys.numel(), missing)
        return missing

    def _count(self, missing: int) -> None:
        if not self._counted:
            self.group.cache.hits += self.keys.numel() - missing
            self.group.cache.misses += missing
        self._counted = True

    # --- ahead of the batch's turn ---

    def prefetch(self, count: int) -> bool:
        """Assign slots to the rows of `count` missing ids, insert their keys into the index and start writing back the
        evicted rows. Returns whether every row got a slot."""
        self._count(count)
        cache, group = self.group.cache, self.group
        self.staged_rows = self.unplaced_rows = self.unseen_rows = 0
        if count == 0 or group.batches_with_extra:
            assert count == 0 or self._miss_list is None, "keys were inserted and their rows are not uploaded"
            self._keys_inserted = False
            return count == 0
        misses = self._assign_slots(count, cache.settled_before(self.batch))
        after, put = group.last_write_back, self._begin_eviction(misses)
        if put is not None:
            put()
        # From here on those slots may be emptied: the write-back of their rows has started.
        self._misses, self._pending_write_back, self._keys_inserted = misses, after, False
        if not misses.keys_inserted:
            number = misses.keys.numel()
            insert_keys(cache.index, misses.report.keys[:number], misses.target.slots, None, self.batch, self._score())
            scatter_slots(misses.positions, misses.unique.inverse, misses.report.ranks, misses.target.slots, self.slots)
        self.unplaced_rows = int(np.count_nonzero(misses.assigned.slots.numpy() < 0))
        return self.unplaced_rows == 0

    def prefetch_failed(self, error: BaseException) -> None:
        """`find` or `prefetch` raised this error. Keys may be in slots whose rows were not written back."""
        if self._keys_inserted:
            self.group.mark_lost(error)
        self._keys_inserted = False

    def stage(self) -> bool:
        """Upload the rows that `prefetch` assigned slots to, on the upload stream. Returns whether all exist."""
        if self._misses is None:
            return True
        group, misses, count = self.group, self._misses, self._misses.keys.numel()
        group.wait_for_write_backs(self._pending_write_back)
        places = HostRowFetch(pinned=group.upload_stream is not None).allocate(
            group.stores, misses.victims.bounds, count
        )
        absent = group.row_transfer.upload(
            places, misses.keys, group.row_transfer.zero_copy_rows(count, ahead=True), misses.target
        )
        used_on(group.upload_stream, misses.report.packed)
        self._misses = self._pending_write_back = None
        self.unseen_rows = 0
        if absent:  # some of the absent rows may have had no slot
            assigned = misses.assigned.slots.numpy()
            lost = (assigned >= 0) & (places.slots.numpy() < 0)
            self.unseen_rows = int(lost.sum())
            group.invalidate(torch.from_numpy(assigned[lost]))
        self.staged_rows = count - self.unseen_rows - self.unplaced_rows
        return self.unseen_rows == 0

    def cancel(self) -> bool:
        """Drop an upload that `stage` has not done. Returns whether there was one."""
        if self._misses is None:
            return False
        self.group.invalidate(self._misses.assigned.slots)
        self._misses = self._pending_write_back = None
        return True

    # --- at its turn ---

    def fetch(self, count: int, step: int) -> None:
        """Upload the rows of `count` missing ids, and write back the rows that they evict."""
        self._count(count)
        cache, group = self.group.cache, self.group
        if count == 0:
            return
        misses = self._assign_slots(count, cache.settled)
        group.wait_for_write_backs()
        put = self._begin_eviction(misses)
        try:
            upload, slots, places = self._begin_upload(step, misses)
        except BaseException:
            with group.lost_on_error():
                self._undo_fetch(misses.target.slots, put)
            raise
        with group.lost_on_error():
            group.finish_upload(UploadTarget(cache.source(self.extra), slots, misses.target.tables), upload)
            if put is not None:
                put()
            insert_fetched(
                cache.index, (cache.hosts, cache.steps, cache.counts), misses.report.keys, slots, places, self.batch,
                self._score(),
            )  # fmt: skip
        scatter_slots(misses.positions, misses.unique.inverse, misses.report.ranks, slots, self.slots)
        self._runs = None

    def _assign_slots(self, count: int, settled: int) -> Misses:
        """Find the missing keys, choose their slots and find the rows that these evict. Waits for the device."""
        cache, known = self.group.cache, self._miss_list
        if known is not None and known.complete:
            positions, unique, report = known.positions[:count], known.unique, known.report
            keys, assigned, victims = self._parse_report(known.numbers, report.write_back.numel())
        else:
            cache.wait(settled)
            positions, unique = self._missing_keys(count)
            chosen = choose_slots(cache.index, unique.keys, unique.tables, unique.number, settled, cache.policy)
            report, keys, assigned, victims = self._report_misses(unique, chosen)
        for table, (begin, end) in enumerate(itertools.pairwise(victims.bounds)):
            cache.missed[table] += end - begin
        target = UploadTarget(cache.source(), report.field(SLOTS)[: keys.numel()], report.field(TABLES))
        return Misses(positions, unique, report, keys, assigned, victims, target, known is not None and known.complete)

    def _begin_eviction(self, misses: Misses) -> Callable[[], None] | None:
        """Start writing back the evicted rows. Call what this returns to store them in DRAM."""
        going = int(np.count_nonzero(misses.victims.slots.numpy() >= 0))
        if going == 0:
            return None
        put = self.group.begin_write_back(
            self.group.cache.source(), misses.report.write_back[: misses.keys.numel()], misses.victims
        )
        self.group.cache.evictions += going
        return put

    def _score(self) -> float:
        return initial_score(self.batch, self.group.cache.policy, self.group.cache.half_life)

    def _begin_upload(self, step: int, misses: Misses) -> tuple[BegunUpload, Tensor, Tensor]:
        """The begun upload, the slots of its rows, and their locations in DRAM as a device tensor."""
        group, assigned = self.group, misses.assigned
        self._host_rows = HostRowFetch(pinned=group.cache.device.type == "cuda")
        all_have_slots = int(assigned.slots.numpy().min()) >= 0
        target = misses.target if all_have_slots else None
        upload = group.begin_upload(self._host_rows, misses.victims.bounds, misses.keys, assigned.seen, step, target)
        assert upload.places.block is not None
        places = to_device(upload.places.block, group.cache.device)
        return upload, self._place_rows(misses.target.slots, assigned.slots, misses.victims, upload.places), places

    def _undo_fetch(self, slots: Tensor, put: Callable[[], None] | None) -> None:
        """After a failed fetch: empty the assigned slots, some of which may have new rows, and store the evicted rows,
        which were copied before."""
        cache = self.group.cache
        wait_for(self.group.upload_stream)
        erase(cache.index, slots)
        cache.hosts[slots[slots >= 0].long()] = -1
        if put is not None:
            put()

    def use_on_current_stream(self) -> None:
        """The current stream uses tensors that were made on another one: keep their memory until it has."""
        device = self.group.cache.device
        if device.type == "cuda" and raw_stream(device) != self._layout_stream:
            used = (self.keys, self.begins, self.slots, self.seen, *vars(self.items).values())
            used_on(current_stream(device), *used)

    def _missing_keys(self, count: int) -> tuple[Tensor, Unique]:
        """The positions of the ids without a slot, and their unique keys."""
        positions, keys, tables = compact_keys(self.slots, count, self.keys, self.begins)
        unique = dedup(keys, tables, tables_sorted=True)
        if self.seen is None:
            return positions, unique
        times = torch.zeros_like(unique.counts)
        times.scatter_add_(0, unique.inverse.long(), self.seen[positions.long()])
        return positions, unique._replace(counts=times)

    def _report_misses(self, unique: Unique, chosen: Chosen) -> tuple[MissReport, Tensor, AssignedSlots, RowLocations]:
        """On the host: the missing keys, their assigned slots and the evicted rows. Waits for the device.

        The host uses numpy, because torch would wake threads that compete with the core's pool.
        """
        cache = self.group.cache
        report = report_misses(unique, chosen, cache.hosts, cache.steps, cache.counts, cache.clean)
        return report, *self._parse_report(to_host_by_kernel(report.packed), chosen.slots.numel())

    def _parse_report(self, numbers: Tensor, n: int) -> tuple[Tensor, AssignedSlots, RowLocations]:
        """Unpack a report of n keys on the host."""
        words = numbers.numpy()
        number = int(words[(FIELDS - 1) * n])
        tables, seen, slots, *victims = (words[field * n : field * n + number] for field in range(2, FIELDS - 1))
        rows = RowLocations(self.group.stores, self.group.bounds(tables), *map(torch.from_numpy, victims))
        keys = torch.from_numpy(words[: 2 * n].view(np.int64)[:number])
        return keys, AssignedSlots(torch.from_numpy(seen), torch.from_numpy(slots)), rows

    def _place_rows(self, chosen: Tensor, assigned: Tensor, victims: RowLocations, arriving: RowLocations) -> Tensor:
        """The slots of the arriving rows. Rows without a slot, or that admission refused, become extra rows of the
        batch, and the rows that they would have evicted stay."""
        cache, steps, slots = self.group.cache, arriving.steps.numpy(), assigned.numpy()
        if slots.size == 0 or (slots.min() >= 0 and steps.min() >= 0):
            return chosen
        refused = steps < 0
        in_extra = refused | (slots < 0)
        extra = int(in_extra.sum())
        slots = np.where(in_extra, cache.capacity + np.cumsum(in_extra, dtype=np.int32) - 1, slots).astype(np.int32)
        self.extra = torch.empty(extra, cache.layout.stride, dtype=torch.float32, device=cache.device)
        beside = np.stack([steps[in_extra], arriving.counts.numpy()[in_extra]], axis=1)
        self.extra_steps, self.extra_counts = to_device(torch.from_numpy(beside), cache.device).unbind(1)
        kept = torch.from_numpy(np.where(refused, -1, arriving.slots.numpy())[in_extra].astype(np.int32))
        bounds = _bounds_of(in_extra, arriving.bounds)
        self.extra_locations = RowLocations(self.group.stores, bounds, kept, arriving.steps, arriving.counts)
        overflows = int((kept >= 0).sum())
        cache.overflows += overflows
        self._set_writes_back_extra(overflows > 0)
        settled = to_device(torch.from_numpy(slots), cache.device)
        victims.slots.numpy()[in_extra] = -1  # last: after an error all of them are written back
        return settled

    def _read_raw(self, store: HostStore, keys: Tensor, out: Tensor) -> Tensor:
        return store.read_raw(keys, out) if self.below is None else self.below[0].read_raw(store, keys, out)

    def read_into_cache(self, count: int, late: str) -> None:
        """For read-only tables: insert missing rows that are in DRAM into the cache, as far as slots are free. Copy the
        others for this batch."""
        cache, group = self.group.cache, self.group
        cache.hits += self.keys.numel() - count
        cache.misses += count
        self.late = torch.zeros(0, dtype=torch.int64)  # of an earlier attempt
        if count == 0:
            return
        settled = cache.settled
        cache.wait(settled)
        positions, unique = self._missing_keys(count)
        chosen = choose_slots(cache.index, unique.keys, unique.tables, unique.number, settled, cache.policy)
        report, keys, assigned, victims = self._report_misses(unique, chosen)
        rows = torch.empty(keys.numel(), group.width, pin_memory=cache.device.type == "cuda")
        here = torch.cat([self._read_raw(store, keys[b:e], rows[b:e]) for store, b, e in victims.by_table()])
        kept = here.numpy() & (assigned.slots.numpy() >= 0)
        cache.evictions += int(np.count_nonzero(kept & (victims.slots.numpy() >= 0)))
        cache.overflows += int(np.count_nonzero(here.numpy() & ~kept))
        slots = np.where(kept, assigned.slots.numpy(), cache.capacity + np.cumsum(~kept) - 1).astype(np.int32)
        places = to_device(torch.from_numpy(slots), cache.device)
        transfer.deliver(Source(cache.rows), torch.where(places < cache.capacity, places, -1), group.width,
                     to_device(rows, cache.device))  # fmt: skip
        beside = (cache.hosts, cache.steps, cache.counts)
        nothing = torch.zeros(3, keys.numel(), dtype=torch.int32, device=cache.device)
        score = initial_score(self.batch, cache.policy, cache.half_life)
        insert_fetched(cache.index, beside, report.keys, places, nothing, self.batch, score)
        scatter_slots(positions, unique.inverse, report.ranks, places, self.slots)
        in_extra = np.flatnonzero(~kept)
        if in_extra.size:
            bounds = _bounds_of(~kept, victims.bounds)
            locations = RowLocations(group.stores, bounds, victims.slots, victims.steps, victims.counts)
            values, flags = self._read_from_host(keys[in_extra], locations, late)
            self.extra = to_device(values, cache.device)
            if flags is not None:
                late_keys = torch.zeros(keys.numel(), dtype=torch.bool)
                late_keys[in_extra] = flags
                self._note_late(late_keys, positions, report.ranks[unique.inverse.long()])
        self._runs = None

    def _read_from_host(self, keys: Tensor, rows: RowLocations, late: str) -> tuple[Tensor, Tensor | None]:
        """Read keys (table by table) from the stores as extra rows; and which of them the policy answered, if any."""
        layout, self._extra_is_read_only = self.group.cache.extra_values_layout, True
        values = torch.zeros(keys.numel(), layout.stride, dtype=torch.float32)
        flags = torch.zeros(keys.numel(), dtype=torch.bool)
        for store, begin, end in rows.by_table():
            if self.below is not None:
                found, flags[begin:end] = self.below[1].read(store, keys[begin:end], late)
                values[begin:end, : layout.dim] = found
            elif late == "wait":
                values[begin:end, : layout.dim] = store.read(keys[begin:end])[0]
            else:
                found, flags[begin:end] = store.read_late(keys[begin:end], late)
                values[begin:end, : layout.dim] = found
        return values, flags if bool(flags.any()) else None

    def _note_late(self, flags: Tensor, positions: Tensor, ranks: Tensor) -> None:
        self.late = to_host(positions[to_device(flags, ranks.device)[ranks.long()]]).long()

    def count_late(self, counts: Tensor) -> None:
        """Add the number of ids that a policy answered to each example's count."""
        begin = 0
        for jagged in self.ids:
            end = begin + jagged.values.numel()
            at = self.late[(self.late >= begin) & (self.late < end)] - begin
            if jagged.offsets is not None:
                at = torch.searchsorted(jagged.offsets.cpu(), at, right=True) - 1
            counts.index_add_(0, at, torch.ones_like(at, dtype=counts.dtype))
            begin = end

    def read_without_caching(self, count: int, late: str) -> None:
        """Copy the missing rows for this batch. Neither the cache nor DRAM changes."""
        cache, group = self.group.cache, self.group
        if count == 0:
            return
        positions, unique = self._missing_keys(count)
        real = torch.arange(unique.keys.numel(), device=cache.device) < unique.number
        order = torch.where(real, unique.tables, len(group.stores)).sort(stable=True)[1]
        report, keys, _, rows = self._report_misses(unique, Chosen(torch.full_like(unique.counts, -1), order))
        group.wait_for_write_backs()
        values, flags = self._read_from_host(keys, rows, late)
        self.extra = to_device(values, cache.device)
        if flags is not None:
            self._note_late(flags, positions, report.ranks[unique.inverse.long()])
        self.slots[positions.long()] = cache.capacity + report.ranks[unique.inverse.long()]
        self._runs = None

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs."""
        cache = self.group.cache
        gather(cache.source(self.extra, self._extra_is_read_only), cache.layout, self.slots, self.items, outputs)

    def runs(self) -> Runs:
        """The batch's positions, grouped by row."""
        if self._runs is None:
            self._runs = group_runs(self.slots)
        return self._runs

    def update(
        self, gradients: Sequence[Tensor | None], rules: Sequence[TableRule], step: int, scale: float, flag: Tensor
    ) -> None:
        """Sum each row's gradients and apply the optimizer's rule, unless `flag` is set."""
        cache = self.group.cache
        runs = self._runs or self.group.grouper(self.slots)
        meta = RowMetadata(
            cache.steps,
            cache.counts,
            *((self.extra_steps, self.extra_counts) if self._has_extra_metadata else (None, None)),
        )
        update(
            cache.source(self.extra), cache.layout, self.group.optimizer_code, runs, self.items, gradients, self.keys,
            _coefficients(rules), self.group.count_streams, self.group.rounding_streams, step, scale, meta, flag,
            seen=self._occurrences(runs),
        )  # fmt: skip

    def _occurrences(self, runs: Runs) -> Tensor | None:
        """How often each row occurs, if that is not the number of its positions."""
        if self.seen is None:
            return None
        times = torch.zeros_like(runs.run_of)
        return times.scatter_add_(0, runs.run_of.long(), self.seen[runs.order])

    def _set_writes_back_extra(self, rows: bool) -> None:
        """Set whether extra rows of this batch must be written back after its update."""
        if rows != self.writes_back_extra:  # another thread may change the group's count
            self.group.batches_with_extra += int(rows) - int(self.writes_back_extra)
            self.writes_back_extra = rows

    @property
    def _has_extra_metadata(self) -> bool:
        return self.extra is not None and self._host_rows is not None

    def commit(self) -> None:
        """After the update: write back the extra rows, then release."""
        if self.extra_locations is not None and self.writes_back_extra:
            with self.group.lost_on_error():
                self._write_back_extra(self.extra_locations)
            self.extra_locations = None
            self._set_writes_back_extra(False)
        if self._host_rows is not None:
            self._host_rows.commit()
            self._host_rows = None
        self.release()

    def _write_back_extra(self, rows: RowLocations) -> None:
        cache = self.group.cache
        steps, counts = to_host(torch.stack([self.extra_steps, self.extra_counts]))
        down = RowLocations(rows.stores, rows.bounds, rows.slots, steps, counts)
        places = torch.arange(cache.capacity, cache.capacity + rows.slots.numel(), dtype=torch.int32)
        self.group.begin_write_back(cache.source(self.extra), to_device(places, cache.device), down)()

    def release(self) -> None:
        """Release the rows without writing anything back."""
        if self._host_rows is not None:
            if self.extra_locations is not None:
                self.extra_locations.unpin()
            self._host_rows.release()
        self._host_rows, self.extra_locations, self.extra = None, None, None
        self._set_writes_back_extra(False)


def _coefficients(rules: Sequence[TableRule]) -> list[Coefficients]:
    """The coefficients of each table's rule; a single entry if they are all equal."""
    first = rules[0]
    same = all(rule is first or rule == first for rule in rules)
    return [Coefficients(r.coefficients, r.clip_value, r.clip_norm) for r in (rules[:1] if same else rules)]


def _bounds_of(mask: np.ndarray, bounds: Sequence[int]) -> list[int]:  # type: ignore[type-arg]
    """The bounds of the rows that a mask selects."""
    before = np.concatenate(([0], np.cumsum(mask)))
    return [int(at) for at in before[np.asarray(bounds)]]
