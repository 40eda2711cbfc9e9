"""The report of missing keys and the index entries of fetched rows, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotrow.errors import BatchError
from hotrow.kernels.index.dedup import compact_keys, dedup
from hotrow.kernels.index.insert import Chosen
from hotrow.kernels.index.miss_report import FIELDS, SLOTS, TABLES, insert_fetched, report_misses, scatter_slots
from hotrow.kernels.index.sets import SetIndex

SIZES = [0, 1, 256, 600]


def ints(low: int, high: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def metadata(capacity: int, device: torch.device, together: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hosts (some slots have none), steps and counts of the slots; the last two one after the other, or interleaved."""
    hosts, pair = ints(-1, 4, capacity, 1), torch.stack([ints(0, 20, capacity, 2), ints(0, 1 << 16, capacity, 3)])
    steps, counts = pair.t().contiguous().to(device).unbind(1) if together else pair.to(device).unbind(0)
    return hosts.to(device), steps, counts


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_a_report_holds_what_plain_indexing_finds(device: torch.device, draw: Any, n: int, together: bool) -> None:
    keys, tables = draw(max(n // 2, 1))[ints(0, max(n // 2, 1), n).long()], ints(0, 3, n, 4)
    unique = dedup(keys.to(device), tables.to(device), 3)
    hosts, steps, counts = metadata(1000, device, together)
    chosen = torch.randperm(1000, generator=torch.Generator().manual_seed(5))[:n].int()
    chosen[::3] = -1
    order = torch.randperm(n, generator=torch.Generator().manual_seed(6))
    found = report_misses(unique, Chosen(chosen.to(device), order.to(device)), hosts, steps, counts, clean=11)
    out, write_back = found.packed, found.write_back
    assert torch.equal(found.ranks.cpu()[order], torch.arange(n, dtype=torch.int32))
    chosen = chosen[order]
    assert out.shape == (FIELDS * n,) and out.dtype == torch.int32
    has_slot = chosen >= 0
    host, step = (torch.where(has_slot, each.cpu()[chosen.long()], -1) for each in (hosts, steps))
    count = torch.where(has_slot, counts.cpu()[chosen.long()], 0)
    assert torch.equal(found.keys.cpu(), unique.keys.cpu()[order])
    assert torch.equal(found.field(SLOTS).cpu(), chosen)
    assert torch.equal(found.field(TABLES).cpu(), unique.tables.cpu()[order])
    fields = (
        unique.tables.cpu()[order],
        unique.counts.cpu()[order],
        chosen,
        host,
        step,
        count,
        unique.number.expand(n),
    )
    for field, expected in zip(out[2 * n :].view(FIELDS - 2, n).cpu(), fields, strict=True):
        assert torch.equal(field, expected.cpu())
    assert torch.equal(write_back.cpu(), torch.where((host >= 0) & (step > 11), chosen, -1))


def test_a_row_changed_at_the_clean_step_is_not_written_back(device: torch.device) -> None:
    unique = dedup(torch.arange(4, device=device))
    chosen = torch.arange(4, dtype=torch.int32, device=device)
    hosts = torch.tensor([0, 5, -1, 7], dtype=torch.int32, device=device)
    steps = torch.tensor([10, 11, 12, 12], dtype=torch.int32, device=device)
    for clean, expected in ((9, [0, 1, -1, 3]), (10, [-1, 1, -1, 3]), (11, [-1, -1, -1, 3]), (12, [-1] * 4)):
        order = torch.arange(4, device=device)
        assert report_misses(unique, Chosen(chosen, order), hosts, steps, hosts, clean).write_back.tolist() == expected


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_fetched_keys_and_metadata_are_in_their_slots_and_nowhere_else(
    device: torch.device, draw: Any, n: int, together: bool
) -> None:
    index = SetIndex([60, 40], device)
    index.pins.copy_(ints(0, 9, index.capacity, 6))
    index.scores.copy_(torch.rand(index.capacity, generator=torch.Generator().manual_seed(7)))
    slots = torch.randperm(index.capacity, generator=torch.Generator().manual_seed(n))[:n].int()
    for at, outside in enumerate((-1, index.capacity, index.capacity + 7, 2**31 - 1)):
        slots[at + 3 :: 11] = outside
    keys = draw(max(n, 1))[:n]
    places = torch.stack([ints(0, 2**31 - 1, n, seed) for seed in (8, 9, 10)])
    tensors = metadata(index.capacity, device, together)
    before = [each.cpu().clone() for each in (index.keys.view(-1), index.pins, index.scores, *tensors)]
    insert_fetched(index, tensors, keys.to(device), slots.to(device), places.to(device), batch=17, score=2.5)
    inside = (slots >= 0) & (slots < index.capacity)
    where, values = slots[inside].long(), (keys, 17, 2.5, *places)
    for each, value in zip(before, values, strict=True):
        each[where] = value[inside] if isinstance(value, torch.Tensor) else value
    for now, expected in zip((index.keys.view(-1), index.pins, index.scores, *tensors), before, strict=True):
        assert torch.equal(now.cpu(), expected)


@pytest.mark.parametrize("n", SIZES)
def test_positions_get_the_slots_of_their_keys(device: torch.device, n: int) -> None:
    positions = torch.randperm(1000, generator=torch.Generator().manual_seed(n))[:n].int()
    inverse, slots = ints(0, max(n // 3, 1), n), ints(-1, 5000, max(n // 3, 1), 1)
    ranks = torch.randperm(max(n // 3, 1), generator=torch.Generator().manual_seed(n)).int()
    out = ints(0, 9, 1000, 2).to(device)
    expected = out.cpu().clone()
    expected[positions.long()] = slots[ranks[inverse.long()].long()]
    scatter_slots(positions.to(device), inverse.to(device), ranks.to(device), slots.to(device), out)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("n", [1, 1023, 1025, 2500])
@pytest.mark.parametrize("tables", [1, 5])
def test_absent_keys_come_with_their_tables(device: torch.device, draw: Any, n: int, tables: int) -> None:
    slots, keys = ints(-3, 4, n, n), draw(n)
    inner = (ints(0, n + 1, tables - 1, n).sort().values).tolist()
    if tables > 2:
        inner[1] = inner[0]  # a table without a key
    begins = torch.tensor([0, *inner, n], dtype=torch.int32)
    expected = (slots < 0).nonzero().view(-1)
    positions, absent, of = compact_keys(slots.to(device), len(expected), keys.to(device), begins.to(device))
    assert positions.tolist() == expected.tolist()
    assert torch.equal(absent.cpu(), keys[expected])
    assert of.tolist() == [sum(begin <= at for begin in begins[1:-1].tolist()) for at in expected.tolist()]


def test_no_key_is_absent(device: torch.device) -> None:
    slots = torch.arange(9, dtype=torch.int32, device=device)
    begins = torch.tensor([0, 9], dtype=torch.int32, device=device)
    for none in (slots, slots[:0]):
        positions, keys, tables = compact_keys(none, 0, none.long(), begins)
        assert positions.numel() == keys.numel() == tables.numel() == 0
        assert keys.dtype == torch.int64 and tables.dtype == torch.int32
    with pytest.raises(BatchError, match="there are 9 slots"):
        compact_keys(slots, 10, slots.long(), begins)
