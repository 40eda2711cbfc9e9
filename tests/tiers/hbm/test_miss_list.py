"""Asking for a batch in one go, against finding, choosing and placing step by step: the same slots and victims."""

from __future__ import annotations

import os

import pytest
import torch

from hotrow.kernels.index.admit import SLOTS, answer, brief
from hotrow.kernels.index.dedup import compact_keys, dedup
from hotrow.kernels.index.find import Warmth, find
from hotrow.kernels.index.insert import choose_in_order, place
from hotrow.kernels.index.touch import first_score
from hotrow.kernels.rows.layout import RowLayout
from hotrow.tiers.hbm.miss_list import LEAST, PATIENCE, RECORDED, Asker
from hotrow.tiers.hbm.slots import HbmTier

TABLES, SETS = 3, 12


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (request.param == "cuda") == interpreted:
        pytest.skip("needs the other mode of Triton")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


def a_tier(device: torch.device) -> HbmTier:
    tier = HbmTier(RowLayout(4), [SETS] * TABLES, device)
    tier.clean = 2
    return tier


def drawn(seed: int, ids: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-40, 40, (ids,), generator=generator) ** 3
    cuts = torch.randint(0, ids + 1, (TABLES - 1,), generator=generator).sort().values
    begins = torch.cat([torch.tensor([0]), cuts, torch.tensor([ids])]).int()
    return keys.to(device), begins.to(device)


def step_by_step(
    tier: HbmTier, keys: torch.Tensor, begins: torch.Tensor, batch: int, settled: int, ahead: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Slots, what the host is told of unique missing keys ([FIELDS, number]), and how many ids were missing."""
    score = first_score(batch, tier.policy, tier.half_life)
    slots = find(tier.index, keys, begins, batch, None, Warmth(tier.policy, tier.half_life))
    missing = int((slots < 0).sum())
    positions, absent, tables = compact_keys(slots, missing, keys, begins)
    unique = dedup(absent, tables, rising=True)
    chosen = choose_in_order(tier.index, unique.keys, unique.tables, unique.number, settled, tier.policy)
    report = brief(unique, chosen, tier.hosts, tier.steps, tier.counts, tier.clean)
    if ahead:
        place(tier.index, report.keys, report.field(SLOTS), unique.number, batch, score)
        answer(positions, unique.inverse, report.ranks, report.field(SLOTS), slots)
    return slots, fields(report.told, int(unique.number)), missing


def fields(told: torch.Tensor, number: int) -> torch.Tensor:
    """Of the keys that are real: all but the last field, which has only numbers."""
    n = told.numel() // 9
    keys = told[: 2 * n].view(torch.int64)[:number]
    return torch.cat([keys[None], told[2 * n : 8 * n].view(6, n)[:, :number].long()])


def settle_rows(tier: HbmTier, batch: int) -> None:
    """Every row that is in the index has a place below and a step, as if it had come and been updated."""
    there = torch.arange(tier.capacity, device=tier.device)
    tier.hosts.copy_(there * 3)
    tier.steps.copy_(there % (batch + 1))
    tier.counts.copy_(there % 7)


@pytest.mark.parametrize("ahead", [True, False])
def test_one_go_is_the_same_as_step_by_step(device: torch.device, ahead: bool) -> None:
    ours, theirs = a_tier(device), a_tier(device)
    asker, ids = Asker(ours), 180
    asked = 0
    for batch in range(1, 9):
        keys, begins = drawn(batch, ids, device)
        settled = max(0, batch - 2)
        expected = step_by_step(theirs, keys, begins, batch, settled, ahead)
        if asker.ready(ids):
            score = first_score(batch, ours.policy, ours.half_life)
            got = asker.ask(keys, begins, batch, settled, score, ahead)
            number = int(got.unique.number)
            assert got.whole and got.missing == expected[2]
            assert torch.equal(got.slots, expected[0])
            assert torch.equal(fields(got.numbers, number), expected[1].cpu())
            assert torch.equal(fields(got.report.told, number), expected[1])
            asker.record()
            asked += 1
        else:
            step_by_step(ours, keys, begins, batch, settled, ahead)
        asker.saw(ids, expected[2])
        if not ahead:  # rows come at their turn: something must be there to be found and driven out
            for tier in (ours, theirs):
                step_by_step(tier, *drawn(100 + batch, 60, device), batch, settled, True)
        for tier in (ours, theirs):
            settle_rows(tier, batch)
        assert torch.equal(ours.index.keys, theirs.index.keys)
        assert torch.equal(ours.index.held, theirs.index.held)
    assert asked == 8 - RECORDED


def test_more_missing_ids_than_there_is_room_for_change_nothing(device: torch.device) -> None:
    ours, theirs = a_tier(device), a_tier(device)
    asker, ids = Asker(ours), 3 * LEAST
    for _ in range(RECORDED):
        asker.saw(ids, 5)
    assert asker.room == LEAST
    for batch in (1, 2, 3):  # the second and the third are replayed
        keys = torch.arange(ids, device=device) + batch * ids
        begins = torch.tensor([0, 10, 20, ids], dtype=torch.int32, device=device)
        got = asker.ask(keys, begins, batch, batch - 1, 1.0, True)
        asker.record()
        assert got.missing == ids and not got.whole
        assert torch.equal(got.slots, torch.full_like(got.slots, -1))
        assert torch.equal(ours.index.keys, theirs.index.keys) and torch.equal(ours.index.held, theirs.index.held)
    asker.saw(ids, ids)
    assert asker.room == ids


def test_room_follows_what_was_missing(device: torch.device) -> None:
    asker, ids = Asker(a_tier(device)), 100 * LEAST
    for missing in (50 * LEAST, 50 * LEAST, 50 * LEAST):
        assert not asker.ready(ids)
        asker.saw(ids, missing)
    assert asker.ready(ids) and not asker.ready(ids + 1) and asker.room == 63 * LEAST
    for _ in range(PATIENCE):
        asker.saw(ids, LEAST)
    assert asker.room == 63 * LEAST
    asker.saw(ids, LEAST)
    assert asker.room == 2 * LEAST
    asker.saw(ids, 0)
    assert not asker.ready(ids)  # nothing was missing: looking for that alone is quicker
    asker.saw(ids + 1, 7)
    assert not asker.ready(ids + 1)
