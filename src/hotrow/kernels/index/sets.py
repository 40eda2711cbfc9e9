"""The index of rows in HBM: sets of eight ways, whole 64-bit keys, several tables in one structure.

slot = set * 8 + way, and a key's row lies in another array at its slot. A set's eight keys are 64 contiguous bytes, so
a find costs one memory access, or two: a key whose first choice of set is well filled may be in its second (insert.py).
With two choices, 60% of the slots fill before any set overflows. With one choice, a few keys in a thousand evict each
other again and again at half that load.

Every int64 is a valid key. An empty way therefore holds a key that can never be in its set: the key whose hash is 0
belongs to its table's first set and the one whose hash is 2^64 - 1 to its last, so the first set uses the latter and
all others the former. Hence a table has two sets or more.

Per slot also: `pins`, the number of the last batch that uses the row, which must not be evicted while that number is
above the last settled batch's; and `scores`, higher is hotter. They are adjacent, because an insert writes both.
Batches are numbered from 1; 0 means not pinned.

The object only owns the tensors. find.py reads them, insert.py and touch.py change them, on the caller's stream; the
caller orders two streams. Nothing synchronises with the host.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from hotrow.errors import BatchError, OptionError
from hotrow.kernels.index.key_hash import HIGHEST, LOWEST

WAYS = 8
SPILL = 5  # occupied ways in its first set from which on a new key considers its second
CROWDED = 6  # available ways below which a set is avoided
POLICIES = ("lru", "lfu")


class SetIndex:
    """Keys, pins and scores of the slots of several tables; empty at first."""

    WAYS = WAYS

    def __init__(self, sets_per_table: Sequence[int], device: torch.device | str) -> None:
        self.device = torch.empty(0, device=device).device
        self.sets = sum(sets_per_table)
        if self.sets * WAYS >= 1 << 30:
            raise OptionError(f"{self.sets * WAYS:,} slots are more than an index takes; split the tables over several")
        self.keys = torch.empty(self.sets, WAYS, dtype=torch.int64, device=device)
        pairs = torch.empty(self.capacity, 2, dtype=torch.int32, device=device)
        self.pins, self.scores = pairs[:, 0], pairs.view(torch.float32)[:, 1]
        self.pins_and_scores = pairs.view(torch.int64).view(-1)  # the score's bits above the pin's
        self.repartition(sets_per_table)

    def repartition(self, sets_per_table: Sequence[int]) -> None:
        """Give each table its number of sets, and forget every key. Requires: their sum is `sets`."""
        counts = [int(count) for count in sets_per_table]
        if not counts or min(counts) < 2:
            raise OptionError(f"every table needs at least 2 sets ({2 * WAYS} rows) in HBM, got {counts}; raise hbm=")
        assert sum(counts) == self.sets
        self.counts, self.tables = counts, len(counts)
        firsts = [sum(counts[:t]) for t in range(len(counts))]
        self.count, self.first = torch.tensor([counts, firsts], dtype=torch.int64, device=self.device).unbind()
        self.clear()

    @property
    def capacity(self) -> int:
        """Slots: eight a set."""
        return self.sets * WAYS

    def clear(self) -> None:
        """Forget every key."""
        self.keys.fill_(LOWEST)
        self.keys[self.first] = HIGHEST
        self.pins.zero_()
        self.scores.zero_()

    def occupied(self) -> torch.Tensor:
        """Which slots hold a key, bool [capacity]."""
        taken = self.keys != LOWEST
        taken[self.first] = self.keys[self.first] != HIGHEST
        return taken.view(-1)

    def bytes(self) -> int:
        """Device memory of the index: 16 bytes a slot."""
        parts = (self.keys, self.pins, self.scores, self.first, self.count)
        return sum(part.numel() * part.element_size() for part in parts)


def pack_pin_and_score(batch: int, score: float) -> int:
    """The word in `pins_and_scores` of a row that a batch has pinned, with its score: one store of eight bytes."""
    return int(struct.unpack("<q", struct.pack("<if", batch, score))[0])


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int | None, device: torch.device) -> None:
    """Requires: one dimension of `size` (where given), contiguous, this type, this device."""
    if tensor.dtype != dtype or tensor.device != device or tensor.dim() != 1 or not tensor.is_contiguous():
        raise BatchError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}; it must be {dtype} of one dimension on {device}"
        )
    if size is not None and tensor.numel() != size:
        raise BatchError(f"{name} has {tensor.numel()} entries, it must have {size}")
