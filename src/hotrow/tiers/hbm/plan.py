"""One batch through the caches in HBM: route → fetch (find, bring what is missing) → gather → update.

It has the calls of tiers/host_plan.HostPlan, over device tensors, so a Lookup takes either. The hit path waits for the
device once, for the number of missing ids; with none missing nothing else happens between keys and vectors. What is
missing is deduplicated on the device, goes down as keys once, and comes up as rows into slots that were chosen
meanwhile; the rows that had those slots go down (tiers/hbm/cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hotrow.device.streams import follow, on
from hotrow.errors import GradientError
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.rows import finite
from hotrow.tiers.batch_values import ALL_EXAMPLES, BatchUpdate, Moved, Routed
from hotrow.tiers.hbm.batch_layout import join
from hotrow.tiers.hbm.cache import HotRows
from hotrow.tiers.hbm.group_batch import Part
from hotrow.tiers.hbm.staging_queue import DeferredFetch, StagedBatch
from hotrow.tiers.host.plan import HostPlan
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import ANY_PUBLICATION, Feature, Jobs


class HotPlan:
    """One batch's way through all groups."""

    publications = ANY_PUBLICATION

    def __init__(self, hot: HotRows) -> None:
        self.hot = hot
        self.parts: list[Part] = []
        self._jobs: list[tuple[HostStore, list[Feature]]] = []
        self._numbers: list[int] = []  # of this batch, in each group
        self._given: Any = None  # when keys that came on the device are there
        self._seen: list[Tensor] | None = None  # how often each feature's ids were seen
        self._reads, self._late, self.late_ids = False, "wait", 0
        self._below: HostPlan | None = None  # keeps rows in DRAM that came from SSD
        self._looked = False  # whether `_give_slots` has run
        self.staged: StagedBatch | None = None  # its rows have slots, ahead of its turn
        self.deferred: DeferredFetch | None = None  # its turn has come; rows may still be missing

    def route(self, jobs: Jobs, ahead: bool = False) -> Routed:
        """Take the keys; they go to the device when it is looked for them there."""
        self.release()
        self._jobs = [(store, list(features)) for store, features in jobs]
        self._numbers = [group.tier.begin() for group in self.hot.groups]
        values = [jagged.values for _, features in self._jobs for jagged, _ in features]
        on_device = self.hot.staging and any(keys.device.type == "cuda" for keys in values)
        self._given = current_stream(self.hot.device).record_event() if on_device else None
        return ALL_EXAMPLES

    def prefetch(self) -> Moved:
        """Rows that are on SSD come up to DRAM and stay there until `fetch`; where none ever is, look what is missing.

        Rows that keep DRAM slots over SSD come to HBM when it is their turn: they would have to be held there.
        """
        if self.hot.staging:
            self._give_slots()
            return Moved()
        on_host = all(jagged.values.device.type == "cpu" for _, features in self._jobs for jagged, _ in features)
        if not on_host or not any(store.evicts for store, _ in self._jobs):
            return Moved()
        self._below = HostPlan()
        self._below.route(self._jobs)
        return self._below.prefetch()

    def stage(self) -> Moved:
        """Rows that exist and find room come up to HBM, ahead of the batch's turn; what else it needs waits for it."""
        if not self.hot.staging:
            return Moved()
        if not self._looked:
            self._give_slots()
        if self.staged is not None:
            self.hot.queue.finish(self.staged)
        rows = [(part.brought, part.group.width) for part in self.parts]
        return Moved(sum(count for count, _ in rows), sum(4 * count * width for count, width in rows))

    def _give_slots(self) -> None:
        """Find what is missing and give it slots, ahead of the batch's turn."""
        hot, self._looked = self.hot, True
        if hot.queue.skips_next() or any(group.tier.frozen for group in hot.groups):
            return
        with hot.fits, hot.lock, on(hot.ahead):
            hot.finish_deferred()
            generation = hot.generation.number  # first: slots that are spoiled from here on make this worthless
            hot.clean_up()
            if self._given is not None:
                self._given.wait()
            self._lay_out()
            try:
                self._find(ahead=True)
                found = [part.look(count) for part, count in zip(self.parts, self._missing(), strict=True)]
            except BaseException as error:
                for part in self.parts:
                    part.abandon(error)
                raise
            self.staged = StagedBatch(self.parts, generation if all(found) else -1, keeper=self)
            for part in self.parts:
                follow(part.group.up)
            hot.queue.add(self.staged)

    def fetch(self, step: int = 0) -> None:
        """Find the rows and hold them; those that are missing come up now, or when it shows that there are any.

        After a batch that missed nothing, the next is taken to miss nothing either: the device goes on to the gather
        while the host still waits to hear so.
        """
        for group in self.hot.groups:
            if group.tier.frozen:
                for store in group.stores:
                    store.check_trainable()
        hot, staged = self.hot, self.staged
        hot.record()
        if staged is not None:
            hot.queue.finish(staged)
        if staged is not None and staged.generation == hot.generation.number:
            for event in staged.ready:
                event.wait()
        else:
            with hot.fits, hot.exclusive():
                hot.finish_deferred()
                self._lay_out()
                at_once = hot.ahead_of_turn or any(part.group.missed for part in self.parts)
                self._find(ahead=False if at_once else None)
                self.deferred = hot.deferred = DeferredFetch(self.parts, step, keeper=self)
                if at_once:
                    hot.finish_deferred(self.deferred)
        self.staged = None
        for part in self.parts:
            part.take_over()
            part.group.tier.take(part.batch)
        self._free_below()

    def _find(self, ahead: bool | None) -> None:
        for part, number in zip(self.parts, self._numbers, strict=True):
            part.find(number, ahead)

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

    def route_seen(self, jobs: Jobs, seen: Sequence[Tensor]) -> None:
        """The same for keys without duplicates that were seen more than once: int32 for each feature's ids."""
        self.route(jobs)
        self._seen = list(seen)

    def read(self, late: str = "wait") -> None:
        """Only read: no row is held, so that they are found when they are gathered; those on SSD alone are then waited
        for, or answered by the policy `late`."""
        self._reads, self._late = True, late

    def _read(self, outputs: Sequence[Tensor]) -> None:
        """Find the rows; those that are missing are copied for this batch alone. Nobody may change any meanwhile.

        Where rows are only read, those that are in DRAM come up to stay. Lanes come here on streams of their own, one
        after the other: `turn` is when the one before has gathered.
        """
        with self.hot.fits, self.hot.exclusive():
            self.hot.finish_deferred()
            if self.hot.turn is not None:
                self.hot.turn.wait()
            self._lay_out()
            for part, number in zip(self.parts, self._numbers, strict=True):
                part.find(number if part.group.tier.frozen else 0)
            for part, count in zip(self.parts, self._missing(), strict=True):
                if part.group.tier.frozen:
                    part.keep(count, self._late)
                else:
                    part.borrow(count, self._late)
                part.take_over()
                part.gather([outputs[number] for number in part.numbers])
            self.late_ids = sum(part.late.numel() for part in self.parts)
            if self.hot.device.type == "cuda":
                self.hot.turn = current_stream(self.hot.device).record_event()

    def late_by_example(self, examples: int) -> Tensor:
        """How many of its ids a policy answered, for each example, int32."""
        counts = torch.zeros(examples, dtype=torch.int32)
        for part in self.parts:
            part.count_late(counts)
        return counts

    def _missing(self) -> list[int]:
        """How many ids of each part were not found. Waits for the device."""
        return [part.missing(learn=not self._reads) for part in self.parts]

    def _free_below(self) -> None:
        if self._below is not None:
            self._below.release()
            self._below = None

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one matrix per feature."""
        if self._reads:
            self._read(outputs)
            return
        with self.hot.fits:
            for part in self.parts:
                part.gather([outputs[number] for number in part.numbers])
            if self._finish():
                self.gather(outputs)

    def _finish(self) -> bool:
        """Bring up what is missing, unless that was done. Whether there was anything."""
        return self.deferred is not None and self.hot.finish_deferred(self.deferred)

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """Not done: the gather kernel takes each feature's output."""
        return False

    def update(self, update: BatchUpdate) -> None:
        """Apply gradients in place. A NaN or infinity in `checked` raises, and no row has changed."""
        with self.hot.fits:
            self._finish()
            flag = self.hot.flag.number
            for columns in sorted({matrix.shape[1] for matrix in update.checked}):
                finite.check([matrix for matrix in update.checked if matrix.shape[1] == columns], flag)
            self.hot.flag.send()
            by_store = {id(store): rule for store, rule in zip(self.hot.stores, update.rules, strict=True)}
            for part in self.parts:
                part.update(
                    [update.gradients[number] for number in part.numbers],
                    [by_store[id(store)] for store in part.group.stores],
                    update.step,
                    update.scale,
                    flag,
                )
            if self.hot.flag.wait():
                flag.zero_()
                raise GradientError(
                    "a gradient is NaN or infinite; no row was changed. Lower the learning rate, clip gradients, or "
                    "find the bad input with torch.autograd.set_detect_anomaly(True)"
                )
            with self.hot.lock if any(part.aside for part in self.parts) else nullcontext():
                for part in self.parts:
                    part.commit()

    def release(self) -> None:
        """Let go of the rows."""
        if self.deferred is not None and self.hot.deferred is self.deferred:
            self.hot.deferred = None
            self.deferred.abandon()
        if self.staged is not None:
            self.hot.queue.give_up(self.staged)
        for part in self.parts:
            part.give_up()  # slots that it got before an error kept the batch from being staged
            part.release()
        for group, number in zip(self.hot.groups, self._numbers, strict=False):
            group.tier.settle(number)
        self.parts, self._numbers, self.staged, self.deferred = [], [], None, None
        self._reads, self._late, self._seen, self.late_ids = False, "wait", None, 0
        self._looked = False
        self._free_below()

    @property
    def late(self) -> int:
        """Rows that found no room ahead of the batch's turn."""
        return sum(part.homeless for part in self.parts)

    def __del__(self) -> None:
        self.release()
