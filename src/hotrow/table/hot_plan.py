"""One batch through the caches in HBM: route → fetch (find, bring what is missing) → gather → update.

It has the calls of tiers/host.HostPlan, over device tensors, so a Lookup takes either. The hit path waits for the
device once, for the number of missing ids; with none missing nothing else happens between keys and vectors. What is
missing is deduplicated on the device, goes down as keys once, and comes up as rows into slots that were chosen
meanwhile; the rows that had those slots go down (hot.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.errors import GradientError
from hotrow.kernels import finite
from hotrow.kernels.admit import FIELDS, SLOTS, TABLES, Brief, admit, answer, brief
from hotrow.kernels.dedup import Unique, compact_keys, dedup
from hotrow.kernels.find import Warmth, find
from hotrow.kernels.gather import gather
from hotrow.kernels.insert import Chosen, choose_in_order, erase
from hotrow.kernels.runs import Runs
from hotrow.kernels.runs import group as group_runs
from hotrow.kernels.touch import first_score
from hotrow.kernels.update import Coefficients, Meta, update
from hotrow.table.batch_layout import Feature, join, lay_out
from hotrow.table.hot import Coming, Group, HotRows, Into, on, to_device, to_host, used_on, wait_for
from hotrow.tiers.host import HostLift, HostPlan, HostStore, Moved, Places, Update

PATIENCE = 16  # batches that come up at their turn, after one that was staged and lacked something


class HotPlan:
    """One batch's way through all groups."""

    share = 1.0
    over = False
    examples: int | None = None

    def __init__(self, hot: HotRows) -> None:
        self.hot = hot
        self.ids = 0
        self.parts: list[Part] = []
        self._jobs: list[tuple[HostStore, list[Feature]]] = []
        self._numbers: list[int] = []  # of this batch, in each group
        self._given: Any = None  # when keys that came on the device are there
        self._seen: list[Tensor] | None = None  # how often each feature's ids were seen
        self._reads = False
        self._below: HostPlan | None = None  # keeps rows in DRAM that came from SSD
        self._staged = -1  # the generation in which all rows were brought up ahead
        self._ready: Any = None  # when they are there
        self._step: int | None = None  # that rows are still to be brought up for

    def route(self, jobs: Sequence[tuple[HostStore, Sequence[Feature]]], ahead: bool = False) -> None:
        """Take the keys; they go to the device when it is looked for them there."""
        self.release()
        self._jobs = [(store, list(features)) for store, features in jobs]
        self._numbers = [group.tier.begin() for group in self.hot.groups]
        values = [jagged.values for _, features in self._jobs for jagged, _ in features]
        self.ids = sum(keys.numel() for keys in values)
        on_device = self.hot.staging and any(keys.device.type == "cuda" for keys in values)
        self._given = torch.cuda.current_stream(self.hot.device).record_event() if on_device else None

    def prefetch(self) -> Moved:
        """Rows that are on SSD come up to DRAM and stay there until `fetch`."""
        on_host = all(jagged.values.device.type == "cpu" for _, features in self._jobs for jagged, _ in features)
        if not on_host or not any(store.evicts for store, _ in self._jobs):
            return Moved()
        self._below = HostPlan()
        self._below.route(self._jobs)
        return self._below.prefetch()

    def stage(self) -> Moved:
        """Rows that exist and find room come up to HBM, ahead of the batch's turn; what else it needs waits for that.

        Rows that keep DRAM slots over SSD come when it is their turn: they would have to be held there.
        """
        hot, moved = self.hot, 0
        if hot.patience or not hot.staging:
            hot.patience = max(0, hot.patience - 1)
            return Moved()
        with hot.lock:
            with on(hot.ahead):
                if self._given is not None:
                    self._given.wait()
                self._alone()
                self._lay_out()
                self._find()
                whole = True
                for part, count in zip(self.parts, self._missing(), strict=True):
                    whole &= part.bring(count, None)
                    moved += part.brought
            if any(part.unseen for part in self.parts):
                hot.patience = PATIENCE
            if whole:
                self._staged = hot.generation
                self._ready = _after([hot.ahead, *(part.group.up for part in self.parts)])
        return Moved(moved, sum(4 * part.brought * part.group.width for part in self.parts))

    def fetch(self, step: int = 0) -> None:
        """Find the rows and hold them; those that are missing come up now, or when it shows that there are any.

        After a batch that missed nothing, the next is taken to miss nothing either: the device goes on to the gather
        while the host still waits to hear so.
        """
        if self._staged == self.hot.generation:
            if self._ready is not None:
                self._ready.wait()
        else:
            with self.hot.alone():
                self._alone()
                self._lay_out()
                self._find()
                self._step, self.hot.pending = step, self
                if self.hot.ahead_of_turn or any(part.group.missed for part in self.parts):
                    self._arrive()
        self._staged, self._ready = -1, None
        for part in self.parts:
            part.take_over()
            part.group.tier.take(part.batch)
        self._free_below()

    def _find(self) -> None:
        for part, number in zip(self.parts, self._numbers, strict=True):
            part.find(number)

    def _lay_out(self) -> None:
        """The keys to the device, group by group."""
        if self.parts:
            return
        features = {id(store): of_table for store, of_table in self._jobs}
        starts, at = {}, 0
        for store, of_table in self._jobs:
            starts[id(store)] = at
            at += len(of_table)
        self.parts = [
            Part(
                group,
                [features[id(store)] for store in group.stores],
                [starts[id(store)] + i for store in group.stores for i in range(len(features[id(store)]))],
            )
            for group in self.hot.groups
        ]
        if self._seen is not None:
            for part in self.parts:
                part.seen = join([self._seen[number] for number in part.numbers], self.hot.device)

    def route_seen(self, jobs: Sequence[tuple[HostStore, Sequence[Feature]]], seen: Sequence[Tensor]) -> None:
        """The same for keys without duplicates that were seen more than once: int32 for each feature's ids."""
        self.route(jobs)
        self._seen = list(seen)

    def _arrive(self) -> bool:
        """Bring up what is missing, unless that was done. Whether there was anything."""
        if self._step is None:
            return False
        step, self.hot.pending = self._step, None
        counts = self._missing()
        for part, count in zip(self.parts, counts, strict=True):
            part.group.missed = count > 0
            part.bring(count, step)
            wait_for(part.group.up)
        self._step = None
        return any(counts)

    def read(self) -> None:
        """Only read: no row is held, so that they are found when they are gathered."""
        self._reads = True

    def _read(self, outputs: Sequence[Tensor]) -> None:
        """Find the rows; those that are missing are copied for this batch alone. Nobody may change any meanwhile."""
        with self.hot.alone():
            self._alone()
            self._lay_out()
            for part in self.parts:
                part.find(0)
            for part, count in zip(self.parts, self._missing(), strict=True):
                part.borrow(count)
                part.take_over()
                part.gather([outputs[number] for number in part.numbers])

    def _alone(self) -> None:
        """Only one batch at a time has something to come."""
        if self.hot.pending is not None:
            self.hot.pending._arrive()

    def _missing(self) -> list[int]:
        """How many ids of each part were not found. Waits for the device."""
        return [part.group.missing.increase() for part in self.parts]

    def _free_below(self) -> None:
        if self._below is not None:
            self._below.release()
            self._below = None

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one matrix per feature."""
        if self._reads:
            self._read(outputs)
            return
        for part in self.parts:
            part.gather([outputs[number] for number in part.numbers])
        if self._arrive():
            self.gather(outputs)

    def update(
        self,
        gradients: Sequence[Tensor | None],
        checked: Sequence[Tensor],
        updates: Sequence[Update],
        step: int,
        grad_scale: float,
    ) -> None:
        """Apply gradients in place. A NaN or infinity in `checked` raises, and no row has changed."""
        self._arrive()
        flag = self.hot.flag.number
        for columns in sorted({matrix.shape[1] for matrix in checked}):
            finite.check([matrix for matrix in checked if matrix.shape[1] == columns], flag)
        self.hot.flag.send()
        by_store = {id(store): u for store, u in zip(self.hot.stores, updates, strict=True)}
        for part in self.parts:
            part.update(
                [gradients[number] for number in part.numbers],
                [by_store[id(store)] for store in part.group.stores],
                step,
                grad_scale,
                flag,
            )
        if self.hot.flag.wait():
            flag.zero_()
            raise GradientError(
                "a gradient is NaN or infinite; no row was changed. Lower the learning rate, clip gradients, or find "
                "the bad input with torch.autograd.set_detect_anomaly(True)"
            )
        with self.hot.lock if any(part.aside for part in self.parts) else nullcontext():
            for part in self.parts:
                part.commit()

    def release(self) -> None:
        """Let go of the rows."""
        if self.hot.pending is self:
            self.hot.pending, _ = None, self._missing()
        for part in self.parts:
            part.release()
        for group, number in zip(self.hot.groups, self._numbers, strict=False):
            group.tier.settle(number)
        self.parts, self._numbers, self._staged, self._ready, self._step = [], [], -1, None, None
        self._reads, self._seen = False, None
        self._free_below()

    @property
    def late(self) -> int:
        """Rows that found no room ahead of the batch's turn."""
        return sum(part.homeless for part in self.parts)

    @property
    def unique(self) -> int:
        """Unique keys of the batch. Waits for the device."""
        self._arrive()
        return sum(int(part.runs().number) for part in self.parts)

    def __del__(self) -> None:
        self.release()


class Wanted(NamedTuple):
    """Of missing keys: how often each was seen, and which slot it was given (-1: none)."""

    seen: Tensor
    slots: Tensor


class Part:
    """One batch in one group."""

    def __init__(self, group: Group, features: Sequence[Sequence[Feature]], numbers: Sequence[int]) -> None:
        self.group = group
        self.numbers = numbers  # of its features, among all
        self.keys, self.begins, self.items = lay_out(features, group.tier.device)
        self.batch = 0
        self.seen: Tensor | None = None  # by position, where duplicates were taken out before
        self.extra: Tensor | None = None
        self.extra_rows: Places | None = None  # of those that go down after the update
        self._lift: HostLift | None = None
        self._runs: Runs | None = None
        self.aside = False
        self.brought = self.homeless = self.unseen = 0  # of rows that came ahead, or could not
        self._counted = False

    def find(self, batch: int) -> None:
        """Slots of the ids; -1 where there is no row here."""
        self.batch = batch
        self._runs = None
        missing = self.group.missing
        missing.catch_up()
        tier = self.group.tier
        self.slots = find(
            tier.index, self.keys, self.begins, batch, missing.number, Warmth(tier.policy, tier.half_life)
        )
        missing.send()

    def bring(self, count: int, step: int | None) -> bool:
        """Rows of `count` ids that were not found come up; rows whose slots they take go down.

        Without a step it is ahead of the batch's turn: only rows that exist and find room come. Whether all did.
        """
        tier, group = self.group.tier, self.group
        if not self._counted:
            tier.hits += self.keys.numel() - count
            tier.misses += count
        self._counted, self.brought, left = True, 0, 0
        if step is None:
            self.homeless = self.unseen = 0
        if count == 0:
            return True
        if step is None and group.aside:
            return False
        settled = tier.settled if step is not None else tier.settled_before(self.batch)
        tier.wait(settled)
        positions, unique = self._absent(count)
        chosen = choose_in_order(tier.index, unique.keys, unique.tables, unique.number, settled, tier.policy)
        group.landed()
        report, keys, wanted, leaving = self._brief(unique, chosen)
        for table, (begin, end) in enumerate(itertools.pairwise(leaving.bounds)):
            tier.missed[table] += end - begin
        number = keys.numel()
        evicts = bool((leaving.slots.numpy() >= 0).any())
        put = group.lower(tier.source(), report.going[:number], leaving) if evicts else None
        into = Into(tier.source(), report.field(SLOTS)[:number], report.field(TABLES))
        try:
            coming, slots, left = self._fetch(step, into, keys, wanted, leaving)
        except BaseException:
            self._undo(into.slots, put)
            raise
        group.raise_rows(Into(tier.source(self.extra), slots, into.tables), coming)
        assert coming.places.block is not None
        places = to_device(coming.places.block, tier.device)
        if put is not None:
            tier.evictions += int(np.count_nonzero(leaving.slots.numpy() >= 0))
            put()
        beside = (tier.hosts, tier.steps, tier.counts)
        score = first_score(self.batch, tier.policy, tier.half_life)
        admit(tier.index, beside, report.keys, slots, places, self.batch, score)
        answer(positions, unique.inverse, report.ranks, slots, self.slots)
        self._runs = None
        self.brought = number - left
        return left == 0

    def _fetch(
        self, step: int | None, into: Into, keys: Tensor, wanted: Wanted, leaving: Places
    ) -> tuple[Coming, Tensor, int]:
        """Rows on their way up, the slots they get, and how many stay behind."""
        group = self.group
        self._lift = HostLift(pinned=group.tier.device.type == "cuda")
        room = int(wanted.slots.numpy().min()) >= 0
        ahead = step is None
        coming = group.fetch_rows(self._lift, leaving.bounds, keys, wanted.seen, step, into if room or ahead else None)
        if ahead:
            return coming, *self._leave(into.slots, wanted.slots, leaving, coming.places)
        return coming, self._settle_places(into.slots, wanted.slots, leaving, coming.places), 0

    def _undo(self, slots: Tensor, put: Callable[[], None] | None) -> None:
        """Rows that were to come could not. Some may lie in their slots already: those are emptied, and whose they were
        goes down, as it was collected."""
        tier = self.group.tier
        wait_for(self.group.up)
        erase(tier.index, slots)
        tier.hosts[slots[slots >= 0].long()] = -1
        if put is not None:
            put()

    def take_over(self) -> None:
        """What was laid out and found on another stream is used on this one from now on."""
        if self.slots.device.type == "cuda":
            used_on(torch.cuda.current_stream(), self.keys, self.begins, self.slots, *vars(self.items).values())

    def _absent(self, count: int) -> tuple[Tensor, Unique]:
        """Positions of the ids without a slot, and their unique keys."""
        positions, keys, tables = compact_keys(self.slots, count, self.keys, self.begins)
        unique = dedup(keys, tables, rising=True)
        if self.seen is None:
            return positions, unique
        times = torch.zeros_like(unique.counts)
        times.scatter_add_(0, unique.inverse.long(), self.seen[positions.long()])
        return positions, unique._replace(counts=times)

    def _brief(self, unique: Unique, chosen: Chosen) -> tuple[Brief, Tensor, Wanted, Places]:
        """On the host: the missing keys, what they want, and who leaves for them. Waits for the device.

        The host's part is numpy: torch would wake threads for it that then stand in the way of the core's.
        """
        tier = self.group.tier
        report = brief(unique, chosen, tier.hosts, tier.steps, tier.counts, tier.clean)
        told, n = to_host(report.told), chosen.slots.numel()
        tables, seen, slots, *leaving, numbers = told[2 * n :].view(FIELDS - 2, n).unbind()
        number = int(numbers[0])
        bounds = self.group.bounds(tables[:number])
        rows = Places(self.group.stores, bounds, *(field[:number] for field in leaving))
        keys = told[: 2 * n].view(torch.int64)[:number]
        return report, keys, Wanted(seen[:number], slots[:number]), rows

    def _settle_places(self, chosen: Tensor, wanted: Tensor, leaving: Places, arriving: Places) -> Tensor:
        """The slots of the arriving rows. Those that found no way, or are not admitted, get rows of the batch's own,
        and whose place they would have had does not leave."""
        tier, steps, slots = self.group.tier, arriving.steps.numpy(), wanted.numpy()
        if slots.size == 0 or (slots.min() >= 0 and steps.min() >= 0):
            return chosen
        refused = steps < 0
        aside = refused | (slots < 0)
        extra = int(aside.sum())
        leaving.slots.numpy()[aside] = -1
        slots = np.where(aside, tier.capacity + np.cumsum(aside, dtype=np.int32) - 1, slots).astype(np.int32)
        self.extra = torch.empty(extra, tier.layout.stride, dtype=torch.float32, device=tier.device)
        beside = np.stack([steps[aside], arriving.counts.numpy()[aside]], axis=1)
        self.extra_steps, self.extra_counts = to_device(torch.from_numpy(beside), tier.device).unbind(1)
        kept = torch.from_numpy(np.where(refused, -1, arriving.slots.numpy())[aside].astype(np.int32))
        bounds = _bounds_of(aside, arriving.bounds)
        self.extra_rows = Places(self.group.stores, bounds, kept, arriving.steps, arriving.counts)
        overflows = int((kept >= 0).sum())
        tier.overflows += overflows
        self._aside(overflows > 0)
        return to_device(torch.from_numpy(slots), tier.device)

    def _leave(self, chosen: Tensor, wanted: Tensor, leaving: Places, arriving: Places) -> tuple[Tensor, int]:
        """The slots of the rows that come ahead of their turn: -1 for those that are unseen or have no room, and how
        many those are."""
        slots = wanted.numpy()
        aside = (slots < 0) | (arriving.slots.numpy() < 0)
        left, self.homeless = int(aside.sum()), int((slots < 0).sum())
        self.unseen = left - self.homeless
        if left == 0:
            return chosen, 0
        leaving.slots.numpy()[aside] = -1
        stay = torch.from_numpy(np.where(aside, -1, slots).astype(np.int32))
        return to_device(stay, self.group.tier.device), left

    def borrow(self, count: int) -> None:
        """Missing rows are copied for this batch; nothing below or here changes."""
        tier, group = self.group.tier, self.group
        if count == 0:
            return
        positions, unique = self._absent(count)
        real = torch.arange(unique.keys.numel(), device=tier.device) < unique.number
        order = torch.where(real, unique.tables, len(group.stores)).sort(stable=True)[1]
        report, keys, _, rows = self._brief(unique, Chosen(torch.full_like(unique.counts, -1), order))
        group.landed()
        values = torch.zeros(keys.numel(), tier.layout.stride, dtype=torch.float32)
        for store, begin, end in rows.of_tables():
            values[begin:end, : tier.layout.dim] = store.read(keys[begin:end])[0]
        self.extra = to_device(values, tier.device)
        self.slots[positions.long()] = tier.capacity + report.ranks[unique.inverse.long()]
        self._runs = None

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs."""
        gather(self.group.tier.source(self.extra), self.group.tier.layout, self.slots, self.items, outputs)

    def runs(self) -> Runs:
        """The batch's positions, those of one row together."""
        if self._runs is None:
            self._runs = group_runs(self.slots)
        return self._runs

    def update(
        self, gradients: Sequence[Tensor | None], updates: Sequence[Update], step: int, scale: float, flag: Tensor
    ) -> None:
        """Sum each row's gradients and apply the rule, unless the flag is up."""
        tier = self.group.tier
        runs = self._runs or self.group.grouper(self.slots)
        meta = Meta(tier.steps, tier.counts, *((self.extra_steps, self.extra_counts) if self._kept else (None, None)))
        update(
            tier.source(self.extra), tier.layout, self.group.code, runs, self.items, gradients, self.keys,
            _coefficients(updates), self.group.streams, None, step, scale, meta, flag, seen=self._times(runs),
        )  # fmt: skip

    def _times(self, runs: Runs) -> Tensor | None:
        """How often each run's row was seen, where that is not the run's length."""
        if self.seen is None:
            return None
        times = torch.zeros_like(runs.run_of)
        return times.scatter_add_(0, runs.run_of.long(), self.seen[runs.order])

    def _aside(self, rows: bool) -> None:
        """Whether rows of this batch's own must go down after its update."""
        self.group.aside += int(rows) - int(self.aside)
        self.aside = rows

    @property
    def _kept(self) -> bool:
        return self.extra is not None and self._lift is not None

    def commit(self) -> None:
        """The update has landed: bring the batch's own rows down, let go."""
        tier = self.group.tier
        if self.extra_rows is not None and self.aside:
            steps, counts = to_host(torch.stack([self.extra_steps, self.extra_counts]))
            rows = self.extra_rows
            down = Places(rows.stores, rows.bounds, rows.slots, steps, counts)
            places = torch.arange(tier.capacity, tier.capacity + rows.slots.numel(), dtype=torch.int32)
            self.group.lower(tier.source(self.extra), to_device(places, tier.device), down)()
            self.extra_rows = None
            self._aside(False)
        if self._lift is not None:
            self._lift.commit()
            self._lift = None
        self.release()

    def release(self) -> None:
        """Let go of the rows."""
        if self._lift is not None:
            if self.extra_rows is not None:
                self.extra_rows.unhold()
            self._lift.release()
        self._lift, self.extra_rows, self.extra = None, None, None
        self._aside(False)


def _after(streams: Sequence[Any]) -> Any:
    """An event behind what was asked of some streams; None without a GPU."""
    if streams[0] is None:
        return None
    for stream in streams[1:]:
        streams[0].wait_stream(stream)
    return streams[0].record_event()


def _coefficients(updates: Sequence[Update]) -> list[Coefficients]:
    """What each table's rule reads; one for all where they are the same."""
    found = [Coefficients(u.coefficients, u.clip_value, u.clip_norm) for u in updates]
    return found[:1] if all(c == found[0] for c in found) else found


def _bounds_of(mask: np.ndarray, bounds: Sequence[int]) -> list[int]:  # type: ignore[type-arg]
    """Bounds of the rows that a mask leaves."""
    before = np.concatenate(([0], np.cumsum(mask)))
    return [int(at) for at in before[np.asarray(bounds)]]
