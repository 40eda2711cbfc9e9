"""Lookup: the lifecycle of one batch: route → (prefetch → stage →) fetch → gather → update.

A `Lookup` belongs to one batch and lives until the batch is updated. `route` needs only the keys. `fetch` needs the
rows as earlier batches have updated them. `gather` and `update` run in the training step. `prefetch` and `stage` may
run between route and fetch, while earlier batches are in flight. They load rows into a faster tier and change no
result, so they may be left out. In evaluation `read` replaces `fetch`: it creates no row and changes no count, and
there is no `update`.

Threads: the calls on one lookup do not overlap. `route`, `prefetch` and `stage` of different batches do: each of the
three verbs has one thread.

Pooled features share one output matrix [batch, sum of dims], in the collection's order of features, because towers
concatenate them. Each feature's output is its slice of that matrix. Each sequence feature has its own matrix [ids,
dim]. Backward gives one gradient per feature, or None for a feature that no loss used: its rows are counted and not
changed.

With gradient accumulation several lookups wait for one update. `MergedLookup` updates them together: a key that
occurs in two of them gets the sum of its gradients and one step of the optimizer.
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
        self.routed = ALL_EXAMPLES  # the result of `route`
        self.gradients: Gradients | None = None  # by feature, in the layout's order
        self.late_ids = 0  # after `read` and `gather`: how many ids the late policy answered
        self.late_by_example: Tensor | None = None  # int32 per example; None if there are none
        self.publications = ANY_PUBLICATION  # after `read`: the oldest and the newest publication of its rows
        self.done = False

    def route(self) -> Lookup:
        """Deduplicate the batch's keys, table by table."""
        self.routed = self.plan.route(self.layout.table_inputs(self.batch), self.ahead, self.batch.size)
        return self

    @property
    def example_fraction(self) -> float:
        """This batch's examples divided by the step's examples."""
        return self.routed.example_fraction

    @property
    def examples(self) -> int:
        """The number of examples in the step, over all ranks."""
        return self.batch.size if self.routed.examples is None else self.routed.examples

    @property
    def finished(self) -> bool:
        """Whether no process has a batch left."""
        return self.routed.finished

    def prefetch(self) -> TransferStats:
        """Load rows into DRAM ahead of the batch's turn (tiers/plan.py)."""
        return self.plan.prefetch()

    def stage(self) -> TransferStats:
        """Load rows into HBM ahead of the batch's turn."""
        return self.plan.stage()

    def fetch(self) -> Lookup:
        """On the batch's turn: find its rows, and create rows for unseen keys."""
        self.plan.fetch(self.step)
        return self

    def read(self, late: str = "wait") -> Lookup:
        """Copy the rows and change nothing. Unseen keys read their initial values and get no row.

        `late` is the policy for rows that are only on a slow tier. "wait" loads them. "initial" answers as for an
        unseen key and "default" with the table's default row, both without a disk access. After `gather`, `late_ids`
        is the number of ids that the policy answered, and `late_by_example` the same for each example (None in a batch
        with users, whose ids are of no single example).
        """
        if late not in LATE:
            raise OptionError(f"late={late!r}: {choices(late, LATE)}")
        self.plan.read(late)
        self.publications = self.plan.publications
        return self

    def gather(self, whole: bool = False) -> tuple[Tensor, list[Tensor]]:
        """The pooled matrix [batch, width], and each feature's output: a slice of it, or [ids, dim] for a sequence.

        With `whole` the caller needs only the matrix. A plan over DRAM alone then makes no slices. In a batch with
        users there is no matrix ([0, width]): features have one row per user or per example.
        """
        if self.batch.user_of is not None:
            outputs = self._outputs_by_feature()
            self.plan.gather(outputs)
            self._count_late()
            return self._empty(0, self.layout.width), outputs
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
        if self.late_ids and self.batch.user_of is None:
            self.late_by_example = self.plan.late_by_example(self.batch.size)

    def accept(self, gradients: Gradients) -> None:
        """Store the gradients of a backward pass, one or None per feature. A second call adds to the first."""
        if self.done:
            raise BatchError("backward through rows that step() has changed since; run the forward pass again")
        arrived = [_plain(gradient, self.layout.device) for gradient in gradients]
        if self.gradients is not None:
            arrived = [_add(a, b) for a, b in zip(self.gradients, arrived, strict=True)]
        self.gradients = arrived

    def update(self, step: int, grad_scale: float = 1.0, also: Sequence[Tensor] = ()) -> None:
        """Sum each row's gradients, apply its table's rule in place, and increase its count. If a gradient or one of
        the float matrices `also` (on the rows' device) is not finite, this raises and no row changes."""
        if self.gradients is None:
            raise BatchError("update before backward: this lookup has no gradients yet")
        self.plan.update(_update(self.layout, self.gradients, also, step, grad_scale))

    def _outputs_by_feature(self) -> list[Tensor]:
        """A matrix of its own for each feature: one row for each entry, or for a sequence for each id."""
        outputs = []
        for place in self.layout.outputs:
            ids = self.batch.ids[place.feature]
            outputs.append(self._empty(ids.size if place.pooled else ids.values.numel(), place.table.table.dim))
        return outputs

    def _sequences(self) -> list[Tensor]:
        """A matrix [ids, dim] for each sequence. Adjacent sequences of one dim share an allocation."""
        wanted = [(self.batch.ids[feature].values.numel(), dim) for feature, dim in self.layout.sequences]
        outputs: list[Tensor] = []
        for dim, group in itertools.groupby(wanted, key=lambda size: size[1]):
            sizes = [rows for rows, _ in group]
            outputs += self._empty(sum(sizes), dim).split(sizes)
        return outputs

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.float32, device=self.layout.device)


class MergedLookup:
    """Several lookups with one update: one step of the optimizer for each row, in however many lookups it occurs."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self.lookups = list(lookups)
        self.layout = lookups[0].layout

    def update(self, step: int, grad_scale: float = 1.0, also: Sequence[Tensor] = ()) -> None:
        """As `Lookup.update`, with the gradients of all of them."""
        plan = self.layout.create_plan()
        parts = [self.layout.table_inputs(lookup.batch) for lookup in self.lookups]
        inputs = [(jobs[0][0], [f for _, features in jobs for f in features]) for jobs in zip(*parts, strict=True)]
        plan.route(inputs, examples=self.lookups[0].batch.size)
        plan.fetch(step)
        gradients: Gradients = []
        at = 0
        for rows in self.layout.tables:  # in the order of `route`: by table, then by lookup
            count = len(rows.table.poolings)
            for lookup in self.lookups:
                gradients += (lookup.gradients or [None] * len(self.layout.outputs))[at : at + count]
            at += count
        plan.update(_update(self.layout, gradients, also, step, grad_scale))


def _update(layout: Layout, gradients: Gradients, also: Sequence[Tensor], step: int, scale: float) -> BatchUpdate:
    return BatchUpdate(gradients, [*joined(gradients), *also], layout.rules(step), step, scale)


def joined(matrices: Sequence[Tensor | None]) -> list[Tensor]:
    """The matrices, with adjacent slices of one matrix joined. A tower's backward returns such slices; joined, they are
    checked for NaN in one pass over whole rows instead of 26 passes over parts of them."""
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
    """The gradient as float32 with contiguous rows on the device. It is copied only if it is not so already."""
    if gradient is None:
        return None
    if gradient.requires_grad or gradient.dtype is not torch.float32 or gradient.device.type != device.type:
        gradient = gradient.detach().to(device, torch.float32)
    (rows, columns), (row_stride, stride) = gradient.shape, gradient.stride()
    plain = (columns <= 1 or stride == 1) and (rows <= 1 or row_stride >= columns)
    return gradient if plain else gradient.contiguous()


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
