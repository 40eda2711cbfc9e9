"""Placement: reserve what all ranks of a job take, in one Ray placement group with a bundle for each rank.

All or nothing: with one group, two jobs that each hold half of what they need cannot block each other.

The strategy is PACK: as few nodes as possible. Ranks of one node exchange through shared memory and towers through
NVLink, the job ends with any of its nodes, and whole nodes stay free for readers, other jobs and as spares. What a row
rank must not share with another (cores, memory, a disk) is said by its resources, which hold under PACK too. SPREAD
would put neighbours on different nodes without need.

PACK alone would also put row ranks beside towers, where a GPU node has CPUs left. So row ranks are restricted to the
nodes without GPUs, if these have room for them, by a label that Ray gives to every node (from the Ray release on that
knows label selectors of bundles).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hotrow.cluster.resources import Node, RankGroup, check_capacity, describe, fit_together
from hotrow.errors import ClusterError

POLL_SECONDS = 0.3
NOTE_SECONDS = 3.0  # of waiting, after which the user hears of it
NODE_LABEL = "ray.io/node-id"


def nodes_of(ray: ModuleType) -> list[Node]:
    """The living nodes of the cluster."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"]))
        if node["Alive"]
    ]


def reserve(
    ray: ModuleType,
    groups: Sequence[RankGroup],
    seconds: float,
    stopping: Callable[[], bool],
    note: Callable[[str], None],
) -> Any:
    """The placement group, whose bundles are in rank order. None if `stopping` became true. `note` shows a line.

    Raises ClusterError if it cannot be placed within `seconds`, with what is missing or not free.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    begin, noted = time.monotonic(), False
    deadline = begin + seconds
    bundles = [dict(group.needs) for group in groups for _ in range(group.count)]
    while True:
        nodes = nodes_of(ray)
        group = placement_group(bundles, strategy="PACK", **_selectors(placement_group, groups, nodes))
        try:
            while not stopping():
                if group.wait(POLL_SECONDS):
                    placed, group = group, None
                    return placed
                if time.monotonic() > deadline:
                    raise _cannot_place(ray, groups, seconds)
                if not noted and time.monotonic() > begin + NOTE_SECONDS:
                    noted = True
                    note(f"waiting up to {seconds:g} s for {_missing(ray, groups)}")
                if [node.number for node in nodes_of(ray)] != [node.number for node in nodes]:
                    break  # a node came or left: where row ranks may go has changed
            else:
                return None
        finally:
            if group is not None:
                remove_placement_group(group)


def cpu_nodes(groups: Sequence[RankGroup], nodes: Sequence[Node]) -> list[Node] | None:
    """The nodes to which row ranks are restricted; None if they may be anywhere."""
    without = [node for node in nodes if not node.has_gpu]
    if len(groups) == 1 or len(without) == len(nodes) or not fit_together(groups, nodes, rows_on=without):
        return None
    return without


def _selectors(create: Callable[..., Any], groups: Sequence[RankGroup], nodes: Sequence[Node]) -> dict[str, Any]:
    chosen = cpu_nodes(groups, nodes)
    if chosen is None or "bundle_label_selector" not in inspect.signature(create).parameters:
        return {}
    selector = {NODE_LABEL: f"in({','.join(node.number for node in chosen)})"}
    return {"bundle_label_selector": [{}] * groups[0].count + [dict(selector) for _ in range(groups[1].count)]}


def _cannot_place(ray: ModuleType, groups: Sequence[RankGroup], seconds: float) -> ClusterError:
    try:
        check_capacity(groups, nodes_of(ray))
    except ClusterError as error:
        return error
    return ClusterError(
        f"the cluster has room for the job, but it was not free within {seconds:g} s: {_free(ray, groups)}; wait for "
        "other jobs (`ray status` shows what is in use), or add nodes with `ray start --address=HOST:PORT`"
    )


def _missing(ray: ModuleType, groups: Sequence[RankGroup]) -> str:
    """What a job that cannot be placed now waits for."""
    try:
        check_capacity(groups, nodes_of(ray))
    except ClusterError as error:
        return f"more nodes: {error}"
    return f"resources that other jobs have: {_free(ray, groups)}"


def _free(ray: ModuleType, groups: Sequence[RankGroup]) -> str:
    names = dict.fromkeys(name for group in groups for name in group.needs)
    free = ray.available_resources()
    return f"free are {describe({name: free.get(name, 0) for name in names})} on all nodes together"
