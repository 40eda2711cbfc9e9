"""RowsBelow: the tiers below a cache in HBM, where these are more than the host store (a remote store).

Without it, a key that neither HBM nor the host store has is an unseen key. With it, the row may be elsewhere:

    read_raw   rows that HBM may keep: those in DRAM that lack nothing that was applied
    BatchBelow one batch's reads. `read` answers from memory. With the policy "wait" `finish` raises LeftError if a row
               has to be loaded; then `load` loads those rows, without any lock, and the batch is read again

Tiers do not import each other: the collection gives an object of the remote tier to HbmCache.below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hotrow.tiers.batch_values import TransferStats
from hotrow.tiers.host.store import HostStore

ONLY_READ = "rows over remote= are only read: train with dram= and ssd=, and publish to the remote store"


class BatchBelow(Protocol):
    """One batch's reads of the tiers below. One thread at a time."""

    @property
    def publications(self) -> tuple[int, int]:
        """After `finish`: as RowStages.publications, for all rows of the batch, those in HBM too."""

    def begin(self) -> None:
        """Begin to read the batch, or begin anew after `load`."""

    def read(self, store: HostStore, keys: Tensor, late: str) -> tuple[Tensor, Tensor]:
        """Values [n, dim] of unique keys that HBM lacks, and which of them the policy `late` answered."""

    def finish(self, late: str) -> None:
        """All keys are read. With "wait", raise LeftError if some must be loaded first, or LateError if they did not
        come."""

    def load(self, parts: Sequence[tuple[HostStore, Tensor]] = ()) -> TransferStats:
        """Load the rows that the last `read` lacked, or those of `parts`. May wait for seconds."""


class RowsBelow(Protocol):
    """The tiers below HBM. Any thread."""

    def batch(self) -> BatchBelow:
        """For one batch."""

    def read_raw(self, store: HostStore, keys: Tensor, out: Tensor) -> Tensor:
        """As HostStore.read_raw, without rows that are older than what was applied."""
