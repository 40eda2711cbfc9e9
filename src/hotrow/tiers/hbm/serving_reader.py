"""Lookups of a server in HBM: lanes read, one filler writes, and a reader-writer gate orders the two on the device.

    lane    keys → one captured launch: cached rows into the pooled matrix, a list of the misses
    (kernels/rows/serving_lookup.py)
            → the core reads the missing rows from DRAM or SSD, by the request's policy → one launch inserts them
    filler  the keys that lanes missed, in rounds: their rows are inserted into the cache and evict the coldest rows

A miss never waits for the cache. It is answered from the tiers below, and its row is inserted later, in the background.
A round of the filler changes slots between two launches of the lanes. It holds the gate only while it enqueues that
work; the device waits, not the host. So a lane sees whole rows, with the values of the tiers below.

This serves read-only tables with pooled features of one id each (`supports`): nearly all requests of ranking models.
jagged_reader.py takes multi-hot features and histories, over the same cache, gate and filler. Other batches use
HbmPlan.read, which must not run at the same time: `changing` excludes this reader.

Captured lanes run the steps of LaneReader in the core (core/device/graph_runner.h), over the same buffers.

Threads: a LaneReader belongs to its lane's thread. Any thread may offer keys to the filler, which has its own thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import KeyedBatch
from hotrow.device.streams import new_stream, on, to_device, to_host
from hotrow.kernels.current_stream import raw_stream
from hotrow.kernels.index.find import find
from hotrow.kernels.index.insert import choose_slots, erase, insert_keys
from hotrow.kernels.index.touch import initial_score
from hotrow.kernels.rows import transfer
from hotrow.kernels.rows.serving_lookup import MissLists, StagedRows, lookup, scatter_staged
from hotrow.tiers.feature_layout import Layout
from hotrow.tiers.hbm.cache import HbmCache
from hotrow.tiers.hbm.pinned_ring import charge
from hotrow.tiers.hbm.rows_below import BatchBelow, RowsBelow
from hotrow.tiers.hbm.table_group import TableGroup
from hotrow.tiers.host.store import LATE, HostStore

HALF_LIFE = 4096.0  # rounds of the filler
# Keys per round and seconds between rounds, first while slots are empty, then when the cache is full. A lane waits for
# a round that it meets. When the cache is full, that should be fewer than one batch in a hundred.
FIRST_KEYS, ROUND_KEYS = 1 << 15, 1 << 13
FIRST_PAUSE, PAUSE = 0.02, 0.25


class ReaderWriterGate:
    """Orders work on one GPU cache. Lanes enqueue reads concurrently. The filler enqueues writes exclusively, after all
    earlier reads."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.core = device, _core.ReaderWriterGate(device.type == "cuda")

    @contextmanager
    def reading(self, lane: int) -> Iterator[None]:
        """Work enqueued on the current stream inside the block reads the cache."""
        stream = raw_stream(self.device)
        self.core.begin_read(stream)
        try:
            yield
        finally:
            self.core.end_read(lane, stream)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Work enqueued on the current stream inside the block writes the cache."""
        stream = raw_stream(self.device)
        self.core.begin_write(stream)
        try:
            yield
        finally:
            self.core.end_write(stream)


class ServingReader:
    """The cache of a served collection: what its lanes share."""

    def __init__(self, layout: Layout, cache: HbmCache) -> None:
        self.layout, self.cache, self.device = layout, cache, cache.device
        self.gate = ReaderWriterGate(cache.device)
        self.clock = torch.tensor([1, 0], dtype=torch.int32, device=cache.device)
        self.single = [place.feature for place in layout.outputs if place.pooled]
        self.groups = [GroupFeatures(group, layout, cache.device) for group in cache.groups]
        for group in cache.groups:
            group.cache.half_life = HALF_LIFE
        self.lock = threading.Lock()  # held while rows are inserted or refreshed
        self.filler = CacheFiller(self)

    def supports(self, batch: KeyedBatch) -> bool:
        """Whether a batch has one id for each example of every feature, and no sequences, in the host's memory."""
        if len(self.single) != len(self.layout.outputs):
            return False
        for feature in self.single:
            ids = batch.ids.get(feature)
            if ids is None or ids.offsets is not None or ids.weights is not None or ids.values.is_cuda:
                return False
        return True

    def add_lane(self) -> int:
        """Register a lane, which uses one stream. Returns its number."""
        return int(self.gate.core.add_lane())

    def staging(self, capacity: int) -> list[StagedRows]:
        """Pinned buffers for the missing rows of up to `capacity` examples, one per group. Charged to `dram=`."""
        made = [
            StagedRows(len(part.names) * capacity, part.group.cache.layout.dim, self.device) for part in self.groups
        ]
        for staging in made:
            charge(self.cache.budget, staging, staging.rows.nbytes)
        return made

    def lane(self, capacity: int, lane: int | None = None, staging: Sequence[StagedRows] | None = None) -> LaneReader:
        """A reader for up to `capacity` examples, for a new lane or for lane number `lane`. Readers that share
        `staging` must not run at the same time."""
        return LaneReader(self, capacity, self.add_lane() if lane is None else lane, staging or self.staging(capacity))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside the block, the caller instead of the filler changes the cache, on the current stream."""
        with self.lock, self.gate.writing():
            yield

    @contextmanager
    def refreshing(self, changed: Mapping[int, Tensor]) -> Iterator[Callable[[], None]]:
        """Inside the block the filler inserts nothing. Change the rows of these keys (by id of their store) in the
        tiers below, then call what this yields: it refreshes the cached copies, and drops those that are not in
        DRAM."""
        refresh = prepare_refresh(self.cache, changed)
        with self.lock:
            yield lambda: refresh(self.gate)

    def close(self) -> None:
        """Stop the filler."""
        self.filler.close()


def prepare_refresh(cache: HbmCache, changed: Mapping[int, Tensor]) -> Callable[[ReaderWriterGate], None]:
    """A function that refreshes the cached copies of these keys (by id of their store) after their rows have changed in
    the tiers below. Requires: meanwhile nobody else reads or changes the cache."""
    parts = [part for group in cache.groups if (part := _Changed(group, changed, cache.below)).count]

    def refresh(gate: ReaderWriterGate) -> None:
        for part in parts:
            part.refresh(gate)

    return refresh


class _Changed:
    """A group's keys whose rows change in the tiers below."""

    def __init__(self, group: TableGroup, changed: Mapping[int, Tensor], below: RowsBelow | None) -> None:
        self.below = below
        nothing = torch.empty(0, dtype=torch.int64)
        self.group, self.keys = group, [changed.get(id(store), nothing) for store in group.stores]
        self.bounds = [0, *itertools.accumulate(keys.numel() for keys in self.keys)]
        self.count, device = self.bounds[-1], group.cache.device
        if self.count:
            self._keys = _up(torch.cat(self.keys).numpy(), device)
            self._bounds = _up(np.array(self.bounds, dtype=np.int32), device)
            self._rows = torch.empty(self.count, group.width, dtype=torch.float32, pin_memory=device.type == "cuda")

    def refresh(self, gate: ReaderWriterGate) -> None:
        """Requires: the caller holds the reader's lock, and no lane reads."""
        cache, present = self.group.cache, torch.zeros(self.count, dtype=torch.bool)
        for store, keys, (begin, end) in zip(
            self.group.stores, self.keys, itertools.pairwise(self.bounds), strict=True
        ):
            if begin < end:
                present[begin:end] = _read_raw(self.below, store, keys, self._rows[begin:end])
        incoming, stay = to_device(self._rows, cache.device), to_device(present, cache.device)
        with gate.writing():
            slots = find(cache.index, self._keys, self._bounds)
            nowhere = torch.full_like(slots, -1)
            transfer.deliver(cache.source(), torch.where(stay, slots, nowhere), self.group.width, incoming)
            erase(cache.index, torch.where(stay, nowhere, slots))
        if cache.device.type == "cuda":
            torch.cuda.current_stream(cache.device).synchronize()


class GroupFeatures:
    """The features of one table group: the table and the output column of each."""

    def __init__(self, group: TableGroup, layout: Layout, device: torch.device) -> None:
        self.group = group
        stores = [id(store) for store in group.stores]
        places = [place for place in layout.outputs if id(place.table.store) in stores and place.pooled]
        self.names = [place.feature for place in places]
        self.tables = [stores.index(id(place.table.store)) for place in places]
        self.cores = [place.table.store.core for place in places]
        self.columns = torch.tensor([place.begin for place in places], dtype=torch.int32)
        self.on_device = (
            torch.tensor(self.tables, dtype=torch.int32, device=device),
            self.columns.to(device),
        )


class LaneReader:
    """The static buffers of one lane and bucket: keys in, pooled matrix out."""

    def __init__(self, reader: ServingReader, capacity: int, lane: int, staging: Sequence[StagedRows]) -> None:
        self.reader, self.capacity, self.number, self.staging = reader, capacity, lane, staging
        device = reader.device
        pinned = device.type == "cuda"
        features = sum(len(part.names) for part in reader.groups)
        self.keys = torch.zeros(features, capacity, dtype=torch.int64, pin_memory=pinned)
        self.examples = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self._keys = torch.zeros_like(self.keys, device=device)
        self._examples = torch.zeros_like(self.examples, device=device)
        self.out = torch.zeros(capacity, reader.layout.width, dtype=torch.float32, device=device)
        self.lists = [MissLists(len(part.names), capacity, device) for part in reader.groups]
        self.late = np.zeros(capacity, dtype=np.uint32)
        self.missed = [np.empty(len(part.names) * capacity, dtype=np.int64) for part in reader.groups]
        self.names = [name for part in reader.groups for name in part.names]
        self.graph: Any = None
        self.ids = self.misses = self._count = 0
        self._done = torch.cuda.Event() if pinned else None

    def find(self, batch: KeyedBatch, policy: str = "wait", below: BatchBelow | None = None) -> tuple[Tensor, int]:
        """The pooled matrix [examples, width], on the current stream, and how many ids the policy answered (`late`
        counts them by example). The matrix is valid until the next call. Requires: `reader.supports(batch)`.
        """
        self.enqueue_lookup(batch)
        late = self.fill_misses(policy, below)
        return self.out[: batch.size], late

    def enqueue_lookup(self, batch: KeyedBatch) -> None:
        """Enqueue the lookup of a batch. Does not block."""
        self._count = batch.size
        torch.stack([batch.ids[name].values for name in self.names], out=self.keys[:, : self._count])
        self.examples[0] = self._count
        with self.reader.gate.reading(self.number):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._launch()
        if self._done is not None:
            self._done.record()

    def fill_misses(self, policy: str = "wait", below: BatchBelow | None = None) -> int:
        """Wait for the lookup, read the missing rows and enqueue their insertion. Returns how many ids the policy
        answered."""
        late = self.read_misses(policy, below)
        self.insert_staged()
        self.offer()
        return late

    def read_misses(self, policy: str = "wait", below: BatchBelow | None = None) -> int:
        """Wait for the lookup and read the missing rows, over a remote store through `below`, which may raise
        LeftError. Returns how many ids the policy answered."""
        if self._done is not None:
            self._done.synchronize()
        self.late[: self._count] = 0
        self.ids, self.misses = (
            self._count * len(self.names),
            sum([self._read_misses(*part, policy, below) for part in self._parts()]),
        )
        if below is not None:
            below.finish(policy)
        return int(self.late[: self._count].sum())

    def insert_staged(self) -> None:
        """Enqueue the copy of staged rows into the pooled matrix."""
        for part, staging in zip(self.reader.groups, self.staging, strict=True):
            scatter_staged(self.out, staging, part.group.cache.layout)

    def offer(self) -> None:
        """Offer the missed keys to the filler."""
        for part, lists, staging, missed in self._parts():
            if count := int(staging.count[0]):
                self.reader.filler.offer(part, lists.counts.numpy(), missed[:count])

    def capture(self) -> None:
        """Capture the lookup as a CUDA graph. On the lane's stream."""
        if self._done is None or self.graph is not None:
            return
        self.examples[0] = 0
        with self.reader.gate.reading(self.number):
            self._launch()
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._launch()
            self.graph = graph

    def missing(self) -> list[Any]:
        """The miss buffers for the core's GraphRunner (core/device/graph_runner.h)."""
        return [
            _core.MissBuffers(
                part.cores, self.capacity, part.columns.data_ptr(), lists.counts.data_ptr(), lists.keys.data_ptr(),
                lists.examples.data_ptr(), staging.rows.data_ptr(), staging.places.data_ptr(), missed.ctypes.data,
                staging.count.data_ptr(),
            )
            for part, lists, staging, missed in self._parts()
        ]  # fmt: skip

    def _parts(self) -> Iterator[tuple[GroupFeatures, MissLists, StagedRows, Any]]:
        return zip(self.reader.groups, self.lists, self.staging, self.missed, strict=True)

    def _launch(self) -> None:
        self._keys.copy_(self.keys, non_blocking=True)
        self._examples.copy_(self.examples, non_blocking=True)
        at = 0
        for part, lists in zip(self.reader.groups, self.lists, strict=True):
            cache = part.group.cache
            keys = self._keys[at : at + len(part.names)]
            at += len(part.names)
            lookup(
                cache.index, cache.rows, cache.layout, keys, part.on_device, self._examples, self.reader.clock, lists,
                self.out, cache.policy,
            )  # fmt: skip

    def _read_misses(
        self,
        part: GroupFeatures,
        lists: MissLists,
        staging: StagedRows,
        missed: Any,
        policy: str,
        below: BatchBelow | None,
    ) -> int:
        """Read the missing rows from the tiers below into the staging buffers."""
        if below is not None:
            return self._read_misses_below(part, lists, staging, missed, policy, below)
        count = _core.read_misses(
            part.cores, part.columns.data_ptr(), lists.counts.data_ptr(), lists.keys.data_ptr(),
            lists.examples.data_ptr(), self.capacity, LATE[policy], self.out.stride(0), staging.rows.data_ptr(),
            staging.places.data_ptr(), missed.ctypes.data, self.late.ctypes.data,
        )  # fmt: skip
        staging.count[0] = count
        return int(count)

    def _read_misses_below(
        self,
        part: GroupFeatures,
        lists: MissLists,
        staging: StagedRows,
        missed: Any,
        policy: str,
        below: BatchBelow,
    ) -> int:
        """The same over a remote store: feature by feature in the buffers, and one read for each table."""
        counts = lists.counts.tolist()
        bounds = list(itertools.accumulate(counts, initial=0))
        keys, examples = (
            np.concatenate([row[:count] for row, count in zip(of_lists.numpy(), counts, strict=True)])
            for of_lists in (lists.keys, lists.examples)
        )
        columns = np.repeat(part.columns.numpy(), counts)
        missed[: bounds[-1]] = keys
        staging.places[: bounds[-1]] = torch.from_numpy(examples.astype(np.int64) * self.out.stride(0) + columns)
        tables = np.repeat(part.tables, counts)
        for table, store in enumerate(part.group.stores):
            at = np.flatnonzero(tables == table)
            if not at.size:
                continue
            unique, inverse = np.unique(keys[at], return_inverse=True)
            values, late = below.read(store, torch.from_numpy(unique), policy)
            staging.rows[torch.from_numpy(at)] = values[torch.from_numpy(inverse)]
            np.add.at(self.late, examples[at[late.numpy()[inverse]]], 1)
        staging.count[0] = bounds[-1]
        return int(bounds[-1])


class CacheFiller:
    """Inserts rows that lanes missed, in rounds, on its own thread."""

    def __init__(self, reader: ServingReader) -> None:
        self.reader = reader
        self.tick = 1
        self.rows_inserted = self.rounds = 0
        self._slots = sum(part.group.cache.capacity for part in reader.groups)
        charge(reader.cache.budget, self, FIRST_KEYS * 4 * max([part.group.width for part in reader.groups], default=0))
        self._waiting: dict[int, list[tuple[Any, Any]]] = {}
        self._keys = 0
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), False
        self.stream = new_stream(reader.device)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hotrow fill", daemon=True)
        if self.stream is not None:  # the interpreter, which stands in for a GPU, has one thread: call `run_round`
            self._thread.start()

    @property
    def full(self) -> bool:
        """Whether all slots were filled. From then on a sample of the misses is enough: hot keys miss again."""
        return self.rows_inserted >= self._slots

    def offer(self, part: GroupFeatures, numbers: Any, keys: Any) -> None:
        """Queue missed keys for insertion: `numbers[f]` of feature f, one feature after another. If not all fit
        into the queue, every n-th key is kept."""
        self.offer_to(self.reader.groups.index(part), part.tables, numbers, keys)

    def offer_to(self, group: int, tables_of_features: Sequence[int], numbers: Any, keys: Any) -> None:
        """As `offer`, for features of these tables of a group."""
        capacity = (ROUND_KEYS if self.full else FIRST_KEYS) - self._keys
        if capacity <= 0:
            return
        every = -(-keys.size // capacity)
        tables = np.repeat(tables_of_features, numbers)[::every]
        with self._lock:
            self._waiting.setdefault(group, []).append((tables, keys[::every].copy()))
            self._keys += tables.size
        self._wake.set()

    def run_round(self) -> int:
        """Insert the rows of the offered keys. Returns how many rows were inserted."""
        with self._lock:
            waiting, self._waiting, self._keys = self._waiting, {}, 0
        with self.reader.lock:
            came = sum([self._insert_missed(self.reader.groups[g].group, lists) for g, lists in waiting.items()])
        self.rows_inserted += came
        self.rounds += 1
        return came

    def close(self) -> None:
        """Stop the thread."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.stream is not None:
            self.stream.synchronize()  # after this the cache is unused, and its memory may be freed

    def _run(self) -> None:
        with on(self.stream):
            while not self._stop:
                self._wake.wait()
                self._wake.clear()
                try:
                    if not self._stop:
                        self.run_round()
                except BaseException as error:  # no more insertions; lanes read misses from the tiers below
                    self.error = error
                    return
                time.sleep(PAUSE if self.full else FIRST_PAUSE)

    def _insert_missed(self, group: TableGroup, lists: Sequence[tuple[Any, Any]]) -> int:
        tables, keys = _unique(lists)
        device, cache = group.cache.device, group.cache
        bounds = np.searchsorted(tables, np.arange(len(group.stores) + 1)).astype(np.int32)
        self.reader.gate.core.wait_for_writes(raw_stream(device))  # of `refreshing`
        slots = find(cache.index, _up(keys, device), _up(bounds, device))
        absent = to_host(slots).numpy() < 0
        keys, tables, rows = self._rows(group, keys[absent], tables[absent])
        if keys.size == 0:
            return 0
        on_keys, on_tables, incoming = _up(keys, device), _up(tables, device), to_device(rows, device)
        self.tick += 1
        score = initial_score(self.tick, cache.policy, cache.half_life)
        clock = _up(np.array([self.tick, np.float32(score).view(np.int32)], dtype=np.int32), device)
        with self.reader.gate.writing():
            chosen = choose_slots(cache.index, on_keys, on_tables, None, self.tick, cache.policy).slots
            insert_keys(cache.index, on_keys, chosen, None, self.tick, score)
            transfer.deliver(cache.source(), chosen, group.width, incoming)
            self.reader.clock.copy_(clock)
        return int(keys.size)

    def _rows(self, group: TableGroup, keys: Any, tables: Any) -> tuple[Any, Any, Tensor]:
        """The rows of those keys that are in DRAM. Keys whose row is only on SSD are left out."""
        bounds = np.searchsorted(tables, np.arange(len(group.stores) + 1)).tolist()
        rows = torch.empty(keys.size, group.width, dtype=torch.float32, pin_memory=group.cache.device.type == "cuda")
        present = np.zeros(keys.size, dtype=bool)
        for store, (begin, end) in zip(group.stores, itertools.pairwise(bounds), strict=True):
            if begin < end:
                some = torch.from_numpy(keys[begin:end])
                present[begin:end] = _read_raw(self.reader.cache.below, store, some, rows[begin:end]).numpy()
        if present.all():
            return keys, tables, rows
        return keys[present], tables[present], rows[torch.from_numpy(present)]


def _read_raw(below: RowsBelow | None, store: HostStore, keys: Tensor, out: Tensor) -> Tensor:
    """Rows that HBM may keep: those in DRAM, over a remote store without those that are older than what was applied."""
    return store.read_raw(keys, out) if below is None else below.read_raw(store, keys, out)


def _unique(lists: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The unique keys of each table, in table order: tables int32, keys int64."""
    tables, keys = (np.concatenate(parts) for parts in zip(*lists, strict=True))
    order = np.lexsort((keys, tables))
    tables, keys = tables[order].astype(np.int32), keys[order]
    first = np.ones(keys.size, dtype=bool)
    first[1:] = (keys[1:] != keys[:-1]) | (tables[1:] != tables[:-1])
    return tables[first], keys[first]


def _up(array: Any, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return to_device(tensor.pin_memory() if device.type == "cuda" else tensor, device)
