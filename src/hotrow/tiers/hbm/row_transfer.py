"""RowTransfer: moves the rows of one table group between DRAM and HBM.

Upload: if rows never leave DRAM, the GPU reads the first ones in place (zero-copy) while the CPU cores look the next
ones up. The cores gather the other rows into pinned memory, chunk by chunk, and the copy engine copies each chunk
(core/device/row_transfer.h has the rates). Rows over SSD are all gathered. Write-back: the GPU gathers the rows into
one buffer and copies it to pinned memory, and the cores store each chunk into its DRAM slots. pinned_ring.py has the
memory.

On a GPU each direction is one call of the core without Python's lock. Without a GPU (Triton's interpreter) the same
steps run in Python. The uploads of one group come from one thread at a time; write-backs may run beside them.
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
from hotrow.device.streams import CapturedSteps, follow, new_stream, on, used_on
from hotrow.errors import StorageError
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.launch import cdiv
from hotrow.kernels.rows import transfer
from hotrow.kernels.rows.layout import Source
from hotrow.tiers.hbm.group_cache import GroupCache
from hotrow.tiers.hbm.pinned_ring import UPLOAD_BUFFERS, PinnedRing
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.row_staging import RowLocations
from hotrow.tiers.host.store import HostStore

CHUNK_BYTES = 8 << 20  # bytes per chunk: one is copied while the next is gathered
ZERO_COPY_SHARE = 0.6  # the share of rows read in place; the cores gather the others in the same time
ZERO_COPY_SHARE_AHEAD = 0.8  # the same for batches ahead of their turn, when the cores also store write-backs
WIDE_ROW_BYTES = 1024  # wider rows are all read in place, at the link's speed
ZERO_COPY_PARTS = 4  # launches per upload: one reads while the rows of the next are looked up
ZERO_COPY_LAUNCHES, SCATTER_LAUNCHES = 2 * ZERO_COPY_PARTS, 3  # captured launches that may be in flight
LAUNCH_ROWS = 1 << 15  # rows per launch


class UploadTarget(NamedTuple):
    """The destination of an upload: slots of a source, and the table of each row."""

    source: Source
    slots: Tensor
    tables: Tensor


class RowTransfer:
    """Uploads and write-backs of one group."""

    def __init__(self, stores: Sequence[HostStore], cache: GroupCache, ring: PinnedRing) -> None:
        self.stores, self.cache, self.ring = list(stores), cache, ring
        self.width = cache.layout.width
        self.chunk_rows = max(1, CHUNK_BYTES // (4 * self.width))
        self.buffer_rows = max(1, ring.size // (4 * self.width))  # rows per buffer of the ring
        self.dram_only = not any(store.evicts for store in stores)  # rows never leave DRAM
        self.zero_copy_share, self.zero_copy_share_ahead = (
            (1.0, 1.0) if 4 * self.width >= WIDE_ROW_BYTES else (ZERO_COPY_SHARE, ZERO_COPY_SHARE_AHEAD)
        )
        if not self.dram_only:
            self.zero_copy_share = self.zero_copy_share_ahead = 0.0
        self.upload_stream, self.copy_stream, self.write_back_stream = (new_stream(cache.device) for _ in range(3))
        self._reachable_bytes = [0] * len(self.stores)  # bytes of each table's rows that are registered with the GPU
        self._ranges: list[int] = []
        # Runs before the stores and other memory that launches read are freed.
        weakref.finalize(self, _release, self._ranges, cache.device, self.upload_stream)
        self._bases = torch.tensor([store.row_memory()[0] for store in stores], device=cache.device)
        self._launches: list[transfer.HostRowReader | transfer.FetchedRowWriter] = []
        self._captured_launches: list[CapturedSteps] = []
        # Captured now, because later a tower may run (graph_capture.py). Frozen groups do not upload through here.
        self._core: Any = self._native() if self.upload_stream is not None and not cache.frozen else None
        self.rows_uploaded = self.rows_written_back = 0  # totals for a trace; concurrent threads may lose some
        self._nothing = torch.empty(0, self.width, dtype=torch.float32, device=cache.device)
        self._buffers_being_read: deque[tuple[Any, Tensor, Tensor]] = deque()  # event, slots, buffer

    def zero_copy_rows(self, count: int, ahead: bool = False) -> int:
        """How many of `count` rows to read in place; 0 if the GPU cannot access them."""
        if self.zero_copy_share:
            self._make_reachable()
        return int(count * (self.zero_copy_share_ahead if ahead else self.zero_copy_share))

    def begin_upload(
        self,
        places: RowLocations,
        keys: Tensor | None,
        zero_copy_count: int,
        target: UploadTarget | None,
        stop_at_first_miss: bool,
    ) -> Tensor | None:
        """Look the keys up (None: `places` is known) and start uploading their rows. The first `zero_copy_count` go
        into their slots. Returns the others, which the upload stream is copying, or None if it stopped at a missing
        row."""
        zero_copy_count = 0 if target is None else zero_copy_count
        count, begin, absent = places.slots.numel(), 0, 0
        incoming = self._incoming(count - zero_copy_count)
        while begin < count and not (absent and stop_at_first_miss):
            end = min(count, max(begin, zero_copy_count) + self.buffer_rows)
            part, part_keys = places.slice(begin, end), None if keys is None else keys[begin:end]
            buffer = incoming[max(begin, zero_copy_count) - zero_copy_count : end - zero_copy_count]
            absent += self._upload_part(
                part,
                part_keys,
                max(0, zero_copy_count - begin),
                target if begin < zero_copy_count else None,
                stop_at_first_miss,
                buffer,
            )
            begin = end
        return None if absent and stop_at_first_miss else incoming

    def upload(self, places: RowLocations, keys: Tensor, zero_copy_count: int, target: UploadTarget) -> int:
        """Look the keys up, upload their rows into their slots and set the slots' metadata. Returns how many are
        missing; their slots then have undefined contents."""
        count = places.slots.numel()
        if count - zero_copy_count <= self.buffer_rows:
            return self._upload_part(
                places, keys, zero_copy_count, target, False, self._incoming(count - zero_copy_count), scatter=True
            )
        absent = 0
        for begin in range(0, count, self.buffer_rows):  # one part per buffer
            end = min(count, begin + self.buffer_rows)
            part, in_place = places.separate(begin, end), (end - begin) * zero_copy_count // count
            part_target = UploadTarget(target.source, target.slots[begin:end], target.tables[begin:end])
            buffer = self._incoming(end - begin - in_place)
            absent += self._upload_part(part, keys[begin:end], in_place, part_target, False, buffer, scatter=True)
            places.copy_slice_from(begin, part)
        return absent

    def _upload_part(
        self, places: RowLocations, keys: Tensor | None, zero_copy_count: int, target: UploadTarget | None,
        stop_at_first_miss: bool, incoming: Tensor,
        scatter: bool = False,
    ) -> int:  # fmt: skip
        """Upload one part. Rows from `zero_copy_count` on go to `incoming`. Returns how many are missing. Requires:
        they fit into one buffer."""
        count = places.slots.numel()
        self.rows_uploaded += count
        staged = self._staging(incoming.numel())
        if self.upload_stream is None:
            return self._upload_without_gpu(
                places, keys, zero_copy_count, target, stop_at_first_miss, scatter, incoming, staged
            )
        if current_stream(self.cache.device) != self.upload_stream:
            follow(self.upload_stream)
        used_on(self.upload_stream, *(target[1:] if target is not None else ()))
        try:
            with core_errors():
                with stream_trace.span(
                    "gpu: rows up", self.upload_stream, "rows", rows=count, in_place=zero_copy_count
                ):
                    absent = self._core.upload(
                        places.core_ranges, count, 0 if keys is None else keys.data_ptr(), places.slots.data_ptr(),
                        places.steps.data_ptr(), places.counts.data_ptr(), zero_copy_count,
                        target.slots.data_ptr() if target is not None else 0,
                        target.tables.data_ptr() if target is not None else 0,
                        staged.data_ptr(), incoming.data_ptr(), stop_at_first_miss, scatter, ZERO_COPY_PARTS,
                    )  # fmt: skip
        finally:
            self._buffers_being_read.append((self.upload_stream.record_event(), places.slots, staged))
        return int(absent)

    def _incoming(self, rows: int) -> Tensor:
        """Device memory for gathered rows."""
        if rows == 0:
            return self._nothing
        with on(self.copy_stream):
            incoming = torch.empty(rows, self.width, dtype=torch.float32, device=self.cache.device)
        used_on(self.upload_stream, incoming)
        return incoming

    def _staging(self, floats: int) -> Tensor:
        """Pinned memory for gathered rows.

        Buffers and slot arrays of earlier uploads are kept until the upload stream has passed their event, because
        torch does not know that launches read them and would reuse the memory.
        """
        spare = torch.empty(0)
        while self._buffers_being_read and (
            len(self._buffers_being_read) >= UPLOAD_BUFFERS or self._buffers_being_read[0][0].query()
        ):
            event, _, spare = self._buffers_being_read.popleft()
            event.synchronize()
        return spare if spare.numel() >= floats else self.ring.buffer(floats)

    def _upload_without_gpu(
        self, places: RowLocations, keys: Tensor | None, zero_copy_count: int, target: UploadTarget | None,
        stop_at_first_miss: bool, scatter: bool,
        incoming: Tensor, staged: Tensor,
    ) -> int:  # fmt: skip
        reader, part = self._new_reader(), min(LAUNCH_ROWS, cdiv(zero_copy_count, ZERO_COPY_PARTS))
        count, absent = places.slots.numel(), 0
        for begin in range(0, zero_copy_count, max(1, part)):
            end = min(zero_copy_count, begin + part)
            assert keys is not None and target is not None
            absent += places.lookup(keys, begin, end)
            if absent and stop_at_first_miss:
                return absent
            reader.set_request(target.slots[begin:end], target.tables[begin:end], places.slots[begin:end])
            reader()
        for begin in range(zero_copy_count, count, self.chunk_rows):
            end = min(count, begin + self.chunk_rows)
            rows = staged[: incoming.numel()].view_as(incoming)[begin - zero_copy_count : end - zero_copy_count]
            if keys is None:
                places.gather_rows(begin, end, rows)
            else:
                absent += places.lookup(keys, begin, end, rows)
            if absent and stop_at_first_miss:
                return absent
            incoming[begin - zero_copy_count : end - zero_copy_count] = rows
        if scatter:
            assert target is not None and places.block is not None
            finish = transfer.FetchedRowWriter(self.cache.rows, self._slot_metadata, self.width)
            finish.set_request(target.slots, places.block, zero_copy_count, incoming)
            finish()
        return absent

    def _native(self) -> Any:
        """The core's RowTransfer, over captured launches."""
        self._launches = [
            *(self._new_reader() for _ in range(ZERO_COPY_LAUNCHES)),
            *(
                transfer.FetchedRowWriter(self.cache.rows, self._slot_metadata, self.width)
                for _ in range(SCATTER_LAUNCHES)
            ),
        ]
        for launch in self._launches:
            launch()  # without rows: a kernel must be compiled before it can be captured
            self._captured_launches.append(CapturedSteps(self.cache.device, launch, keep_graph=True))
        follow(self.upload_stream)
        cells = [
            (captured.graph.raw_cuda_graph(), launch.request.data_ptr())
            for captured, launch in zip(self._captured_launches, self._launches, strict=True)
        ]
        return _core.RowTransfer(
            self.upload_stream.cuda_stream, self.copy_stream.cuda_stream, self.write_back_stream.cuda_stream,
            self.width, LAUNCH_ROWS, self.chunk_rows,
            cells[:ZERO_COPY_LAUNCHES], cells[ZERO_COPY_LAUNCHES:],
        )  # fmt: skip

    def _new_reader(self) -> transfer.HostRowReader:
        return transfer.HostRowReader(self.cache.rows, self._bases, self.width, self.width, LAUNCH_ROWS)

    @property
    def _slot_metadata(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache.hosts, self.cache.steps, self.cache.counts

    def _make_reachable(self) -> None:
        """Register all present rows with the GPU. If that fails, no row is read in place from now on."""
        for number, store in enumerate(self.stores):
            address, used, _ = store.row_memory()
            if used > self._reachable_bytes[number]:
                begin = address + self._reachable_bytes[number]
                try:
                    transfer.register_host_memory(begin, used - self._reachable_bytes[number], self.cache.device)
                except StorageError as error:
                    self.zero_copy_share = self.zero_copy_share_ahead = 0.0
                    warnings.warn(f"{error}. Until then all rows are gathered by the cores", stacklevel=2)
                    return
                self._ranges.append(begin)
                self._reachable_bytes[number] = used

    def begin_write_back(self, source: Source, slots: Tensor) -> Callable[[RowLocations, int], None]:
        """Start copying the rows in `slots` (-1: none) to pinned memory. Call what this returns to store the rows at
        `places` that were updated after step `clean`. Requires: at most `buffer_rows` slots."""
        gathered = torch.empty(slots.numel(), self.width, dtype=torch.float32, device=self.cache.device)
        transfer.collect(source, slots, self.width, gathered)
        self.rows_written_back += slots.numel()
        staged = self.ring.buffer(gathered.numel())
        if self.write_back_stream is None:
            rows = staged[: gathered.numel()].view_as(gathered).copy_(gathered)
            return lambda places, clean: places.write_back(rows, 0, slots.numel(), clean)
        here = current_stream(self.cache.device)
        if stream_trace.on():  # the span must begin when the rows are gathered; the core orders the copy anyway
            follow(self.write_back_stream)
        with stream_trace.span("gpu: rows down", self.write_back_stream, "rows", rows=len(gathered)):
            sent = self._core.begin_write_back(here.cuda_stream, gathered.data_ptr(), len(gathered), staged.data_ptr())
        used_on(self.write_back_stream, gathered)

        return partial(_store, staged, sent)  # in this order: `sent` is freed first, and waits for its copies


def _store(staged: Tensor, sent: Any, places: RowLocations, clean: int) -> None:
    """Store rows into DRAM. Holding `staged` keeps the buffer that the core reads from."""
    with core_errors():
        sent.store_rows(
            places.core_ranges, places.slots.data_ptr(), places.steps.data_ptr(), places.counts.data_ptr(), clean
        )


def _release(ranges: list[int], device: torch.device, upload_stream: Any) -> None:
    if upload_stream is not None:
        upload_stream.synchronize()  # uploads that no thread waits for may still be in flight
    for address in ranges:
        transfer.unregister_host_memory(address, device)
