"""Hot rows of a collection: the tables' caches in HBM, and the way between them and the rows below.

Tables with one row layout and one rule share a cache (`Group`), so that a batch takes one launch for all of them. A row
that comes up keeps its slot in DRAM; one whose place is wanted goes back there with its step and count.

Two ways lead up and down. `direct`: the GPU reads and writes DRAM rows in place, both at once (kernels/move.py); for
rows that never leave DRAM, because memory that a GPU can address cannot be given back. `staged`: all cores gather into
pinned memory, which is copied; for tables over SSD, and where rows are so narrow that single reads would waste the
wire. The training thread is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotrow.config import Memory, format_size
from hotrow.errors import MemoryBudgetError
from hotrow.kernels import move
from hotrow.kernels.insert import erase
from hotrow.kernels.layout import RowLayout, Source
from hotrow.table.rows import TableRows
from hotrow.tiers.hbm import LEAST_SETS, HbmTier, slot_bytes
from hotrow.tiers.host import HostStore

WAYS = 8
CHUNK = 1 << 16  # rows that are staged at a time when many go down
DIRECT_BYTES = 512  # rows at least so wide are read in place: 45 million rows/s, whatever their width (H200)


class HotRows:
    """The caches of all tables of a collection."""

    def __init__(self, tables: Sequence[TableRows], memory: Memory, device: torch.device) -> None:
        self.device = device
        self.stores = [rows.store for rows in tables]  # not the tables, which know their cache
        kinds: dict[tuple[int, int, tuple[int, ...]], list[HostStore]] = {}
        for rows in tables:
            state = tuple(part.width for part in rows.optimizer.state(rows.table.dim))
            kinds.setdefault((rows.table.dim, rows.optimizer.code, state), []).append(rows.store)
        layouts = [RowLayout(dim, state, "fp32") for dim, _, state in kinds]
        sets = self._share(layouts, [len(members) for members in kinds.values()], memory)
        self.groups = [
            Group(members, HbmTier(layout, [sets] * len(members), device), code)
            for layout, ((_, code, _), members) in zip(layouts, kinds.items(), strict=True)
        ]

    @staticmethod
    def _share(layouts: Sequence[RowLayout], members: Sequence[int], memory: Memory) -> int:
        """Sets of each table: every table gets the same number of rows."""
        of_one = sum(WAYS * slot_bytes(layout) * count for layout, count in zip(layouts, members, strict=True))
        if memory.hbm_bytes < LEAST_SETS * of_one:
            raise MemoryBudgetError(
                f"hbm={format_size(memory.hbm_bytes)} is too small for {sum(members)} tables; give at least "
                f"{format_size(LEAST_SETS * of_one)}, better room for the rows of a batch"
            )
        # The allocator rounds each tensor up to a megabyte or so.
        rounding = min(memory.hbm_bytes // 64, len(layouts) * (6 << 20))
        sets = max(LEAST_SETS, (memory.hbm_bytes - rounding) // of_one)
        held = sum(
            WAYS * sets * count * (layout.width * 4 + 24) for layout, count in zip(layouts, members, strict=True)
        )
        if memory.ssd is not None and memory.dram_bytes < held * 5 // 4:
            raise MemoryBudgetError(
                f"dram={format_size(memory.dram_bytes)} over ssd= is too small below hbm="
                f"{format_size(memory.hbm_bytes)}: a row in HBM keeps its place in DRAM. Give dram= at least "
                f"{format_size(held * 5 / 4)}, or lower hbm="
            )
        return sets

    def flush(self) -> None:
        """Bring down every row that is newer here, so that what is below is all there is."""
        for group in self.groups:
            group.flush()

    def drop(self) -> None:
        """Forget every row. What is newer here than below is lost: flush first, if it is wanted."""
        for group in self.groups:
            group.drop()

    def prune(self) -> None:
        """Rows were removed below: remove them here."""
        for group in self.groups:
            group.prune()

    def report(self) -> dict[str, int]:
        """Slots and bytes, and what happened so far: ids found, ids missed, evictions, rows without room."""
        tiers = [group.tier for group in self.groups]
        figures = {name: sum(getattr(tier, name) for tier in tiers) for name in FIGURES}
        return {"slots": sum(tier.capacity for tier in tiers), "bytes": sum(tier.bytes() for tier in tiers), **figures}


FIGURES = ("hits", "misses", "evictions", "overflows")


@dataclass
class Rows:
    """Rows on the host's side: by table, in table order. All int32, on the CPU."""

    bounds: list[int]  # rows bounds[t] to bounds[t + 1] are table t's
    hosts: Tensor
    steps: Tensor
    counts: Tensor


class Group:
    """Tables that share a cache, with the way to the rows below."""

    def __init__(self, stores: Sequence[HostStore], tier: HbmTier, code: int) -> None:
        self.stores = list(stores)
        self.tier = tier
        self.code = code
        self.host_stride = tier.layout.width
        self.direct = not any(store.evicts for store in self.stores) and tier.layout.width * 4 >= DIRECT_BYTES
        self.streams = torch.tensor(
            [_signed(int(store.core.count_stream)) for store in self.stores], dtype=torch.int64, device=tier.device
        )
        self._reached = [0] * len(self.stores)
        self._bases = torch.tensor([store.row_memory()[0] for store in self.stores], device=tier.device)

    def table_of(self, slots: Tensor) -> Tensor:
        """Which table's sets these slots are in, int32."""
        if len(self.stores) == 1:
            return torch.zeros_like(slots)
        return torch.bucketize(slots // WAYS, self.tier.index.first[1:].to(torch.int32), right=True, out_int32=True)

    def reach(self) -> Tensor:
        """Addresses of the tables' rows, all of which the GPU can reach now."""
        for number, store in enumerate(self.stores):
            address, used, _ = store.row_memory()
            if used > self._reached[number]:
                begin = address + self._reached[number]
                move.reachable(begin, (used - self._reached[number]) // 4, self.tier.device)
                self._reached[number] = used
        return self._bases

    # --- down ---

    def lower(self, source: Source, slots: Tensor, tables: Tensor, rows: Rows, hosts: Tensor) -> None:
        """Rows in `slots` go down to `hosts`, with the steps and counts of `rows`; hosts of -1 stay. In table order."""
        if self.direct:
            for store, begin, end in self.slices(rows.bounds):
                store.lower(rows.hosts[begin:end], None, rows.steps[begin:end], rows.counts[begin:end], self.tier.clean)
            move.exchange(source, slots, tables, self.reach(), self.tier.layout.width, self.host_stride, down=hosts)
            return
        for at in range(0, slots.numel(), CHUNK):
            chosen = slots[at : at + CHUNK]
            staged = self.staging(chosen.numel())
            move.collect(source, chosen, self.tier.layout.width, staged)
            self.put(at, to_host(staged), rows)

    def put(self, first: int, values: Tensor, rows: Rows) -> None:
        """Values of the rows from number `first` on, as they came down, into their slots below."""
        last = first + values.shape[0]
        for store, begin, end in self.slices(rows.bounds):
            begin, end = max(begin, first), min(end, last)
            if begin < end:
                store.lower(
                    rows.hosts[begin:end],
                    values[begin - first :],
                    rows.steps[begin:end],
                    rows.counts[begin:end],
                    self.tier.clean,
                    values.stride(0),
                )

    def unhold(self, rows: Rows) -> None:
        """The rows' slots below are free to move. Requires: their values have landed there."""
        for store, begin, end in self.slices(rows.bounds):
            if store.evicts:
                store.unhold(rows.hosts[begin:end])

    def staging(self, count: int) -> Tensor:
        """A matrix on the device for rows on their way."""
        return torch.empty(count, self.tier.layout.width, dtype=torch.float32, device=self.tier.device)

    def flush(self) -> None:
        """Bring down what is newer here."""
        tier = self.tier
        slots = tier.dirty()
        if slots.numel():
            tables = self.table_of(slots)
            self.lower(tier.source(), slots, tables, self.describe(slots, tables), tier.hosts[slots.long()])
            synchronize(tier.device)
            tier.clean = int(tier.steps[slots.long()].max())

    def describe(self, slots: Tensor, tables: Tensor) -> Rows:
        """What lies beside the rows of these slots, which are in table order. Waits for the device."""
        where = slots.long()
        tier = self.tier
        found = to_host(torch.stack([tables, tier.hosts[where], tier.steps[where], tier.counts[where]]))
        return Rows(self.bounds(found[0]), found[1], found[2], found[3])

    def bounds(self, tables: Tensor) -> list[int]:
        """Where each table's rows begin and end, of rows in table order."""
        return [int(at) for at in np.searchsorted(tables.numpy(), np.arange(len(self.stores) + 1))]

    def drop(self) -> None:
        """Forget every row here."""
        slots = self.tier.resident()
        if slots.numel():
            self.unhold(self.describe(slots, self.table_of(slots)))
        self.tier.clear()

    def prune(self) -> None:
        """Forget the rows that are gone below."""
        slots = self.tier.resident()
        if not slots.numel():
            return
        rows = self.describe(slots, self.table_of(slots))
        gone = torch.cat([~store.alive(rows.hosts[a:b]) for store, a, b in self.slices(rows.bounds)])
        if bool(gone.any()):
            dead = slots[gone.to(slots.device)]
            self.unhold(self.describe(dead, self.table_of(dead)))
            erase(self.tier.index, dead)
            self.tier.hosts[dead.long()] = -1

    def slices(self, bounds: Sequence[int]) -> list[tuple[HostStore, int, int]]:
        """Each table's store with where its rows begin and end, where it has any."""
        return [(store, bounds[t], bounds[t + 1]) for t, store in enumerate(self.stores) if bounds[t] < bounds[t + 1]]


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU, by way of pinned memory. Waits for it."""
    if tensor.device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return pinned


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; does not wait where the tensor is pinned."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait for everything that was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
