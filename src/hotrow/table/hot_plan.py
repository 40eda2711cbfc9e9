"""One batch through the caches in HBM: route → fetch (find, bring what is missing) → gather → update.

It has the calls of tiers/host.HostPlan, over device tensors, so a Lookup takes either. The hit path waits for the
device once, for the number of missing ids; with none missing nothing else happens between keys and vectors. What is
missing is deduplicated on the device, goes down as keys once, and comes up as rows into slots that were chosen
meanwhile; the rows that had those slots go down (hot.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.errors import GradientError
from hotrow.kernels import finite, move
from hotrow.kernels.dedup import Unique, compact, dedup
from hotrow.kernels.find import find
from hotrow.kernels.gather import gather
from hotrow.kernels.insert import choose, place
from hotrow.kernels.layout import Items, spread
from hotrow.kernels.runs import Runs
from hotrow.kernels.runs import group as group_runs
from hotrow.kernels.touch import touch
from hotrow.kernels.update import Meta, update
from hotrow.table.hot import Group, HotRows, Rows, to_device, to_host
from hotrow.tiers.host import HostLift, HostStore, Update

Feature = tuple[Jagged, str]


class HotPlan:
    """One batch's way through all groups."""

    def __init__(self, hot: HotRows) -> None:
        self.parts: list[Part] = []
        self.hot = hot
        self.ids = 0

    def route(self, jobs: Sequence[tuple[HostStore, Sequence[Feature]]]) -> None:
        """Bring the keys to the device, group by group."""
        self.release()
        features = {id(store): of_table for store, of_table in jobs}
        starts, at = {}, 0
        for store, of_table in jobs:
            starts[id(store)] = at
            at += len(of_table)
        self.parts = [
            Part(
                group,
                [list(features[id(store)]) for store in group.stores],
                [starts[id(store)] + i for store in group.stores for i in range(len(features[id(store)]))],
            )
            for group in self.hot.groups
        ]
        self.ids = sum(part.keys.numel() for part in self.parts)

    def fetch(self, step: int = 0) -> None:
        """Find the rows, bring up those that are missing, hold them all."""
        for part in self.parts:
            part.find(part.group.tier.begin())
        for part in self.parts:
            part.bring(step)

    def read(self) -> None:
        """Find the rows; those that are missing are copied for this batch alone."""
        for part in self.parts:
            part.find(0)
        for part in self.parts:
            part.borrow()

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one matrix per feature."""
        for part in self.parts:
            part.gather([outputs[number] for number in part.numbers])

    def update(
        self,
        gradients: Sequence[Tensor | None],
        checked: Sequence[Tensor],
        updates: Sequence[Update],
        step: int,
        grad_scale: float,
    ) -> None:
        """Apply gradients in place. A NaN or infinity in `checked` raises, and no row has changed."""
        flag = torch.zeros(1, dtype=torch.int32, device=self.hot.device)
        for columns in sorted({matrix.shape[1] for matrix in checked}):
            finite.check([matrix for matrix in checked if matrix.shape[1] == columns], flag)
        arrived = _later(flag)
        by_store = {id(store): u for store, u in zip(self.hot.stores, updates, strict=True)}
        for part in self.parts:
            part.update(
                [gradients[number] for number in part.numbers],
                [by_store[id(store)] for store in part.group.stores],
                step,
                grad_scale,
                flag,
            )
        if arrived():
            raise GradientError(
                "a gradient is NaN or infinite; no row was changed. Lower the learning rate, clip gradients, or find "
                "the bad input with torch.autograd.set_detect_anomaly(True)"
            )
        for part in self.parts:
            part.commit(step)

    def release(self) -> None:
        """Let go of the rows."""
        for part in self.parts:
            part.release()

    @property
    def unique(self) -> int:
        """Unique keys of the batch. Waits for the device."""
        return sum(int(part.runs().number) for part in self.parts)

    def __del__(self) -> None:
        self.release()


class Part:
    """One batch in one group."""

    def __init__(self, group: Group, features: Sequence[Sequence[Feature]], numbers: Sequence[int]) -> None:
        self.group = group
        self.numbers = list(numbers)  # of its features, among all
        device = group.tier.device
        flat = [feature for of_table in features for feature in of_table]
        self.keys = _join([jagged.values for jagged, _ in flat], device)
        sizes = [sum(jagged.values.numel() for jagged, _ in of_table) for of_table in features]
        self.begins = _small(np.concatenate(([0], np.cumsum(sizes))), device)
        tables = [table for table, of_table in enumerate(features) for _ in of_table]
        self.items = _items(flat, tables, self.keys.numel(), device)
        self.batch = 0
        self.extra: Tensor | None = None
        self.extra_rows: Rows | None = None  # of those that go down after the update
        self._lift: HostLift | None = None
        self._runs: Runs | None = None

    def find(self, batch: int) -> None:
        """Slots of the ids; -1 where there is no row here."""
        self.batch = batch
        missing = torch.empty(1, dtype=torch.int32, device=self.keys.device)
        self.slots = find(self.group.tier.index, self.keys, self.begins, batch, missing)
        self._missing = _later(missing)

    def bring(self, step: int) -> None:
        """Rows that are missing come up; rows whose slots they take go down."""
        tier, group = self.group.tier, self.group
        count = self._missing()
        tier.hits += self.keys.numel() - count
        tier.misses += count
        if count == 0:
            return
        positions, unique = self._absent(count)
        chosen = choose(tier.index, unique.keys, unique.tables, unique.number, tier.settled, tier.policy)
        there = chosen.clamp(min=0).long()
        about = torch.stack([unique.tables, unique.counts, chosen, tier.hosts[there], tier.steps[there],
                             tier.counts[there], unique.number.expand_as(chosen)])  # fmt: skip
        about, keys = to_host(about), to_host(unique.keys)
        number = int(about[6, 0])
        bounds = group.bounds(about[0, :number])
        seen, chosen_host, leaving = about[1], about[2, :number], Rows(bounds, *about[3:6, :number])
        self._lift = lift = HostLift()
        jobs = [(store, keys[a:b], seen[a:b]) for store, a, b in zip(group.stores, bounds, bounds[1:], strict=False)]
        arriving = Rows(bounds, *lift.fetch(jobs, step))
        lift.hold()
        slots = self._settle_places(chosen_host, leaving, arriving)
        self._exchange(slots, unique.tables[:number], leaving, arriving, lift)
        hosts, steps, counts = to_device(torch.stack([arriving.hosts, arriving.steps, arriving.counts]), tier.device)
        here = slots if self.extra is None else torch.where(slots < tier.capacity, slots, -1)
        place(tier.index, unique.keys[:number], here, unique.number, self.batch, float("-inf"))  # touch() scores it
        if self.extra is not None:
            inside = here >= 0
            hosts, steps, counts, here = hosts[inside], steps[inside], counts[inside], here[inside]
        tier.record(here, hosts, steps, counts)
        self.slots[positions.long()] = slots[unique.inverse.long()]
        self._runs = None

    def _absent(self, count: int) -> tuple[Tensor, Unique]:
        """Positions of the ids without a slot, and their unique keys in order of their sets."""
        positions = compact(self.slots, count)
        tables = torch.bucketize(positions, self.begins[1:], right=True, out_int32=True)
        return positions, dedup(self.keys[positions.long()], tables, len(self.group.stores))

    def _settle_places(self, chosen: Tensor, leaving: Rows, arriving: Rows) -> Tensor:
        """The slots of the arriving rows; those that found no way, or are not admitted, get rows of the batch's own."""
        tier = self.group.tier
        refused = arriving.steps < 0
        aside = refused | (chosen < 0)
        slots = chosen.clone()
        extra = int(aside.sum())
        if extra:
            leaving.hosts[aside] = -1
            slots[aside] = torch.arange(tier.capacity, tier.capacity + extra, dtype=torch.int32)
            layout = tier.layout
            self.extra = torch.empty(extra, layout.stride, dtype=torch.float32, device=tier.device)
            self.extra_steps = to_device(arriving.steps[aside], tier.device)
            self.extra_counts = to_device(arriving.counts[aside], tier.device)
            kept = torch.where(refused, -1, arriving.hosts)[aside]
            self.extra_rows = Rows(_bounds_of(aside, arriving.bounds), kept, arriving.steps, arriving.counts)
            tier.overflows += int((kept >= 0).sum())
        tier.evictions += int((leaving.hosts >= 0).sum())
        return to_device(slots, tier.device)

    def _exchange(self, slots: Tensor, tables: Tensor, leaving: Rows, arriving: Rows, lift: HostLift) -> None:
        """Down with those that leave, up with those that arrive."""
        group, tier = self.group, self.group.tier
        source, width = tier.source(self.extra), tier.layout.width
        goes = torch.where(leaving.steps > tier.clean, leaving.hosts, -1)
        if group.direct:
            for store, a, b in group.slices(leaving.bounds):
                store.lower(goes[a:b], None, leaving.steps[a:b], leaving.counts[a:b], tier.clean)
            down, up = to_device(torch.stack([goes, arriving.hosts]), tier.device)
            move.exchange(source, slots, tables, group.reach(), width, group.host_stride, down, up)
            return
        out = group.staging(slots.numel())
        move.collect(source, torch.where(to_device(goes, tier.device) >= 0, slots, -1), width, out)
        staged = torch.empty(slots.numel(), width, dtype=torch.float32, pin_memory=tier.device.type == "cuda")
        lift.copy_rows(staged)
        move.deliver(source, slots, width, to_device(staged, tier.device))
        group.put(0, to_host(out), Rows(leaving.bounds, goes, leaving.steps, leaving.counts))
        group.unhold(leaving)

    def borrow(self) -> None:
        """Missing rows are copied for this batch; nothing below or here changes."""
        tier, group = self.group.tier, self.group
        count = self._missing()
        if count == 0:
            return
        positions, unique = self._absent(count)
        about, keys = to_host(torch.stack([unique.tables, unique.number.expand_as(unique.tables)])), None
        keys, number = to_host(unique.keys), int(about[1, 0])
        bounds = group.bounds(about[0, :number])
        values = torch.zeros(number, tier.layout.stride, dtype=torch.float32)
        for store, a, b in group.slices(bounds):
            values[a:b, : tier.layout.dim] = store.read(keys[a:b])[0]
        self.extra = to_device(values, tier.device)
        self.slots[positions.long()] = tier.capacity + unique.inverse
        self._runs = None

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs."""
        gather(self.group.tier.source(self.extra), self.group.tier.layout, self.slots, self.items, outputs)

    def runs(self) -> Runs:
        """The batch's positions, those of one row together."""
        if self._runs is None:
            extra = 0 if self.extra is None else self.extra.shape[0]
            self._runs = group_runs(self.slots, self.group.tier.capacity + extra)
        return self._runs

    def update(
        self, gradients: Sequence[Tensor | None], updates: Sequence[Update], step: int, scale: float, flag: Tensor
    ) -> None:
        """Sum each row's gradients and apply the rule, unless the flag is up."""
        tier = self.group.tier
        coefficients = [list(u.coefficients) + [0.0] * (8 - len(u.coefficients)) for u in updates]
        clips = [[u.clip_value, u.clip_norm] for u in updates]
        numbers = torch.tensor([c + k for c, k in zip(coefficients, clips, strict=True)])
        tables = to_device(_pinned(numbers), tier.device)
        meta = Meta(tier.steps, tier.counts, *((self.extra_steps, self.extra_counts) if self._kept else (None, None)))
        update(
            tier.source(self.extra), tier.layout, self.group.code, self.runs(), self.items, gradients, self.keys,
            tables[:, :8].contiguous(), tables[:, 8:].contiguous(), self.group.streams, self.group.streams, step, scale,
            meta, flag,
        )  # fmt: skip

    @property
    def _kept(self) -> bool:
        return self.extra is not None and self._lift is not None

    def commit(self, step: int) -> None:
        """The update has landed: warm what was used, bring the batch's own rows down, let go."""
        tier, runs = self.group.tier, self.runs()
        touch(tier.index, runs.slots, runs.number, self.batch, tier.policy, tier.half_life)
        if self.extra_rows is not None and bool((self.extra_rows.hosts >= 0).any()):
            about = to_host(torch.stack([self.extra_steps, self.extra_counts]))
            rows = Rows(self.extra_rows.bounds, self.extra_rows.hosts, about[0], about[1])
            count = self.extra.shape[0]  # type: ignore[union-attr]
            slots = torch.arange(tier.capacity, tier.capacity + count, dtype=torch.int32, device=tier.device)
            tables = torch.repeat_interleave(
                torch.arange(len(self.group.stores), dtype=torch.int32), torch.tensor(rows.bounds).diff()
            )
            self.group.lower(
                tier.source(self.extra), slots, to_device(tables, tier.device), rows, to_device(rows.hosts, tier.device)
            )
            self.group.unhold(rows)
        if self._lift is not None:
            self._lift.commit()
            self._lift = None
        self.release()

    def release(self) -> None:
        """Let go of the rows."""
        if self._lift is not None:
            if self.extra_rows is not None:
                self.group.unhold(self.extra_rows)
            self._lift.release()
        self._lift, self.extra_rows, self.extra = None, None, None
        if self.batch:
            self.group.tier.settle(self.batch)
            self.batch = 0


def _items(features: Sequence[Feature], tables: Sequence[int], ids: int, device: torch.device) -> Items:
    """How positions become outputs."""
    jagged = [j.offsets is not None and pooling != "none" for j, pooling in features]
    sizes = [j.size if bags else j.values.numel() for (j, _), bags in zip(features, jagged, strict=True)]
    begins = _small(np.concatenate(([0], np.cumsum(sizes))), device)
    offsets = item_of = scales = None
    if any(jagged):
        parts, at = [], 0
        for (j, _), bags in zip(features, jagged, strict=True):
            of_feature = j.offsets[:-1] if bags else torch.arange(j.values.numel(), device=j.values.device)  # type: ignore[index]
            parts.append(of_feature + at)
            at += j.values.numel()
        parts.append(torch.tensor([at], device=parts[0].device))
        offsets = _join(parts, device).to(torch.int32)
        item_of = spread(offsets, sum(sizes), ids)
    if any(j.weights is not None for j, _ in features) or any(
        pooling == "mean" and bags for (_, pooling), bags in zip(features, jagged, strict=True)
    ):
        scales = _join([_scale(j, pooling) for j, pooling in features], device)
    return Items(begins, _small(np.asarray(tables), device), offsets, scales, item_of)


def _scale(jagged: Jagged, pooling: str) -> Tensor:
    """What each id's vector is multiplied by: its weight, and 1 / length for a mean."""
    weights = jagged.weights if jagged.weights is not None else torch.ones(
        jagged.values.numel(), dtype=torch.float32, device=jagged.values.device
    )  # fmt: skip
    if pooling != "mean" or jagged.offsets is None:
        return weights
    lengths = jagged.lengths()
    return weights / torch.repeat_interleave(lengths, lengths).float()


def _bounds_of(mask: Tensor, bounds: Sequence[int]) -> list[int]:
    """Bounds of the rows that a mask leaves."""
    before = np.concatenate(([0], np.cumsum(mask.numpy())))
    return [int(at) for at in before[np.asarray(bounds)]]


def _join(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One after another, on the device."""
    tensors = [t for t in tensors if t.numel()] or list(tensors[:1])
    if all(t.device == device for t in tensors):
        return torch.cat(tensors)
    joined = torch.cat([t.cpu() for t in tensors])
    return to_device(_pinned(joined), device)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


_SMALL: dict[tuple[bytes, str], Tensor] = {}


def _small(values: np.ndarray, device: torch.device) -> Tensor:  # type: ignore[type-arg]
    """A few int32 numbers on the device; those of the last batches are kept."""
    values = values.astype(np.int32)
    key = (values.tobytes(), str(device))
    if key not in _SMALL:
        if len(_SMALL) > 256:
            _SMALL.clear()
        _SMALL[key] = torch.from_numpy(values).to(device)
    return _SMALL[key]


def _later(flag: Tensor) -> Callable[[], int]:
    """A number that is on its way to the host: call what this returns to wait for it."""
    if flag.device.type == "cpu":
        return lambda: int(flag)
    pinned = torch.empty(1, dtype=torch.int32, pin_memory=True)
    pinned.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def wait() -> int:
        event.synchronize()
        return int(pinned)

    return wait
