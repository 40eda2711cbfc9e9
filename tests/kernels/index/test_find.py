"""find gives every key its slot, whatever the keys, the tables and the block borders."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from kernels import reference

from hotrow.errors import BatchError, OptionError
from hotrow.kernels.index import find as find_module
from hotrow.kernels.index.find import find
from hotrow.kernels.index.key_hash import HIGHEST, LOWEST, MASK, key_of
from hotrow.kernels.index.sets import WAYS, SetIndex


def begins_of(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


def tables_of(counts: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def test_the_hash_is_the_one_of_the_host_and_can_be_undone(draw: Any) -> None:
    keys = draw(1000)
    hashes = reference.hash_key(keys)
    assert all(key_of(h & MASK) == k for h, k in zip(hashes.tolist(), keys.tolist(), strict=True))
    assert reference.hash_key(torch.tensor([LOWEST, HIGHEST])).tolist() == [0, -1]


def test_a_key_lives_in_its_tables_sets_and_rises_with_its_hash(draw: Any) -> None:
    hashes = reference.hash_key(draw(1000))
    order = reference.unsigned_order(hashes).argsort()
    sets = reference.set_of(hashes, torch.tensor(10), torch.tensor(7))[order]
    assert sets.min() == 10 and sets.max() == 16
    assert (sets.diff() >= 0).all()


@pytest.mark.parametrize("n", [0, 1, 2, 255, 256, 257, 1500])
def test_present_and_absent_keys_of_one_table(device: torch.device, draw: Any, filled: Any, n: int) -> None:
    keys = draw(max(n, 1))[:n]
    index = filled([50], keys[: n // 2])
    begins = begins_of([n], device)
    missing = torch.zeros(1, dtype=torch.int32, device=device)
    slots = find(index, keys.to(device), begins, missing=missing)
    expected = reference.find(index, keys.to(device), torch.zeros_like(keys, device=device))
    assert slots.dtype == torch.int32 and torch.equal(slots, expected)
    assert missing.item() == (expected < 0).sum()
    assert index.pins.eq(0).all()


@pytest.mark.parametrize("block", [32, 256])
def test_tables_of_all_sizes_share_blocks_and_keys(
    device: torch.device, draw: Any, filled: Any, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(find_module, "BLOCK", block)
    counts = [0, 300, 1, 0, 0, 40, 299, 0]
    shared = draw(300)
    keys = torch.cat([shared[:count] for count in counts])
    tables = tables_of(counts)
    some = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))[:400]
    index = filled([2, 30, 2, 3, 2, 9, 40, 5], keys[some], tables[some])
    missing = torch.zeros(1, dtype=torch.int32, device=device)
    slots = find(index, keys.to(device), begins_of(counts, device), batch=7, missing=missing)
    expected = reference.find(index, keys.to(device), tables.to(device))
    assert torch.equal(slots, expected)
    assert missing.item() == (expected < 0).sum() > 0
    pins = torch.zeros_like(index.pins)
    pins[expected[expected >= 0].long()] = 7
    assert torch.equal(index.pins, pins)


def test_empty_markers_are_found_only_where_they_were_inserted(device: torch.device, filled: Any) -> None:
    both = torch.tensor([LOWEST, HIGHEST])
    begins = begins_of([2, 2], device)
    asked = torch.cat([both, both]).to(device)
    assert find(filled([2, 3], both[:0]), asked, begins).tolist() == [-1] * 4
    index = filled([2, 3], both, torch.tensor([0, 0]))
    assert find(index, asked, begins).tolist() == [0, WAYS, -1, -1]
    index = filled([2, 3], both, torch.tensor([1, 1]))
    assert find(index, asked, begins).tolist() == [-1, -1, 2 * WAYS, 4 * WAYS]
    assert index.occupied().nonzero().flatten().tolist() == [2 * WAYS, 4 * WAYS]


def test_a_crowded_set_holds_eight(device: torch.device, crowd: Any, filled: Any) -> None:
    for high in (0, 1 << 31, (1 << 32) - 1):
        keys = crowd(40, high)
        slots = find(filled([5], keys), keys.to(device), begins_of([40], device))
        assert (slots[:8] == slots[0] + torch.arange(8, device=device)).all() and (slots[8:] == -1).all()


@pytest.mark.gpu
def test_ten_million_keys() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    index = SetIndex([300_000, 2, 200_000], device)
    counts = [6_000_000, 1, 3_999_999]
    keys = torch.arange(10_000_000, device=device) - 5_000_000
    tables = tables_of(counts).to(device)
    sets = reference.set_of(reference.hash_key(keys), index.first[tables], index.count[tables])
    index.keys[sets[::7], 3] = keys[::7]
    missing = torch.zeros(1, dtype=torch.int32, device=device)
    slots = find(index, keys, begins_of(counts, device), missing=missing)
    assert torch.equal(slots, reference.find(index, keys, tables))
    assert missing.item() == (slots < 0).sum()


def test_clear_forgets(device: torch.device, draw: Any, filled: Any) -> None:
    keys = draw(60)
    index = filled([9], keys)
    assert index.occupied().sum() > 40
    index.clear()
    assert not index.occupied().any()
    assert (find(index, keys.to(device), begins_of([60], device)) == -1).all()
    assert index.bytes() == 16 * index.capacity + 16


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    with pytest.raises(OptionError, match="at least 2 sets"):
        SetIndex([5, 1], device)
    with pytest.raises(OptionError, match="more than an index takes"):
        SetIndex([1 << 28], device)
    index, begins = SetIndex([2], device), begins_of([3], device)
    with pytest.raises(BatchError, match=r"keys is torch\.int32"):
        find(index, torch.zeros(3, dtype=torch.int32, device=device), begins)
    with pytest.raises(BatchError, match="begins has 3 entries"):
        find(index, torch.zeros(3, dtype=torch.int64, device=device), begins_of([1, 2], device))
