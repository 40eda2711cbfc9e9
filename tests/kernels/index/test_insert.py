"""New keys take empty ways, then the coldest that nobody holds; the same ways on every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotrow.errors import BatchError, OptionError
from hotrow.kernels import reference
from hotrow.kernels.index import insert
from hotrow.kernels.index.dedup import dedup
from hotrow.kernels.index.find import find
from hotrow.kernels.index.insert import choose, erase, insert_and_evict, place
from hotrow.kernels.index.key_hash import HIGHEST, LOWEST
from hotrow.kernels.index.sets import WAYS, SetIndex


def shuffle_state(index: SetIndex, seed: int = 0, settled: int = 5) -> None:
    """Scores with many ties, some below 0; about a third of the slots pinned above `settled`."""
    g = torch.Generator().manual_seed(seed)
    index.scores.copy_(torch.randint(-2, 3, (index.capacity,), generator=g) / 2 + 0.0)
    index.pins.copy_(torch.where(torch.rand(index.capacity, generator=g) < 0.3, settled + 1, settled).int())


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
    slots = choose(index, new.keys, new.tables, new.number, 5)
    assert slots.tolist() == reference.choose(index, new.keys, new.tables, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, [index.keys, index.pins, index.scores], strict=True))


def test_only_the_first_number_are_real(device: torch.device, draw: Any, filled: Any) -> None:
    keys = dedup(draw(300).to(device)).keys
    index = filled([40], keys[:0].cpu())
    slots = choose(index, keys, None, one(257, device), 0, "lfu")
    assert slots[:257].tolist() == reference.choose(index, keys[:257], torch.zeros_like(keys[:257]), 0)
    assert (slots[257:] == -1).all()
    place(index, keys, slots, one(250, device), batch=3, score=2.5)
    held = sorted(slot for slot in slots[:250].tolist() if slot >= 0)
    assert index.occupied().nonzero().flatten().tolist() == held
    assert index.pins.nonzero().flatten().tolist() == held and index.pins.max() == 3
    assert index.scores.nonzero().flatten().tolist() == held and index.scores.max() == 2.5


def test_a_crowd_overflows_its_set(device: torch.device, crowd: Any, filled: Any) -> None:
    for high, n in ((0, 270), (1 << 31, 20), ((1 << 32) - 1, 20)):
        keys = dedup(crowd(n, high).to(device)).keys
        index = SetIndex([7], device)
        slots = choose(index, keys, None, None, 0)
        assert (slots[:8] == slots[0] + torch.arange(8, device=device)).all() and (slots[8:] == -1).all()


def test_a_pinned_set_takes_nobody_until_it_has_settled(device: torch.device, crowd: Any) -> None:
    keys = dedup(crowd(10).to(device)).keys
    index = SetIndex([2], device)
    place(index, keys[:8], choose(index, keys[:8], None, None, 0), None, batch=4, score=4.0)
    assert choose(index, keys[8:], None, None, settled=3).tolist() == [-1, -1]
    assert choose(index, keys[8:], None, None, settled=4).tolist() == [0, 1]


def test_the_least_recently_used_goes_first(device: torch.device, crowd: Any) -> None:
    keys = dedup(crowd(11).to(device)).keys
    index = SetIndex([2], device)
    for i in range(8):
        place(index, keys[i : i + 1], one((i * 3) % 8, device), None, batch=i + 1, score=i + 1.0)
    assert choose(index, keys[8:], None, None, 8).tolist() == [0, 3, 6]


def test_markers_are_keys_like_others(device: torch.device) -> None:
    index = SetIndex([2, 2], device)
    keys = dedup(torch.tensor([LOWEST, HIGHEST] * 2, device=device), torch.tensor([0, 0, 1, 1], device=device).int())
    slots = choose(index, keys.keys, keys.tables, keys.number, 0)
    assert slots.tolist() == [0, WAYS, 2 * WAYS, 3 * WAYS]
    place(index, keys.keys, slots, keys.number, 1, 1.0)
    assert index.occupied().nonzero().flatten().tolist() == slots.tolist()
    erase(index, slots[1:3].contiguous())
    assert index.occupied().nonzero().flatten().tolist() == [0, 3 * WAYS]
    erase(index, torch.tensor([-1, 0, 3 * WAYS, 4 * WAYS, 1 << 30], dtype=torch.int32, device=device))
    empty = SetIndex([2, 2], device)
    assert torch.equal(index.keys, empty.keys) and torch.equal(index.pins, empty.pins)
    assert torch.equal(index.scores, empty.scores)


class Model:
    """insert_and_evict by the book: a dict of rows beside the index's own choices."""

    def __init__(self, index: SetIndex) -> None:
        self.index = index
        self.rows: dict[tuple[int, int], list[float]] = {}

    def check(self, rows: torch.Tensor, tables: int) -> None:
        held = {}
        bounds = [*self.index.first.tolist(), self.index.sets]
        for slot in self.index.occupied().nonzero().flatten().tolist():
            table = next(t for t in range(tables) if slot // WAYS < bounds[t + 1])
            held[table, int(self.index.keys.view(-1)[slot])] = rows[slot].tolist()
        assert held == self.rows


@pytest.mark.parametrize("dim", [1, 6, 32])
@pytest.mark.parametrize("sets", [[9], [4, 2, 5]])
def test_rows_are_assigned_inserted_and_driven_out(device: torch.device, draw: Any, sets: list[int], dim: int) -> None:
    index, several = SetIndex(sets, device), len(sets) > 1
    rows = torch.zeros(index.capacity, dim, device=device)
    model, pool = Model(index), draw(150)
    g = torch.Generator().manual_seed(dim)
    for batch in range(1, 5):
        keys = pool[torch.randperm(len(pool), generator=g)[:60]]
        tables = torch.randint(0, len(sets), (60,), generator=g).int()
        values = torch.randn(60, dim, generator=g)
        on = tables.to(device)
        present = reference.find(index, keys.to(device), on.long())
        out = insert_and_evict(
            index, rows, keys.to(device), values.to(device), on if several else None, batch=batch, settled=batch - 1
        )
        slots, number = out.slots.tolist(), int(out.number.item())
        gone: dict[tuple[int, int], list[float]] = {}
        for key, values_of in zip(out.keys[:number].tolist(), out.values[:number].tolist(), strict=True):
            table = next(t for t in range(len(sets)) if (t, key) in model.rows and model.rows[t, key] == values_of)
            gone[table, key] = model.rows.pop((table, key))
        assert len(gone) == number
        for i, slot in enumerate(slots):
            assert present[i] < 0 or slot == present[i]
            if slot >= 0:
                model.rows[int(tables[i]), int(keys[i])] = values[i].tolist()
                assert index.pins[slot] == batch and index.scores[slot] == batch
        model.check(rows, len(sets))
        again = reference.find(index, keys.to(device), on.long())
        assert again.tolist() == slots


def test_blocks_of_any_size_drive_out_the_same(
    device: torch.device, draw: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = draw(140), torch.arange(140.0)[:, None]
    results = []
    for block, elements in ((256, 4096), (32, 16), (256, 4096)):
        monkeypatch.setattr(insert, "BLOCK", block)
        monkeypatch.setattr(insert, "SWAP_ELEMENTS", elements)
        index = filled([17], keys[::2])
        shuffle_state(index)
        rows = torch.arange(float(index.capacity), device=device)[:, None].clone()
        out = insert_and_evict(index, rows, keys.to(device), values.to(device), batch=7, settled=5)
        number = int(out.number.item())
        results.append([out.keys[:number], out.values[:number], out.slots, index.keys, rows, index.scores])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_present_keys_of_the_call_are_never_driven_out_by_it(device: torch.device, crowd: Any, filled: Any) -> None:
    keys = crowd(30)
    index = filled([3], keys[:8])
    rows = torch.zeros(index.capacity, 2, device=device)
    mixed = torch.cat([keys[20:], keys[:6]])
    values = torch.arange(32.0).view(16, 2)
    out = insert_and_evict(index, rows, mixed.to(device), values.to(device), batch=1, settled=0)
    assert sorted(out.slots[10:].tolist()) == list(range(6))
    assert sorted(out.slots[:10].tolist()) == [-1] * 8 + [6, 7]
    assert out.number.item() == 2 and set(out.keys[:2].tolist()) == set(keys[6:8].tolist())


def test_what_does_not_fit_is_said(device: torch.device) -> None:
    index = SetIndex([2, 2], device)
    keys = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(BatchError, match="pass tables="):
        choose(index, keys, None, None, 0)
    with pytest.raises(OptionError, match="did you mean 'lru'"):
        choose(index, keys, keys.int(), None, 0, "lruu")
    rows, values = torch.zeros(32, 4, device=device), torch.zeros(3, 4, device=device)
    with pytest.raises(BatchError, match="batch 0"):
        insert_and_evict(index, rows, keys, values, keys.int(), batch=0, settled=0)
    with pytest.raises(BatchError, match="values is"):
        insert_and_evict(index, rows, keys, values[:2], keys.int(), batch=1, settled=0)
    nothing = insert_and_evict(index, rows, keys[:0], values[:0], keys[:0].int(), batch=1, settled=0)
    assert nothing.number.item() == 0 and nothing.values.shape == (0, 4)


@pytest.mark.gpu
def test_a_large_stream_leaves_the_same_index_twice_and_loses_no_row() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    ends = []
    for _ in range(2):
        index = SetIndex([20_000, 7_000], device)
        rows = torch.zeros(index.capacity, 4, device=device)
        g = torch.Generator(device).manual_seed(0)
        inside = 0
        for batch in range(1, 9):
            keys = torch.unique(torch.randint(-(2**62), 2**62, (100_000,), device=device, generator=g) >> 43)
            keys = keys[torch.randperm(len(keys), device=device, generator=g)]
            tables = (keys & 1).int()
            values = keys[:, None].float().expand(-1, 4).contiguous()
            was = reference.find(index, keys, tables.long())
            out = insert_and_evict(index, rows, keys, values, tables, batch=batch, settled=batch - 1)
            number = int(out.number)
            inside += int(((was < 0) & (out.slots >= 0)).sum()) - number
            assert int(index.occupied().sum()) == inside
            assert torch.equal(reference.find(index, keys, tables.long()), out.slots)
            assert torch.equal(rows[out.slots[out.slots >= 0].long()], values[out.slots >= 0])
            assert torch.equal(out.values[:number], out.keys[:number, None].float().expand(-1, 4))
            assert (reference.find(index, out.keys[:number], out.keys[:number] & 1) == -1).all()
        ends.append([index.keys, index.pins, index.scores, rows, out.keys[:number], out.slots])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
