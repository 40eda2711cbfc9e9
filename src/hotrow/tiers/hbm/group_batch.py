"""One batch in one group of tables: its slots in HBM, and what must move for it.

At the batch's turn (`bring`) everything that is missing comes up in one go. Ahead of it, the same is done in two parts
by two threads, so that one batch's slots are looked for while the rows of the one before move: `look` finds who is
missing, gives them slots, writes their keys into the index and sends away whose slots they are; `raise_rows` has the
rows themselves come. In between the index names rows that are not there yet: the staging queue brings them first.
Only rows that exist and find room come ahead. A slot that was given to a key without a row (or whose row could not
come) is spoiled, and emptied before anybody looks again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.device.streams import to_device, to_host, told, used_on, wait_for
from hotrow.kernels.current_stream import current_stream, raw_stream
from hotrow.kernels.index.admit import FIELDS, SLOTS, TABLES, Brief, admit, answer, brief
from hotrow.kernels.index.dedup import Unique, compact_keys, dedup
from hotrow.kernels.index.find import Warmth, find
from hotrow.kernels.index.insert import Chosen, choose_in_order, erase, place
from hotrow.kernels.index.touch import first_score
from hotrow.kernels.rows import move
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import Source
from hotrow.kernels.rows.runs import Runs
from hotrow.kernels.rows.runs import group as group_runs
from hotrow.kernels.rows.update import Coefficients, Meta, update
from hotrow.tiers.batch_values import TableRule
from hotrow.tiers.hbm.batch_layout import lay_out
from hotrow.tiers.hbm.miss_list import Answer
from hotrow.tiers.hbm.row_transfer import Into
from hotrow.tiers.hbm.table_group import Coming, Group
from hotrow.tiers.host.row_staging import HostLift, Places
from hotrow.tiers.plan import Feature


class Wanted(NamedTuple):
    """Of missing keys: how often each was seen, and which slot it was given (-1: none)."""

    seen: Tensor
    slots: Tensor


class Asked(NamedTuple):
    """Missing ids: their positions, unique keys, what the host was told of them, who leaves, and where they come."""

    positions: Tensor
    unique: Unique
    report: Brief
    keys: Tensor
    wanted: Wanted
    leaving: Places
    into: Into
    placed: bool  # whether their keys are in the index, if that is to be done ahead


class Part:
    """One batch in one group."""

    def __init__(self, group: Group, features: Sequence[Sequence[Feature]], numbers: Sequence[int]) -> None:
        self.group = group
        self.numbers = numbers  # of its features, among all
        self.keys, self.begins, self.items = lay_out(features, group.tier.device)
        self._home = raw_stream(group.tier.device)
        self.ids = [jagged for of_table in features for jagged, _ in of_table]
        self.late = torch.zeros(0, dtype=torch.int64)  # positions that a policy answered
        self.batch = 0
        self.seen: Tensor | None = None  # by position, where duplicates were taken out before
        self.extra: Tensor | None = None
        self._borrowed = False  # whether those are values that were only read
        self.extra_rows: Places | None = None  # of those that go down after the update
        self._lift: HostLift | None = None
        self._runs: Runs | None = None
        self._answer: Answer | None = None  # what was asked in one go
        self.aside = False
        self.brought = self.homeless = self.unseen = 0  # of rows that came ahead, or could not
        self._counted = False
        self._asked: Asked | None = None  # rows that have slots and are not there yet
        self._placed = False  # whether keys are in slots whose rows have not been sent away
        self._after: Future[None] | None = None  # what must be below before they are looked for there

    def find(self, batch: int, ahead: bool | None = None) -> None:
        """Slots of the ids; -1 where there is no row here. Where the caller will go on at once with what is missing, it
        says whether that is ahead of the batch's turn."""
        self.batch = batch
        self._runs = self._answer = None
        ids = self.keys.numel()
        # While rows lie beside the cache, `look` gives nobody a place: then none may be given here, either.
        waits = ahead is None or (ahead and self.group.aside > 0)
        if ahead is not None and not waits and self.seen is None and self.group.asker.ready(ids):
            tier = self.group.tier
            settled = tier.settled_before(batch) if ahead else tier.settled
            tier.wait(settled)
            self._placed = ahead
            self._answer = self.group.asker.ask(self.keys, self.begins, batch, settled, self._score(), ahead)
            self._placed = ahead and self._answer.whole
            self.slots = self._answer.slots
            return
        missing = self.group.missing
        missing.catch_up()
        tier = self.group.tier
        self.slots = find(
            tier.index, self.keys, self.begins, batch, missing.number, Warmth(tier.policy, tier.half_life)
        )
        missing.send()

    def missing(self, learn: bool = True) -> int:
        """How many ids were not found. Waits for the device. The asker does not learn from batches that are only read:
        it asks for others, of other sizes."""
        missing = self._answer.missing if self._answer is not None else self.group.missing.increase()
        if learn:
            self.group.asker.saw(self.keys.numel(), missing)
        return missing

    def _count(self, missing: int) -> None:
        if not self._counted:
            self.group.tier.hits += self.keys.numel() - missing
            self.group.tier.misses += missing
        self._counted = True

    # --- ahead of the batch's turn ---

    def look(self, count: int) -> bool:
        """Slots for the rows of `count` ids that were not found, and their keys into the index; whose slots they were
        goes down. Whether all rows that are to come have room."""
        self._count(count)
        tier, group = self.group.tier, self.group
        self.brought = self.homeless = self.unseen = 0
        if count == 0 or group.aside:
            assert count == 0 or self._answer is None, "keys were placed, and nobody brings their rows"
            self._placed = False
            return count == 0
        asked = self._ask(count, tier.settled_before(self.batch))
        after, put = group.landing, self._send_away(asked)
        if put is not None:
            put()
        # From here on those slots can be emptied, and not before: whose they were is on its way down.
        self._asked, self._after, self._placed = asked, after, False
        if not asked.placed:
            number = asked.keys.numel()
            place(tier.index, asked.report.keys[:number], asked.into.slots, None, self.batch, self._score())
            answer(asked.positions, asked.unique.inverse, asked.report.ranks, asked.into.slots, self.slots)
        self.homeless = int(np.count_nonzero(asked.wanted.slots.numpy() < 0))
        return self.homeless == 0

    def abandon(self, error: BaseException) -> None:
        """Looking for this batch ended there."""
        if self._placed:
            self.group.lose(error)
        self._placed = False

    def raise_rows(self) -> bool:
        """The rows that `look` found slots for come up, on the stream `up`. Whether all of them exist."""
        if self._asked is None:
            return True
        group, asked, count = self.group, self._asked, self._asked.keys.numel()
        group.landed(self._after)
        places = HostLift(pinned=group.up is not None).nowhere(group.stores, asked.leaving.bounds, count)
        absent = group.way.land_rows(places, asked.keys, group.way.reading(count, ahead=True), asked.into)
        used_on(group.up, asked.report.told)
        self._asked = self._after = None
        self.unseen = 0
        if absent:  # some of those may have had no slot
            wanted = asked.wanted.slots.numpy()
            lost = (wanted >= 0) & (places.slots.numpy() < 0)
            self.unseen = int(lost.sum())
            group.spoil(torch.from_numpy(wanted[lost]))
        self.brought = count - self.unseen - self.homeless
        return self.unseen == 0

    def give_up(self) -> bool:
        """Rows that were looked for will not come. Whether there are any."""
        if self._asked is None:
            return False
        self.group.spoil(self._asked.wanted.slots)
        self._asked = self._after = None
        return True

    # --- at its turn ---

    def bring(self, count: int, step: int) -> None:
        """Rows of `count` ids that were not found come up; rows whose slots they take go down."""
        self._count(count)
        tier, group = self.group.tier, self.group
        if count == 0:
            return
        asked = self._ask(count, tier.settled)
        group.landed()
        put = self._send_away(asked)
        try:
            coming, slots, places = self._fetch(step, asked)
        except BaseException:
            with group.moving():
                self._undo(asked.into.slots, put)
            raise
        with group.moving():
            group.raise_rows(Into(tier.source(self.extra), slots, asked.into.tables), coming)
            if put is not None:
                put()
            admit(
                tier.index, (tier.hosts, tier.steps, tier.counts), asked.report.keys, slots, places, self.batch,
                self._score(),
            )  # fmt: skip
        answer(asked.positions, asked.unique.inverse, asked.report.ranks, slots, self.slots)
        self._runs = None

    def _ask(self, count: int, settled: int) -> Asked:
        """Who is missing, which slots they get, and whose those are. Waits for the device."""
        tier, known = self.group.tier, self._answer
        if known is not None and known.whole:
            positions, unique, report = known.positions[:count], known.unique, known.report
            keys, wanted, leaving = self._heard(known.numbers, report.going.numel())
        else:
            tier.wait(settled)
            positions, unique = self._absent(count)
            chosen = choose_in_order(tier.index, unique.keys, unique.tables, unique.number, settled, tier.policy)
            report, keys, wanted, leaving = self._brief(unique, chosen)
        for table, (begin, end) in enumerate(itertools.pairwise(leaving.bounds)):
            tier.missed[table] += end - begin
        into = Into(tier.source(), report.field(SLOTS)[: keys.numel()], report.field(TABLES))
        return Asked(positions, unique, report, keys, wanted, leaving, into, known is not None and known.whole)

    def _send_away(self, asked: Asked) -> Callable[[], None] | None:
        """Rows whose slots are taken start on their way down; call what this returns to have them put away."""
        going = int(np.count_nonzero(asked.leaving.slots.numpy() >= 0))
        if going == 0:
            return None
        put = self.group.lower(self.group.tier.source(), asked.report.going[: asked.keys.numel()], asked.leaving)
        self.group.tier.evictions += going
        return put

    def _score(self) -> float:
        return first_score(self.batch, self.group.tier.policy, self.group.tier.half_life)

    def _fetch(self, step: int, asked: Asked) -> tuple[Coming, Tensor, Tensor]:
        """Rows on their way up, the slots they get, and on the device where they are below."""
        group, wanted = self.group, asked.wanted
        self._lift = HostLift(pinned=group.tier.device.type == "cuda")
        room = int(wanted.slots.numpy().min()) >= 0
        coming = group.fetch_rows(
            self._lift, asked.leaving.bounds, asked.keys, wanted.seen, step, asked.into if room else None
        )
        assert coming.places.block is not None
        places = to_device(coming.places.block, group.tier.device)
        return coming, self._settle_places(asked.into.slots, wanted.slots, asked.leaving, coming.places), places

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
        device = self.group.tier.device
        if device.type == "cuda" and raw_stream(device) != self._home:
            used = (self.keys, self.begins, self.slots, self.seen, *vars(self.items).values())
            used_on(current_stream(device), *used)

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
        return report, *self._heard(told(report.told), chosen.slots.numel())

    def _heard(self, numbers: Tensor, n: int) -> tuple[Tensor, Wanted, Places]:
        """What a brief of n keys says, on the host."""
        words = numbers.numpy()
        number = int(words[(FIELDS - 1) * n])
        tables, seen, slots, *leaving = (words[field * n : field * n + number] for field in range(2, FIELDS - 1))
        rows = Places(self.group.stores, self.group.bounds(tables), *map(torch.from_numpy, leaving))
        keys = torch.from_numpy(words[: 2 * n].view(np.int64)[:number])
        return keys, Wanted(torch.from_numpy(seen), torch.from_numpy(slots)), rows

    def _settle_places(self, chosen: Tensor, wanted: Tensor, leaving: Places, arriving: Places) -> Tensor:
        """The slots of the arriving rows. Those that found no way, or are not admitted, get rows of the batch's own,
        and whose place they would have had does not leave."""
        tier, steps, slots = self.group.tier, arriving.steps.numpy(), wanted.numpy()
        if slots.size == 0 or (slots.min() >= 0 and steps.min() >= 0):
            return chosen
        refused = steps < 0
        aside = refused | (slots < 0)
        extra = int(aside.sum())
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
        settled = to_device(torch.from_numpy(slots), tier.device)
        leaving.slots.numpy()[aside] = -1  # last: after an error all of them leave
        return settled

    def keep(self, count: int, late: str) -> None:
        """Of tables that are only read: missing rows that are in DRAM come up, as far as there is room; the others are
        copied for this batch."""
        tier, group = self.group.tier, self.group
        tier.hits += self.keys.numel() - count
        tier.misses += count
        if count == 0:
            return
        settled = tier.settled
        tier.wait(settled)
        positions, unique = self._absent(count)
        chosen = choose_in_order(tier.index, unique.keys, unique.tables, unique.number, settled, tier.policy)
        report, keys, wanted, leaving = self._brief(unique, chosen)
        rows = torch.empty(keys.numel(), group.width, pin_memory=tier.device.type == "cuda")
        here = torch.cat([store.read_raw(keys[b:e], rows[b:e]) for store, b, e in leaving.of_tables()])
        kept = here.numpy() & (wanted.slots.numpy() >= 0)
        tier.evictions += int(np.count_nonzero(kept & (leaving.slots.numpy() >= 0)))
        tier.overflows += int(np.count_nonzero(here.numpy() & ~kept))
        slots = np.where(kept, wanted.slots.numpy(), tier.capacity + np.cumsum(~kept) - 1).astype(np.int32)
        places = to_device(torch.from_numpy(slots), tier.device)
        move.deliver(Source(tier.rows), torch.where(places < tier.capacity, places, -1), group.width,
                     to_device(rows, tier.device))  # fmt: skip
        beside = (tier.hosts, tier.steps, tier.counts)
        nothing = torch.zeros(3, keys.numel(), dtype=torch.int32, device=tier.device)
        score = first_score(self.batch, tier.policy, tier.half_life)
        admit(tier.index, beside, report.keys, places, nothing, self.batch, score)
        answer(positions, unique.inverse, report.ranks, places, self.slots)
        aside = np.flatnonzero(~kept)
        if aside.size:
            values, flags = self._below(keys[aside], Places(group.stores, _bounds_of(~kept, leaving.bounds),
                                        leaving.slots, leaving.steps, leaving.counts), late)  # fmt: skip
            self.extra = to_device(values, tier.device)
            if flags is not None:
                late_keys = torch.zeros(keys.numel(), dtype=torch.bool)
                late_keys[aside] = flags
                self._note_late(late_keys, positions, report.ranks[unique.inverse.long()])
        self._runs = None

    def _below(self, keys: Tensor, rows: Places, late: str) -> tuple[Tensor, Tensor | None]:
        """Values of keys (table by table) as the store reads them, as rows of the batch's own; and which of them the
        policy answered, if any."""
        layout, self._borrowed = self.group.tier.borrowed, True
        values = torch.zeros(keys.numel(), layout.stride, dtype=torch.float32)
        flags = torch.zeros(keys.numel(), dtype=torch.bool)
        for store, begin, end in rows.of_tables():
            if late == "wait":
                values[begin:end, : layout.dim] = store.read(keys[begin:end])[0]
            else:
                found, flags[begin:end] = store.read_late(keys[begin:end], late)
                values[begin:end, : layout.dim] = found
        return values, flags if bool(flags.any()) else None

    def _note_late(self, flags: Tensor, positions: Tensor, ranks: Tensor) -> None:
        self.late = to_host(positions[to_device(flags, ranks.device)[ranks.long()]]).long()

    def count_late(self, counts: Tensor) -> None:
        """Add each example's ids that a policy answered."""
        begin = 0
        for jagged in self.ids:
            end = begin + jagged.values.numel()
            at = self.late[(self.late >= begin) & (self.late < end)] - begin
            if jagged.offsets is not None:
                at = torch.searchsorted(jagged.offsets.cpu(), at, right=True) - 1
            counts.index_add_(0, at, torch.ones_like(at, dtype=counts.dtype))
            begin = end

    def borrow(self, count: int, late: str) -> None:
        """Missing rows are copied for this batch; nothing below or here changes."""
        tier, group = self.group.tier, self.group
        if count == 0:
            return
        positions, unique = self._absent(count)
        real = torch.arange(unique.keys.numel(), device=tier.device) < unique.number
        order = torch.where(real, unique.tables, len(group.stores)).sort(stable=True)[1]
        report, keys, _, rows = self._brief(unique, Chosen(torch.full_like(unique.counts, -1), order))
        group.landed()
        values, flags = self._below(keys, rows, late)
        self.extra = to_device(values, tier.device)
        if flags is not None:
            self._note_late(flags, positions, report.ranks[unique.inverse.long()])
        self.slots[positions.long()] = tier.capacity + report.ranks[unique.inverse.long()]
        self._runs = None

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs."""
        tier = self.group.tier
        gather(tier.source(self.extra, self._borrowed), tier.layout, self.slots, self.items, outputs)

    def runs(self) -> Runs:
        """The batch's positions, those of one row together."""
        if self._runs is None:
            self._runs = group_runs(self.slots)
        return self._runs

    def update(
        self, gradients: Sequence[Tensor | None], rules: Sequence[TableRule], step: int, scale: float, flag: Tensor
    ) -> None:
        """Sum each row's gradients and apply the rule, unless the flag is up."""
        tier = self.group.tier
        runs = self._runs or self.group.grouper(self.slots)
        meta = Meta(tier.steps, tier.counts, *((self.extra_steps, self.extra_counts) if self._kept else (None, None)))
        update(
            tier.source(self.extra), tier.layout, self.group.code, runs, self.items, gradients, self.keys,
            _coefficients(rules), self.group.streams, self.group.rounding_streams, step, scale, meta, flag,
            seen=self._times(runs),
        )  # fmt: skip

    def _times(self, runs: Runs) -> Tensor | None:
        """How often each run's row was seen, where that is not the run's length."""
        if self.seen is None:
            return None
        times = torch.zeros_like(runs.run_of)
        return times.scatter_add_(0, runs.run_of.long(), self.seen[runs.order])

    def _aside(self, rows: bool) -> None:
        """Whether rows of this batch's own must go down after its update."""
        if rows != self.aside:  # another thread may count its own
            self.group.aside += int(rows) - int(self.aside)
            self.aside = rows

    @property
    def _kept(self) -> bool:
        return self.extra is not None and self._lift is not None

    def commit(self) -> None:
        """The update has landed: bring the batch's own rows down, let go."""
        if self.extra_rows is not None and self.aside:
            with self.group.moving():
                self._lower_extra(self.extra_rows)
            self.extra_rows = None
            self._aside(False)
        if self._lift is not None:
            self._lift.commit()
            self._lift = None
        self.release()

    def _lower_extra(self, rows: Places) -> None:
        tier = self.group.tier
        steps, counts = to_host(torch.stack([self.extra_steps, self.extra_counts]))
        down = Places(rows.stores, rows.bounds, rows.slots, steps, counts)
        places = torch.arange(tier.capacity, tier.capacity + rows.slots.numel(), dtype=torch.int32)
        self.group.lower(tier.source(self.extra), to_device(places, tier.device), down)()

    def release(self) -> None:
        """Let go of the rows."""
        if self._lift is not None:
            if self.extra_rows is not None:
                self.extra_rows.unhold()
            self._lift.release()
        self._lift, self.extra_rows, self.extra = None, None, None
        self._aside(False)


def _coefficients(rules: Sequence[TableRule]) -> list[Coefficients]:
    """What each table's rule reads; one for all where they are the same."""
    first = rules[0]
    same = all(rule is first or rule == first for rule in rules)
    return [Coefficients(r.coefficients, r.clip_value, r.clip_norm) for r in (rules[:1] if same else rules)]


def _bounds_of(mask: np.ndarray, bounds: Sequence[int]) -> list[int]:  # type: ignore[type-arg]
    """Bounds of the rows that a mask leaves."""
    before = np.concatenate(([0], np.cumsum(mask)))
    return [int(at) for at in before[np.asarray(bounds)]]
