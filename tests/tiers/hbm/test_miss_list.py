"""A miss list against finding, choosing and placing step by step: the same slots and victims."""

from __future__ import annotations

import os

import pytest
import torch

from hotrow.kernels.index.dedup import compact_keys, dedup
from hotrow.kernels.index.find import ScorePolicy, find
from hotrow.kernels.index.insert import choose_slots, insert_keys
from hotrow.kernels.index.miss_report import SLOTS, report_misses, scatter_slots
from hotrow.kernels.index.touch import initial_score
from hotrow.kernels.rows.layout import RowLayout
from hotrow.tiers.hbm.group_cache import GroupCache
from hotrow.tiers.hbm.miss_list import CAPACITY_STEP, CAPTURE_AFTER, SHRINK_AFTER, MissFinder

TABLES, SETS = 3, 12


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (request.param == "cuda") == interpreted:
        pytest.skip("needs the other mode of Triton")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def a_tier(device: torch.device) -> GroupCache:
    cache = GroupCache(RowLayout(4), [SETS] * TABLES, device)
    cache.clean = 2
    return cache


def drawn(seed: int, ids: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-40, 40, (ids,), generator=generator) ** 3
    cuts = torch.randint(0, ids + 1, (TABLES - 1,), generator=generator).sort().values
    begins = torch.cat([torch.tensor([0]), cuts, torch.tensor([ids])]).int()
    return keys.to(device), begins.to(device)


def step_by_step(
    cache: GroupCache, keys: torch.Tensor, begins: torch.Tensor, batch: int, settled: int, ahead: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Slots, the report of unique missing keys ([FIELDS, number]), and the number of missing ids."""
    score = initial_score(batch, cache.policy, cache.half_life)
    slots = find(cache.index, keys, begins, batch, None, ScorePolicy(cache.policy, cache.half_life))
    missing = int((slots < 0).sum())
    positions, absent, tables = compact_keys(slots, missing, keys, begins)
    unique = dedup(absent, tables, tables_sorted=True)
    chosen = choose_slots(cache.index, unique.keys, unique.tables, unique.number, settled, cache.policy)
    report = report_misses(unique, chosen, cache.hosts, cache.steps, cache.counts, cache.clean)
    if ahead:
        insert_keys(cache.index, report.keys, report.field(SLOTS), unique.number, batch, score)
        scatter_slots(positions, unique.inverse, report.ranks, report.field(SLOTS), slots)
    return slots, fields(report.packed, int(unique.number)), missing


def fields(to_host_by_kernel: torch.Tensor, number: int) -> torch.Tensor:
    """Of the keys that are real: all but the last field, which has only numbers."""
    n = to_host_by_kernel.numel() // 9
    keys = to_host_by_kernel[: 2 * n].view(torch.int64)[:number]
    return torch.cat([keys[None], to_host_by_kernel[2 * n : 8 * n].view(6, n)[:, :number].long()])


def settle_rows(cache: GroupCache, batch: int) -> None:
    """Every row in the index has a DRAM slot and a step, as if it had been loaded and updated."""
    there = torch.arange(cache.capacity, device=cache.device)
    cache.hosts.copy_(there * 3)
    cache.steps.copy_(there % (batch + 1))
    cache.counts.copy_(there % 7)


@pytest.mark.parametrize("ahead", [True, False])
def test_one_go_is_the_same_as_step_by_step(device: torch.device, ahead: bool) -> None:
    ours, theirs = a_tier(device), a_tier(device)
    miss_finder, ids = MissFinder(ours), 180
    asked = 0
    for batch in range(1, 9):
        keys, begins = drawn(batch, ids, device)
        settled = max(0, batch - 2)
        expected = step_by_step(theirs, keys, begins, batch, settled, ahead)
        if miss_finder.ready(ids):
            score = initial_score(batch, ours.policy, ours.half_life)
            got = miss_finder.find_misses(keys, begins, batch, settled, score, ahead)
            number = int(got.unique.number)
            assert got.complete and got.missing == expected[2]
            assert torch.equal(got.slots, expected[0])
            assert torch.equal(fields(got.numbers, number), expected[1].cpu())
            assert torch.equal(fields(got.report.packed, number), expected[1])
            miss_finder.capture()
            asked += 1
        else:
            step_by_step(ours, keys, begins, batch, settled, ahead)
        miss_finder.observe(ids, expected[2])
        if not ahead:  # rows are loaded at their turn: some must be there to be found and evicted
            for cache in (ours, theirs):
                step_by_step(cache, *drawn(100 + batch, 60, device), batch, settled, True)
        for cache in (ours, theirs):
            settle_rows(cache, batch)
        assert torch.equal(ours.index.keys, theirs.index.keys)
        assert torch.equal(ours.index.pins_and_scores, theirs.index.pins_and_scores)
    assert asked == 8 - CAPTURE_AFTER


def test_more_missing_ids_than_there_is_room_for_change_nothing(device: torch.device) -> None:
    ours, theirs = a_tier(device), a_tier(device)
    miss_finder, ids = MissFinder(ours), 3 * CAPACITY_STEP
    for _ in range(CAPTURE_AFTER):
        miss_finder.observe(ids, 5)
    assert miss_finder.capacity == CAPACITY_STEP
    for batch in (1, 2, 3):  # the second and the third are replayed
        keys = torch.arange(ids, device=device) + batch * ids
        begins = torch.tensor([0, 10, 20, ids], dtype=torch.int32, device=device)
        got = miss_finder.find_misses(keys, begins, batch, batch - 1, 1.0, True)
        miss_finder.capture()
        assert got.missing == ids and not got.complete
        assert torch.equal(got.slots, torch.full_like(got.slots, -1))
        assert torch.equal(ours.index.keys, theirs.index.keys) and torch.equal(
            ours.index.pins_and_scores, theirs.index.pins_and_scores
        )
    miss_finder.observe(ids, ids)
    assert miss_finder.capacity == ids


def test_room_follows_what_was_missing(device: torch.device) -> None:
    miss_finder, ids = MissFinder(a_tier(device)), 100 * CAPACITY_STEP
    for missing in (50 * CAPACITY_STEP, 50 * CAPACITY_STEP, 50 * CAPACITY_STEP):
        assert not miss_finder.ready(ids)
        miss_finder.observe(ids, missing)
    assert miss_finder.ready(ids) and not miss_finder.ready(ids + 1) and miss_finder.capacity == 63 * CAPACITY_STEP
    for _ in range(SHRINK_AFTER):
        miss_finder.observe(ids, CAPACITY_STEP)
    assert miss_finder.capacity == 63 * CAPACITY_STEP
    miss_finder.observe(ids, CAPACITY_STEP)
    assert miss_finder.capacity == 2 * CAPACITY_STEP
    miss_finder.observe(ids, 0)
    assert not miss_finder.ready(ids)  # nothing was missing: a lookup without a miss list is faster
    miss_finder.observe(ids + 1, 7)
    assert not miss_finder.ready(ids + 1)
