"""Unique keys by table and hash, their inverse, and the positions of absent keys: exact for every input."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from kernels import reference

from hotrow.errors import BatchError
from hotrow.kernels.index import dedup as dedup_module
from hotrow.kernels.index.dedup import Unique, compact_keys, dedup


def absent_positions(slots: torch.Tensor, count: int) -> torch.Tensor:
    begins = torch.tensor([0, len(slots)], dtype=torch.int32, device=slots.device)
    return compact_keys(slots, count, slots.long(), begins)[0]


def same(unique: Unique, keys: torch.Tensor, tables: torch.Tensor | None) -> None:
    """Equal to the reference, and consistent in what the reference does not have."""
    pairs, counts, inverse = reference.dedup(keys, tables)
    number, n = int(unique.number.item()), len(keys)
    assert number == len(pairs)
    assert unique.keys.tolist() == [key for _, key in pairs] + [0] * (n - number)
    assert unique.tables.tolist() == [table for table, _ in pairs] + [0] * (n - number)
    assert unique.counts.tolist() == counts + [0] * (n - number)
    assert unique.inverse.tolist() == inverse
    by_place = sorted(range(n), key=lambda i: (inverse[i], i))
    assert unique.order.tolist() == by_place
    assert unique.starts[:number].tolist() == [0, *accumulate(counts)][:number]


def with_repeats(keys: torch.Tensor, n: int) -> torch.Tensor:
    """n of the keys, the first ones far more often than the rest."""
    u = torch.rand(n, generator=torch.Generator().manual_seed(n))
    return keys[(u**4 * len(keys)).long()]


@pytest.mark.parametrize("n", [0, 1, 2, 1023, 1024, 1025, 3000])
def test_unique_keys_of_one_table(device: torch.device, draw: Any, n: int) -> None:
    keys = with_repeats(draw(max(n // 2, 1)), n)
    same(dedup(keys.to(device)), keys, None)


@pytest.mark.parametrize("table_count", [None, 5, 300])
def test_a_key_of_two_tables_counts_twice(device: torch.device, draw: Any, table_count: int | None) -> None:
    keys = with_repeats(draw(100), 2500)
    tables = torch.randint(0, 5, (2500,), generator=torch.Generator().manual_seed(1)).int()
    same(dedup(keys.to(device), tables.to(device), table_count), keys, tables)
    tables = tables.sort().values
    same(dedup(keys.to(device), tables.to(device), table_count), keys, tables)


def test_keys_whose_hashes_differ_in_the_last_bits_stay_apart(device: torch.device, crowd: Any) -> None:
    keys = crowd(40).repeat(9)
    tables = torch.arange(360).remainder(2).int()
    same(dedup(keys.to(device)), keys, None)
    same(dedup(keys.to(device), tables.to(device)), keys, tables)


@pytest.mark.parametrize("n", [0, 1, 1024, 1500])
def test_tables_that_rise_take_one_sort(device: torch.device, draw: Any, n: int) -> None:
    keys = with_repeats(draw(100), n)
    tables = torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(2)).int().sort().values
    ours = dedup(keys.to(device), tables.to(device), tables_sorted=True)
    plain = dedup(keys.to(device), tables.to(device), 5)
    number = int(ours.number.item())
    assert number == plain.number.item()
    pairs = list(zip(ours.tables[:number].tolist(), ours.keys[:number].tolist(), strict=True))
    hashes = dict(zip(keys.tolist(), reference.hash_key(keys).tolist(), strict=True))
    assert pairs == sorted(pairs, key=lambda pair: (hashes[pair[1]] & (2**64 - 1), pair[0]))
    real = slice(int(plain.number.item()))
    expected = zip(plain.tables[real].tolist(), plain.keys[real].tolist(), plain.counts[real].tolist(), strict=True)
    assert set(expected) == {(*pair, count) for pair, count in zip(pairs, ours.counts.tolist(), strict=False)}
    place = ours.inverse.long()
    assert torch.equal(ours.keys[place].cpu(), keys) and torch.equal(ours.tables[place].cpu(), tables)


def test_one_key_a_thousand_times_and_all_keys_once(device: torch.device, draw: Any) -> None:
    one = torch.full((2500,), -1)
    same(dedup(one.to(device)), one, None)
    many = draw(2500)
    same(dedup(many.to(device)), many, None)


def test_blocks_of_any_size_and_many_blocks_give_the_same(
    device: torch.device, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = with_repeats(draw(200), 600).to(device)
    tables = torch.zeros(600, dtype=torch.int32, device=device)
    slots = torch.randint(-1, 1, (600,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)).to(device)
    count = int((slots < 0).sum())
    results = []
    for block, chunk in ((64, 4), (1024, 256), (1024, 256)):
        monkeypatch.setattr(dedup_module, "BLOCK", block)
        monkeypatch.setattr(dedup_module, "CHUNK", chunk)
        unique = dedup(keys, tables, 1)
        number = int(unique.number.item())
        results.append([*unique[:5], unique.order, unique.starts[:number], absent_positions(slots, count)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("n", [0, 1, 1024, 2100])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_positions_of_absent_keys_rise(device: torch.device, n: int, share: float) -> None:
    u = torch.rand(n, generator=torch.Generator().manual_seed(n))
    slots = torch.where(u < share, -1, torch.arange(n)).int()
    expected = reference.compact(slots)
    assert absent_positions(slots.to(device), len(expected)).tolist() == expected.tolist()


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    with pytest.raises(BatchError, match="count is 3"):
        absent_positions(torch.zeros(2, dtype=torch.int32, device=device), 3)
    with pytest.raises(BatchError, match="tables has 1 entries"):
        dedup(torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device))


@pytest.mark.gpu
def test_ten_million_keys() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    keys = torch.randint(-(2**40), 2**20, (10_000_000,), device="cuda")
    unique = dedup(keys)
    number = int(unique.number.item())
    assert number == len(torch.unique(keys))
    assert torch.equal(unique.keys[unique.inverse.long()], keys)
    assert torch.equal(unique.counts.sum(), torch.tensor(len(keys), device="cuda"))
