"""Which servers have which shards, against a plain reference."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.serve.rows.shards import ALL, in_shards
from hotrow.tiers.host.store import SHARDS
from hotrow.tiers.rows.topology import Topology

bounds = st.lists(st.integers(0, SHARDS), min_size=2, max_size=2, unique=True).map(lambda pair: tuple(sorted(pair)))


@given(st.dictionaries(st.integers(0, 30), bounds, max_size=8))
def test_every_shard_belongs_to_the_range_whose_servers_have_it(shards: dict[int, tuple[int, int]]) -> None:
    topology = Topology.of(shards)
    for shard in range(SHARDS):
        number = int(topology.owner_of[shard])
        begin, end = topology.bounds[number]
        assert begin <= shard < end
        assert topology.servers[number] == [n for n, (first, last) in shards.items() if first <= shard < last]
    assert topology.bounds[0][0] == 0 and topology.bounds[-1][1] == SHARDS
    neighbours = list(pairwise(topology.servers))
    assert all(one != other for one, other in neighbours)  # no range is divided without a reason
    assert [end for _, end in topology.bounds[:-1]] == [begin for begin, _ in topology.bounds[1:]]
    uncovered = [s for s in range(SHARDS) if not any(b <= s < e for b, e in shards.values())]
    assert [s for begin, end in topology.missing for s in range(begin, end)] == uncovered


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), bounds)
def test_each_key_is_in_exactly_one_of_two_divisions(keys: list[int], pair: tuple[int, int]) -> None:
    begin, end = pair
    tensor = torch.tensor(keys, dtype=torch.int64)
    parts = [(0, begin), pair, (end, SHARDS)]
    having = [in_shards(tensor, (first, last)) for first, last in parts if first < last]
    assert torch.stack([one.int() for one in having]).sum(0).tolist() == [1] * len(keys)
    assert in_shards(tensor, ALL).all()
