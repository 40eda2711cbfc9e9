"""From a batch's keys to what the host must know of those that are missing, in one captured launch.

    find → missing positions → their unique keys → slots for them → what lies there now
    and ahead of the batch's turn: their keys into the index, their slots to the positions that missed

Step by step that is some forty calls of torch and Triton, with a wait for the number of missing ids in between because
shapes depend on it; while other threads want Python's lock too, each call costs several times what it takes alone. Here
shapes have room for more ids than were missing lately, how many are real is known on the device (launch_arguments.py), and
the host waits once. A batch that misses more than there is room for is found all the same, and goes on step by step.

Batches must have one size, as for kernels/runs.Grouper; after RECORDED of them that missed something the steps are
captured, once for batches ahead of their turn and once for those at it. The thread that trains does that
(kernels/graph_capture.py), so batches ahead go on launch by launch until it comes by.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.device.streams import Recorded, told
from hotrow.kernels.index.admit import SLOTS, Brief, answer, brief
from hotrow.kernels.index.dedup import Unique, compact_keys, dedup
from hotrow.kernels.index.find import Warmth, find
from hotrow.kernels.index.insert import choose_in_order, place
from hotrow.kernels.index.launch_arguments import Terms
from hotrow.kernels.launch import cdiv
from hotrow.tiers.hbm.slots import HbmTier

RECORDED = 3  # batches of one size before their steps are captured
LEAST = 1024  # missing ids there is room for; more in steps of this
PATIENCE = 32  # batches that miss less than half of that before it shrinks


class Answer(NamedTuple):
    """Slots of all ids; of the `missing` ones positions, unique keys, and what the host must know of them."""

    slots: Tensor
    positions: Tensor
    unique: Unique
    report: Brief
    numbers: Tensor  # report.told, on the host
    missing: int

    @property
    def whole(self) -> bool:
        """Whether all missing ids found room."""
        return self.missing <= self.positions.numel()


class Asker:
    """Asks for batch after batch of one cache."""

    def __init__(self, tier: HbmTier) -> None:
        self.tier = tier
        self.ids = 0
        self.room = 0
        self._calls = self._small = 0
        self._rooms: dict[bool, Room] = {}
        self.unrecorded = False  # whether there are steps that are worth it

    def saw(self, ids: int, missing: int) -> None:
        """A batch of so many ids missed so many."""
        if ids != self.ids:
            self.ids, self._calls, self.room = ids, 0, 0
            self._rooms.clear()
        self._calls = self._calls + 1 if missing else 0
        self._small = self._small + 1 if missing < self.room // 2 else 0
        if missing > self.room or self._small > PATIENCE:
            self.room, self._small = min(ids, cdiv(missing * 5 // 4, LEAST) * LEAST), 0
            self._rooms.clear()

    def forget(self) -> None:
        """The cache was divided anew: what was captured no longer holds."""
        self._rooms.clear()

    def ready(self, ids: int) -> bool:
        """Whether to ask here for such a batch."""
        return ids == self.ids and self._calls >= RECORDED

    def ask(self, keys: Tensor, begins: Tensor, batch: int, settled: int, score: float, ahead: bool) -> Answer:
        """Waits for the device. With `ahead`, missing keys are in the index afterwards."""
        if ahead not in self._rooms:
            self._rooms[ahead] = Room(self.tier, keys, begins, self.room, ahead)
        room = self._rooms[ahead]
        found = room.ask(keys, begins, batch, settled, score)
        self.unrecorded |= room.recorded is None
        return found

    def record(self) -> None:
        """Have the device remember the steps of batches that were asked for. Requires: as graph_capture.py says, and
        that nobody asks meanwhile."""
        self.unrecorded = False
        for room in self._rooms.values():
            if room.recorded is None:
                room.record()


class Room:
    """Static inputs and outputs of the steps."""

    def __init__(self, tier: HbmTier, keys: Tensor, begins: Tensor, room: int, ahead: bool) -> None:
        self.tier, self.room, self.ahead = tier, room, ahead
        self.keys, self.begins = torch.empty_like(keys), torch.empty_like(begins)
        self._begins: Tensor | None = None
        self.terms = Terms(tier.device)
        self.count = torch.zeros(1, dtype=torch.int32, device=tier.device)
        self.recorded: Recorded | None = None

    def ask(self, keys: Tensor, begins: Tensor, batch: int, settled: int, score: float) -> Answer:
        """As Asker.ask."""
        self.terms.say(batch, settled, self.tier.clean, score)
        self.keys.copy_(keys)
        if begins is not self._begins:  # mostly what the last batch had
            self.begins.copy_(begins)
            self._begins = begins
        found = self._steps() if self.recorded is None else self.recorded.replay(self._steps)
        slots, positions, unique, report = found
        # Others are asked for while these are still wanted.
        slots, report = slots.clone(), report._replace(told=report.told.clone())
        numbers = told(report.told)
        return Answer(slots, positions, unique, report, numbers, int(numbers.numpy()[-1]))

    def _steps(self) -> tuple[Tensor, Tensor, Unique, Brief]:
        tier, index, terms = self.tier, self.tier.index, self.terms.read()
        self.count.zero_()
        slots = find(index, self.keys, self.begins, terms, self.count, Warmth(tier.policy, tier.half_life))
        positions, keys, tables = compact_keys(slots, self.room, self.keys, self.begins)
        unique = dedup(keys, tables, rising=True, count=self.count)
        chosen = choose_in_order(index, unique.keys, unique.tables, unique.number, terms, tier.policy)
        report = brief(unique, chosen, tier.hosts, tier.steps, tier.counts, terms)
        report.told[-1:] = self.count
        if self.ahead:
            chosen_slots = report.field(SLOTS)
            place(index, report.keys, chosen_slots, unique.number, terms)
            answer(positions, unique.inverse, report.ranks, chosen_slots, slots, self.count)
        return slots, positions, unique, report

    def record(self) -> None:
        """Requires: it was asked before, so that all kernels are compiled."""
        self.recorded = Recorded(self.tier.device, self._steps)
