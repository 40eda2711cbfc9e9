"""Exchanges of ranks on one machine use shared memory instead of Gloo, unless a rank cannot or does not want to."""

from __future__ import annotations

import os

import torch
from crew import Crew

import hotrow as hr
from hotrow.parallel.exchange import Channel
from hotrow.parallel.shared_memory import SWITCH, connect_shared_memory


def fresh(ranks: hr.Ranks) -> Channel:
    return Channel("test", ranks._health)


def by_both_ways(ranks: hr.Ranks) -> bool:
    """Messages of many sizes and types, several under way at once and waited for in another order."""
    shared, plain = fresh(ranks), fresh(ranks)
    plain.create_group(ranks.timeout)
    same = connect_shared_memory([shared], ranks.patient, ranks.timeout) and ranks.rows.group is None
    for number in range(40):
        sizes = torch.randint(0, 5000, (ranks.world, ranks.world), generator=torch.Generator().manual_seed(number))
        to, came = sizes[ranks.rank].tolist(), sizes[:, ranks.rank].tolist()
        kind = (torch.float32, torch.int64, torch.uint8, torch.bfloat16)[number % 4]
        send = torch.randint(0, 100, (sum(to),)).to(kind)
        words = torch.full((number,), ranks.rank, dtype=torch.int64)
        first, second = shared.begin_all_to_all(send, to, came), shared.begin_all_gather(words)
        gathered, arrived = second.wait(), first.wait()
        same &= torch.equal(arrived, plain.all_to_all(send, to, came)) and shared.sent > 0
        same &= torch.equal(gathered, torch.cat(plain.all_gather(words))) if number else gathered.numel() == 0
    return same


def test_shared_memory_brings_what_gloo_brings(crew: Crew) -> None:
    assert crew.run(by_both_ways) == [True] * crew.world


def unless_one_says_no(ranks: hr.Ranks) -> tuple[bool, list[list[int]]]:
    channel, before = fresh(ranks), os.environ.get(SWITCH)
    if ranks.rank == 1:
        os.environ[SWITCH] = "0"
    try:
        shared = connect_shared_memory([channel], ranks.patient, ranks.timeout)
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before
    channel.create_group(ranks.timeout)
    return not shared and channel._core is None, channel.gather_numbers(ranks.rank, 7)


def test_gloo_carries_everything_where_one_rank_wants_it(crew: Crew) -> None:
    numbers = [[rank, 7] for rank in range(crew.world)]
    assert crew.run(unless_one_says_no) == [(True, numbers)] * crew.world
