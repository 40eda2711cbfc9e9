"""One batch through the tables: route → fetch → gather → update, in verbs, top to bottom.

A `Lookup` is made for a batch and lives until its update has landed. `route` needs only the keys; `fetch` needs the
rows that earlier batches left; `gather` and `update` run in the training step. For evaluation `read` takes the place of
`fetch`: it creates no row and touches no count, and there is no `update`.

Pooled features share one output matrix [batch, sum of dims], in the collection's order of features, because towers
concatenate them and because their gradient then is one matrix too. Each sequence feature has its own [ids, dim].

Several lookups may wait for one update (gradient accumulation): `merge` makes one lookup of them, so that a key seen by
two of them gets the sum of its gradients and one step of the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError, choices
from hotrow.table.rows import TableRows
from hotrow.tiers.host import HostPlan, HostStore, Update


@dataclass(frozen=True)
class Slice:
    """Where a pooled feature's vector is in the output matrix."""

    feature: str
    begin: int
    end: int


class Layout:
    """Which feature goes to which table and where its vector comes out. Made once for a collection."""

    def __init__(self, tables: Sequence[TableRows]) -> None:
        self.tables = list(tables)
        self.pooled: list[Slice] = []
        self.sequences: list[str] = []
        self.width = 0
        for rows in tables:
            for feature, pooling in rows.table.poolings.items():
                if pooling == "none":
                    self.sequences.append(feature)
                else:
                    self.pooled.append(Slice(feature, self.width, self.width + rows.table.dim))
                    self.width += rows.table.dim
        self._slices = {s.feature: s for s in self.pooled}
        self._sequence_index = {name: i for i, name in enumerate(self.sequences)}

    def jagged(self, batch: KeyedBatch, feature: str) -> Jagged:
        """A feature's ids, or an error that names it."""
        if feature not in batch.ids:
            raise BatchError(f"the batch has no feature {feature!r}; {choices(feature, batch.ids)}")
        return batch.ids[feature]

    def matrices(self, pooled: Tensor | None, sequences: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each feature's part of the outputs or gradients, in the order of tables and their features."""
        parts: list[Tensor | None] = []
        for rows in self.tables:
            for feature, pooling in rows.table.poolings.items():
                if pooling == "none":
                    parts.append(sequences[self._sequence_index[feature]])
                else:
                    place = self._slices[feature]
                    parts.append(None if pooled is None else pooled[:, place.begin : place.end])
        return parts


class Lookup:
    """One batch's rows, from its keys to its update."""

    def __init__(self, layout: Layout, batch: KeyedBatch, plan: HostPlan | None = None) -> None:
        self.layout = layout
        self.batch = batch
        self.plan = plan or HostPlan()
        self.gradients: tuple[Tensor | None, list[Tensor | None]] | None = None

    def route(self) -> Lookup:
        """Deduplicate the batch's keys, table by table."""
        self.plan.route(self._jobs())
        return self

    def fetch(self) -> Lookup:
        """Find the rows; unseen keys get one."""
        self.plan.fetch()
        return self

    def read(self) -> Lookup:
        """Copy the rows as they are; unseen keys read their initial values and stay unseen."""
        self.plan.read()
        return self

    def gather(self) -> tuple[Tensor, list[Tensor]]:
        """The pooled matrix [batch, width] and each sequence's vectors [ids, dim]."""
        pooled = torch.empty(self.batch.size, self.layout.width)
        dims = {f: rows.table.dim for rows in self.layout.tables for f in rows.table.poolings}
        sequences = [torch.empty(self.batch.ids[f].values.numel(), dims[f]) for f in self.layout.sequences]
        self.plan.gather([m for m in self.layout.matrices(pooled, sequences) if m is not None])
        return pooled, sequences

    def accept(self, pooled: Tensor | None, sequences: Sequence[Tensor | None]) -> None:
        """Keep the gradients that backward brought; a second call adds to them."""
        arrived = [_plain(pooled), *map(_plain, sequences)]
        if self.gradients is not None:
            before = [self.gradients[0], *self.gradients[1]]
            arrived = [_add(a, b) for a, b in zip(before, arrived, strict=True)]
        self.gradients = arrived[0], arrived[1:]

    def update(self, step: int, grad_scale: float = 1.0) -> None:
        """Sum each row's gradients, apply its table's rule in place, and count the sightings."""
        if self.gradients is None:
            raise BatchError("update before backward: this lookup has no gradients yet")
        pooled, sequences = self.gradients
        self.plan.update(
            self.layout.matrices(pooled, sequences),
            [matrix for matrix in (pooled, *sequences) if matrix is not None],
            [Update.of(rows.optimizer, step) for rows in self.layout.tables],
            step,
            grad_scale,
        )

    def _jobs(self) -> list[tuple[HostStore, list[tuple[Jagged, str]]]]:
        return [
            (rows.store, [(self.layout.jagged(self.batch, f), pooling) for f, pooling in rows.table.poolings.items()])
            for rows in self.layout.tables
        ]


class Merged:
    """Several lookups that are updated together: one step of the optimizer for each row, whatever lookups it was in."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        self.lookups = list(lookups)
        self.layout = lookups[0].layout

    def update(self, step: int, grad_scale: float = 1.0) -> None:
        """As `Lookup.update`, with the gradients of all of them."""
        plan = HostPlan()
        parts = [lookup._jobs() for lookup in self.lookups]
        plan.route([(jobs[0][0], [f for _, features in jobs for f in features]) for jobs in zip(*parts, strict=True)])
        plan.fetch()
        gradients, checked = self._gradients()
        updates = [Update.of(rows.optimizer, step) for rows in self.layout.tables]
        plan.update(gradients, checked, updates, step, grad_scale)

    def _gradients(self) -> tuple[list[Tensor | None], list[Tensor]]:
        by_lookup: list[list[Tensor | None]] = []
        checked: list[Tensor] = []
        for lookup in self.lookups:
            pooled, sequences = lookup.gradients or (None, [None] * len(self.layout.sequences))
            by_lookup.append(self.layout.matrices(pooled, sequences))
            checked += [matrix for matrix in (pooled, *sequences) if matrix is not None]
        gradients: list[Tensor | None] = []
        at = 0
        for rows in self.layout.tables:
            count = len(rows.table.poolings)
            gradients += [part for parts in by_lookup for part in parts[at : at + count]]
            at += count
        return gradients, checked


def _plain(gradient: Tensor | None) -> Tensor | None:
    """Float32 rows with unit stride, copied only where they are not."""
    if gradient is None:
        return None
    gradient = gradient.detach().to("cpu", torch.float32)
    unit = gradient.shape[1] <= 1 or gradient.stride(1) == 1
    rows = gradient.shape[0] <= 1 or gradient.stride(0) >= gradient.shape[1]
    return gradient if unit and rows else gradient.contiguous()


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
