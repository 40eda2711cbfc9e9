"""Scores rise with use: by recency, or by decayed frequency."""

from __future__ import annotations

import pytest
import torch
from kernels import reference

from hotrow.errors import OptionError
from hotrow.kernels.index.insert import choose_slots, insert_keys
from hotrow.kernels.index.sets import SetIndex
from hotrow.kernels.index.touch import initial_score, touch


def some_slots(capacity: int, n: int, device: torch.device) -> torch.Tensor:
    """n unique slots in random order, with some outside the index between them."""
    slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(n))[:n]
    outside = torch.tensor([-1, capacity, capacity + 7, 2**31 - 1])
    return torch.cat([slots[: n // 2], outside, slots[n // 2 :]]).int().to(device)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("n", [0, 1, 600])
def test_scores_are_the_references(device: torch.device, policy: str, n: int) -> None:
    index = SetIndex([50, 40], device)
    start = torch.rand(index.capacity, generator=torch.Generator().manual_seed(0)) * 40
    index.scores.copy_(start)
    slots = some_slots(index.capacity, n, device)
    touch(index, slots, None, batch=200, policy=policy, half_life=10.0)
    expected = start.clone()
    for slot in slots.tolist():
        if 0 <= slot < index.capacity:
            expected[slot] = reference.touch(float(start[slot]), 200, policy, 10.0)
    torch.testing.assert_close(index.scores.cpu(), expected, rtol=1e-6, atol=1e-6)
    untouched = torch.ones(index.capacity, dtype=torch.bool)
    untouched[[slot for slot in slots.tolist() if 0 <= slot < index.capacity]] = False
    assert torch.equal(index.scores.cpu()[untouched], start[untouched])


def test_only_the_first_number_count(device: torch.device) -> None:
    index = SetIndex([2], device)
    slots = torch.arange(16, dtype=torch.int32, device=device)
    touch(index, slots, torch.tensor([5], dtype=torch.int32, device=device), 9, "lru", 1.0)
    assert index.scores.tolist() == [9.0] * 5 + [0.0] * 11


def test_scores_stay_finite_however_far_apart(device: torch.device) -> None:
    index = SetIndex([2], device)
    index.scores[0], index.scores[1] = 3e38, -3e38
    slots = torch.arange(2, dtype=torch.int32, device=device)
    touch(index, slots, None, 10**9, "lfu", 1.0)
    assert index.scores[0] == torch.tensor(3e38) and index.scores[1] == 1e9


def test_a_row_placed_without_a_score_gets_its_first_one(device: torch.device) -> None:
    index = SetIndex([2], device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    insert_keys(index, slots.long(), slots, None, 30, float("-inf"))
    for policy, score in (("lfu", 3.0), ("lru", 30.0)):
        touch(index, slots, None, 30, policy, 10.0)
        assert index.scores[:3].tolist() == [score] * 3 == [initial_score(30, policy, 10.0)] * 3


def test_lfu_keeps_the_frequent_and_lru_the_recent(device: torch.device, crowd: object) -> None:
    keys = torch.arange(9, device=device)  # which keys does not matter: they are placed by hand
    for policy, victim in (("lfu", 7), ("lru", 0)):
        index = SetIndex([2], device)
        slots = torch.arange(8, dtype=torch.int32, device=device)
        insert_keys(index, keys[:8], slots, None, 1, initial_score(1, policy, 100.0))
        for batch in range(2, 40):  # way 0 is used often and long ago, way 7 once and lately, the rest in between
            used = slots[:1] if batch < 20 else slots[1:7]
            touch(index, used, None, batch, policy, 100.0)
        touch(index, slots[7:], None, 40, policy, 100.0)
        index.keys[1] = index.keys[0]
        new = crowd(1).to(device)  # type: ignore[operator]
        assert choose_slots(index, new, None, None, 1).slots.tolist() == [victim]


def test_old_use_fades(device: torch.device) -> None:
    index = SetIndex([2], device)
    slots = torch.arange(2, dtype=torch.int32, device=device)
    insert_keys(index, slots[:1].long(), slots[:1], None, 1, initial_score(1, "lfu", 10.0))
    for batch in range(2, 101):
        touch(index, slots[:1], None, batch, "lfu", 10.0)
    for batch in range(200, 210):
        touch(index, slots[1:], None, batch, "lfu", 10.0)
    assert index.scores[1] > index.scores[0]  # ten uses now score higher than a hundred that ended ten half-lives ago
    assert float(index.scores[0]) == pytest.approx(10 + 3.85, abs=0.1)  # log2(1 / (1 - 2^-0.1)) above its last use


def test_an_unknown_policy_is_refused(device: torch.device) -> None:
    with pytest.raises(OptionError, match="did you mean 'lfu'"):
        touch(SetIndex([2], device), torch.zeros(1, dtype=torch.int32, device=device), None, 1, "lfuu", 1.0)
