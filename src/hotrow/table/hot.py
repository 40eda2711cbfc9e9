"""Hot rows of a collection: the tables' caches in HBM, and the way between them and the rows below.

Tables with one row layout and one rule share a cache (`Group`), so that a batch takes one launch for all of them. A row
that comes up keeps its slot in DRAM; one whose place is wanted goes back there with its step and count.

How rows move is in way.py. Those that go down are put into their slots by a thread behind, for which others wait
(`landed`) before they look below again.

Two threads come here: the one that trains, and with a lookahead one that brings rows up for later batches, on a stream
of its own (`ahead`). `lock` is held by whoever looks for keys or changes what is here; a batch that was staged takes it
no more. The index is changed on one stream after the other; what is evicted for a staged batch follows from the batches
alone, and no result depends on it in any case. `generation` counts what makes slots that were found before worthless.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow import _core
from hotrow.config import Memory, enough, format_size
from hotrow.errors import MemoryBudgetError, StorageError
from hotrow.kernels import move
from hotrow.kernels.current import current_stream
from hotrow.kernels.insert import erase
from hotrow.kernels.layout import RowLayout, Source
from hotrow.kernels.mixing import signed
from hotrow.kernels.runs import Grouper
from hotrow.kernels.sets import WAYS
from hotrow.table import shares
from hotrow.table.asking import Asker
from hotrow.table.ring import DOWN, SHARE, UP, Ring, buffer_bytes
from hotrow.table.rows import TableRows
from hotrow.table.ssd import least_bytes
from hotrow.table.streams import follow, new_stream, on, to_device, to_host, used_on, wait_for
from hotrow.table.way import Into, Way
from hotrow.tiers.hbm import LEAST_SETS, HbmTier, free_bytes, slot_bytes
from hotrow.tiers.host import Budget, HostStore
from hotrow.tiers.host_lift import HostLift, Places

SPARE, STEP_BACK = 4, 10  # cores that the core's threads leave, and by how much these give way
FLUSHED = 8  # pieces of rows that are on their way at once when all come down


if TYPE_CHECKING:
    from hotrow.table.hot_plan import HotPlan


class HotRows:
    """The caches of all tables of a collection."""

    def __init__(
        self, tables: Sequence[TableRows], memory: Memory, device: torch.device, budget: Budget | None = None
    ) -> None:
        self.device, self.budget = device, budget or Budget()
        self.fits = Fits(memory.hbm_bytes, device)
        self.fits.check()
        if device.type == "cuda" and _core.threads() == len(os.sched_getaffinity(0)) > 4:
            # Launching, looking ahead and what waits for the device want cores at once: all others wait for them.
            _core.set_threads(_core.threads() - SPARE, nice=STEP_BACK)
        self.flag = Later(device)  # whether a gradient was not finite
        self.lock = threading.RLock()
        self.ahead = new_stream(device, urgent=True)
        self.ahead_of_turn = False  # whether batches may be in flight ahead of the one in work
        self.staging = False  # whether rows may come up ahead, on another thread and stream
        self.patience = 0  # batches not to stage: the last one had unseen keys, for which all must wait
        self.generation = 0
        self.coming: list[HotPlan] = []  # batches whose rows have slots and are not there yet, in order
        self.pending: HotPlan | None = None  # a batch of which it is not known yet whether rows are missing
        self.stores = [rows.store for rows in tables]  # not the tables, which know their cache
        self.turn: Any = None  # when the last batch that was only read has been
        kinds: dict[tuple[RowLayout, int, bool], list[HostStore]] = {}
        for rows in tables:
            kinds.setdefault((layout_of(rows), rows.optimizer.code, rows.table.values is not None), []).append(
                rows.store
            )
        trained = [4 * layout.width for layout, _, frozen in kinds if not frozen]
        buffer = buffer_bytes(memory.dram_bytes if trained else 0, trained)
        members = [len(members) for members in kinds.values()]
        sets = self._share(list(kinds), members, memory)
        if memory.ssd is not None:
            held = _held_below(list(kinds), members, sets)
            _check_below(memory, max(held, least_bytes(tables)), buffer * (UP + DOWN) * len(trained))
        spoiled = weakref.WeakMethod(self._spoiled)  # groups do not keep this alive: HBM is free when it is let go
        self.groups = [
            Group(
                members,
                HbmTier(layout, [sets] * len(members), device, memory.hbm_policy, frozen=frozen),
                code,
                Ring(Budget() if frozen else self.budget, buffer, device.type == "cuda"),
                spoiled,
            )
            for (layout, code, frozen), members in kinds.items()
        ]

    @staticmethod
    def _share(kinds: Sequence[tuple[RowLayout, int, bool]], members: Sequence[int], memory: Memory) -> int:
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

    def _spoiled(self) -> None:
        self.generation += 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside it, nobody else works here, and this stream comes after all that was done here and before the rest."""
        with self.lock:
            if self.staging:
                for plan in list(self.coming):
                    plan._raise()
                for stream in (self.ahead, *(group.up for group in self.groups)):
                    wait_for(stream)
                self.clean_up()
            try:
                yield
            finally:
                if self.staging:
                    follow(self.ahead)

    def clean_up(self) -> None:
        """Empty slots whose rows never came. Requires: the lock."""
        for group in self.groups:
            group.clean_up()

    def in_flight(self, batches: int) -> None:
        """So many batches may have been begun and not have landed."""
        with self.alone():
            for group in self.groups:
                group.tier.window = batches
            self.ahead_of_turn = batches > 0
            if self.ahead_of_turn and all(group.stays for group in self.groups):
                self.staging = True
                follow(self.ahead)

    def record(self) -> None:
        """Have the device remember what is asked of it again and again. The thread that trains, at a batch's turn."""
        if any(group.asker.unrecorded for group in self.groups):
            with self.lock:
                for group in self.groups:
                    group.asker.record()

    def flush(self) -> None:
        """Bring down every row that is newer here, so that what is below is all there is."""
        with self.alone():
            for group in self.groups:
                group.flush()

    def drop(self) -> None:
        """Forget every row. What is newer here than below is lost: flush first, if it is wanted."""
        with self.alone():
            self.generation += 1
            for group in self.groups:
                group.drop()

    def prune(self) -> None:
        """Rows were removed below: remove them here."""
        with self.alone():
            self.generation += 1
            for group in self.groups:
                group.prune()

    def tend(self) -> None:
        """Between two steps: see whether the caches are well divided between their tables."""
        for group in self.groups:
            if group.untended():
                with self.alone():
                    self.generation += group.tend()

    def report(self) -> dict[str, int]:
        """Slots and bytes, pinned bytes of `dram=` that rows pass through, and what happened so far: ids found, ids
        missed, evictions, rows without room."""
        tiers = [group.tier for group in self.groups]
        return {
            "slots": sum(tier.capacity for tier in tiers),
            "bytes": sum(tier.bytes() for tier in tiers),
            "pinned_bytes": sum(group.way.ring.bytes for group in self.groups),
            **self.figures(),
        }

    def figures(self) -> dict[str, int]:
        """What happened so far."""
        return {name: sum(getattr(group.tier, name) for group in self.groups) for name in FIGURES}


def _held_below(kinds: Sequence[tuple[RowLayout, int, bool]], members: Sequence[int], sets: int) -> int:
    """Bytes of DRAM for the rows that may be in HBM, and some beside."""
    rows = sum(
        WAYS * sets * count * (layout.width * 4 + 24)
        for (layout, _, frozen), count in zip(kinds, members, strict=True)
        if not frozen
    )
    return rows * 5 // 4


def _check_below(memory: Memory, rows: int, pinned: int) -> None:
    """Whether `dram=` over `ssd=` has room for so many bytes of rows beside what they pass through."""
    if memory.dram_bytes < rows + pinned:
        least = enough((rows + pinned) * SHARE // (SHARE - 1))  # what is pinned grows with it
        raise MemoryBudgetError(
            f"dram={format_size(memory.dram_bytes)} over ssd= is too small below hbm={format_size(memory.hbm_bytes)}: "
            f"a row in HBM keeps its place in DRAM. Give dram= at least {least}, or lower hbm="
        )


def layout_of(rows: TableRows) -> RowLayout:
    """How a table's rows lie in HBM: as they lie below, so that they are copied as they are."""
    if rows.table.values is not None:
        return RowLayout(rows.table.dim, (2,) if rows.table.values == "int8" else (), rows.table.values)
    state = tuple(part.width for part in rows.optimizer.state(rows.table.dim))
    return RowLayout(rows.table.dim, state, rows.table.dtype)


Put = Callable[[Places, int], None]
FIGURES = ("hits", "misses", "evictions", "overflows")


class Fits:
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


class Coming(NamedTuple):
    """Rows on their way up: found at `places`, those before `first` read in place, the others in `incoming`."""

    places: Places
    first: int
    incoming: Tensor


class Group:
    """Tables that share a cache, with the way to the rows below."""

    def __init__(
        self,
        stores: Sequence[HostStore],
        tier: HbmTier,
        code: int,
        ring: Ring,
        spoiled: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        self.stores = list(stores)
        self.tier = tier
        self.code = code
        self.way = Way(stores, tier, ring)
        self.width, self.stays = self.way.width, self.way.stays
        self.streams, self.rounding_streams = (
            torch.tensor([signed(int(stream)) for stream in of_kind], dtype=torch.int64, device=tier.device)
            for of_kind in zip(
                *((store.core.count_stream, store.core.rounding_stream) for store in stores), strict=True
            )
        )
        self.grouper = Grouper()
        self.asker = Asker(tier)
        self.missing = Later(tier.device)
        self.missed = True  # whether the last batch missed any
        self.up = self.way.up
        self._look = shares.FIRST  # batches after which to look again how the cache is divided
        self.aside = 0  # batches in flight whose own rows must go down before anybody looks for them below
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="hotrow-down")
        self.landing: Future[None] | None = None  # the last rows that were sent down
        self._sent: deque[Future[None]] = deque()  # those that may still lie in a buffer
        self._spoiled, self._tell_spoiled = list[Tensor](), spoiled  # slots whose rows never came
        self._lost: BaseException | None = None

    def table_of(self, slots: Tensor) -> Tensor:
        """Which table's sets these slots are in, int32."""
        if len(self.stores) == 1:
            return torch.zeros_like(slots)
        return torch.bucketize(slots // WAYS, self.tier.index.first[1:].to(torch.int32), right=True, out_int32=True)

    # --- up ---

    def fetch_rows(
        self, lift: HostLift, bounds: Sequence[int], keys: Tensor, seen: Tensor, step: int, into: Into | None
    ) -> Coming:
        """Where the rows of missing keys are below, and the rows on their way up.

        Without `into` (some have no slot yet) none is read in place.
        """
        count = keys.numel()
        first = self.way.reading(count) if into is not None else 0
        places = lift.nowhere(self.stores, bounds, count)
        if self.stays:
            incoming = self.way.raise_rows(places, keys, first, into, True)
            if incoming is not None:
                return Coming(places, first, incoming)
            wait_for(self.up)
        lift.fetch(places, keys, seen, step)
        incoming = self.way.raise_rows(places, None, 0, None, False)
        assert incoming is not None
        return Coming(places, 0, incoming)

    def raise_rows(self, into: Into, coming: Coming) -> None:
        """Rows that fetch_rows found come into their slots, on the stream `up`."""
        follow(self.up)
        with on(self.up):
            move.deliver(into.source, into.slots[coming.first :], self.width, coming.incoming)
        used_on(self.up, into.slots, into.source.extra)

    # --- down ---

    def lower(self, source: Source, slots: Tensor, places: Places, unhold: bool = True) -> Callable[[], None]:
        """Rows in `slots` (-1 is passed over) start on their way down.

        Call what this returns to have them put into `places`, as those are then, behind the caller's back: later,
        because the cores are wanted for something else first.
        """
        self._check_lost()
        begin, count, clean = 0, slots.numel(), self.tier.clean
        while (
            count - begin > self.way.most
        ):  # more than a buffer holds: the first go at once, to places as they are now
            end = begin + self.way.most
            self._put_away(self._collect(source, slots[begin:end]), places.part(begin, end), clean, None)
            begin = end
        put, rest = self._collect(source, slots[begin:]), places.part(begin, count)
        return lambda: self._put_away(put, rest, clean, places if unhold else None)

    def _collect(self, source: Source, slots: Tensor) -> Put:
        """Rows into a buffer, when one is free."""
        while len(self._sent) > DOWN - 2:
            self._sent.popleft().result()
        return self.way.lower_rows(source, slots)

    def _put_away(self, put: Put, places: Places, clean: int, held: Places | None) -> None:
        if self.up is None:
            self._put(put, places, clean, held)
        else:
            self.landing = self._behind.submit(self._put_behind, put, places, clean, held)
            self._sent.append(self.landing)

    @staticmethod
    def _put(put: Put, places: Places, clean: int, held: Places | None) -> None:
        put(places, clean)
        if held is not None:
            held.unhold()

    def _put_behind(self, put: Put, places: Places, clean: int, held: Places | None) -> None:
        try:
            self._put(put, places, clean, held)
        except BaseException as error:
            self.lose(error)

    def landed(self, last: Future[None] | None = None) -> None:
        """Wait until everything that went down (up to `last`) is there.

        What could not be put there is lost: an error until a load.
        """
        landing = last or self.landing
        if landing is not None:
            landing.result()
        self._check_lost()

    def _check_lost(self) -> None:
        if self._lost is not None:
            raise StorageError(
                f"rows that left HBM could not be put away: {self._lost}. They are lost; put that right and load the "
                "last checkpoint"
            ) from self._lost

    def lose(self, error: BaseException) -> None:
        """Rows whose places were given away did not come down: from now on it is an error, until a load."""
        self._lost = self._lost or error

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside it slots hold other rows than what is below and in the index say: an error there loses some."""
        try:
            yield
        except BaseException as error:
            self.lose(error)
            raise

    # --- slots whose rows never came ---

    def spoil(self, slots: Tensor) -> None:
        """The index names rows in these slots (on the CPU) that are not there. Any thread."""
        self._spoiled.append(slots)
        if (tell := self._tell_spoiled()) is not None:
            tell()  # last: who sees the new generation finds the slots

    def clean_up(self) -> None:
        """Empty those slots, after what was still asked for there."""
        while self._spoiled:
            spoiled = self._spoiled.pop()
            wait_for(self.up)  # each time: another thread may have added it just now
            slots = to_device(spoiled.clone(), self.tier.device)
            erase(self.tier.index, slots)
            self.tier.hosts[slots[slots >= 0].long()] = -1

    def flush(self) -> None:
        """Bring down what is newer here."""
        tier = self.tier
        self.landed()
        dirty = tier.dirty()
        if not dirty.numel():
            return
        for slots in dirty.split(min(self.way.most, FLUSHED * self.way.piece)):
            before = self.landing
            self.lower(tier.source(), slots, self.describe(slots), unhold=False)()
            if before is not None:  # pinned memory for two, however slowly they are put away
                self.landed(before)
        self.landed()
        tier.clean = int(tier.steps[dirty.long()].max())

    def describe(self, slots: Tensor) -> Places:
        """Where the rows of these slots, in rising order, are below. Waits for the device."""
        where, tier = slots.long(), self.tier
        found = to_host(torch.stack([self.table_of(slots), tier.hosts[where], tier.steps[where], tier.counts[where]]))
        return Places(self.stores, self.bounds(found[0].numpy()), found[1], found[2], found[3])

    def bounds(self, tables: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
        """Where each table's rows begin and end, of rows in table order."""
        bounds: list[int] = np.searchsorted(tables, np.arange(len(self.stores) + 1, dtype=np.int32)).tolist()
        return bounds

    def drop(self) -> None:
        """Forget every row here."""
        if self.landing is not None:
            self.landing.result()
        self.landing = self._lost = None
        slots = self.tier.resident()
        if slots.numel() and not self.tier.frozen:
            self.describe(slots).unhold()
        self.tier.clear()

    def prune(self) -> None:
        """Forget the rows that are gone below."""
        self.landed()
        slots = self.tier.resident()
        if not slots.numel() or self.tier.frozen:
            return
        rows = self.describe(slots)
        gone = torch.cat([~store.alive(rows.slots[begin:end]) for store, begin, end in rows.of_tables()])
        if bool(gone.any()):
            dead = slots[gone.to(slots.device)]
            self.describe(dead).unhold()
            erase(self.tier.index, dead)
            self.tier.hosts[dead.long()] = -1

    def untended(self) -> bool:
        """Whether it is time for `tend`."""
        return len(self.stores) > 1 and self.tier.free and self.tier.done >= self._look

    def tend(self) -> bool:
        """Give tables that are full what others leave empty (shares.py). Whether that changed anything."""
        tier = self.tier
        self._look = max(2 * self._look, tier.done)
        wanted = shares.divide(tier.index.counts, tier.used(), tier.missed)
        if wanted is not None:
            self.flush()
            self.drop()
            tier.divide(wanted)
            self.asker.forget()
        return wanted is not None


class Later:
    """A number on its way to the host: `send` it, and `wait` for it some other time. One at a time."""

    def __init__(self, device: torch.device) -> None:
        self.number = torch.zeros(1, dtype=torch.int32, device=device)
        self._before, self._sent = 0, False
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._pinned = torch.empty(1, dtype=torch.int32, pin_memory=True) if self._event else self.number
        if self._event is not None:  # torch does not know that a launch writes there: after an error nobody has waited
            weakref.finalize(self, self._event.synchronize)

    def send(self) -> None:
        """It is what it will be when the stream comes to here."""
        if self._event is not None:
            move.tell(self.number, self._pinned)
            self._event.record(current_stream(self.number.device))
        self._sent = True

    def wait(self) -> int:
        """The number."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._pinned)

    def increase(self) -> int:
        """By how much the number rose since this was last asked."""
        now = self.wait()
        more, self._before, self._sent = (now - self._before) & 0xFFFFFFFF, now, False
        return more

    def catch_up(self) -> None:
        """Forget a number that was sent and never asked for, because of an error in between."""
        if self._sent:
            self.increase()
