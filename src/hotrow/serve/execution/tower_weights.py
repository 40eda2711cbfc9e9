"""Replaces the weights of a tower in all that run it: the original graphs, compiled buckets, captured lanes.

`prepare_weights` checks and converts while batches run. The function that it returns is called inside the gate of the
engine, between two batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from hotrow.serve.execution.towers import Towers
from hotrow.serve.execution.two_part_tower import TwoPartTower
from hotrow.serve.graph.tower import OriginalTower, Tower

if TYPE_CHECKING:
    from hotrow.serve.execution.device_lane import DeviceLanes


def prepare_weights(
    original: OriginalTower | TwoPartTower,
    towers: Tower | TwoPartTower,
    lanes: DeviceLanes | None,
    state: Mapping[str, Tensor],
) -> Callable[[], None]:
    """Check a tower's state dict; returns the function that replaces the weights. An error changes nothing."""
    if isinstance(original, TwoPartTower):
        runners = [original] if towers is original or not isinstance(towers, TwoPartTower) else [original, towers]
        prepared = [runner.prepare_weights(state) for runner in runners]

        def set_parts() -> None:
            for runner, parts in zip(runners, prepared, strict=True):
                if lanes is not None and runner is original:
                    lanes.set_weights(parts)  # copies into the storage that the graphs read
                else:
                    runner.set_weights(parts)

        return set_parts
    weights = original.prepare_weights(state)
    ordered = towers.order_weights(weights) if isinstance(towers, Towers) else None

    def set_weights() -> None:
        if lanes is not None:
            lanes.set_weights(weights)  # copies into the storage that the graphs read
        else:
            original.set_weights(weights)
        if isinstance(towers, Towers) and ordered is not None:
            towers.set_weights(ordered)
        elif towers is not original and hasattr(towers, "replace_weights"):
            towers.replace_weights(weights)

    return set_weights
