"""A server's way to rows in HBM: lanes read, one filler writes, and a gate orders the two on the device.

    a lane   keys → one captured launch: rows that are here into the pooled matrix, a list of the others (kernels/read)
             → the core reads those below, by the request's policy → one more launch puts them into their places
    filler   keys that lanes missed, in rounds: their rows come up and take the slots of the coldest

A miss never waits for the cache: it is answered from below, and the row comes up later, behind everybody's back, so a
lane's time has no queue in it but the device's. A round of the filler changes slots between two launches of the
lanes: it holds the gate for as long as it takes to ask for that (the device waits, not the host). So a lane sees rows
whole, and the same values as below whatever is here.

This is for tables that are only read, with pooled features of one id each (`takes`): nearly all requests of ranking
models. Other batches go by HotPlan.read, which copies what is missing and leaves the cache as it is. The two must not
run beside each other: `changing` is for those.

What a LaneReader does in Python, captured lanes do in the core (core/device/graph_runner.h), over the same buffers.

A LaneReader belongs to its lane's thread. Any thread may offer keys to the filler; it takes what it has room for.
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
from hotrow.kernels.index.insert import choose_in_order, erase, place
from hotrow.kernels.index.touch import first_score
from hotrow.kernels.rows import move
from hotrow.kernels.rows.read import Lists, Staging, put, read
from hotrow.tiers.feature_layout import Layout
from hotrow.tiers.hbm.cache import HotRows
from hotrow.tiers.hbm.pinned_ring import charge
from hotrow.tiers.hbm.table_group import Group
from hotrow.tiers.host.store import LATE

HALF_LIFE = 4096.0  # rounds of the filler
# Keys of a round, and seconds between two, while there are empty slots and afterwards. A lane that meets a round waits
# for it: afterwards fewer than one batch in a hundred should.
FIRST_KEYS, ROUND_KEYS = 1 << 15, 1 << 13
FIRST_PAUSE, PAUSE = 0.02, 0.25


class Gate:
    """Lanes ask the device for reads together; the filler asks for its writes alone, after all reads before it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.core = device, _core.Gate(device.type == "cuda")

    @contextmanager
    def reading(self, lane: int) -> Iterator[None]:
        """Inside it, what is asked of this stream reads the cache."""
        stream = raw_stream(self.device)
        self.core.begin_read(stream)
        try:
            yield
        finally:
            self.core.end_read(lane, stream)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside it, what is asked of this stream changes the cache."""
        stream = raw_stream(self.device)
        self.core.begin_write(stream)
        try:
            yield
        finally:
            self.core.end_write(stream)


class HotReader:
    """The cache of a collection that is served: what its lanes share."""

    def __init__(self, layout: Layout, hot: HotRows) -> None:
        self.layout, self.hot, self.device = layout, hot, hot.device
        self.gate = Gate(hot.device)
        self.clock = torch.tensor([1, 0], dtype=torch.int32, device=hot.device)
        self.single = [place.feature for place in layout.places if place.pooled]
        self.groups = [GroupFeatures(group, layout, hot.device) for group in hot.groups]
        for group in hot.groups:
            group.tier.half_life = HALF_LIFE
        self.lock = threading.Lock()  # held by who brings rows up
        self.filler = Filler(self)

    def takes(self, batch: KeyedBatch) -> bool:
        """Whether a batch has one id for each example of every feature, and no sequences, in the host's memory."""
        if len(self.single) != len(self.layout.places):
            return False
        for feature in self.single:
            ids = batch.ids.get(feature)
            if ids is None or ids.offsets is not None or ids.weights is not None or ids.values.is_cuda:
                return False
        return True

    def add_lane(self) -> int:
        """A lane's number. It asks on one stream."""
        return int(self.gate.core.add_lane())

    def staging(self, room: int) -> list[Staging]:
        """Where missing rows of up to so many examples wait for the device, for each group. Part of `dram=`."""
        made = [Staging(len(part.names) * room, part.group.tier.layout.dim, self.device) for part in self.groups]
        for staging in made:
            charge(self.hot.budget, staging, staging.rows.nbytes)
        return made

    def lane(self, room: int, lane: int | None = None, staging: Sequence[Staging] | None = None) -> LaneReader:
        """A reader for up to so many examples, of a lane of its own or of one that has a number. Readers that share a
        staging have their batches one after the other."""
        return LaneReader(self, room, self.add_lane() if lane is None else lane, staging or self.staging(room))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside it, somebody else than the filler changes the cache, on this stream."""
        with self.lock, self.gate.writing():
            yield

    @contextmanager
    def refreshing(self, changed: Mapping[int, Tensor]) -> Iterator[Callable[[], None]]:
        """Inside it no row comes up. Change the rows of these keys (by id of their store) below, then call what this
        gives: rows of theirs that are here become what is below, or go, where there is none in DRAM."""
        parts = [part for group in self.hot.groups if (part := _Changed(group, changed)).count]

        def refresh() -> None:
            for part in parts:
                part.refresh(self.gate)

        with self.lock:
            yield refresh

    def close(self) -> None:
        """End the filler."""
        self.filler.close()


class _Changed:
    """A group's keys whose rows change below."""

    def __init__(self, group: Group, changed: Mapping[int, Tensor]) -> None:
        nothing = torch.empty(0, dtype=torch.int64)
        self.group, self.keys = group, [changed.get(id(store), nothing) for store in group.stores]
        self.bounds = [0, *itertools.accumulate(keys.numel() for keys in self.keys)]
        self.count, device = self.bounds[-1], group.tier.device
        if self.count:
            self._keys = _up(torch.cat(self.keys).numpy(), device)
            self._bounds = _up(np.array(self.bounds, dtype=np.int32), device)
            self._rows = torch.empty(self.count, group.width, dtype=torch.float32, pin_memory=device.type == "cuda")

    def refresh(self, gate: Gate) -> None:
        """Requires: the reader's lock, and that nobody reads."""
        tier, there = self.group.tier, torch.zeros(self.count, dtype=torch.bool)
        for store, keys, (begin, end) in zip(
            self.group.stores, self.keys, itertools.pairwise(self.bounds), strict=True
        ):
            if begin < end:
                there[begin:end] = store.read_raw(keys, self._rows[begin:end])
        incoming, stay = to_device(self._rows, tier.device), to_device(there, tier.device)
        with gate.writing():
            slots = find(tier.index, self._keys, self._bounds)
            nowhere = torch.full_like(slots, -1)
            move.deliver(tier.source(), torch.where(stay, slots, nowhere), self.group.width, incoming)
            erase(tier.index, torch.where(stay, nowhere, slots))
        if tier.device.type == "cuda":
            torch.cuda.current_stream(tier.device).synchronize()


class GroupFeatures:
    """The features of one group of tables: which table of the group, and which column, each has."""

    def __init__(self, group: Group, layout: Layout, device: torch.device) -> None:
        self.group = group
        stores = [id(store) for store in group.stores]
        places = [place for place in layout.places if id(place.table.store) in stores and place.pooled]
        self.names = [place.feature for place in places]
        self.tables = [stores.index(id(place.table.store)) for place in places]
        self.cores = [place.table.store.core for place in places]
        self.columns = torch.tensor([place.begin for place in places], dtype=torch.int32)
        self.on_device = (
            torch.tensor(self.tables, dtype=torch.int32, device=device),
            self.columns.to(device),
        )


class LaneReader:
    """Static buffers of one lane and one room: keys in, the pooled matrix out."""

    def __init__(self, reader: HotReader, room: int, lane: int, staging: Sequence[Staging]) -> None:
        self.reader, self.room, self.number, self.staging = reader, room, lane, staging
        device = reader.device
        pinned = device.type == "cuda"
        features = sum(len(part.names) for part in reader.groups)
        self.keys = torch.zeros(features, room, dtype=torch.int64, pin_memory=pinned)
        self.examples = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self._keys = torch.zeros_like(self.keys, device=device)
        self._examples = torch.zeros_like(self.examples, device=device)
        self.out = torch.zeros(room, reader.layout.width, dtype=torch.float32, device=device)
        self.lists = [Lists(len(part.names), room, device) for part in reader.groups]
        self.late = np.zeros(room, dtype=np.uint32)
        self.missed = [np.empty(len(part.names) * room, dtype=np.int64) for part in reader.groups]
        self.names = [name for part in reader.groups for name in part.names]
        self.graph: Any = None
        self.ids = self.misses = self._count = 0
        self._done = torch.cuda.Event() if pinned else None

    def find(self, batch: KeyedBatch, policy: str = "wait") -> tuple[Tensor, int]:
        """The pooled matrix [examples, width], on the current stream, and how many ids were answered by the policy
        (`late` has them by example). It is this reader's: valid until the next call. Requires: `reader.takes(batch)`.
        """
        self.ask(batch)
        late = self.fill(policy)
        return self.out[: batch.size], late

    def ask(self, batch: KeyedBatch) -> None:
        """Have the device look for a batch's rows; nothing waits."""
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

    def fill(self, policy: str = "wait") -> int:
        """Wait for what `ask` asked, and put what it did not find into its place; returns how many ids the policy
        answered."""
        if self._done is not None:
            self._done.synchronize()
        self.late[: self._count] = 0
        self.ids, self.misses = (
            self._count * len(self.names),
            sum([self._read(*part, policy) for part in self._parts()]),
        )
        self.put()
        self.offer()
        return int(self.late[: self._count].sum())

    def put(self) -> None:
        """Rows that are staged, into their places."""
        for part, staging in zip(self.reader.groups, self.staging, strict=True):
            put(self.out, staging, part.group.tier.layout)

    def offer(self) -> None:
        """Have the filler bring up what was missing."""
        for part, lists, staging, missed in self._parts():
            if count := int(staging.number[0]):
                self.reader.filler.offer(part, lists.numbers.numpy(), missed[:count])

    def capture(self) -> None:
        """Have the device remember what a lookup asks of it, so that one call asks for all. On the lane's stream."""
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
        """The same lists as the core's lanes take them (core/device/graph_runner.h)."""
        return [
            _core.Missing(
                part.cores, self.room, part.columns.data_ptr(), lists.numbers.data_ptr(), lists.keys.data_ptr(),
                lists.examples.data_ptr(), staging.rows.data_ptr(), staging.places.data_ptr(), missed.ctypes.data,
                staging.number.data_ptr(),
            )
            for part, lists, staging, missed in self._parts()
        ]  # fmt: skip

    def _parts(self) -> Iterator[tuple[GroupFeatures, Lists, Staging, Any]]:
        return zip(self.reader.groups, self.lists, self.staging, self.missed, strict=True)

    def _launch(self) -> None:
        self._keys.copy_(self.keys, non_blocking=True)
        self._examples.copy_(self.examples, non_blocking=True)
        at = 0
        for part, lists in zip(self.reader.groups, self.lists, strict=True):
            tier = part.group.tier
            keys = self._keys[at : at + len(part.names)]
            at += len(part.names)
            read(
                tier.index, tier.rows, tier.layout, keys, part.on_device, self._examples, self.reader.clock, lists,
                self.out, tier.policy,
            )  # fmt: skip

    def _read(self, part: GroupFeatures, lists: Lists, staging: Staging, missed: Any, policy: str) -> int:
        """Rows that were not in HBM, read below and staged."""
        count = _core.read_missing(
            part.cores, part.columns.data_ptr(), lists.numbers.data_ptr(), lists.keys.data_ptr(),
            lists.examples.data_ptr(), self.room, LATE[policy], self.out.stride(0), staging.rows.data_ptr(),
            staging.places.data_ptr(), missed.ctypes.data, self.late.ctypes.data,
        )  # fmt: skip
        staging.number[0] = count
        return int(count)


class Filler:
    """Brings rows up that lanes missed, in rounds, on a thread of its own."""

    def __init__(self, reader: HotReader) -> None:
        self.reader = reader
        self.tick = 1
        self.brought = self.rounds = 0
        self._slots = sum(part.group.tier.capacity for part in reader.groups)
        charge(reader.hot.budget, self, FIRST_KEYS * 4 * max([part.group.width for part in reader.groups], default=0))
        self._waiting: dict[int, list[tuple[Any, Any]]] = {}
        self._keys = 0
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), False
        self.stream = new_stream(reader.device)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hotrow fill", daemon=True)
        if self.stream is not None:  # the interpreter, which stands in for a GPU, has one thread: call `round`
            self._thread.start()

    @property
    def full(self) -> bool:
        """Whether all slots are taken. From then on a sample of what is missed will do: what is hot is missed again."""
        return self.brought >= self._slots

    def offer(self, part: GroupFeatures, numbers: Any, keys: Any) -> None:
        """Keys that were missed, `numbers[f]` of feature f, one behind another. Those there is room for are copied."""
        room = (ROUND_KEYS if self.full else FIRST_KEYS) - self._keys
        if room <= 0:
            return
        every = -(-keys.size // room)
        tables = np.repeat(part.tables, numbers)[::every]
        with self._lock:
            self._waiting.setdefault(self.reader.groups.index(part), []).append((tables, keys[::every].copy()))
            self._keys += tables.size
        self._wake.set()

    def round(self) -> int:
        """Bring up what waits; returns how many rows came."""
        with self._lock:
            waiting, self._waiting, self._keys = self._waiting, {}, 0
        with self.reader.lock:
            came = sum([self._bring(self.reader.groups[g].group, lists) for g, lists in waiting.items()])
        self.brought += came
        self.rounds += 1
        return came

    def close(self) -> None:
        """End the thread."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.stream is not None:
            self.stream.synchronize()  # the cache is free after this, and its memory for others

    def _run(self) -> None:
        with on(self.stream):
            while not self._stop:
                self._wake.wait()
                self._wake.clear()
                try:
                    if not self._stop:
                        self.round()
                except BaseException as error:  # the cache stays as it is; lanes read below
                    self.error = error
                    return
                time.sleep(PAUSE if self.full else FIRST_PAUSE)

    def _bring(self, group: Group, lists: Sequence[tuple[Any, Any]]) -> int:
        tables, keys = _unique(lists)
        device, tier = group.tier.device, group.tier
        bounds = np.searchsorted(tables, np.arange(len(group.stores) + 1)).astype(np.int32)
        self.reader.gate.core.follow_writes(raw_stream(device))  # of those who bring rows up to date
        slots = find(tier.index, _up(keys, device), _up(bounds, device))
        absent = to_host(slots).numpy() < 0
        keys, tables, rows = self._rows(group, keys[absent], tables[absent])
        if keys.size == 0:
            return 0
        on_keys, on_tables, incoming = _up(keys, device), _up(tables, device), to_device(rows, device)
        self.tick += 1
        score = first_score(self.tick, tier.policy, tier.half_life)
        clock = _up(np.array([self.tick, np.float32(score).view(np.int32)], dtype=np.int32), device)
        with self.reader.gate.writing():
            chosen = choose_in_order(tier.index, on_keys, on_tables, None, self.tick, tier.policy).slots
            place(tier.index, on_keys, chosen, None, self.tick, score)
            move.deliver(tier.source(), chosen, group.width, incoming)
            self.reader.clock.copy_(clock)
        return int(keys.size)

    def _rows(self, group: Group, keys: Any, tables: Any) -> tuple[Any, Any, Tensor]:
        """The rows of those keys that have one in DRAM, as they lie there. One on SSD alone stays there."""
        bounds = np.searchsorted(tables, np.arange(len(group.stores) + 1)).tolist()
        rows = torch.empty(keys.size, group.width, dtype=torch.float32, pin_memory=group.tier.device.type == "cuda")
        there = np.zeros(keys.size, dtype=bool)
        for store, (begin, end) in zip(group.stores, itertools.pairwise(bounds), strict=True):
            if begin < end:
                there[begin:end] = store.read_raw(torch.from_numpy(keys[begin:end]), rows[begin:end]).numpy()
        if there.all():
            return keys, tables, rows
        return keys[there], tables[there], rows[torch.from_numpy(there)]


def _unique(lists: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Keys of tables without duplicates, in table order: tables int32, keys int64."""
    tables, keys = (np.concatenate(parts) for parts in zip(*lists, strict=True))
    order = np.lexsort((keys, tables))
    tables, keys = tables[order].astype(np.int32), keys[order]
    first = np.ones(keys.size, dtype=bool)
    first[1:] = (keys[1:] != keys[:-1]) | (tables[1:] != tables[:-1])
    return tables[first], keys[first]


def _up(array: Any, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return to_device(tensor.pin_memory() if device.type == "cuda" else tensor, device)
