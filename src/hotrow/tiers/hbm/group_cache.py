"""GroupCache: the slots of one table group in HBM, a write-back cache over the group's host stores.

A row's slot comes from a set-associative index (kernels/index/sets.py). Arrays beside the rows hold the row's slot in
DRAM (`hosts`), the step of its last update and its count. While a row is here, its DRAM copy may be stale and is
pinned. A row is written back when its slot is given to another key. `dirty` are the rows newer than their DRAM copy.

A batch pins its rows from `find` until `settle`: slots with a pin above `settled` are never evicted. Several batches
may hold pins. With a lookahead (`window` batches) the eviction candidates do not depend on the progress of these
batches. A row whose set is full of pinned rows goes to the batch's `extra` rows (slots from `capacity` on), which are
written back right after its update. `overflows` counts them. No result depends on which slot a row has.

Tables that are only read are `frozen`: rows are fp32, fp16 or int8 values, never dirty, and keep no slot in DRAM. The
extra rows of a reading batch are fp32 values in every case, because they may be initial or default values.

One thread at a time, except `begin`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import MemoryBudgetError
from hotrow.kernels.current_stream import current_stream
from hotrow.kernels.index.sets import SetIndex
from hotrow.kernels.rows.layout import RowLayout, Source
from hotrow.units import format_size

META_BYTES = 8 + 4 + 4 + 3 * 4  # key, pin, score; host slot, step, count
MIN_SETS = 2
LAST_STEP = 2**31 - 1


class GroupCache:
    """The cache of one group of tables. `sets` is how many sets of eight rows each table has."""

    def __init__(
        self, layout: RowLayout, sets: Sequence[int], device: torch.device, policy: str = "lfu", frozen: bool = False
    ) -> None:
        self.layout = layout
        self.frozen = frozen
        self.device = device
        self.policy = policy
        self.half_life = 512.0  # batches; for lfu
        try:
            self.index = SetIndex(sets, device)
            self.rows = torch.empty(self.index.capacity, layout.stride, dtype=torch.float32, device=device)
            self.hosts = torch.full((self.index.capacity,), -1, dtype=torch.int32, device=device)
            beside = torch.full((self.index.capacity, 2), -1, dtype=torch.int32, device=device)
            self.steps, self.counts = beside.unbind(1)
        except torch.OutOfMemoryError as error:
            raise MemoryBudgetError(
                f"hbm= does not fit on {device}: {str(error).split('.')[0]}, and {format_size(free_bytes(device))} is "
                "free. Lower hbm= by the difference, or free memory there"
            ) from None
        # Rows last updated at or before this step equal their DRAM copy. Frozen rows always do.
        self.clean = LAST_STEP if frozen else 0
        self.batch = 0
        self.done = 0  # batches that ended after their turn
        self.window = 0  # batches that may be ahead of the current one
        self._numbers = threading.Lock()
        self._held: set[int] = set()
        self._due: set[int] = set()  # held batches whose turn has come
        self._updates_enqueued: dict[
            int, tuple[int, Any]
        ] = {}  # by batch: the stream of its update, and the event after it
        self.missed = [0] * len(sets)  # unique keys, by table, since the sets were divided
        self.hits = self.misses = self.overflows = self.evictions = 0

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return int(self.index.capacity)

    def source(self, extra: Tensor | None = None, values_only: bool = False) -> Source:
        """The rows, followed by a batch's extra rows. With `values_only`, the extra rows are plain values."""
        return Source(self.rows, extra, self.extra_values_layout if values_only else None)

    @property
    def extra_values_layout(self) -> RowLayout:
        """The layout of a reading batch's extra rows."""
        return RowLayout(self.layout.dim)

    def begin(self) -> int:
        """Number a new batch, which holds rows until `settle`. Any thread."""
        with self._numbers:
            self.batch += 1
            self._held.add(self.batch)
            return self.batch

    def take(self, batch: int) -> None:
        """That batch's turn has come: its slots must not change until `settle`."""
        self._due.add(batch)

    def settle(self, batch: int) -> None:
        """Release that batch's pins. The current stream has its update."""
        self.done += batch in self._due
        self._due.discard(batch)
        if self.window and self.device.type == "cuda":
            stream = current_stream(self.device)
            self._updates_enqueued[batch] = stream.cuda_stream, stream.record_event()
            for old in [number for number in list(self._updates_enqueued) if number < batch - 4 * self.window]:
                del self._updates_enqueued[old]
        self._held.discard(batch)  # last: a thread that sees the batch settled must find its event

    def wait(self, settled: int) -> None:
        """Make the current stream wait for the updates of all batches up to `settled`."""
        last: dict[Any, Any] = {}  # by stream: updates on one stream are in order
        for batch, (stream, event) in list(self._updates_enqueued.items()):
            if settled - self.window <= batch <= settled:
                last[stream] = event
        for event in last.values():
            event.wait()

    @property
    def settled(self) -> int:
        """The last batch such that it and all earlier ones hold no row."""
        held = list(self._held)
        return min(held) - 1 if held else self.batch

    def settled_before(self, batch: int) -> int:
        """The last batch whose rows that batch may evict: as if the `window` batches before it were all in flight."""
        return min(self.settled, max(0, batch - 1 - self.window))

    def dirty(self) -> Tensor:
        """Slots whose rows are newer than in DRAM, int32, ascending. Waits for the device."""
        return ((self.hosts >= 0) & (self.steps > self.clean)).nonzero().squeeze(1).to(torch.int32)

    def resident(self) -> Tensor:
        """Slots with a row. Waits for the device."""
        return (self.hosts >= 0).nonzero().squeeze(1).to(torch.int32)

    @property
    def free(self) -> bool:
        """Whether no batch whose turn has come holds a row."""
        return not self._due

    def used(self) -> list[int]:
        """Slots with a row, by table. Waits for the device."""
        taken = (self.hosts >= 0).view(-1, SetIndex.WAYS).sum(dim=1)
        return [int(part.sum()) for part in taken.split(self.index.counts)]

    def divide(self, sets: Sequence[int]) -> None:
        """Change the number of sets of each table, and drop every row. Requires: as `clear`."""
        self.clear()
        self.index.repartition(sets)
        self.missed = [0] * len(sets)

    def clear(self) -> None:
        """Drop every row. Requires: no row is dirty, or dirty rows are not needed."""
        self.index.clear()
        self.hosts.fill_(-1)
        self.clean = LAST_STEP if self.frozen else 0

    def bytes(self) -> int:
        """Bytes of HBM in use."""
        return self.capacity * slot_bytes(self.layout)


def free_bytes(device: torch.device) -> int:
    """Bytes of HBM that could be allocated now, including what torch caches. Without a GPU there is no limit."""
    if device.type != "cuda":
        return 1 << 62
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def slot_bytes(layout: RowLayout) -> int:
    """Bytes of HBM per slot."""
    return layout.stride * 4 + META_BYTES
