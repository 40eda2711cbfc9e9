"""Rows in HBM: a write-back cache over slots of a host store, for several tables whose rows have one layout.

A row's place here is its slot in a set-associative index (sets.py); beside it lie the slot that it keeps below
(`hosts`), the step of its last update and its count. Below, a row that is here is out of date and does not move. Rows
are brought down when their slot goes to another key; `dirty` are all that are newer here than below.

A batch holds its rows from `find` to `settle`: slots whose pin is above `settled` are never given away. Several batches
may hold rows at once; with a `window` of so many, what may leave does not depend on how far they are. A row that finds
no room in its set lives in the batch's `extra` rows instead (slots from `capacity` on), and goes down right after the
batch's update; `overflows` counts them. No result depends on which of the two it was.

Of tables that are only read (`frozen`), rows are values of fp32, fp16 or int8, nothing here is ever newer than below,
and rows here keep no slot there. The own rows of a batch that only reads are fp32 values, whatever the others are:
they may be initial or default ones.

Who came and who went follows from the batches alone; only for a batch that was to come ahead and had to wait for its
turn does it also matter how far the next ones were. One thread at a time, but for `begin`.
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
LEAST_SETS = 2
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
        # Rows whose last update is not after this step are below as they are here: all, where they are only read.
        self.clean = LAST_STEP if frozen else 0
        self.batch = 0
        self.done = 0  # batches whose turn is over
        self.window = 0  # batches that may be ahead of the one in work
        self._numbers = threading.Lock()
        self._held: set[int] = set()
        self._due: set[int] = set()  # those whose turn has come
        self._landed: dict[int, tuple[int, Any]] = {}  # stream and event: the batch's update has landed
        self.missed = [0] * len(sets)  # unique keys, by table, since the sets were divided
        self.hits = self.misses = self.overflows = self.evictions = 0

    @property
    def capacity(self) -> int:
        """Slots."""
        return int(self.index.capacity)

    def source(self, extra: Tensor | None = None, borrowed: bool = False) -> Source:
        """The rows, with a batch's own behind them: `borrowed` values, or rows as the others are."""
        return Source(self.rows, extra, self.borrowed if borrowed else None)

    @property
    def borrowed(self) -> RowLayout:
        """The layout of a reading batch's own rows."""
        return RowLayout(self.layout.dim)

    def begin(self) -> int:
        """A number for a batch that will hold rows. Any thread."""
        with self._numbers:
            self.batch += 1
            self._held.add(self.batch)
            return self.batch

    def take(self, batch: int) -> None:
        """That batch's turn has come: from now on its slots must stay as they are."""
        self._due.add(batch)

    def settle(self, batch: int) -> None:
        """That batch's rows may leave."""
        self.done += batch in self._due
        self._due.discard(batch)
        if self.window and self.device.type == "cuda":
            stream = current_stream(self.device)
            self._landed[batch] = stream.cuda_stream, stream.record_event()
            for old in [number for number in list(self._landed) if number < batch - 4 * self.window]:
                del self._landed[old]
        self._held.discard(batch)  # last: who sees it finds the event

    def wait(self, settled: int) -> None:
        """This stream goes on when updates up to that batch have landed."""
        last: dict[Any, Any] = {}  # of each stream: updates on one land in their order
        for batch, (stream, event) in list(self._landed.items()):
            if settled - self.window <= batch <= settled:
                last[stream] = event
        for event in last.values():
            event.wait()

    @property
    def settled(self) -> int:
        """The last batch up to which nobody holds anything."""
        held = list(self._held)
        return min(held) - 1 if held else self.batch

    def settled_before(self, batch: int) -> int:
        """What may leave for that batch: what was settled when `window` batches before it had not begun."""
        return min(self.settled, max(0, batch - 1 - self.window))

    def dirty(self) -> Tensor:
        """Slots whose rows are newer than below, int32, rising. Waits for the device."""
        return ((self.hosts >= 0) & (self.steps > self.clean)).nonzero().squeeze(1).to(torch.int32)

    def resident(self) -> Tensor:
        """Slots with a row. Waits for the device."""
        return (self.hosts >= 0).nonzero().squeeze(1).to(torch.int32)

    @property
    def free(self) -> bool:
        """Whether no batch whose turn has come holds anything."""
        return not self._due

    def used(self) -> list[int]:
        """Slots with a row, by table. Waits for the device."""
        taken = (self.hosts >= 0).view(-1, SetIndex.WAYS).sum(dim=1)
        return [int(part.sum()) for part in taken.split(self.index.counts)]

    def divide(self, sets: Sequence[int]) -> None:
        """Give the tables other numbers of sets. Requires: as `clear`."""
        self.clear()
        self.index.repartition(sets)
        self.missed = [0] * len(sets)

    def clear(self) -> None:
        """Forget every row. Requires: nothing here is newer than below, or it is not wanted."""
        self.index.clear()
        self.hosts.fill_(-1)
        self.clean = LAST_STEP if self.frozen else 0

    def bytes(self) -> int:
        """HBM held."""
        return self.capacity * slot_bytes(self.layout)


def free_bytes(device: torch.device) -> int:
    """HBM that could be taken now, with what torch keeps for itself. Where there is none, there is no limit."""
    if device.type != "cuda":
        return 1 << 62
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def slot_bytes(layout: RowLayout) -> int:
    """HBM that one slot takes."""
    return layout.stride * 4 + META_BYTES
