"""Resources: what a rank of each role takes, from [cluster] of a job file, and whether a cluster's nodes have it.

The driver compares before it reserves anything, because Ray waits for ever for a node that might still join. A rank is
on one node, so a sum over nodes is not enough: `check_capacity` also finds how many ranks each node can hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotrow.errors import ClusterError, OptionError
from hotrow.units import format_size, parse_size

ROLES = ("tower", "row")
OPTIONS = ("tower_cpus", "tower_gpus", "tower_memory", "tower_resources", "row_cpus", "row_memory", "row_resources")
UNIT = 10_000  # Ray counts in such parts
RESERVED = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one role: how one is called, how many there are, and what each takes, under Ray's names."""

    role: str  # "tower rank", "row rank"; "rank" where each has both roles
    count: int
    needs: Mapping[str, float]


@dataclass(frozen=True)
class Node:
    """A node of the cluster with all that it has."""

    number: str  # Ray's id
    address: str
    has: Mapping[str, float]

    @property
    def has_gpu(self) -> bool:
        """Whether Ray knows of a GPU on it."""
        return self.has.get("GPU", 0) > 0


def check_rank_options(options: Mapping[str, Any]) -> None:
    """Raise for a value that a rank cannot take. `options` is [cluster]."""
    for role in ROLES:
        _needs(options, role, 0)


def rank_groups(values: Mapping[str, Any], towers: int, rows: int) -> list[RankGroup]:
    """The ranks of a job with these values, in rank order. Without row ranks, each rank has both roles and takes the
    options of a tower."""
    options = values.get("cluster", {})
    on_gpu = "hbm" in values.get("memory", {}) or str(values.get("train", {}).get("device", "")).startswith("cuda")
    tower = _needs(options, "tower", 1 if on_gpu else 0)
    if rows == 0:
        return [RankGroup("rank", towers, tower)]
    return [RankGroup("tower rank", towers, tower), RankGroup("row rank", rows, _needs(options, "row", 0))]


def check_capacity(groups: Sequence[RankGroup], nodes: Sequence[Node]) -> None:
    """Raise if the nodes cannot hold all ranks, even when nothing else runs. Names what is missing."""
    cure = "; add nodes with `ray start --address=HOST:PORT`, or ask for less in [cluster] of the job file"
    short = [words for name in _names(groups) if (words := _shortage(name, groups, nodes))]
    if short:
        raise ClusterError(f"the cluster lacks resources: {'; '.join(short)}{cure}")
    for group in groups:
        capacity = sum(_capacity(group, node.has) for node in nodes)
        if capacity == 0:
            raise ClusterError(
                f"no node has what one {group.role} takes, {describe(group.needs)}: {_list(nodes, group.needs)}{cure}"
            )
        if capacity < group.count:
            raise ClusterError(
                f"there is room for {capacity} of {_count(group)}: each takes {describe(group.needs)} of one "
                f"node, and there are {_list(nodes, group.needs)}{cure}"
            )
    if not fit_together(groups, nodes):
        wanted = " and ".join(f"{_count(group)} of {describe(group.needs)}" for group in groups)
        both = dict.fromkeys(_names(groups), 0.0)
        raise ClusterError(f"there is no room for {wanted} together: there are {_list(nodes, both)}{cure}")


def fit_together(groups: Sequence[RankGroup], nodes: Sequence[Node], rows_on: Sequence[Node] | None = None) -> bool:
    """Whether the nodes can hold the ranks of one or two groups; with `rows_on` the second only on those nodes.

    For each number of ranks of the first group on the nodes so far: how many of the second fit beside them, at most.
    """
    first, second = groups[0], groups[-1]
    if len(groups) == 1:
        return sum(_capacity(first, node.has) for node in nodes) >= first.count
    allowed = {node.number for node in (nodes if rows_on is None else rows_on)}
    most = {0: 0}
    for node in nodes:
        beside = [
            _capacity(second, _without(node.has, first.needs, number)) if node.number in allowed else 0
            for number in range(min(_capacity(first, node.has), first.count) + 1)
        ]
        grown: dict[int, int] = {}
        for before, held in most.items():
            for number, fits in enumerate(beside):
                total = min(before + number, first.count)
                grown[total] = max(grown.get(total, 0), held + fits)
        most = grown
    return most.get(first.count, -1) >= second.count


def describe(needs: Mapping[str, float]) -> str:
    """Resources as a person says them.

    >>> describe({"CPU": 4, "GPU": 1, "memory": 2**36, "fast": 0.5})
    '4 CPUs, 1 GPU, 64.0 GiB of memory, 0.5 of resource fast'
    """
    return ", ".join(_amount(name, amount) for name, amount in needs.items()) or "nothing"


def _needs(options: Mapping[str, Any], role: str, gpus: int) -> dict[str, float]:
    cpus = _number(options, f"{role}_cpus", 1)
    needs = {"CPU": cpus, "GPU": _number(options, f"{role}_gpus", gpus)}
    memory = f"{role}_memory"
    if memory in options:
        needs["memory"] = float(parse_size(options[memory], f"[cluster] {memory}"))
    custom = options.get(f"{role}_resources", {})
    if not isinstance(custom, dict):
        raise OptionError(f"[cluster] {role}_resources={custom!r}: give a table, such as {{ fast_disk = 1 }}")
    for name in custom:
        if name in RESERVED:
            raise OptionError(
                f"[cluster] {role}_resources has {name!r}, which is not a custom resource; use {role}_cpus, "
                "tower_gpus or row_memory"
            )
        needs[name] = _number(custom, name, 0)
    if not any(needs.values()):
        raise OptionError(f"[cluster] gives a {role} rank nothing: set {role}_cpus above 0, or {role}_resources")
    return {name: amount for name, amount in needs.items() if amount}


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    value = options.get(name, default)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good or (value > 1 and value != int(value)):
        raise OptionError(f"[cluster] {name}={value!r}: give a whole number, or a part of 1 such as 0.5")
    return float(value)


def _names(groups: Sequence[RankGroup]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group.needs))


def _shortage(name: str, groups: Sequence[RankGroup], nodes: Sequence[Node]) -> str:
    """Says that the sum over nodes is not enough, if so."""
    asked = [(group, group.count * group.needs[name]) for group in groups if name in group.needs]
    total, has = sum(amount for _, amount in asked), sum(node.has.get(name, 0) for node in nodes)
    if _parts(total) <= _parts(has):
        return ""
    each = " and ".join(f"{_amount(name, group.needs[name])} for {_each(group)}" for group, _ in asked)
    nodes_have = "its node has" if len(nodes) == 1 else f"its {len(nodes)} nodes have"
    return f"the job takes {_amount(name, total)} ({each}), and {nodes_have} {_amount(name, has)}"


def _count(group: RankGroup) -> str:
    return f"{group.count} {group.role}{'' if group.count == 1 else 's'}"


def _each(group: RankGroup) -> str:
    return f"the {group.role}" if group.count == 1 else f"each of {_count(group)}"


def _capacity(group: RankGroup, has: Mapping[str, float]) -> int:
    """How many ranks of a group fit on a node with so much."""
    fits = [_parts(has.get(name, 0)) // _parts(amount) for name, amount in group.needs.items()]
    return min([*fits, group.count])


def _without(has: Mapping[str, float], needs: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: amount - count * needs.get(name, 0) for name, amount in has.items()}


def _parts(amount: float) -> int:
    return round(amount * UNIT)


def _list(nodes: Sequence[Node], needs: Mapping[str, float]) -> str:
    shown = [f"{node.address} with {describe({name: node.has.get(name, 0) for name in needs})}" for node in nodes]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} nodes more" if len(shown) > 8 else "")


def _amount(name: str, amount: float) -> str:
    if name == "memory":
        return f"{format_size(int(amount))} of memory"
    if name in ("CPU", "GPU"):
        return f"{amount:g} {name}{'' if amount == 1 else 's'}"
    return f"{amount:g} of resource {name}"
