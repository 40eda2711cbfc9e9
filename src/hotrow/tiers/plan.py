"""The plan protocol: the verbs of one batch over the tiers. This file alone defines what they mean.

    verb      what it does                                                   thread
    route     deduplicates the batch's keys and sends them to their owners   route thread
    prefetch  prepares rows ahead of the batch's turn: SSD to DRAM           prefetch thread
    stage     loads rows into HBM ahead of the batch's turn                  stage thread
    fetch     on the batch's turn: finds all its rows, creates unseen ones   training thread
    read      instead of fetch: copies the rows, creates and counts nothing  any thread
    gather    pools the rows into the features' outputs                      the thread of fetch or read
    update    applies gradients to the rows                                  training thread
    release   unpins the rows                                                any thread, also a garbage collector's

What every plan guarantees:

- `prefetch` and `stage` change no result. They may be left out, and may load only some of the rows: `fetch` and `read`
  find the others themselves. (A remote store is read by `prefetch` alone: tiers/remote/owner.py.)
- From `fetch` to `update` or `release` the rows are pinned, and no other batch's `fetch` runs in between.
- `update` raises before it has changed any row, or changes all of them.
- After `release` the plan can be routed again. It keeps its buffers, so reuse a plan.

The calls on one plan do not overlap. `route`, `prefetch` and `stage` of different batches do overlap: each of the three
verbs has one thread, on which it takes batches in order.

**The requester and the owner of rows** are two objects, so they can be two processes. A RowClient has the batch: it
finds the unique keys, pools rows and sums gradients. A RowOwner has the rows of unique keys. ShardedPlan
(tiers/sharded/plan.py) connects them by a Transport. HostPlan and the plan over HBM do both in one object and pool rows
where they are stored: a client and an owner would copy every unique row once more in each direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hotrow.batch import Jagged
from hotrow.tiers.batch_values import (
    BatchUpdate,
    GradientSums,
    KeyRequest,
    ReceivedGradients,
    RoutedBatch,
    TransferStats,
)
from hotrow.tiers.host.store import HostStore

Feature = tuple[Jagged, str]  # ids and their pooling
TableInputs = Sequence[tuple[HostStore, Sequence[Feature]]]  # a batch's features by table
ANY_PUBLICATION = ((1 << 62) - 1, 0)  # `publications` of rows that no publication has touched


class RowStages(Protocol):
    """The verbs that concern rows alone: a Plan has them, and so has a RowOwner."""

    def prefetch(self) -> TransferStats:
        """Prepare rows ahead of the batch's turn: load them from SSD into DRAM, or, over HBM with all rows in DRAM,
        assign their slots and begin evictions."""

    def stage(self) -> TransferStats:
        """Load rows into HBM, ahead of the batch's turn. Does nothing where there is no HBM."""

    def fetch(self, step: int = 0) -> None:
        """Find and pin the rows; create those of unseen keys. `step` is the update that they are for."""

    def read(self, late: str = "wait") -> None:
        """Copy the rows; create and count nothing. The policy `late` decides about rows on a slow tier: "wait" for
        them, or answer at once with the "initial" or the "default" row."""

    def release(self) -> None:
        """Unpin the rows and forget the batch."""

    @property
    def prefetch_misses(self) -> int:
        """How many rows `fetch` had to load because `prefetch` or `stage` had not."""

    @property
    def publications(self) -> tuple[int, int]:
        """After `read`: every row is as new as the first publication, and none is newer than the second."""


class Plan(RowStages, Protocol):
    """One batch over the tiers, as a Lookup (table/lookup.py) calls it."""

    def route(self, inputs: TableInputs, ahead: bool = False, examples: int | None = None) -> RoutedBatch:
        """Deduplicate the batch's keys. `ahead`: the batch belongs to a stream that is routed in order, perhaps on a
        thread of its own. A batch beside that stream (an evaluation) has `ahead=False`. `examples` are the batch's; by
        default, the entries of its first feature."""

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one [bags, dim] matrix for each feature (for pooling "none", one row for each id)."""

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """Pool all features side by side into one matrix: each has its columns from begin to before end. Returns False,
        and has done nothing, where the plan cannot; then call `gather`."""

    def update(self, update: BatchUpdate) -> None:
        """Apply gradients. Raises GradientError, with no row changed, if a checked matrix is not finite."""

    @property
    def late_ids(self) -> int:
        """After `read` and `gather`: how many ids the late policy answered."""

    def late_by_example(self, examples: int) -> Tensor:
        """After `read` and `gather`: the same for each example, int32."""


class RequestedRows(NamedTuple):
    """The unique keys of some tables that requesters want from one owner.

    `counts` has the number of keys by requester and table. `keys` and `occurrences` (int32, how often the requester's
    batch has each key) have one tensor for each requester, table by table, on the CPU. `table_numbers` are the tables'
    numbers in the collection. With `reply_only_to` rows go to that requester alone: of a replicated table every process
    owns all rows, and reads its own copy.
    """

    stores: Sequence[HostStore]
    table_numbers: Sequence[int]
    counts: Sequence[Sequence[int]]
    keys: Sequence[Tensor]
    occurrences: Sequence[Tensor]
    reply_only_to: int | None = None


class RowOwner(RowStages, Protocol):
    """The owner's half of a plan: rows of unique keys. It knows no feature, no pooling and no batch."""

    def route(self, requests: Sequence[RequestedRows]) -> None:
        """Take the keys that are requested."""

    def gather_rows(self) -> Iterator[Tensor]:
        """For each RequestedRows one flat float32 tensor: requester by requester, and for each table by table. It is
        valid until the next one is produced."""

    def apply_gradients(self, received: Iterable[ReceivedGradients], update: BatchUpdate) -> None:
        """Apply sums of gradients, one ReceivedGradients for each RequestedRows, laid out as the rows of all
        requesters. A key's sums are added in the order of requesters. `update` has no gradients, and its rules are by
        `table_numbers`."""

    @property
    def late_keys(self) -> Mapping[int, Any]:
        """After `read`: the keys that the late policy answered, by table number. Empty with the policy "wait"."""


class RowClient(Protocol):
    """The requester's half of a plan: the batch. It knows no tier."""

    def request_keys(self, inputs: TableInputs, owner_of: Tensor, owners: int, ahead: bool) -> KeyRequest:
        """Deduplicate the batch's keys and sort them by owner. `owner_of` has the owner of each shard, int32."""

    def join_route_stream(self) -> None:
        """Make the current CUDA stream wait for what `request_keys` enqueued on another. Training thread."""

    def pool(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool rows (float32, in the order of the requested keys) into one matrix for each feature."""

    def sum_gradients(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> GradientSums:
        """Sum each requested key's gradients in batch order. The sums are `floats` numbers, laid out as the rows."""
