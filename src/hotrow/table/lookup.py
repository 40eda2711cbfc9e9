"""One batch through the tables: route → (prefetch → stage →) fetch → gather → update, in verbs, top to bottom.

A `Lookup` is made for a batch and lives until its update has landed. `route` needs only the keys; `fetch` needs the
rows that earlier batches left; `gather` and `update` run in the training step. `prefetch` and `stage` may run between
route and fetch, while earlier batches are in work: they bring rows nearer and change nothing that anybody can see, so
they may be left out. The calls of one plan come one after another; but `route`, `prefetch` and `stage` of different
batches run on different threads at the same moment, each of the three on one. For evaluation `read` takes the place of
`fetch`: it creates no row and touches no count, and there is no `update`.

Pooled features share one output matrix [batch, sum of dims], in the collection's order of features, because towers put
them side by side; each feature's output is its slice of it. Each sequence feature has its own [ids, dim]. Gradients
come back feature by feature; one that no loss used stays None: its rows are counted and not changed.

Several lookups may wait for one update (gradient accumulation): `Merged` makes one update of them, so that a key seen
by two of them gets the sum of its gradients and one step of the optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.errors import BatchError, OptionError, choices
from hotrow.tiers.batch_values import ALL_EXAMPLES, BatchUpdate, TransferStats
from hotrow.tiers.feature_layout import Layout
from hotrow.tiers.host.store import LATE
from hotrow.tiers.plan import ANY_PUBLICATION, Plan

Gradients = list[Tensor | None]


class Lookup:
    """One batch's rows, from its keys to its update."""

    def __init__(
        self, layout: Layout, batch: KeyedBatch, plan: Plan | None = None, step: int = 0, ahead: bool = False
    ) -> None:
        self.layout = layout
        self.batch = batch
        self.ahead = ahead
        self.step = step  # the update that this batch will be part of
        self.plan = plan or layout.create_plan()
        self.routed = ALL_EXAMPLES  # what `route` learned
        self.gradients: Gradients | None = None  # by feature, in the layout's order
        self.late_ids = 0  # of a read, answered by a policy
        self.late_by_example: Tensor | None = None  # int32, where there are any
        self.publications = ANY_PUBLICATION  # of the rows, after `read`: the oldest and the newest
        self.done = False

    def route(self) -> Lookup:
        """Deduplicate the batch's keys, table by table."""
        self.routed = self.plan.route(self.layout.table_inputs(self.batch), self.ahead)
        return self

    @property
    def example_fraction(self) -> float:
        """The part of the step's examples that this batch has."""
        return self.routed.example_fraction

    @property
    def examples(self) -> int:
        """How many examples the step has."""
        return self.batch.size if self.routed.examples is None else self.routed.examples

    @property
    def finished(self) -> bool:
        """Whether no process has a batch left."""
        return self.routed.finished

    def prefetch(self) -> TransferStats:
        """Bring rows nearer, ahead of the batch's turn."""
        return self.plan.prefetch()

    def stage(self) -> TransferStats:
        """Bring rows up to the device, ahead of the batch's turn."""
        return self.plan.stage()

    def fetch(self) -> Lookup:
        """Find the rows; unseen keys get one."""
        self.plan.fetch(self.step)
        return self

    def read(self, late: str = "wait") -> Lookup:
        """Copy the rows as they are; unseen keys read their initial values and stay unseen.

        Rows that are on SSD alone are waited for, or with `late` "initial" or "default" answered without touching the
        disk: as an unseen key, or by the table's default row. After `gather`, `late_ids` is how many ids were so
        answered, and `late_by_example` how many of each example.
        """
        if late not in LATE:
            raise OptionError(f"late={late!r}: {choices(late, LATE)}")
        self.plan.read(late)
        self.publications = self.plan.publications
        return self

    def gather(self, whole: bool = False) -> tuple[Tensor, list[Tensor]]:
        """The pooled matrix [batch, width], and each feature's output: a slice of it, or [ids, dim] for a sequence.

        With `whole` only the matrix is wanted; of a plan over DRAM alone the slices are then not made.
        """
        pooled = self._empty(self.batch.size, self.layout.width)
        if whole and not self.layout.sequences and self.plan.gather_matrix(pooled, self.layout.columns):
            self._count_late()
            return pooled, []
        slices = self.layout.split(pooled)
        sequences = iter(self._sequences())
        outputs = [next(sequences) if part is None else part for part in slices]
        self.plan.gather(outputs)
        self._count_late()
        return pooled, outputs

    def _count_late(self) -> None:
        self.late_ids = self.plan.late_ids
        if self.late_ids:
            self.late_by_example = self.plan.late_by_example(self.batch.size)

    def accept(self, gradients: Gradients) -> None:
        """Keep the gradients that backward brought, one or None per feature; a second call adds to them."""
        if self.done:
            raise BatchError("backward through rows that step() has changed since; run the forward pass again")
        arrived = [_plain(gradient, self.layout.device) for gradient in gradients]
        if self.gradients is not None:
            arrived = [_add(a, b) for a, b in zip(self.gradients, arrived, strict=True)]
        self.gradients = arrived

    def update(self, step: int, grad_scale: float = 1.0, also: Sequence[Tensor] = ()) -> None:
        """Sum each row's gradients, apply its table's rule in place, and count the sightings. `also` are float matrices
        that must be finite too, where rows are."""
        if self.gradients is None:
            raise BatchError("update before backward: this lookup has no gradients yet")
        self.plan.update(_update(self.layout, self.gradients, also, step, grad_scale))

    def _sequences(self) -> list[Tensor]:
        """A matrix [ids, dim] for each sequence; neighbours of one dim are parts of one allocation."""
        wanted = [(self.batch.ids[feature].values.numel(), dim) for feature, dim in self.layout.sequences]
        outputs: list[Tensor] = []
        for dim, group in itertools.groupby(wanted, key=lambda size: size[1]):
            sizes = [rows for rows, _ in group]
            outputs += self._empty(sum(sizes), dim).split(sizes)
        return outputs

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.float32, device=self.layout.device)


class MergedLookup:
    """Several lookups that are updated together: one step of the optimizer for each row, whatever lookups it was in."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self.lookups = list(lookups)
        self.layout = lookups[0].layout

    def update(self, step: int, grad_scale: float = 1.0, also: Sequence[Tensor] = ()) -> None:
        """As `Lookup.update`, with the gradients of all of them."""
        plan = self.layout.create_plan()
        parts = [self.layout.table_inputs(lookup.batch) for lookup in self.lookups]
        plan.route([(jobs[0][0], [f for _, features in jobs for f in features]) for jobs in zip(*parts, strict=True)])
        plan.fetch(step)
        gradients: Gradients = []
        at = 0
        for rows in self.layout.tables:  # the order of route: table by table, there lookup by lookup
            count = len(rows.table.poolings)
            for lookup in self.lookups:
                gradients += (lookup.gradients or [None] * len(self.layout.outputs))[at : at + count]
            at += count
        plan.update(_update(self.layout, gradients, also, step, grad_scale))


def _update(layout: Layout, gradients: Gradients, also: Sequence[Tensor], step: int, scale: float) -> BatchUpdate:
    return BatchUpdate(gradients, [*joined(gradients), *also], layout.rules(step), step, scale)


def joined(matrices: Sequence[Tensor | None]) -> list[Tensor]:
    """The matrices with neighbours made one: slices of a common matrix, as a tower's backward leaves them, are checked
    for NaN in one sweep over whole rows instead of 26 over pieces of them."""
    result: list[Tensor] = []
    for matrix in matrices:
        if matrix is None:
            continue
        if result and _adjacent(result[-1], matrix):
            last = result[-1]
            size = (last.shape[0], last.shape[1] + matrix.shape[1])
            result[-1] = last.as_strided(size, (last.stride(0), 1))
        else:
            result.append(matrix)
    return result


def _adjacent(left: Tensor, right: Tensor) -> bool:
    return (
        left.shape[0] == right.shape[0]
        and left.stride(0) == right.stride(0) >= left.shape[1] + right.shape[1]
        and left.data_ptr() + 4 * left.shape[1] == right.data_ptr()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and (left.shape[1] == 1 or left.stride(1) == 1)
        and (right.shape[1] == 1 or right.stride(1) == 1)
    )


def _plain(gradient: Tensor | None, device: torch.device) -> Tensor | None:
    """Float32 rows with unit stride, copied only where they are not."""
    if gradient is None:
        return None
    if gradient.requires_grad or gradient.dtype is not torch.float32 or gradient.device.type != device.type:
        gradient = gradient.detach().to(device, torch.float32)
    (rows, columns), (row_stride, stride) = gradient.shape, gradient.stride()
    plain = (columns <= 1 or stride == 1) and (rows <= 1 or row_stride >= columns)
    return gradient if plain else gradient.contiguous()


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
