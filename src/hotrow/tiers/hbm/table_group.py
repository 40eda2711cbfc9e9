"""Tables that share a cache in HBM, and how their rows move between it and the tiers below.

A row that comes up keeps its slot in DRAM. A row that leaves its slot in HBM goes back there with its step and count;
a thread of the group puts it there, and `landed` waits for that thread. row_transfer.py moves the rows themselves.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.device.streams import follow, on, to_device, to_host, used_on, wait_for
from hotrow.errors import StorageError
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.index.insert import erase
from hotrow.kernels.index.key_hash import signed
from hotrow.kernels.index.sets import WAYS
from hotrow.kernels.rows import move
from hotrow.kernels.rows.layout import Source
from hotrow.kernels.rows.runs import Grouper
from hotrow.tiers.hbm import capacity_split
from hotrow.tiers.hbm.miss_list import Asker
from hotrow.tiers.hbm.pinned_ring import DOWN, Ring
from hotrow.tiers.hbm.row_transfer import Into, Way
from hotrow.tiers.hbm.slots import HbmTier
from hotrow.tiers.host.row_staging import HostLift, Places
from hotrow.tiers.host.store import HostStore

FLUSHED = 8  # pieces of rows that are on their way at once when all come down
Put = Callable[[Places, int], None]


class Generation:
    """Counts what makes slots that were found before worthless: rows were dropped, pruned or spoiled. A cache and its
    groups share one. Any thread."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = threading.Lock()

    def advance(self) -> None:
        """Slots found so far are worthless."""
        with self._lock:
            self.number += 1


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
        generation: Generation | None = None,
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
        self._look = capacity_split.FIRST  # batches after which to look again how the cache is divided
        self.aside = 0  # batches in flight whose own rows must go down before anybody looks for them below
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="hotrow-down")
        self.landing: Future[None] | None = None  # the last rows that were sent down
        self._sent: deque[Future[None]] = deque()  # those that may still lie in a buffer
        self._spoiled: list[Tensor] = []  # slots whose rows never came
        self._generation = generation or Generation()
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
        self._generation.advance()  # last: a thread that sees the new generation finds the slots

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
        """Give tables that are full what others leave empty (capacity_split.py). Whether that changed anything."""
        tier = self.tier
        self._look = max(2 * self._look, tier.done)
        wanted = capacity_split.divide(tier.index.counts, tier.used(), tier.missed)
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
