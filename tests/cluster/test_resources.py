"""What ranks take, and whether nodes have it. No Ray runs here."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.cluster.placement import cpu_nodes
from hotrow.cluster.resources import Node, RankGroup, check_capacity, fit_together, rank_groups
from hotrow.errors import ClusterError, OptionError
from hotrow.job import Cluster

GIB = 1 << 30


def nodes(*has: Mapping[str, float]) -> list[Node]:
    return [Node(f"node{number}", f"10.0.0.{number}", dict(one)) for number, one in enumerate(has)]


def test_a_rank_takes_one_cpu_and_a_tower_with_rows_in_hbm_a_gpu() -> None:
    assert rank_groups({}, 2, 3) == [RankGroup("tower rank", 2, {"CPU": 1}), RankGroup("row rank", 3, {"CPU": 1})]
    assert rank_groups({"memory": {"hbm": "1GiB"}}, 4, 0) == [RankGroup("rank", 4, {"CPU": 1, "GPU": 1})]
    on_gpu = {"train": {"device": "cuda"}, "cluster": {"tower_gpus": 0.5}}
    assert rank_groups(on_gpu, 1, 1)[0].needs == {"CPU": 1, "GPU": 0.5}


def test_the_job_says_what_each_role_takes() -> None:
    cluster = {
        "tower_cpus": 4,
        "tower_gpus": 1,
        "row_cpus": 8,
        "row_memory": "64GiB",
        "row_resources": {"fast_disk": 1},
    }
    towers, rows = rank_groups({"cluster": cluster}, 1, 2)
    assert towers.needs == {"CPU": 4, "GPU": 1}
    assert rows.needs == {"CPU": 8, "memory": 64 * GIB, "fast_disk": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tower_cpus": -1}, r"\[cluster\] tower_cpus=-1: give a whole number, or a part of 1"),
        ({"tower_gpus": 1.5}, r"\[cluster\] tower_gpus=1\.5: give a whole number"),
        ({"row_cpus": True}, r"\[cluster\] row_cpus=True: give a whole number"),
        ({"row_memory": "much"}, "'much' is not a size"),
        ({"row_resources": 3}, r"\[cluster\] row_resources=3: give a table"),
        ({"row_resources": {"CPU": 1}}, "'CPU', which is not a custom resource; use row_cpus"),
        ({"row_resources": {"disk": "a"}}, "disk='a': give a whole number"),
        ({"row_cpus": 0}, "gives a row rank nothing: set row_cpus above 0"),
        ({"row_cpu": 1}, r"\[cluster\] has no option 'row_cpu'; did you mean 'row_cpus'"),
    ],
)
def test_wrong_options_are_named_when_the_job_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Cluster.of({"cluster": options})


def test_resources_alone_ask_for_no_row_ranks() -> None:
    assert Cluster.of({"cluster": {"tower_cpus": 2}}) is None


def test_a_missing_resource_is_named_with_what_there_is() -> None:
    two = nodes({"CPU": 4}, {"CPU": 2, "fast": 1})
    towers, rows = RankGroup("tower rank", 1, {"CPU": 1, "GPU": 1}), RankGroup("row rank", 2, {"CPU": 4, "fast": 1})
    with pytest.raises(ClusterError) as caught:
        check_capacity([towers, rows], two)
    assert str(caught.value) == (
        "the cluster lacks resources: the job takes 9 CPUs (1 CPU for the tower rank and 4 CPUs for each of 2 row "
        "ranks), and its 2 nodes have 6 CPUs; the job takes 1 GPU (1 GPU for the tower rank), and its 2 nodes have 0 "
        "GPUs; the job takes 2 of resource fast (1 of resource fast for each of 2 row ranks), and its 2 nodes have 1 "
        "of resource fast; add nodes with `ray start --address=HOST:PORT`, or ask for less in [cluster] of the job file"
    )
    with pytest.raises(ClusterError, match=r"the job takes 8\.0 GiB of memory .* its node has 4\.0 GiB of memory"):
        check_capacity([RankGroup("rank", 2, {"memory": 4 * GIB})], nodes({"memory": 4 * GIB}))


def test_enough_in_sum_is_not_enough_for_one_rank() -> None:
    rank = RankGroup("rank", 1, {"CPU": 3})
    with pytest.raises(ClusterError, match=r"no node has what one rank takes, 3 CPUs: 10\.0\.0\.0 with 2 CPUs, "):
        check_capacity([rank], nodes({"CPU": 2}, {"CPU": 2}))
    with pytest.raises(ClusterError, match=r"there is room for 1 of 2 ranks: each takes 3 CPUs of one node"):
        check_capacity([RankGroup("rank", 2, {"CPU": 3})], nodes({"CPU": 5}, {"CPU": 1}))
    both = [RankGroup("tower rank", 1, {"CPU": 2}), RankGroup("row rank", 2, {"CPU": 3})]
    with pytest.raises(ClusterError, match="no room for 1 tower rank of 2 CPUs and 2 row ranks of 3 CPUs together"):
        check_capacity(both, nodes({"CPU": 4}, {"CPU": 4}))
    check_capacity(both, nodes({"CPU": 6}, {"CPU": 2}))


def fits_by_trial(groups: list[RankGroup], has: list[tuple[int, int]]) -> bool:
    """Tries every assignment of ranks to nodes."""
    every = [group.needs for group in groups for _ in range(group.count)]
    for places in product(range(len(has)), repeat=len(every)):
        used = [[0.0, 0.0] for _ in has]
        for needs, place in zip(every, places, strict=True):
            used[place][0] += needs.get("CPU", 0)
            used[place][1] += needs.get("x", 0)
        if all(cpu <= a and x <= b for (cpu, x), (a, b) in zip(used, has, strict=True)):
            return True
    return False


small = st.tuples(st.integers(0, 3), st.integers(0, 2)).filter(any)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=3), small, small, st.data())
@settings(max_examples=150, deadline=None)
def test_room_for_two_roles_is_what_trying_every_placement_finds(
    has: list[tuple[int, int]], tower: tuple[int, int], row: tuple[int, int], data: st.DataObject
) -> None:
    groups = []
    for role, (cpus, custom) in (("tower rank", tower), ("row rank", row)):
        needs = {name: amount for name, amount in (("CPU", cpus), ("x", custom)) if amount}
        groups.append(RankGroup(role, data.draw(st.integers(1, 3)), needs))
    found = fit_together(groups, nodes(*({"CPU": cpu, "x": x} for cpu, x in has)))
    assert found == fits_by_trial(groups, has)


def test_row_ranks_stay_off_nodes_with_gpus_if_the_others_have_room() -> None:
    cluster = nodes({"CPU": 8, "GPU": 1}, {"CPU": 2}, {"CPU": 2})
    tower = RankGroup("tower rank", 1, {"CPU": 1, "GPU": 1})

    def chosen(rows: int) -> list[str] | None:
        found = cpu_nodes([tower, RankGroup("row rank", rows, {"CPU": 1})], cluster)
        return None if found is None else [node.number for node in found]

    assert chosen(4) == ["node1", "node2"]
    assert chosen(5) is None  # anywhere
    assert cpu_nodes([RankGroup("rank", 1, {"CPU": 1})], cluster) is None
