"""Rows leave HBM for DRAM: none is lost, or an error says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hbm_runs import MANY, ROOMY, Clicks, batch, one_table, rows_of, train_on, trainer_of, with_miss_lists

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.errors import MemoryBudgetError, StorageError
from hotrow.tiers.hbm.row_transfer import RowTransfer
from hotrow.tiers.hbm.table_group import TableGroup
from hotrow.tiers.host.row_staging import RowLocations


def test_many_rows_come_down_a_few_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.row_transfer.CHUNK_BYTES", 1 << 10)
    trainer, plain = trainer_of(Memory(hbm=ROOMY), device), trainer_of(None)
    for each in (trainer, plain):
        each.fit(Clicks(1), progress=False)
    assert trainer.model.embeddings.hbm_cache is not None
    assert (
        max(
            group.cache.dirty().numel() / group.row_transfer.chunk_rows
            for group in trainer.model.embeddings.hbm_cache.groups
        )
        > 4
    )
    ours, theirs = rows_of(trainer), rows_of(plain)
    for name in ours:
        torch.testing.assert_close(ours[name][1], theirs[name][1], rtol=1e-4, atol=1e-5)


def test_rows_that_could_not_be_put_away_are_an_error_until_a_checkpoint_is_loaded(device: str, tmp_path: Path) -> None:
    trainer = trainer_of(Memory(hbm=ROOMY), device)
    trainer.fit(Clicks(1), progress=False)
    trainer.save(tmp_path)
    saved = rows_of(trainer)
    assert trainer.model.embeddings.hbm_cache is not None

    def fails(places: RowLocations, clean: int) -> None:
        raise StorageError("disk full")

    group = trainer.model.embeddings.hbm_cache.groups[0]
    group._store_in_background(fails, group.locate(group.cache.resident()), 0, None)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"could not be written back: disk full\. They are lost"):
            trainer.model.embeddings.table("user").read(torch.tensor([1]))
    trainer.load(tmp_path)
    for name, parts in rows_of(trainer).items():
        assert all(torch.equal(x, y) for x, y in zip(parts, saved[name], strict=True))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fetch_that_fails_loses_no_row(device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, plain = one_table(Memory(hbm="2KiB"), device, seed), one_table(None, None, seed)
    keys, others = torch.arange(70), torch.arange(1000, 1012)
    embeddings.table("u").create(others)
    for each in (embeddings, plain):
        train_on(each, keys)

    def full(*_: object) -> None:
        raise MemoryBudgetError("dram= is full")

    with monkeypatch.context() as patch, pytest.raises(MemoryBudgetError):
        patch.setattr("hotrow.tiers.host.row_staging.HostRowFetch.fetch", full)
        embeddings(KeyedBatch({"u": Jagged(torch.cat([others, torch.tensor([777])]))}))
    assert torch.equal(embeddings.table("u").read(keys), plain.table("u").read(keys))


LOST = r"could not be written back: no memory\. They are lost; fix this and load"


def no_memory(*_: object) -> None:
    raise RuntimeError("no memory")


def test_keys_that_took_places_of_rows_that_could_not_leave_are_an_error(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = one_table(Memory(hbm="2KiB"), device)
    embeddings.table("u").create(torch.arange(300, 340))
    with_miss_lists(embeddings)
    lookup = embeddings.route(batch(torch.arange(300, 340)))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(RowTransfer, "begin_write_back", no_memory)
        lookup.prefetch()
    embeddings.release(lookup)
    with pytest.raises(StorageError, match=LOST):
        embeddings.table("u").read(MANY)


@pytest.mark.parametrize(("failing", "ahead"), [("begin_write_back", 0), ("begin_write_back", 1), ("deliver", 0)])
def test_an_error_while_rows_move_loses_none_or_says_so(
    device: str, failing: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of a batch's turn and at it, step by step: rows that were not moved yet are unchanged."""
    embeddings, plain = one_table(Memory(hbm="2KiB"), device), one_table(None, None)
    others = torch.arange(1000, 1030)
    for each in (embeddings, plain):
        each.table("u").create(others)
        train_on(each, MANY)
    embeddings.in_flight(ahead)
    for _ in range(4):
        for each in (embeddings, plain):
            train_on(each, torch.tensor([5]))
    lookup = embeddings.route(batch(others))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        if failing == "deliver":
            patch.setattr("hotrow.tiers.hbm.table_group.transfer.deliver", no_memory)
        else:
            patch.setattr(RowTransfer, "begin_write_back", no_memory)
        lookup.prefetch()
        embeddings.fetch(lookup).gather()
    embeddings.release(lookup)
    if failing == "deliver":
        with pytest.raises(StorageError, match=LOST):
            embeddings.table("u").read(MANY)
    else:
        assert torch.equal(embeddings.table("u").read(MANY), plain.table("u").read(MANY))


def test_rows_beside_the_cache_that_could_not_leave_are_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = one_table(Memory(hbm="2KiB"), device)
    embeddings.train()
    lookup = embeddings.fetch(embeddings.route(batch(torch.arange(60))))
    embeddings(lookup)["u"].sum().backward()  # type: ignore[no-untyped-call]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(RowTransfer, "begin_write_back", no_memory)
        embeddings.step()
    embeddings.discard()
    with pytest.raises(StorageError, match=LOST):
        embeddings.table("u").read(torch.arange(60))


def test_rows_that_the_gpu_cannot_reach_are_gathered(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise StorageError("the GPU cannot reach 1 GiB of DRAM rows; lower dram=")

    monkeypatch.setattr("hotrow.kernels.rows.transfer.register_host_memory", unreachable)
    embeddings, plain = one_table(Memory(hbm="64KiB"), device), one_table(None, None)
    for each in (embeddings, plain):
        each.table("u").create(MANY)
    with pytest.warns(UserWarning, match=r"lower dram=\. Until then all rows are gathered") as warned:
        for each in (embeddings, plain):
            train_on(each, MANY)
            train_on(each, MANY + 20)
    assert len(warned) == 1
    assert torch.equal(embeddings.table("u").read(MANY), plain.table("u").read(MANY))


def test_few_rows_wait_to_be_written_back_however_slow_that_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write-back thread is replaced by one that runs a task only when a caller waits for it."""
    monkeypatch.setattr("hotrow.tiers.hbm.row_transfer.CHUNK_BYTES", 64)
    embeddings = one_table(Memory(hbm="64KiB"), device)
    train_on(embeddings, torch.arange(300))
    assert embeddings.hbm_cache is not None
    group, waiting, most = embeddings.hbm_cache.groups[0], list[Callable[[], None]](), 0

    class Waiting:
        def __init__(self, put: Callable[[], None]) -> None:
            self.put: Callable[[], None] | None = put
            waiting.append(put)

        def result(self) -> None:
            while self.put in waiting:
                waiting.pop(0)()

    def begin_write_back(*given: Any, **options: Any) -> Callable[[], None]:
        put = TableGroup.begin_write_back(group, *given, **options)

        def behind() -> None:
            nonlocal most
            group.last_write_back = Waiting(put)  # type: ignore[assignment]
            most = max(most, len(waiting))

        return behind

    monkeypatch.setattr(group, "begin_write_back", begin_write_back)
    monkeypatch.setattr(group, "_submit_write_back", group._store)  # this test's thread is the only background thread
    group.flush()
    assert most == 2 and not waiting
