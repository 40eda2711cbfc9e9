"""Layout: which feature belongs to which table, and where its vectors come out.

Pooled features share one output matrix [batch, sum of dims], in the collection's order of features, because towers put
them side by side. Each sequence feature has its own matrix [ids, dim]. A collection makes one Layout; it never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError, choices
from hotrow.tiers.batch_values import TableRule
from hotrow.tiers.host.plan import HostPlan
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.host.stored_table import StoredTable
from hotrow.tiers.plan import Plan


@dataclass(frozen=True)
class Place:
    """Where a feature's vectors come out: columns of the pooled matrix, or a matrix of its own for a sequence."""

    feature: str
    table: StoredTable
    pooling: str
    begin: int = 0
    end: int = 0

    @property
    def pooled(self) -> bool:
        """Whether its ids are pooled into one vector per example."""
        return self.pooling != "none"


class Layout:
    """Which feature goes to which table and where its vectors come out. Made once for a collection."""

    def __init__(
        self,
        tables: Sequence[StoredTable],
        device: torch.device | None = None,
        new_plan: Callable[[], Plan] = HostPlan,
    ) -> None:
        self.tables = list(tables)
        self._features = [(rows.store, list(rows.table.poolings.items())) for rows in tables]
        self.device = device or torch.device("cpu")
        self.new_plan = new_plan
        self.places: list[Place] = []
        self.width = 0
        for rows in tables:
            for feature, pooling in rows.table.poolings.items():
                width = rows.table.dim if pooling != "none" else 0
                self.places.append(Place(feature, rows, pooling, self.width, self.width + width))
                self.width += width
        self.columns = [(place.begin, place.end) for place in self.places]
        self._widths = [place.end - place.begin for place in self.places if place.pooled]
        self.sequences = [(place.feature, place.table.table.dim) for place in self.places if not place.pooled]

    def jagged(self, batch: KeyedBatch, feature: str) -> Jagged:
        """A feature's ids, or an error that names it."""
        if feature not in batch.ids:
            raise BatchError(f"the batch has no feature {feature!r}; {choices(feature, batch.ids)}")
        return batch.ids[feature]

    def jobs(self, batch: KeyedBatch) -> list[tuple[HostStore, list[tuple[Jagged, str]]]]:
        """Each table with the ids and the pooling of its features."""
        return [
            (store, [(self.jagged(batch, f), pooling) for f, pooling in wanted]) for store, wanted in self._features
        ]

    def split(self, pooled: Tensor) -> list[Tensor | None]:
        """Each feature's columns of the pooled matrix; None for a sequence."""
        if not self._widths:
            return [None] * len(self.places)
        parts = pooled.split(self._widths, dim=1)
        if not self.sequences:
            return list(parts)
        each = iter(parts)
        return [next(each) if place.pooled else None for place in self.places]

    def rules(self, step: int) -> list[TableRule]:
        """What each table's optimizer does at update number `step`."""
        known: dict[int, TableRule] = {}  # tables mostly share one
        for rows in self.tables:
            if id(rows.optimizer) not in known:
                known[id(rows.optimizer)] = TableRule.of(rows.optimizer, step)
        return [known[id(rows.optimizer)] for rows in self.tables]
