"""The protocol of a plan: one batch's way through the tiers. This is the one place that says what the verbs mean.

    route     take the batch's keys                                     route thread
    prefetch  bring rows nearer; no visible change; may be left out     fetch thread
    stage     bring rows up to HBM; likewise                            stage thread
    fetch     the batch's turn: find its rows, create unseen ones       training thread
    read      in place of fetch: only read the rows                     any thread, each with its own plan
    gather    pool rows into the features' outputs                      the thread of fetch or read
    update    apply gradients; if it raises, no row has changed         training thread
    release   let go of the rows; the plan can be routed again          any thread, also a garbage collector's

The calls on one plan come one after another. `route`, `prefetch` and `stage` of different plans run side by side, each
verb on one thread. A plan is used for many batches: after `release` it can be routed again.

Where the process that has the batch does not own its rows, two objects share the work. A RowClient has the batch: it
finds the unique keys, pools rows and sums gradients. A RowOwner has the rows of unique keys. tiers/sharded/plan.py
makes a plan of them. HostPlan and HotPlan are not made so: they ask and own in one object and pool rows from the slots
where these lie. A client and an owner would copy every unique row once more each way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hotrow.batch import Jagged
from hotrow.tiers.batch_values import Arrived, BatchUpdate, Moved, Request, Routed, Summed
from hotrow.tiers.host.store import HostStore

Feature = tuple[Jagged, str]  # ids and their pooling
Jobs = Sequence[tuple[HostStore, Sequence[Feature]]]  # each table with its features
ANY_PUBLICATION = ((1 << 62) - 1, 0)  # `publications` of rows that no publication has touched


class RowVerbs(Protocol):
    """The verbs that concern rows alone."""

    def prefetch(self) -> Moved:
        """Bring rows nearer, ahead of the batch's turn."""

    def stage(self) -> Moved:
        """Bring rows up to HBM, ahead of the batch's turn. Moves nothing where there is no HBM."""

    def fetch(self, step: int = 0) -> None:
        """Find the rows and hold them; unseen keys get theirs. `step` is the update they are for."""

    def read(self, late: str = "wait") -> None:
        """Read rows without creating or counting anything. Rows that are far are waited for, or the policy `late`
        ("initial" or "default") answers them."""

    def release(self) -> None:
        """Let go of the rows."""

    @property
    def late(self) -> int:
        """Rows that `prefetch` or `stage` was to have brought and `fetch` had to bring after all."""

    @property
    def publications(self) -> tuple[int, int]:
        """After `read`: all rows are as new as the first publication, and none is newer than the second."""


class Plan(RowVerbs, Protocol):
    """One batch's way through the tiers: what a Lookup drives."""

    def route(self, jobs: Jobs, ahead: bool = False) -> Routed:
        """Take the batch's keys. `ahead` says that the batch is one of a stream that is routed in order, perhaps by a
        thread of its own."""

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one [bags, dim] matrix for each feature (for pooling "none", one row for each id)."""

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """Pool all features side by side into one matrix, each into its columns from begin to before end. A plan that
        cannot do so returns False and does nothing; then call `gather`."""

    def update(self, update: BatchUpdate) -> None:
        """Apply gradients. If a checked matrix is not finite it raises, and no row has changed."""

    @property
    def late_ids(self) -> int:
        """After `read` and `gather`: how many ids a policy answered."""

    def late_by_example(self, examples: int) -> Tensor:
        """The same for each example, int32."""


class Asked(NamedTuple):
    """Unique keys that processes ask an owner for.

    `counts` has the number of keys by asker and table. `keys` and `seen` (int32, how often a batch has each key) have
    one tensor for each asker, table by table, on the CPU. `numbers` are the tables' numbers in the collection. `only`
    is the one asker that rows are given to, where the others own the same rows (a replicated table).
    """

    stores: Sequence[HostStore]
    numbers: Sequence[int]
    counts: Sequence[Sequence[int]]
    keys: Sequence[Tensor]
    seen: Sequence[Tensor]
    only: int | None = None


class RowOwner(RowVerbs, Protocol):
    """Rows of unique keys. An owner knows no feature, no pooling and no batch: a process that only has rows needs
    nothing else."""

    def route(self, asked: Sequence[Asked]) -> None:
        """Take the keys that are asked for."""

    def give(self) -> Iterator[Tensor]:
        """For each Asked the rows, float32 without gaps: asker by asker, there table by table. Where there is an `only`
        asker, its rows alone. A tensor is valid until the next `give`."""

    def apply(self, arrived: Iterable[Arrived], update: BatchUpdate) -> None:
        """Apply sums of gradients, laid out as the rows of `give` to all askers, one Arrived for each Asked. A key's
        sums are added in the order of askers. `update` has no gradients; its rules are by the tables' numbers."""

    @property
    def late_keys(self) -> Mapping[int, Any]:
        """After `read`: the keys that a policy answered, by the tables' numbers. Empty where rows are waited for."""


class RowClient(Protocol):
    """The batch's half. A client knows no tier: a process that only has a tower needs nothing else."""

    def ask(self, jobs: Jobs, owner_of: Tensor, owners: int, ahead: bool) -> Request:
        """The batch's unique keys by owner. `owner_of` has the owner of each shard, int32."""

    def take_over(self) -> None:
        """What `ask` made on a stream of its own is used on this one from now on. Training thread."""

    def pool(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool rows (float32, in the order of the request's keys) into one matrix for each feature."""

    def sum(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> Summed:
        """The sum of each requested key's gradients in batch order: so many floats, laid out as the rows."""
