from __future__ import annotations

import pytest
import torch
from kernels import reference

from hotrow.kernels.rows import runs
from hotrow.kernels.rows.runs import CAPTURE_AFTER, Grouper, group


def _check(slots: torch.Tensor, device: torch.device) -> None:
    got = group(slots.to(device))
    order, starts, unique = reference.group(slots)
    number = int(got.number)
    assert number == len(unique)
    assert got.order.tolist() == order
    assert got.starts[: number + 1].tolist() == starts
    assert got.slots[:number].tolist() == unique
    assert got.run_of.tolist() == [r for r in range(number) for _ in range(starts[r], starts[r + 1])]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000, 4096, 4097, 20000])
@pytest.mark.parametrize("highest", [1, 50, 2**31 - 2])
def test_runs_of_random_slots(n: int, highest: int, device: torch.device) -> None:
    _check(torch.randint(-1, highest, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(n)), device)


def test_one_row_owns_everything(device: torch.device) -> None:
    _check(torch.full((9000,), 5, dtype=torch.int32), device)


def test_every_row_once(device: torch.device) -> None:
    _check(torch.randperm(9000, generator=torch.Generator().manual_seed(0)).int(), device)


def test_many_blocks_add_up_the_counts_before_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BLOCK", 16)
    monkeypatch.setattr(runs, "COUNTS", 4)
    _check(torch.randint(0, 100, (400,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)), device)


def test_recorded_launches_group_as_plain_ones(device: torch.device) -> None:
    grouper = Grouper()
    for size in (50, 0, 700):
        for seed in range(CAPTURE_AFTER + 3):
            slots = torch.randint(-1, 40, (size,), generator=torch.Generator().manual_seed(seed)).int().to(device)
            ours, plain = grouper(slots), group(slots)
            number = int(plain.number.item())
            assert ours.number.item() == number
            assert torch.equal(ours.order, plain.order) and torch.equal(ours.run_of, plain.run_of)
            assert torch.equal(ours.starts[: number + 1], plain.starts[: number + 1])
            assert torch.equal(ours.slots[:number], plain.slots[:number])
