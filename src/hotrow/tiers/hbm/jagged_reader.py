"""Lookups of a server in HBM for batches of any number of ids per feature: multi-hot features, histories, numbers.

    ids → one captured launch for each group of tables: a value per id, and a list of the misses
    (kernels/rows/jagged_lookup.py)
        → the core reads the missing rows → a captured launch inserts them → pooled features and histories

It shares the cache, the gate and the filler with ServingReader. A JaggedBuffers has the static buffers of one lane and
bucket. The ids of a group lie one after another: histories first, each in a region of fixed capacity, then the ids of
all pooled features, packed. Pooling is training's kernel (kernels/rows/gather.py) over the value buffer, so the results
have the bits of HbmPlan.read.

A bucket is a Shape: rows, and the lengths of `axes`, in this order: users, for each group the ids beyond one per entry,
for each history its events, and for each padded history its longest length. What a bucket has more than a batch is
padding at the end: entries without ids, events of no one (with the contents of earlier batches), and rows of the last
user.

Threads: a JaggedBuffers belongs to its lane's thread. JaggedReader never changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import Jagged, KeyedBatch
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.jagged_lookup import IdFeatures, IdMissLists, lookup_ids
from hotrow.kernels.rows.layout import Items, Matrices, RowLayout, Source, matrices
from hotrow.kernels.rows.serving_lookup import StagedRows, scatter_staged
from hotrow.tiers.feature_layout import FeatureOutput
from hotrow.tiers.hbm.batch_layout import scale_of_ids
from hotrow.tiers.hbm.pinned_ring import charge
from hotrow.tiers.hbm.rows_below import BatchBelow
from hotrow.tiers.hbm.serving_reader import ServingReader
from hotrow.tiers.hbm.table_group import TableGroup
from hotrow.tiers.host.store import LATE

MOST_IDS = 1 << 22  # of a batch in a lane; more are read without it
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Histories:
    """How a tower reads: `groups` are the histories (each a tuple of aligned columns, keys or numbers), `user` the
    features with one entry per user, `longest` the most events of an entry of each group (None: no limit)."""

    groups: tuple[tuple[str, ...], ...] = ()
    jagged: bool = False
    user: frozenset[str] = frozenset()
    longest: tuple[int | None, ...] = ()

    @property
    def users(self) -> bool:
        """Whether the tower has a user part."""
        return bool(self.user)


class GroupIds:
    """The features of one table group in the order of their ids: histories, then pooled features."""

    def __init__(self, group: TableGroup, places: Sequence[FeatureOutput], device: torch.device) -> None:
        stores = [id(store) for store in group.stores]
        mine = [place for place in places if id(place.table.store) in stores]
        self.histories = [place for place in mine if not place.pooled]
        self.pooled = [place for place in mine if place.pooled]
        self.features = [*self.histories, *self.pooled]
        self.group = group
        self.tables = [stores.index(id(place.table.store)) for place in self.features]
        self.cores = [place.table.store.core for place in self.features]
        self.columns = torch.zeros(len(self.features), dtype=torch.int32)
        self.on_device = torch.tensor(self.tables, dtype=torch.int32, device=device)
        self.layout = RowLayout(group.cache.layout.dim)  # of a value in the buffer


class JaggedReader:
    """What the lanes of a served collection share for jagged batches."""

    def __init__(self, reader: ServingReader, histories: Histories) -> None:
        self.base, self.histories, self.device = reader, histories, reader.device
        places = reader.layout.outputs
        made = [GroupIds(group, places, reader.device) for group in reader.cache.groups]
        self.groups = [(number, part) for number, part in enumerate(made) if part.features]
        self.widths: dict[bool, int] = {False: 0, True: 0}  # of the pooled matrix, by whether it is the users'
        self.columns: dict[str, tuple[int, int]] = {}
        for place in places:
            if place.pooled:
                of_user = place.feature in histories.user
                begin = self.widths[of_user]
                self.widths[of_user] = begin + place.table.table.dim
                self.columns[place.feature] = begin, self.widths[of_user]
        self.numbers = tuple(n for group in histories.groups for n in group if n not in self._keys())
        self.means = any(place.pooling == "mean" for place in places)

    def _keys(self) -> set[str]:
        return {place.feature for place in self.base.layout.outputs}

    def limits(self) -> list[int | None]:
        """The largest size of each axis of a bucket's lengths; None where nothing limits it."""
        histories = self.histories
        found: list[int | None] = [None] * (int(histories.users) + len(self.groups) + len(histories.groups))
        return found if histories.jagged else [*found, *histories.longest]

    def supports(self, batch: KeyedBatch) -> bool:
        """Whether lanes can take the batch: its features are in the host's memory, and no history has weights."""
        if batch.size == 0 or batch.visible or (batch.user_of is not None) != self.histories.users:
            return False
        if batch.user_of is not None and not batch.user_features >= self.histories.user:
            return False
        for place in self.base.layout.outputs:
            ids = batch.ids.get(place.feature)
            if ids is None or ids.values.is_cuda or (ids.weights is not None and not place.pooled):
                return False
        return all(name in batch.numbers for name in self.numbers) and batch.id_count() <= MOST_IDS

    def lengths_of(self, batch: KeyedBatch) -> Sizes:
        """The lengths of a batch, one for each axis of a bucket. Requires: `supports(batch)`."""
        users = (batch.users,) if self.histories.users else ()
        more = []
        for _, part in self.groups:
            ids = [batch.ids[place.feature] for place in part.pooled]
            more.append(max(0, sum([one.values.numel() - one.size for one in ids])))
        first = [batch.column(group[0]) for group in self.histories.groups]
        events = [column.values.numel() for column in first]
        if self.histories.jagged:
            return (*users, *more, *events)
        longest = [int(column.lengths().max()) if column.size else 0 for column in first]
        return (*users, *more, *events, *longest)

    def split(self, lengths: Sizes) -> tuple[int, Sizes, Sizes, Sizes]:
        """The lengths of a bucket by kind: users (0 without), more ids, events, and the longest of each history."""
        rest = list(lengths)
        users = rest.pop(0) if self.histories.users else 0
        groups, histories = len(self.groups), len(self.histories.groups)
        events = tuple(rest[groups : groups + histories])
        return users, tuple(rest[:groups]), events, tuple(rest[groups + histories :])

    def weighted(self, batch: KeyedBatch) -> bool:
        """Whether the batch's pooled ids have factors: weights, or 1 / length in a mean."""
        return self.means or any(ids.weights is not None for ids in batch.ids.values())

    def positions(self, rows: int, lengths: Sizes) -> int:
        """How many vectors a bucket's tower reads, as a measure of its work."""
        users, more, events, longest = self.split(lengths)
        pooled = [p.feature in self.histories.user for _, part in self.groups for p in part.pooled]
        entries = sum([users if of_user else rows for of_user in pooled])
        return rows + entries + sum(more) + sum(events) + rows * sum(longest)


class Scratch:
    """Buffers that the buckets of one lane share, because it runs one batch at a time. A larger one replaces a smaller
    one; buckets that use the smaller one keep it."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def zeros(self, name: Any, rows: int, columns: int, device: torch.device) -> Tensor:
        """A float32 matrix [rows, columns] with finite contents."""
        found = self._kept.get(name)
        if found is None or found.shape[0] < rows:
            found = self._kept[name] = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        return found[:rows]

    def staging(self, name: Any, make: Callable[[], StagedRows], rows: int) -> StagedRows:
        """Staging memory for at least `rows` rows."""
        found = self._kept.get(name)
        if found is None or found.rows.shape[0] < rows:
            found = self._kept[name] = make()
        return found


class _Part(NamedTuple):
    """The buffers of one group. `starts`, `ends` and `offsets` are views of the pinned words, as arrays."""

    number: int  # of the group in the cache
    ids: GroupIds
    keys: Any
    device_keys: Tensor
    begins: Sizes  # where the ids of each history begin, then where those of pooled features do
    starts: Any
    ends: Any
    offsets: Any
    features: IdFeatures
    items: Items | None  # None: no pooled feature
    scales: Any
    values: Tensor
    slots: Tensor
    outputs: Sequence[Tensor]
    described: Matrices | None
    lists: IdMissLists
    staging: StagedRows
    missed: Any
    late: Any


class JaggedBuffers:
    """One lane's static buffers for one bucket."""

    def __init__(
        self, reader: JaggedReader, rows: int, lengths: Sizes, weighted: bool, lane: int, scratch: Scratch
    ) -> None:
        self.reader, self.rows, self.lane, self.weighted = reader, rows, lane, weighted
        self.users, self._more, self._events, self._longest = reader.split(lengths)
        self.entries = {False: rows, True: self.users}
        self.device, pinned = reader.device, reader.device.type == "cuda"
        self.examples = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)  # the core counts a batch's rows here
        self.graph: Any = None
        self._count = 0
        self._done = torch.cuda.Event() if pinned else None
        self.matrices = {
            of_user: torch.zeros(self.entries[of_user], width, dtype=torch.float32, device=self.device)
            for of_user, width in reader.widths.items()
        }
        capacities = [self._capacity(n, part) for n, (_, part) in enumerate(reader.groups)]
        self._columns = [name for group in reader.histories.groups for name in group]
        sizes = [*capacities, *(self._entries(name) for name in self._columns)]
        sizes += [self._events_of(name) for name in reader.numbers] + [rows if self.users else 0]
        self._ints = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        self._device_ints = torch.zeros_like(self._ints, device=self.device)
        ints, device_ints = iter(self._ints.split(sizes)), iter(self._device_ints.split(sizes))
        keys = [(next(ints).numpy(), next(device_ints)) for _ in capacities]
        self._lengths = {name: (next(ints).numpy(), next(device_ints)) for name in self._columns}
        self._numbers = {name: (next(ints).numpy(), next(device_ints)) for name in reader.numbers}
        self._user_of = next(ints).numpy(), next(device_ints)
        items = [self._items(part) for _, part in reader.groups]
        words = [2 * len(part.features) + sum(of) + 1 for (_, part), of in zip(reader.groups, items, strict=True)]
        self._words = torch.zeros(sum(words), dtype=torch.int32, pin_memory=pinned)
        self._device_words = torch.zeros_like(self._words, device=self.device)
        self._scales = torch.ones(sum(capacities) if weighted else 0, dtype=torch.float32, pin_memory=pinned)
        self._device_scales = torch.ones_like(self._scales, device=self.device)
        self.parts: list[_Part] = []
        at = 0
        for n, (number, part) in enumerate(reader.groups):
            word = sum(words[:n])
            block = slice(word, word + words[n])
            scales = slice(at, at + capacities[n]) if weighted else slice(0, 0)
            self.parts.append(
                self._part(number, part, capacities[n], keys[n], items[n], block, scales, scratch)
            )  # fmt: skip
            at += capacities[n]
        self._padded = self._padded_histories(scratch)

    # --- before traffic -----------------------------------------------------------------------------------------------

    def _entries(self, name: str) -> int:
        return self.entries[name in self.reader.histories.user]

    def _events_of(self, name: str) -> int:
        at = next((n for n, group in enumerate(self.reader.histories.groups) if name in group))
        return self._events[at]

    def _items(self, part: GroupIds) -> list[int]:
        return [self._entries(place.feature) for place in part.pooled]

    def _capacity(self, n: int, part: GroupIds) -> int:
        histories = sum([self._events_of(place.feature) for place in part.histories])
        return max(1, histories + sum(self._items(part)) + self._more[n])

    def _part(
        self, number: int, part: GroupIds, capacity: int, keys: tuple[Any, Tensor], items: list[int], block: slice,
        scales: slice, scratch: Scratch,
    ) -> _Part:  # fmt: skip
        device, count = self.device, len(part.features)
        words, on_device = self._words[block].numpy(), self._device_words[block]
        events = [self._events_of(place.feature) for place in part.histories]
        begins = tuple(itertools.accumulate(events, initial=0))
        words[: len(begins) - 1] = begins[:-1]
        words[len(events) : count] = begins[-1]
        words[count:] = begins[-1]
        words[count : count + len(events)] = begins[:-1]  # ends: nothing yet
        values = scratch.zeros(("values", number), capacity, part.layout.stride, device)
        features = IdFeatures(part.on_device, on_device[:count], on_device[count : 2 * count])
        layout: Items | None = None
        outputs: list[Tensor] = []
        described = None
        if part.pooled:
            starts = torch.tensor(list(itertools.accumulate(items, initial=0)), dtype=torch.int32).to(device)
            factors = self._device_scales[scales] if self.weighted else None
            layout = Items(starts, part.on_device[len(events) :], on_device[2 * count :], factors)
            for place in part.pooled:
                begin, end = self.reader.columns[place.feature]
                outputs.append(self.matrices[place.feature in self.reader.histories.user][:, begin:end])
            described = matrices(outputs, part.layout.dim, device)
        staging = scratch.staging(
            ("staging", number), lambda: self._staging(capacity, part.layout.dim), capacity
        )  # fmt: skip
        return _Part(
            number, part, keys[0], keys[1], begins, words[:count], words[count : 2 * count], words[2 * count :],
            features, layout, self._scales[scales].numpy(), values,
            torch.arange(capacity, dtype=torch.int32, device=device), outputs, described,
            IdMissLists(count, capacity, device), staging, np.empty(capacity, np.int64), np.zeros(capacity, np.uint32),
        )  # fmt: skip

    def _staging(self, capacity: int, dim: int) -> StagedRows:
        staging = StagedRows(capacity, dim, self.device)
        charge(self.reader.base.cache.budget, staging, staging.rows.nbytes)
        return staging

    def _padded_histories(self, scratch: Scratch) -> dict[str, tuple[_Part, int, Tensor, Items, Matrices]]:
        """For padded towers: the matrix [rows * longest, stride] of each history of keys, and how it is gathered."""
        found = {}
        for part in self.parts if not self.reader.histories.jagged else ():
            for n, place in enumerate(part.ids.histories):
                name, dim = place.feature, part.ids.layout.dim
                positions = self.rows * self._longest_of(name)
                out = scratch.zeros(("padded", name), positions, dim, self.device)
                begins = torch.tensor([0, positions], dtype=torch.int32).to(self.device)
                items = Items(begins, part.ids.on_device[n : n + 1])
                found[name] = part, part.begins[n], out, items, matrices([out], dim, self.device)
        return found

    def _longest_of(self, name: str) -> int:
        return max(1, self._longest[next(n for n, g in enumerate(self.reader.histories.groups) if name in g)])

    # --- a batch ------------------------------------------------------------------------------------------------------

    def fill(self, batch: KeyedBatch) -> None:
        """Copy a batch's ids and numbers into pinned memory. Requires: it fits, and the last batch has ended."""
        self._count = batch.size
        self.examples[0] = batch.size
        for part in self.parts:
            self._fill_part(part, batch)
        for name, (into, _) in self._lengths.items():
            column = batch.column(name)
            into[: column.size] = column.lengths().numpy()
            into[column.size :] = 0
        for name, (into, _) in self._numbers.items():
            values = batch.numbers[name].values.numpy()
            into[: values.size] = values
        if batch.user_of is not None:
            self._user_of[0][: batch.size] = batch.user_of.numpy()
            self._user_of[0][batch.size :] = self.users - 1

    def _fill_part(self, part: _Part, batch: KeyedBatch) -> None:
        histories = len(part.ids.histories)
        for n, place in enumerate(part.ids.histories):
            values, begin = batch.ids[place.feature].values.numpy(), part.begins[n]
            part.keys[begin : begin + values.size] = values
            part.ends[n] = begin + values.size
        at, item = part.begins[histories], 0
        for n, place in enumerate(part.ids.pooled, histories):
            ids = batch.ids[place.feature]
            values, entries = ids.values.numpy(), ids.size
            part.keys[at : at + values.size] = values
            part.starts[n], part.ends[n] = at, at + values.size
            offsets = np.arange(entries) if ids.offsets is None else ids.offsets.numpy()[:-1]
            np.add(offsets, at, out=part.offsets[item : item + entries], casting="unsafe")
            end = item + self._entries(place.feature)
            part.offsets[item + entries : end] = at + values.size
            if self.weighted:
                part.scales[at : at + values.size] = scale_of_ids(ids, place.pooling).numpy()
            at, item = at + values.size, end
        part.offsets[item] = at

    def enqueue_lookup(self) -> None:
        """Enqueue the lookup of what `fill` copied. Does not block."""
        with self.reader.base.gate.reading(self.lane):
            if self.graph is not None:
                self.graph.replay()
            else:
                self.launch_lookup()
        if self._done is not None:
            self._done.record()

    def launch_lookup(self) -> None:
        """The launches of the lookup. Inside the gate."""
        self._device_ints.copy_(self._ints, non_blocking=True)
        self._device_words.copy_(self._words, non_blocking=True)
        if self.weighted:
            self._device_scales.copy_(self._scales, non_blocking=True)
        for part in self.parts:
            cache = part.ids.group.cache
            lookup_ids(
                cache.index, cache.rows, cache.layout, part.device_keys, part.features, self.reader.base.clock,
                part.lists, part.values, cache.policy,
            )  # fmt: skip

    def read_misses(self, policy: str = "wait", below: BatchBelow | None = None) -> None:
        """Wait for the lookup and read the missing rows, over a remote store through `below`, which may raise
        LeftError."""
        if self._done is not None:
            self._done.synchronize()
        self.forget_late(policy)
        for part in self.parts:
            self._read_part(part, policy) if below is None else self._read_part_below(part, policy, below)
        if below is not None:
            below.finish(policy)

    def vectors(self) -> dict[str, Tensor]:
        """Enqueue the insertion of the missing rows and the pooling; returns the vectors as the tower reads them. The
        tensors are the same every time."""
        for part in self.parts:
            scatter_staged(part.values, part.staging, part.ids.layout)
            if part.items is not None:
                source = Source(part.values)
                gather(source, part.ids.layout, part.slots, part.items, part.outputs, None, None, part.described)
        found: dict[str, Tensor] = {}
        for name, (begin, end) in self.reader.columns.items():
            found[name] = self.matrices[name in self.reader.histories.user][:, begin:end]
        for name in self._columns:
            found |= self._history(name)
        if self.users:
            found["user_of"] = self._user_of[1]
        return found

    def _history(self, name: str) -> dict[str, Tensor]:
        lengths = self._lengths[name][1]
        if self.reader.histories.jagged:
            values = self._numbers[name][1] if name in self._numbers else self._values_of(name)
            return {name: values, f"{name}_lengths": lengths}
        longest = self._longest_of(name)
        places = torch.arange(longest, device=self.device)
        mask = places < lengths.unsqueeze(1)
        source = (lengths.cumsum(0) - lengths).unsqueeze(1) + places
        if name in self._numbers:
            values = self._numbers[name][1]
            most = max(0, values.numel() - 1)
            return {name: torch.where(mask, values[source.clamp(max=most)], 0), f"{name}_mask": mask}
        part, begin, out, items, described = self._padded[name]
        slots = torch.where(mask, source + begin, -1).to(torch.int32).flatten()
        gather(Source(part.values), part.ids.layout, slots, items, [out], None, None, described)
        return {name: out.view(self.rows, longest, part.ids.layout.dim), f"{name}_mask": mask}

    def _values_of(self, name: str) -> Tensor:
        for part in self.parts:
            for n, place in enumerate(part.ids.histories):
                if place.feature == name:
                    values = part.values[part.begins[n] : part.begins[n + 1], : part.ids.layout.dim]
                    return values.contiguous()  # a copy only where the stride is larger than the dim
        raise AssertionError(name)

    def offer(self) -> None:
        """Offer the missed keys to the filler."""
        for part in self.parts:
            if count := int(part.staging.count[0]):
                numbers, keys = part.lists.counts.numpy(), part.missed[:count]
                self.reader.base.filler.offer_to(part.number, part.ids.tables, numbers, keys)

    def forget_late(self, policy: str) -> None:
        """Before a batch whose policy may answer ids: none are yet."""
        for part in self.parts if policy != "wait" else ():
            part.late.fill(0)

    def late(self, batch: KeyedBatch) -> tuple[Tensor | None, int]:
        """How many ids of each example the policy answered (int32; None if there are none, or users share them), and
        how many in all."""
        total = sum([int(part.late.sum()) for part in self.parts])
        if not total or batch.user_of is not None:
            return None, total
        counts = np.zeros(batch.size, np.int64)
        for part in self.parts:
            for n, place in enumerate(part.ids.features):
                late = part.late[part.starts[n] : part.ends[n]]
                if (at := np.flatnonzero(late)).size:
                    offsets = batch.ids[place.feature].offsets
                    entries = at if offsets is None else np.searchsorted(offsets.numpy(), at, side="right") - 1
                    np.add.at(counts, entries, late[at])
        return torch.from_numpy(counts.astype(np.int32)), total

    def missing(self) -> list[Any]:
        """The miss buffers for the core's GraphRunner (core/device/graph_runner.h)."""
        return [
            _core.MissBuffers(
                part.ids.cores, 0, part.ids.columns.data_ptr(), part.lists.counts.data_ptr(),
                part.lists.keys.data_ptr(), part.lists.positions.data_ptr(), part.staging.rows.data_ptr(),
                part.staging.places.data_ptr(), part.missed.ctypes.data, part.staging.count.data_ptr(),
                starts=part.starts.ctypes.data, width=part.values.stride(0), late=part.late.ctypes.data,
            )
            for part in self.parts
        ]  # fmt: skip

    def _read_part(self, part: _Part, policy: str) -> None:
        part.staging.count[0] = _core.read_misses(
            part.ids.cores, part.ids.columns.data_ptr(), part.lists.counts.data_ptr(), part.lists.keys.data_ptr(),
            part.lists.positions.data_ptr(), 0, LATE[policy], part.values.stride(0), part.staging.rows.data_ptr(),
            part.staging.places.data_ptr(), part.missed.ctypes.data, part.late.ctypes.data, part.starts.ctypes.data,
        )  # fmt: skip

    def _read_part_below(self, part: _Part, policy: str, below: BatchBelow) -> None:
        """The same over a remote store: feature by feature in the buffers, and one read for each table."""
        counts = part.lists.counts.tolist()
        lists = list(zip(part.starts.tolist(), counts, strict=True))
        of_keys, of_positions = part.lists.keys.numpy(), part.lists.positions.numpy()
        keys = np.concatenate([of_keys[start : start + count] for start, count in lists])
        positions = np.concatenate([of_positions[start : start + count] for start, count in lists])
        part.missed[: keys.size] = keys
        part.staging.places[: keys.size] = torch.from_numpy(positions.astype(np.int64) * part.values.stride(0))
        tables = np.repeat(part.ids.tables, counts)
        for table, store in enumerate(part.ids.group.stores):
            at = np.flatnonzero(tables == table)
            if at.size:
                unique, inverse = np.unique(keys[at], return_inverse=True)
                values, late = below.read(store, torch.from_numpy(unique), policy)
                part.staging.rows[torch.from_numpy(at)] = values[torch.from_numpy(inverse)]
                np.add.at(part.late, positions[at[late.numpy()[inverse]]], 1)
        part.staging.count[0] = keys.size


def empty_batch(reader: JaggedReader) -> KeyedBatch:
    """A batch of one row without any ids: a lane captures its lookups over it."""
    one = Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    names = [place.feature for place in reader.base.layout.outputs]
    users = frozenset(reader.histories.user)
    return KeyedBatch(
        dict.fromkeys(names, one), numbers=dict.fromkeys(reader.numbers, one),
        user_of=torch.zeros(1, dtype=torch.int64) if users else None, user_features=users,
    )  # fmt: skip
