"""New keys get empty ways, then the coldest unpinned ones, and the same ways in every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels import reference
from kernels.shuffle_state import shuffle_state

from hotrow.errors import BatchError, OptionError
from hotrow.kernels.index.dedup import dedup
from hotrow.kernels.index.find import find
from hotrow.kernels.index.insert import choose_slots, erase, insert_keys
from hotrow.kernels.index.key_hash import HIGHEST, LOWEST
from hotrow.kernels.index.sets import WAYS, SetIndex


def one(number: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int32, device=device)


def located(index: SetIndex, keys: torch.Tensor) -> list[int]:
    """Slots of keys of a single table."""
    begins = torch.tensor([0, len(keys)], dtype=torch.int32, device=index.device)
    return find(index, keys.to(index.device), begins).tolist()


@pytest.mark.parametrize("n", [0, 1, 256, 300, 700])
def test_the_best_ways_are_chosen(device: torch.device, draw: Any, filled: Any, n: int) -> None:
    keys = draw(1000)
    index = filled([60, 30], keys[n:], torch.arange(1000 - n).remainder(2))
    shuffle_state(index)
    before = [index.keys.clone(), index.pins.clone(), index.scores.clone()]
    tables = torch.arange(n).remainder(2).int()
    new = dedup(keys[:n].to(device), tables.to(device))
    slots = choose_slots(index, new.keys, new.tables, new.number, 5).slots
    assert slots.tolist() == reference.choose(index, new.keys, new.tables, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, [index.keys, index.pins, index.scores], strict=True))


def test_only_the_first_number_are_real(device: torch.device, draw: Any, filled: Any) -> None:
    keys = dedup(draw(300).to(device)).keys
    index = filled([40], keys[:0].cpu())
    slots = choose_slots(index, keys, None, one(257, device), 0, "lfu").slots
    assert slots[:257].tolist() == reference.choose(index, keys[:257], torch.zeros_like(keys[:257]), 0)
    assert (slots[257:] == -1).all()
    insert_keys(index, keys, slots, one(250, device), batch=3, score=2.5)
    held = sorted(slot for slot in slots[:250].tolist() if slot >= 0)
    assert index.occupied().nonzero().flatten().tolist() == held
    assert index.pins.nonzero().flatten().tolist() == held and index.pins.max() == 3
    assert index.scores.nonzero().flatten().tolist() == held and index.scores.max() == 2.5


def test_more_keys_than_ways_overflow_their_set(device: torch.device, crowd: Any, filled: Any) -> None:
    for high, n in ((0, 270), (1 << 31, 20), ((1 << 32) - 1, 20)):
        keys = dedup(crowd(n, high).to(device)).keys
        index = SetIndex([7], device)
        slots = choose_slots(index, keys, None, None, 0).slots
        assert (slots[:8] == slots[0] + torch.arange(8, device=device)).all() and (slots[8:] == -1).all()


def test_a_pinned_set_takes_no_key_until_its_batch_has_settled(device: torch.device, crowd: Any) -> None:
    keys = dedup(crowd(10).to(device)).keys
    index = SetIndex([2], device)
    insert_keys(index, keys[:8], choose_slots(index, keys[:8], None, None, 0).slots, None, batch=4, score=4.0)
    assert choose_slots(index, keys[8:], None, None, settled=3).slots.tolist() == [-1, -1]
    assert choose_slots(index, keys[8:], None, None, settled=4).slots.tolist() == [0, 1]


def test_the_least_recently_used_is_evicted_first(device: torch.device, crowd: Any) -> None:
    keys = dedup(crowd(11).to(device)).keys
    index = SetIndex([2], device)
    for i in range(8):
        insert_keys(index, keys[i : i + 1], one((i * 3) % 8, device), None, batch=i + 1, score=i + 1.0)
    assert choose_slots(index, keys[8:], None, None, 8).slots.tolist() == [0, 3, 6]


def test_empty_markers_are_valid_keys(device: torch.device) -> None:
    index = SetIndex([2, 2], device)
    keys = dedup(torch.tensor([LOWEST, HIGHEST] * 2, device=device), torch.tensor([0, 0, 1, 1], device=device).int())
    slots = choose_slots(index, keys.keys, keys.tables, keys.number, 0).slots
    assert slots.tolist() == [0, WAYS, 2 * WAYS, 3 * WAYS]
    insert_keys(index, keys.keys, slots, keys.number, 1, 1.0)
    assert index.occupied().nonzero().flatten().tolist() == slots.tolist()
    erase(index, slots[1:3].contiguous())
    assert index.occupied().nonzero().flatten().tolist() == [0, 3 * WAYS]
    erase(index, torch.tensor([-1, 0, 3 * WAYS, 4 * WAYS, 1 << 30], dtype=torch.int32, device=device))
    empty = SetIndex([2, 2], device)
    assert torch.equal(index.keys, empty.keys) and torch.equal(index.pins, empty.pins)
    assert torch.equal(index.scores, empty.scores)


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    index = SetIndex([2, 2], device)
    keys = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(BatchError, match="pass tables="):
        choose_slots(index, keys, None, None, 0)
    with pytest.raises(OptionError, match="did you mean 'lru'"):
        choose_slots(index, keys, keys.int(), None, 0, "lruu")
