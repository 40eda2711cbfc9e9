"""find_rows and insert_and_evict (bench/gpu/hkv_operations.py) against plain torch and a dict of rows."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from kernels import reference
from kernels.shuffle_state import shuffle_state

from hotrow.bench.gpu import hbm_find, hkv_operations
from hotrow.bench.gpu.hkv_operations import find_rows, insert_and_evict
from hotrow.errors import BatchError
from hotrow.kernels.index.sets import WAYS, SetIndex


def begins_of(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dim, stride", [(8, 8), (1, 1), (5, 9), (32, 34), (64, 64)])
def test_rows_come_with_the_slots(device: torch.device, draw: Any, filled: Any, dim: int, stride: int) -> None:
    counts = [100, 0, 213]
    keys, tables = draw(313), torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    index = filled([7, 2, 8], keys[::2], tables[::2])
    rows = torch.randn(index.capacity, stride, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.full((313, dim), 9.0, device=device)
    slots = find_rows(index, rows, dim, keys.to(device), out, begins_of(counts, device))
    assert torch.equal(slots, reference.find(index, keys.to(device), tables.to(device)))
    assert torch.equal(out, reference.find_rows(slots, rows, dim))


class Model:
    """A model of insert_and_evict: a dict of rows, beside the index's own choices."""

    def __init__(self, index: SetIndex) -> None:
        self.index = index
        self.rows: dict[tuple[int, int], list[float]] = {}

    def check(self, rows: torch.Tensor, tables: int) -> None:
        resident = {}
        bounds = [*self.index.first.tolist(), self.index.sets]
        for slot in self.index.occupied().nonzero().flatten().tolist():
            table = next(t for t in range(tables) if slot // WAYS < bounds[t + 1])
            resident[table, int(self.index.keys.view(-1)[slot])] = rows[slot].tolist()
        assert resident == self.rows


@pytest.mark.parametrize("dim", [1, 6, 32])
@pytest.mark.parametrize("sets", [[9], [4, 2, 5]])
def test_rows_are_assigned_inserted_and_evicted(device: torch.device, draw: Any, sets: list[int], dim: int) -> None:
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
        evicted: dict[tuple[int, int], list[float]] = {}
        for key, values_of in zip(out.keys[:number].tolist(), out.values[:number].tolist(), strict=True):
            table = next(t for t in range(len(sets)) if (t, key) in model.rows and model.rows[t, key] == values_of)
            evicted[table, key] = model.rows.pop((table, key))
        assert len(evicted) == number
        for i, slot in enumerate(slots):
            assert present[i] < 0 or slot == present[i]
            if slot >= 0:
                model.rows[int(tables[i]), int(keys[i])] = values[i].tolist()
                assert index.pins[slot] == batch and index.scores[slot] == batch
        model.check(rows, len(sets))
        again = reference.find(index, keys.to(device), on.long())
        assert again.tolist() == slots


def test_blocks_of_any_size_evict_the_same(
    device: torch.device, draw: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = draw(140), torch.arange(140.0)[:, None]
    results = []
    for block, elements in ((256, 4096), (32, 16), (256, 4096)):
        monkeypatch.setattr(hkv_operations, "INSERT_BLOCK", block)
        monkeypatch.setattr(hkv_operations, "SWAP_ELEMENTS", elements)
        index = filled([17], keys[::2])
        shuffle_state(index)
        rows = torch.arange(float(index.capacity), device=device)[:, None].clone()
        out = insert_and_evict(index, rows, keys.to(device), values.to(device), batch=7, settled=5)
        number = int(out.number.item())
        results.append([out.keys[:number], out.values[:number], out.slots, index.keys, rows, index.scores])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_present_keys_of_a_call_are_never_evicted_by_it(device: torch.device, crowd: Any, filled: Any) -> None:
    keys = crowd(30)
    index = filled([3], keys[:8])
    rows = torch.zeros(index.capacity, 2, device=device)
    mixed = torch.cat([keys[20:], keys[:6]])
    values = torch.arange(32.0).view(16, 2)
    out = insert_and_evict(index, rows, mixed.to(device), values.to(device), batch=1, settled=0)
    assert sorted(out.slots[10:].tolist()) == list(range(6))
    assert sorted(out.slots[:10].tolist()) == [-1] * 8 + [6, 7]
    assert out.number.item() == 2 and set(out.keys[:2].tolist()) == set(keys[6:8].tolist())


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    index = SetIndex([2, 2], device)
    keys = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(BatchError, match="out is"):
        begins = begins_of([3, 0], device)
        find_rows(index, torch.zeros(32, 4, device=device), 4, keys, torch.zeros(3, 3, device=device), begins)
    rows, values = torch.zeros(32, 4, device=device), torch.zeros(3, 4, device=device)
    with pytest.raises(BatchError, match="batch 0"):
        insert_and_evict(index, rows, keys, values, keys.int(), batch=0, settled=0)
    with pytest.raises(BatchError, match="values is"):
        insert_and_evict(index, rows, keys, values[:2], keys.int(), batch=1, settled=0)
    nothing = insert_and_evict(index, rows, keys[:0], values[:0], keys[:0].int(), batch=1, settled=0)
    assert nothing.number.item() == 0 and nothing.values.shape == (0, 4)


def test_the_bench_runs_small(device: torch.device) -> None:
    found = list(hbm_find.results(capacity=256, keys=16, repeats=2, cached=128, draws=150, batches=6))
    rows = {result.name: result for result in found if not isinstance(result, str)}
    assert len(rows) == 4 * 3 + 2 and all(result.value > 0 for result in rows.values())
    assert rows["hbm/hit_rate/lru"].ratio > 0.9 and rows["hbm/hit_rate/lfu"].ratio > 0.9


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
