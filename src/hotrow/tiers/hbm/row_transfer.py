"""Rows of a group of tables between DRAM and HBM.

Up: rows that never leave DRAM are found by the cores; some are read in place by the GPU, the first while the next are
looked for, the others are gathered into pinned memory, piece by piece, and the copy engine follows (move.py
and core/device/row_transfer.h have the rates). Rows over SSD are all gathered. Down: rows are collected on the device
and copied into pinned memory, from which the cores put them into their slots. tiers/hbm/pinned_ring.py has that memory.

On a GPU both are calls of the core without Python's lock; without one (under the interpreter) the same is done here,
step by step.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow import _core
from hotrow.device import stream_trace
from hotrow.device.streams import Recorded, follow, new_stream, on, used_on
from hotrow.errors import StorageError
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.launch import cdiv
from hotrow.kernels.rows import move
from hotrow.kernels.rows.layout import Source
from hotrow.tiers.hbm.pinned_ring import UP, Ring
from hotrow.tiers.hbm.slots import HbmTier
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.row_staging import Places
from hotrow.tiers.host.store import HostStore

PIECE_BYTES = 8 << 20  # of rows that move at a time: one piece is copied while the next is gathered
IN_PLACE = 0.6  # the share of rows that are read in place: they and what the cores gather meanwhile come together
AHEAD = 0.8  # of batches ahead of their turn: the cores are busy with rows that go down
WIDE = 1024  # bytes: rows from here on are read in place at the wire's speed, all of them
PULLS = 4  # launches that read them: one reads while the next one's rows are found
CELLS, LANDERS = 2 * PULLS, 3  # launches that may wait for their turn
ROOM = 1 << 15  # rows of a launch


class Into(NamedTuple):
    """Where missing rows go: slots of a source, and the tables they are of."""

    source: Source
    slots: Tensor
    tables: Tensor


class Way:
    """The way between a group's rows in HBM and DRAM."""

    def __init__(self, stores: Sequence[HostStore], tier: HbmTier, ring: Ring) -> None:
        self.stores, self.tier, self.ring = list(stores), tier, ring
        self.width = tier.layout.width
        self.piece = max(1, PIECE_BYTES // (4 * self.width))
        self.most = max(1, ring.size // (4 * self.width))  # rows that a buffer of the ring holds
        self.stays = not any(store.evicts for store in stores)  # rows never leave DRAM
        self.in_place, self.ahead = (1.0, 1.0) if 4 * self.width >= WIDE else (IN_PLACE, AHEAD)
        if not self.stays:
            self.in_place = self.ahead = 0.0
        self.up, self.copies, self.down = (new_stream(tier.device) for _ in range(3))
        self._reached = [0] * len(self.stores)  # bytes of each table's rows that the GPU can address
        self._ranges: list[int] = []
        # Before the stores, which this keeps, are freed, and what else launches read.
        weakref.finalize(self, _let_go, self._ranges, tier.device, self.up)
        self._bases = torch.tensor([store.row_memory()[0] for store in stores], device=tier.device)
        self._launches: list[move.Puller | move.Lander] = []
        self._recorded: list[Recorded] = []
        # Now, because later a tower may be at work (graph_capture.py). Rows that are only read come another way.
        self._core: Any = self._native() if self.up is not None and not tier.frozen else None
        self.raised = self.lowered = 0  # rows on their way so far, for a trace: threads beside each other may lose some
        self._nothing = torch.empty(0, self.width, dtype=torch.float32, device=tier.device)
        self._reads: deque[tuple[Any, Tensor, Tensor]] = deque()  # until an event, `up` reads these

    def reading(self, count: int, ahead: bool = False) -> int:
        """How many of so many rows are to be read in place; none where the GPU cannot reach them."""
        if self.in_place:
            self._reach()
        return int(count * (self.ahead if ahead else self.in_place))

    def raise_rows(
        self, places: Places, keys: Tensor | None, first: int, into: Into | None, whole: bool
    ) -> Tensor | None:
        """Find rows of keys (None: places know) and have them come, the first ones read in place. Returns the others,
        on their way on the stream `up`; None if a row is not there and the whole must be."""
        first = 0 if into is None else first
        count, begin, absent = places.slots.numel(), 0, 0
        incoming = self._incoming(count - first)
        while begin < count and not (absent and whole):
            end = min(count, max(begin, first) + self.most)
            some, known = places.part(begin, end), None if keys is None else keys[begin:end]
            room = incoming[max(begin, first) - first : end - first]
            absent += self._raise(some, known, max(0, first - begin), into if begin < first else None, whole, room)
            begin = end
        return None if absent and whole else incoming

    def land_rows(self, places: Places, keys: Tensor, first: int, into: Into) -> int:
        """The same, to the end: rows into their slots, and beside them where they are below. Returns how many are not
        there; what lies in their slots then is anything."""
        count = places.slots.numel()
        if count - first <= self.most:
            return self._raise(places, keys, first, into, False, self._incoming(count - first), land=True)
        absent = 0
        for begin in range(0, count, self.most):  # more than a buffer holds: part by part
            end = min(count, begin + self.most)
            some, early = places.apart(begin, end), (end - begin) * first // count
            there = Into(into.source, into.slots[begin:end], into.tables[begin:end])
            room = self._incoming(end - begin - early)
            absent += self._raise(some, keys[begin:end], early, there, False, room, land=True)
            places.take_part(begin, some)
        return absent

    def _raise(
        self, places: Places, keys: Tensor | None, first: int, into: Into | None, whole: bool, incoming: Tensor,
        land: bool = False,
    ) -> int:  # fmt: skip
        """Returns how many are not there. Those from `first` on go to `incoming`. Requires: a buffer holds them."""
        count = places.slots.numel()
        self.raised += count
        staged = self._staging(incoming.numel())
        if self.up is None:
            return self._raise_plainly(places, keys, first, into, whole, land, incoming, staged)
        if current_stream(self.tier.device) != self.up:
            follow(self.up)
        used_on(self.up, *(into[1:] if into is not None else ()))
        try:
            with core_errors():
                with stream_trace.span("gpu: rows up", self.up, "rows", rows=count, in_place=first):
                    absent = self._core.raise_rows(
                        places.parts, count, 0 if keys is None else keys.data_ptr(), places.slots.data_ptr(),
                        places.steps.data_ptr(), places.counts.data_ptr(), first,
                        into.slots.data_ptr() if into is not None else 0,
                        into.tables.data_ptr() if into is not None else 0,
                        staged.data_ptr(), incoming.data_ptr(), whole, land, PULLS,
                    )  # fmt: skip
        finally:
            self._reads.append((self.up.record_event(), places.slots, staged))
        return int(absent)

    def _incoming(self, rows: int) -> Tensor:
        """Room on the device for rows that are gathered."""
        if rows == 0:
            return self._nothing
        with on(self.copies):
            incoming = torch.empty(rows, self.width, dtype=torch.float32, device=self.tier.device)
        used_on(self.up, incoming)
        return incoming

    def _staging(self, floats: int) -> Tensor:
        """Pinned memory that they are gathered into.

        What an earlier batch had is free again when `up` has passed it; of its places too, which launches read: torch
        does not know of either, and would give them to others.
        """
        spare = torch.empty(0)
        while self._reads and (len(self._reads) >= UP or self._reads[0][0].query()):
            event, _, spare = self._reads.popleft()
            event.synchronize()
        return spare if spare.numel() >= floats else self.ring.buffer(floats)

    def _raise_plainly(
        self, places: Places, keys: Tensor | None, first: int, into: Into | None, whole: bool, land: bool,
        incoming: Tensor, staged: Tensor,
    ) -> int:  # fmt: skip
        pull, part = self._puller(), min(ROOM, cdiv(first, PULLS))
        count, absent = places.slots.numel(), 0
        for begin in range(0, first, max(1, part)):
            end = min(first, begin + part)
            assert keys is not None and into is not None
            absent += places.seek(keys, begin, end)
            if absent and whole:
                return absent
            pull.ask(into.slots[begin:end], into.tables[begin:end], places.slots[begin:end])
            pull()
        for begin in range(first, count, self.piece):
            end = min(count, begin + self.piece)
            rows = staged[: incoming.numel()].view_as(incoming)[begin - first : end - first]
            if keys is None:
                places.copy_rows(begin, end, rows)
            else:
                absent += places.seek(keys, begin, end, rows)
            if absent and whole:
                return absent
            incoming[begin - first : end - first] = rows
        if land:
            assert into is not None and places.block is not None
            finish = move.Lander(self.tier.rows, self._beside, self.width)
            finish.ask(into.slots, places.block, first, incoming)
            finish()
        return absent

    def _native(self) -> Any:
        """The core's part, over recorded launches."""
        self._launches = [
            *(self._puller() for _ in range(CELLS)),
            *(move.Lander(self.tier.rows, self._beside, self.width) for _ in range(LANDERS)),
        ]
        for launch in self._launches:
            launch()  # of nothing: capturing one takes that it has been compiled
            self._recorded.append(Recorded(self.tier.device, launch, keep_graph=True))
        follow(self.up)
        cells = [
            (recorded.graph.raw_cuda_graph(), launch.cell.data_ptr())
            for recorded, launch in zip(self._recorded, self._launches, strict=True)
        ]
        return _core.Way(
            self.up.cuda_stream, self.copies.cuda_stream, self.down.cuda_stream, self.width, ROOM, self.piece,
            cells[:CELLS], cells[CELLS:],
        )  # fmt: skip

    def _puller(self) -> move.Puller:
        return move.Puller(self.tier.rows, self._bases, self.width, self.width, ROOM)

    @property
    def _beside(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tier.hosts, self.tier.steps, self.tier.counts

    def _reach(self) -> None:
        """Have the GPU reach all rows there are, or none is read in place from now on."""
        for number, store in enumerate(self.stores):
            address, used, _ = store.row_memory()
            if used > self._reached[number]:
                begin = address + self._reached[number]
                try:
                    move.reachable(begin, used - self._reached[number], self.tier.device)
                except StorageError as error:
                    self.in_place = self.ahead = 0.0
                    warnings.warn(f"{error}. Until then all rows are gathered by the cores", stacklevel=2)
                    return
                self._ranges.append(begin)
                self._reached[number] = used

    def lower_rows(self, source: Source, slots: Tensor) -> Callable[[Places, int], None]:
        """Rows in `slots` (-1 is passed over) start on their way down. What this returns puts them into places, those
        that were updated after a step. Requires: they are no more than `most`."""
        leaving = torch.empty(slots.numel(), self.width, dtype=torch.float32, device=self.tier.device)
        move.collect(source, slots, self.width, leaving)
        self.lowered += slots.numel()
        staged = self.ring.buffer(leaving.numel())
        if self.down is None:
            rows = staged[: leaving.numel()].view_as(leaving).copy_(leaving)
            return lambda places, clean: places.lower(rows, 0, slots.numel(), clean)
        here = current_stream(self.tier.device)
        if stream_trace.on():  # the core has it wait, too: what is measured begins when the rows are collected
            follow(self.down)
        with stream_trace.span("gpu: rows down", self.down, "rows", rows=len(leaving)):
            sent = self._core.lower_rows(here.cuda_stream, leaving.data_ptr(), len(leaving), staged.data_ptr())
        used_on(self.down, leaving)

        return partial(_put, staged, sent)  # in this order: the last is let go first, and waits for its copies


def _put(staged: Tensor, sent: Any, places: Places, clean: int) -> None:
    """Rows into DRAM. `staged` is what the core reads them from: torch does not know."""
    with core_errors():
        sent.put(places.parts, places.slots.data_ptr(), places.steps.data_ptr(), places.counts.data_ptr(), clean)


def _let_go(ranges: list[int], device: torch.device, up: Any) -> None:
    if up is not None:
        up.synchronize()  # rows that nobody waits for may still be on their way
    for address in ranges:
        move.unreachable(address, device)
