"""HostClient: the requester's half of a plan, on the CPU (core/plan/plan.h).

The core deduplicates the keys and sorts them by owner, pools rows from a flat buffer, and sums gradients by key.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotrow.tiers.batch_values import GradientSums, KeyRequest
from hotrow.tiers.host.plan import HostPlan
from hotrow.tiers.plan import TableInputs


class HostClient:
    """A batch on the CPU whose rows another object owns (hotrow.tiers.plan.RowClient)."""

    def __init__(self) -> None:
        self._plan = HostPlan()

    def request_keys(self, inputs: TableInputs, owner_of: Tensor, owners: int, ahead: bool) -> KeyRequest:
        """The batch's unique keys, sorted by owner."""
        self._plan.route(inputs)
        return self._plan.partition_by_owner(owner_of, owners, len(inputs))

    def join_route_stream(self) -> None:
        """Do nothing: the CPU has no streams."""

    def pool(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs. The core reads `rows` until the next batch."""
        self._plan.set_received_rows(rows)
        self._plan.gather(outputs)

    def sum_gradients(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> GradientSums:
        """Gradients summed by unique key."""
        return self._plan.sum_gradients(gradients, checked, floats)
