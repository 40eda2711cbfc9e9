"""HostClient: a batch on the CPU whose rows other objects own (core/plan/plan.h).

The core deduplicates the keys and sorts them by owner, pools rows from a flat buffer, and sums gradients by key.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotrow.tiers.batch_values import Request, Summed
from hotrow.tiers.host.plan import HostPlan
from hotrow.tiers.plan import Jobs


class HostClient:
    """The batch's half of a plan, on the CPU (hotrow.tiers.plan.RowClient)."""

    def __init__(self) -> None:
        self._plan = HostPlan()

    def ask(self, jobs: Jobs, owner_of: Tensor, owners: int, ahead: bool) -> Request:
        """The batch's unique keys by owner."""
        self._plan.route(jobs)
        return self._plan.keys_by_owner(owner_of, owners, len(jobs))

    def take_over(self) -> None:
        """Nothing: there are no streams."""

    def pool(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs. The core has their address until the next batch."""
        self._plan.take_rows(rows)
        self._plan.gather(outputs)

    def sum(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> Summed:
        """Gradients by unique key."""
        return self._plan.sum(gradients, checked, floats)
