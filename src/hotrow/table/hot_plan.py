"""One batch through the caches in HBM: route → fetch (find, bring what is missing) → gather → update.

It has the calls of tiers/host_plan.HostPlan, over device tensors, so a Lookup takes either. The hit path waits for the
device once, for the number of missing ids; with none missing nothing else happens between keys and vectors. What is
missing is deduplicated on the device, goes down as keys once, and comes up as rows into slots that were chosen
meanwhile; the rows that had those slots go down (hot.py).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import GradientError
from hotrow.kernels import finite
from hotrow.kernels.current import current_stream
from hotrow.table.batch_layout import Feature, join
from hotrow.table.hot import HotRows
from hotrow.table.hot_part import Part
from hotrow.table.streams import follow, on, wait_for
from hotrow.tiers.host import HostStore
from hotrow.tiers.host_plan import HostPlan, Moved, Update

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
        self._reads, self._late, self.late_ids = False, "wait", 0
        self._below: HostPlan | None = None  # keeps rows in DRAM that came from SSD
        self._staged = -1  # the generation in which all rows were brought up ahead
        self._ready: list[Any] = []  # when they are there
        self._looked = False  # whether it was looked for them ahead
        self._rising = threading.Lock()  # held by who has them come
        self._step: int | None = None  # that rows are still to be brought up for

    def route(self, jobs: Sequence[tuple[HostStore, Sequence[Feature]]], ahead: bool = False) -> None:
        """Take the keys; they go to the device when it is looked for them there."""
        self.release()
        self._jobs = [(store, list(features)) for store, features in jobs]
        self._numbers = [group.tier.begin() for group in self.hot.groups]
        values = [jagged.values for _, features in self._jobs for jagged, _ in features]
        self.ids = sum(keys.numel() for keys in values)
        on_device = self.hot.staging and any(keys.device.type == "cuda" for keys in values)
        self._given = current_stream(self.hot.device).record_event() if on_device else None

    def prefetch(self) -> Moved:
        """Rows that are on SSD come up to DRAM and stay there until `fetch`; where none ever is, look what is missing.

        Rows that keep DRAM slots over SSD come to HBM when it is their turn: they would have to be held there.
        """
        if self.hot.staging:
            self._look()
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
            self._look()
        self._raise()
        rows = [(part.brought, part.group.width) for part in self.parts]
        return Moved(sum(count for count, _ in rows), sum(4 * count * width for count, width in rows))

    def _look(self) -> None:
        """Find what is missing and give it slots."""
        hot, self._looked = self.hot, True
        if hot.patience or any(group.tier.frozen for group in hot.groups):
            hot.patience = max(0, hot.patience - 1)
            return
        with hot.fits, hot.lock, on(hot.ahead):
            self._alone()
            generation = hot.generation  # first: who spoils slots from here on makes this worthless
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
            self._staged = generation if all(found) else -1
            for part in self.parts:
                follow(part.group.up)
            hot.coming.append(self)

    def _raise(self) -> None:
        """What was looked for comes up; once, by whoever comes first."""
        hot = self.hot
        with self._rising:
            if self not in hot.coming:
                return
            try:
                for part in self.parts:
                    with hot.fits, on(part.group.up):
                        if not part.raise_rows():
                            self._staged, hot.patience = -1, PATIENCE
                self._ready = [part.group.up.record_event() for part in self.parts if part.group.up is not None]
            except BaseException:
                self._give_up()
                raise
            hot.coming.remove(self)

    def _give_up(self) -> None:
        """What was looked for and is not there will not come."""
        if self in self.hot.coming:
            self.hot.coming.remove(self)
        self._staged = -1
        for part in self.parts:
            part.give_up()

    def fetch(self, step: int = 0) -> None:
        """Find the rows and hold them; those that are missing come up now, or when it shows that there are any.

        After a batch that missed nothing, the next is taken to miss nothing either: the device goes on to the gather
        while the host still waits to hear so.
        """
        for group in self.hot.groups:
            if group.tier.frozen:
                for store in group.stores:
                    store.check_trainable()
        self.hot.record()
        self._raise()
        if self._staged == self.hot.generation:
            for event in self._ready:
                event.wait()
        else:
            with self.hot.fits, self.hot.alone():
                self._alone()
                self._lay_out()
                at_once = self.hot.ahead_of_turn or any(part.group.missed for part in self.parts)
                self._find(ahead=False if at_once else None)
                self._step, self.hot.pending = step, self
                if at_once:
                    self._arrive()
        self._staged, self._ready = -1, []
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

    def read(self, late: str = "wait") -> None:
        """Only read: no row is held, so that they are found when they are gathered; those on SSD alone are then waited
        for, or answered by the policy `late`."""
        self._reads, self._late = True, late

    def _read(self, outputs: Sequence[Tensor]) -> None:
        """Find the rows; those that are missing are copied for this batch alone. Nobody may change any meanwhile.

        Where rows are only read, those that are in DRAM come up to stay. Lanes come here on streams of their own, one
        after the other: `turn` is when the one before has gathered.
        """
        with self.hot.fits, self.hot.alone():
            self._alone()
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

    def _alone(self) -> None:
        """Only one batch at a time has something to come."""
        if self.hot.pending is not None:
            self.hot.pending._arrive()

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
        with self.hot.fits:
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
                    "a gradient is NaN or infinite; no row was changed. Lower the learning rate, clip gradients, or "
                    "find the bad input with torch.autograd.set_detect_anomaly(True)"
                )
            with self.hot.lock if any(part.aside for part in self.parts) else nullcontext():
                for part in self.parts:
                    part.commit()

    def release(self) -> None:
        """Let go of the rows."""
        if self.hot.pending is self:
            self.hot.pending, _ = None, self._missing()
        with self._rising:
            self._give_up()
        for part in self.parts:
            part.release()
        for group, number in zip(self.hot.groups, self._numbers, strict=False):
            group.tier.settle(number)
        self.parts, self._numbers, self._staged, self._ready, self._step = [], [], -1, [], None
        self._reads, self._late, self._seen, self.late_ids = False, "wait", None, 0
        self._looked = False
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
