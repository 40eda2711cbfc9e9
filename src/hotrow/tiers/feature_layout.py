"""Layout: which table a feature belongs to, and which output holds its vectors.

Pooled features are columns of one matrix [batch, sum of dims], in the collection's order of features, because towers
put them side by side. Each sequence feature has its own matrix [ids, dim]. A collection makes one Layout, which never
changes; any thread may use it.
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
class FeatureOutput:
    """The output of one feature: columns of the pooled matrix, or a matrix of its own for a sequence."""

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
    """The tables of a collection, the output of each feature, and how to make a plan (`create_plan`)."""

    def __init__(
        self,
        tables: Sequence[StoredTable],
        device: torch.device | None = None,
        create_plan: Callable[[], Plan] = HostPlan,
    ) -> None:
        self.tables = list(tables)
        self._features = [(rows.store, list(rows.table.poolings.items())) for rows in tables]
        self.device = device or torch.device("cpu")
        self.create_plan = create_plan
        self.outputs: list[FeatureOutput] = []
        self.width = 0
        for rows in tables:
            for feature, pooling in rows.table.poolings.items():
                width = rows.table.dim if pooling != "none" else 0
                self.outputs.append(FeatureOutput(feature, rows, pooling, self.width, self.width + width))
                self.width += width
        self.columns = [(output.begin, output.end) for output in self.outputs]
        self._widths = [output.end - output.begin for output in self.outputs if output.pooled]
        self.sequences = [(output.feature, output.table.table.dim) for output in self.outputs if not output.pooled]

    def jagged(self, batch: KeyedBatch, feature: str) -> Jagged:
        """A feature's ids, or an error that names it."""
        if feature not in batch.ids:
            raise BatchError(f"the batch has no feature {feature!r}; {choices(feature, batch.ids)}")
        return batch.ids[feature]

    def table_inputs(self, batch: KeyedBatch) -> list[tuple[HostStore, list[tuple[Jagged, str]]]]:
        """Each table with the ids and the pooling of its features."""
        return [
            (store, [(self.jagged(batch, f), pooling) for f, pooling in features]) for store, features in self._features
        ]

    def split(self, pooled: Tensor) -> list[Tensor | None]:
        """Each feature's columns of the pooled matrix, as a view; None for a sequence."""
        if not self._widths:
            return [None] * len(self.outputs)
        parts = pooled.split(self._widths, dim=1)
        if not self.sequences:
            return list(parts)
        each = iter(parts)
        return [next(each) if output.pooled else None for output in self.outputs]

    def rules(self, step: int) -> list[TableRule]:
        """The rule of each table's optimizer at update number `step`."""
        known: dict[int, TableRule] = {}  # tables mostly share one
        for rows in self.tables:
            if id(rows.optimizer) not in known:
                known[id(rows.optimizer)] = TableRule.of(rows.optimizer, step)
        return [known[id(rows.optimizer)] for rows in self.tables]
