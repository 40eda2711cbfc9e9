"""TableGroup: tables that share a cache in HBM, and the transfers of their rows from and to DRAM.

An uploaded row keeps its slot in DRAM. A row that is evicted from HBM is written back there, with its step and count,
by the group's write-back thread. `wait_for_write_backs` waits for that thread. row_transfer.py moves the bytes.
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
from hotrow.kernels.rows import transfer
from hotrow.kernels.rows.layout import Source
from hotrow.kernels.rows.runs import Grouper
from hotrow.tiers.hbm import capacity_split
from hotrow.tiers.hbm.group_cache import GroupCache
from hotrow.tiers.hbm.miss_list import MissFinder
from hotrow.tiers.hbm.pinned_ring import WRITE_BACK_BUFFERS, PinnedRing
from hotrow.tiers.hbm.row_transfer import RowTransfer, UploadTarget
from hotrow.tiers.host.row_staging import HostRowFetch, RowLocations
from hotrow.tiers.host.store import HostStore

FLUSH_CHUNKS = 8  # chunks in flight at once during a flush
StoreRows = Callable[[RowLocations, int], None]


class Generation:
    """Increases when slots that were found before become invalid, because rows were dropped, pruned or not uploaded. A
    cache and its groups share one. Any thread."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = threading.Lock()

    def advance(self) -> None:
        """Slots found so far are invalid."""
        with self._lock:
            self.number += 1


class BegunUpload(NamedTuple):
    """An upload in flight: rows at `places`, the first `zero_copy_count` read in place, the others in `incoming`."""

    places: RowLocations
    zero_copy_count: int
    incoming: Tensor


class TableGroup:
    """Tables that share a cache, and the transfers of their rows."""

    def __init__(
        self,
        stores: Sequence[HostStore],
        cache: GroupCache,
        optimizer_code: int,
        ring: PinnedRing,
        generation: Generation | None = None,
    ) -> None:
        self.stores = list(stores)
        self.cache = cache
        self.optimizer_code = optimizer_code
        self.row_transfer = RowTransfer(stores, cache, ring)
        self.width, self.dram_only = self.row_transfer.width, self.row_transfer.dram_only
        self.count_streams, self.rounding_streams = (
            torch.tensor([signed(int(stream)) for stream in of_kind], dtype=torch.int64, device=cache.device)
            for of_kind in zip(
                *((store.core.count_stream, store.core.rounding_stream) for store in stores), strict=True
            )
        )
        self.grouper = Grouper()
        self.miss_finder = MissFinder(cache)
        self.miss_counter = AsyncCounter(cache.device)
        self.last_batch_missed = True  # whether the last batch missed ids
        self.upload_stream = self.row_transfer.upload_stream
        self._next_rebalance = capacity_split.FIRST_CHECK  # batches until the split of capacity is checked
        self.batches_with_extra = 0  # batches in flight with extra rows that must be written back before a lookup
        self._write_back_executor = ThreadPoolExecutor(1, thread_name_prefix="hotrow-down")
        self.last_write_back: Future[None] | None = None  # the last write-back that was submitted
        self._buffers_in_use: deque[Future[None]] = deque()  # write-backs whose rows may still be in a buffer
        self._invalid_slots: list[Tensor] = []  # slots whose rows were never uploaded
        self._generation = generation or Generation()
        self._lost_rows_error: BaseException | None = None

    def table_of(self, slots: Tensor) -> Tensor:
        """The number of the table that each slot belongs to, int32."""
        if len(self.stores) == 1:
            return torch.zeros_like(slots)
        return torch.bucketize(slots // WAYS, self.cache.index.first[1:].to(torch.int32), right=True, out_int32=True)

    # --- uploads ---

    def begin_upload(
        self,
        host_rows: HostRowFetch,
        bounds: Sequence[int],
        keys: Tensor,
        seen: Tensor,
        step: int,
        target: UploadTarget | None,
    ) -> BegunUpload:
        """Locate the rows of missing keys in DRAM and start their upload. Without `target` (some rows have no slot yet)
        none is read in place.
        """
        count = keys.numel()
        zero_copy_count = self.row_transfer.zero_copy_rows(count) if target is not None else 0
        places = host_rows.allocate(self.stores, bounds, count)
        if self.dram_only:
            incoming = self.row_transfer.begin_upload(places, keys, zero_copy_count, target, True)
            if incoming is not None:
                return BegunUpload(places, zero_copy_count, incoming)
            wait_for(self.upload_stream)
        host_rows.fetch(places, keys, seen, step)
        incoming = self.row_transfer.begin_upload(places, None, 0, None, False)
        assert incoming is not None
        return BegunUpload(places, 0, incoming)

    def finish_upload(self, target: UploadTarget, upload: BegunUpload) -> None:
        """Copy the rows of `begin_upload` into their slots, on the upload stream."""
        follow(self.upload_stream)
        with on(self.upload_stream):
            transfer.deliver(target.source, target.slots[upload.zero_copy_count :], self.width, upload.incoming)
        used_on(self.upload_stream, target.slots, target.source.extra)

    # --- write-backs ---

    def begin_write_back(
        self, source: Source, slots: Tensor, places: RowLocations, unpin: bool = True
    ) -> Callable[[], None]:
        """Start copying the rows in `slots` (-1: none) to the host.

        Call what this returns to store them at `places`, as these are then, on the write-back thread. It is a separate
        call, because other work needs the CPU cores first.
        """
        self._raise_if_lost()
        begin, count, clean = 0, slots.numel(), self.cache.clean
        while count - begin > self.row_transfer.buffer_rows:  # more rows than a buffer holds: store the first ones now
            end = begin + self.row_transfer.buffer_rows
            self._submit_write_back(
                self._copy_to_buffer(source, slots[begin:end]), places.slice(begin, end), clean, None
            )
            begin = end
        put, rest = self._copy_to_buffer(source, slots[begin:]), places.slice(begin, count)
        return lambda: self._submit_write_back(put, rest, clean, places if unpin else None)

    def _copy_to_buffer(self, source: Source, slots: Tensor) -> StoreRows:
        """Copy rows to a buffer. Blocks until one is free."""
        while len(self._buffers_in_use) > WRITE_BACK_BUFFERS - 2:
            self._buffers_in_use.popleft().result()
        return self.row_transfer.begin_write_back(source, slots)

    def _submit_write_back(self, put: StoreRows, places: RowLocations, clean: int, held: RowLocations | None) -> None:
        if self.upload_stream is None:
            self._store(put, places, clean, held)
        else:
            self.last_write_back = self._write_back_executor.submit(self._store_in_background, put, places, clean, held)
            self._buffers_in_use.append(self.last_write_back)

    @staticmethod
    def _store(put: StoreRows, places: RowLocations, clean: int, held: RowLocations | None) -> None:
        put(places, clean)
        if held is not None:
            held.unpin()

    def _store_in_background(self, put: StoreRows, places: RowLocations, clean: int, held: RowLocations | None) -> None:
        try:
            self._store(put, places, clean, held)
        except BaseException as error:
            self.mark_lost(error)

    def wait_for_write_backs(self, last: Future[None] | None = None) -> None:
        """Wait for all write-backs (up to `last`). Raises if one failed, until the rows are dropped for a load."""
        landing = last or self.last_write_back
        if landing is not None:
            landing.result()
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost_rows_error is not None:
            raise StorageError(
                f"rows evicted from HBM could not be written back: {self._lost_rows_error}. They are lost; "
                "fix this and load the last checkpoint"
            ) from self._lost_rows_error

    def mark_lost(self, error: BaseException) -> None:
        """Rows whose slots were reassigned could not be written back: raise from now on, until a load."""
        self._lost_rows_error = self._lost_rows_error or error

    @contextmanager
    def lost_on_error(self) -> Iterator[None]:
        """Inside the block, the index and the slots disagree: an error there loses rows."""
        try:
            yield
        except BaseException as error:
            self.mark_lost(error)
            raise

    # --- slots whose rows were never uploaded ---

    def invalidate(self, slots: Tensor) -> None:
        """The index names rows in these slots (a CPU tensor) that were never uploaded. Any thread."""
        self._invalid_slots.append(slots)
        self._generation.advance()  # last: a thread that sees the new generation finds the slots

    def erase_invalid(self) -> None:
        """Empty these slots, after the work on them that is enqueued."""
        while self._invalid_slots:
            invalid = self._invalid_slots.pop()
            wait_for(self.upload_stream)  # each time: another thread may have added slots meanwhile
            slots = to_device(invalid.clone(), self.cache.device)
            erase(self.cache.index, slots)
            self.cache.hosts[slots[slots >= 0].long()] = -1

    def flush(self) -> None:
        """Write back every dirty row."""
        cache = self.cache
        self.wait_for_write_backs()
        dirty = cache.dirty()
        if not dirty.numel():
            return
        for slots in dirty.split(min(self.row_transfer.buffer_rows, FLUSH_CHUNKS * self.row_transfer.chunk_rows)):
            before = self.last_write_back
            self.begin_write_back(cache.source(), slots, self.locate(slots), unpin=False)()
            if before is not None:  # at most two write-backs hold pinned memory, however slow they are
                self.wait_for_write_backs(before)
        self.wait_for_write_backs()
        cache.clean = int(cache.steps[dirty.long()].max())

    def locate(self, slots: Tensor) -> RowLocations:
        """The locations in DRAM of the rows in these slots, which are ascending. Waits for the device."""
        where, cache = slots.long(), self.cache
        found = to_host(
            torch.stack([self.table_of(slots), cache.hosts[where], cache.steps[where], cache.counts[where]])
        )
        return RowLocations(self.stores, self.bounds(found[0].numpy()), found[1], found[2], found[3])

    def bounds(self, tables: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
        """Where each table's rows begin and end in an array ordered by table."""
        bounds: list[int] = np.searchsorted(tables, np.arange(len(self.stores) + 1, dtype=np.int32)).tolist()
        return bounds

    def drop(self) -> None:
        """Drop every row, also dirty ones."""
        if self.last_write_back is not None:
            self.last_write_back.result()
        self.last_write_back = self._lost_rows_error = None
        slots = self.cache.resident()
        if slots.numel() and not self.cache.frozen:
            self.locate(slots).unpin()
        self.cache.clear()

    def prune(self) -> None:
        """Drop the rows that were removed in DRAM."""
        self.wait_for_write_backs()
        slots = self.cache.resident()
        if not slots.numel() or self.cache.frozen:
            return
        rows = self.locate(slots)
        gone = torch.cat([~store.alive(rows.slots[begin:end]) for store, begin, end in rows.by_table()])
        if bool(gone.any()):
            dead = slots[gone.to(slots.device)]
            self.locate(dead).unpin()
            erase(self.cache.index, dead)
            self.cache.hosts[dead.long()] = -1

    def rebalance_due(self) -> bool:
        """Whether it is time to call `rebalance`."""
        return len(self.stores) > 1 and self.cache.free and self.cache.done >= self._next_rebalance

    def rebalance(self) -> bool:
        """Split the capacity between the tables anew (capacity_split.py). Returns whether anything changed."""
        cache = self.cache
        self._next_rebalance = max(2 * self._next_rebalance, cache.done)
        wanted = capacity_split.divide(cache.index.counts, cache.used(), cache.missed)
        if wanted is not None:
            self.flush()
            self.drop()
            cache.divide(wanted)
            self.miss_finder.invalidate()
        return wanted is not None


class AsyncCounter:
    """A device counter that is copied to the host: `send` starts the copy and `wait` ends it. One copy at a time."""

    def __init__(self, device: torch.device) -> None:
        self.number = torch.zeros(1, dtype=torch.int32, device=device)
        self._before, self._sent = 0, False
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._pinned = torch.empty(1, dtype=torch.int32, pin_memory=True) if self._event else self.number
        if self._event is not None:  # torch does not track this copy, and after an error no thread has waited for it
            weakref.finalize(self, self._event.synchronize)

    def send(self) -> None:
        """Enqueue a copy of the number on the current stream."""
        if self._event is not None:
            transfer.copy_to_pinned(self.number, self._pinned)
            self._event.record(current_stream(self.number.device))
        self._sent = True

    def wait(self) -> int:
        """The number."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._pinned)

    def increase(self) -> int:
        """The increase since the last call."""
        now = self.wait()
        more, self._before, self._sent = (now - self._before) & 0xFFFFFFFF, now, False
        return more

    def catch_up(self) -> None:
        """Drop a number that was sent and, because of an error, never received."""
        if self._sent:
            self.increase()
