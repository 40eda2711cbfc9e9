"""Rows between slots, buffers and host memory: copied whole, and nothing beside them is touched."""

from __future__ import annotations

import pytest
import torch

from hotrow.errors import StorageError
from hotrow.kernels import launch
from hotrow.kernels.rows.layout import Source
from hotrow.kernels.rows.transfer import (
    FetchedRowWriter,
    HostRowReader,
    collect,
    copy_to_pinned,
    deliver,
    register_host_memory,
)

CAPACITY, EXTRA = 40, 12


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_rows(width: int, device: torch.device, extra: bool = True) -> Source:
    """Rows that are wider than what is moved, and the batch's own behind them."""
    stride = width + 3
    own = drawn(EXTRA, stride, seed=1).to(device) if extra else None
    return Source(drawn(CAPACITY, stride).to(device), own)


def some_slots(n: int, limit: int, device: torch.device) -> torch.Tensor:
    """n unique slots below `limit` in random order, every fourth replaced by -1."""
    slots = torch.randperm(limit, generator=torch.Generator().manual_seed(n))[:n].int()
    slots[::4] = -1
    return slots.to(device)


def row(source: Source, slot: int) -> torch.Tensor:
    if slot < CAPACITY:
        return source.rows[slot]
    assert source.extra is not None
    return source.extra[slot - CAPACITY]


def copied(source: Source) -> Source:
    return Source(source.rows.clone(), None if source.extra is None else source.extra.clone())


def same(source: Source, expected: Source) -> None:
    assert torch.equal(source.rows, expected.rows)
    if source.extra is not None and expected.extra is not None:
        assert torch.equal(source.extra, expected.extra)


SHAPES = [(1, 7), (5, 1), (12, 40), (64, 40), (1025, 3)]  # width, rows


@pytest.mark.parametrize("width, n", SHAPES)
@pytest.mark.parametrize("extra", [True, False])
def test_collected_rows_are_those_of_their_slots(device: torch.device, width: int, n: int, extra: bool) -> None:
    source = some_rows(width, device, extra)
    before = copied(source)
    slots = some_slots(n, CAPACITY + EXTRA if extra else CAPACITY, device)
    out = drawn(slots.numel(), width + 2, seed=2).to(device)
    expected = out.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[i, :width] = row(source, slot)[:width]
    collect(source, slots, width, out)
    assert torch.equal(out, expected)
    same(source, before)


@pytest.mark.parametrize("width, n", SHAPES)
@pytest.mark.parametrize("extra", [True, False])
def test_delivered_rows_go_into_their_slots(device: torch.device, width: int, n: int, extra: bool) -> None:
    source = some_rows(width, device, extra)
    slots = some_slots(n, CAPACITY + EXTRA if extra else CAPACITY, device)
    incoming = drawn(slots.numel(), width + 2, seed=2).to(device)
    expected = copied(source)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row(expected, slot)[:width] = incoming[i, :width]
    deliver(source, slots, width, incoming)
    same(source, expected)


def test_what_is_collected_can_be_delivered_elsewhere(device: torch.device) -> None:
    source, width = some_rows(20, device), 20
    before = copied(source)
    there = torch.arange(CAPACITY - 5, CAPACITY + EXTRA, dtype=torch.int32, device=device)
    staged = torch.empty(there.numel(), width, device=device)
    collect(source, there, width, staged)
    deliver(source, torch.arange(there.numel(), dtype=torch.int32, device=device), width, staged)
    for at, slot in enumerate(there.tolist()):
        assert torch.equal(row(source, at)[:width], row(before, slot)[:width])


@pytest.mark.parametrize("width", [1, 12, 33])
@pytest.mark.parametrize("count", [0, 1, 35])
def test_host_rows_are_read_from_their_tables_memory(device: torch.device, width: int, count: int) -> None:
    host_stride = width + 1
    pinned = device.type == "cuda"  # memory that the GPU can address
    hosts_rows = [torch.empty(30, host_stride, pin_memory=pinned), torch.empty(50, host_stride, pin_memory=pinned)]
    for seed, rows in enumerate(hosts_rows):
        rows.copy_(drawn(*rows.shape, seed=7 + seed))
    source = some_rows(width, device, extra=False)
    bases = torch.tensor([rows.data_ptr() for rows in hosts_rows], device=device)
    pull = HostRowReader(source.rows, bases, width, host_stride, capacity=35)
    for turn in range(2):  # one launch after another
        expected = copied(source)
        slots = some_slots(35, CAPACITY, device)[:count]
        generator = torch.Generator().manual_seed(3 + turn)
        tables = torch.randint(0, 2, (count,), generator=generator).int()
        hosts = torch.empty(count, dtype=torch.int32, pin_memory=pinned)
        hosts.copy_(torch.randint(0, 30, (count,), generator=generator))
        hosts[tables == 1] += 20
        hosts[3::7] = -1
        for slot, table, host in zip(slots.tolist(), tables.tolist(), hosts.tolist(), strict=True):
            if slot >= 0 and host >= 0:
                row(expected, slot)[:width] = hosts_rows[table][host, :width].to(device)
        there = tables.to(device)
        pull.set_request(slots, there, hosts)
        pull()
        same(source, expected)


@pytest.mark.parametrize("width", [1, 12, 33])
@pytest.mark.parametrize("count, first", [(0, 0), (1, 0), (35, 0), (35, 20), (35, 35)])
def test_fetched_rows_and_their_metadata_are_in_their_slots(
    device: torch.device, width: int, count: int, first: int
) -> None:
    pinned = device.type == "cuda"
    source, pairs = some_rows(width, device, extra=False), torch.full((CAPACITY, 2), -9, device=device).int()
    metadata = (torch.full((CAPACITY,), -9, device=device).int(), *pairs.unbind(1))
    writer = FetchedRowWriter(source.rows, metadata, width)
    for turn in range(2):  # one launch after another
        expected, places_there = copied(source), [each.cpu().clone() for each in metadata]
        slots = some_slots(35, CAPACITY, device)[:count]
        places = torch.empty(3, count, dtype=torch.int32, pin_memory=pinned)
        places.copy_(torch.randint(-1, 99, (3, count), generator=torch.Generator().manual_seed(turn)))
        incoming = drawn(count - first, width, seed=turn + 4).to(device)
        for at, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            for each, place in zip(places_there, places, strict=True):
                each[slot] = place[at]
            if at >= first:
                expected.rows[slot, :width] = incoming[at - first]
        writer.set_request(slots, places, first, incoming)
        writer()
        same(source, expected)
        assert all(torch.equal(each.cpu(), place) for each, place in zip(metadata, places_there, strict=True))


def test_no_slots_move_nothing(device: torch.device) -> None:
    source, none = some_rows(12, device), torch.empty(0, dtype=torch.int32, device=device)
    before = copied(source)
    empty = torch.empty(0, 12, device=device)
    collect(source, none, 12, empty)
    deliver(source, none, 12, empty)
    same(source, before)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 3, 16])
def test_numbers_are_copied_to_pinned_memory(n: int) -> None:
    if not torch.cuda.is_available() or launch.INTERPRETED:
        pytest.skip("needs a CUDA device and TRITON_INTERPRET unset")
    pinned = torch.full((n + 1,), 99, dtype=torch.int32, pin_memory=True)
    copy_to_pinned(torch.arange(-1, n - 1, dtype=torch.int32, device="cuda"), pinned)
    torch.cuda.synchronize()
    assert pinned.tolist() == [*range(-1, n - 1), 99]


def test_a_torch_that_cannot_register_memory_is_an_error_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: object())
    with pytest.raises(StorageError, match=r"torch \S+ has no .*cudaHostRegister; HotRow was tested with torch<"):
        register_host_memory(1 << 20, 4096, torch.device("cuda", 0))
