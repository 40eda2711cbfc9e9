"""The HBM cache stays inside its budgets, and budgets that cannot work are refused with one that does."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from hbm_runs import (
    LARGE,
    MANY,
    ROOMY,
    STEPS,
    Clicks,
    Tower,
    assert_same,
    batch,
    figures_of,
    one_table,
    tables,
    train_on,
    trainer_of,
    update,
    with_miss_lists,
)
from torch import Tensor, nn

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.errors import MemoryBudgetError, OptionError
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.table import Table
from hotrow.tiers.hbm.pinned_ring import UPLOAD_BUFFERS, WRITE_BACK_BUFFERS, PinnedRing
from hotrow.train.trainer import Trainer


def test_budgets_that_cannot_work_are_refused_with_the_one_that_does(device: str, tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"hbm=1\.0 KiB is too small for 4 tables; give at least"):
        trainer_of(Memory(hbm="1KiB"), device)
    with pytest.raises(MemoryBudgetError, match=r"a row in HBM keeps its slot in DRAM\. Give dram= at least"):
        trainer_of(Memory(hbm="64MiB", dram="8MiB", ssd=tmp_path), device)
    with pytest.raises(MemoryBudgetError, match="keeps its slot in DRAM") as too_small:
        trainer_of(Memory(hbm="4MiB", dram="5MiB", ssd=tmp_path / "small"), device)
    works = re.findall("at least ([0-9]+MiB)", str(too_small.value))[0]
    trainer_of(Memory(hbm="4MiB", dram=works, ssd=tmp_path / "enough"), device)
    with pytest.raises(MemoryBudgetError, match=r"rows pass through 64\.0 KiB of pinned memory .* at least 1MiB"):
        trainer_of(Memory(hbm="64KiB", dram="100KiB"), device)
    if device == "cpu":
        with pytest.raises(OptionError, match="needs a GPU"):
            EmbeddingCollection(tables(), memory=Memory(hbm="1MiB"))


@pytest.mark.gpu
def test_hbm_stays_inside_its_budget(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    take_cublas_workspace()
    before = torch.cuda.memory_allocated()
    trainer = trainer_of(Memory(hbm="256MiB"), device)
    assert torch.cuda.memory_allocated() - before <= 256 << 20
    trainer.fit(Clicks(20, size=4096, keys=500_000), progress=False)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 260 << 20  # with the tower and the last batch


def take_cublas_workspace() -> None:
    """cuBLAS allocates 32 MiB for each thread that multiplies, once: for the forward and for the backward pass."""
    product = nn.Linear(32, 32, device="cuda")(torch.ones(64, 32, device="cuda", requires_grad=True))
    product.sum().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_hbm_stays_inside_its_budget_and_scratch_with_batches_ahead(device: str) -> None:
    """The scratch is what docs/hbm.md says: a batch's ids and missing rows, for each batch in flight."""
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    size, lookahead, hbm = 4096, 3, 64 << 20
    take_cublas_workspace()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = trainer_of(Memory(hbm=hbm), device)
    trainer.lookahead = lookahead
    clicks = Clicks(30, size=size, keys=400_000)
    trainer.fit(clicks, epochs=2, progress=False)
    torch.cuda.synchronize()
    ids = clicks.all[0].id_count()
    widest = max(group.width for group in trainer.model.embeddings.hbm_cache.groups)  # type: ignore[union-attr]
    scratch = (lookahead + 2) * ids * (200 + 2 * 4 * widest) + ids * 8 * 32 + (16 << 20)
    assert torch.cuda.max_memory_allocated() - before <= hbm + scratch


def test_tables_that_are_full_get_what_others_leave_empty(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.capacity_split.FIRST_CHECK", 2)
    few = {"user": "user", "item": "clicked"}

    def trainer(hbm: str) -> Trainer:
        torch.manual_seed(0)
        made = [Table(name, dim=8, features={feature: "sum"}) for name, feature in [*few.items(), ("tag", "tags")]]
        made.append(Table("history", dim=8, features={"history": "none"}))
        embeddings = EmbeddingCollection(made, optim.SGD(lr=0.1), Memory(hbm=hbm), seed=4, device=device)
        return Trainer(Recommender(embeddings, Tower(history=8)))

    def narrowed(batch: KeyedBatch) -> KeyedBatch:
        ids = {
            n: Jagged(j.values % 3 if n in few.values() else j.values, j.offsets, j.weights)
            for n, j in batch.ids.items()
        }
        return KeyedBatch(ids, labels=batch.labels)

    source = Clicks(STEPS)
    source.all = [narrowed(batch) for batch in source.all]
    tight, roomy = trainer("40KiB" if LARGE else "12KiB"), trainer(ROOMY)
    reports = [each.fit(source, progress=False) for each in (tight, roomy)]
    assert reports[0].losses == reports[1].losses
    assert_same(tight, roomy)
    assert tight.model.embeddings.hbm_cache is not None
    sets = tight.model.embeddings.hbm_cache.groups[0].cache.index.counts
    assert min(sets[2:]) > 2 * max(sets[:2])


def test_hbm_is_free_when_a_collection_is_let_go(device: str) -> None:
    embeddings = with_miss_lists(one_table(Memory(hbm="2KiB"), device))
    assert embeddings.hbm_cache is not None
    rows = weakref.ref(embeddings.hbm_cache.groups[0].cache)
    gc.disable()
    try:
        del embeddings
        assert rows() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dram", [None, "8MiB"])
def test_rows_pass_through_memory_that_is_part_of_dram(
    device: str, dram: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, where a buffer holds four rows; ahead of their batch's turn and at it."""
    monkeypatch.setattr("hotrow.tiers.hbm.pinned_ring.MIN_BYTES", 64)
    monkeypatch.setattr("hotrow.tiers.hbm.pinned_ring.MAX_BYTES", 64)
    used = [0]

    class Watched(PinnedRing):
        def buffer(self, floats: int) -> Tensor:
            made = super().buffer(floats)
            used.append(sum(size * number for size, number in self._used.items()))
            return made

    monkeypatch.setattr("hotrow.tiers.hbm.cache.PinnedRing", Watched)
    embeddings, plain = one_table(Memory(hbm="2KiB", dram=dram), device), one_table(None, None)
    charged = embeddings.budget.used - one_table(Memory(dram=dram), None).budget.used
    assert embeddings.hbm_cache is not None and embeddings.hbm_cache.groups[0].row_transfer.buffer_rows == 4
    assert (
        charged == figures_of(embeddings)["pinned_bytes"] == (64 * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS) if dram else 0)
    )
    embeddings.in_flight(1)
    keys = [(torch.arange(40) * 7 + 11 * number) % 90 for number in range(5)]
    for number in range(10):
        for each in (embeddings, plain):
            each.train()
        lookup = embeddings.route(batch(keys[number % 5]))
        lookup.stage()
        update(embeddings, embeddings.fetch(lookup))
        train_on(plain, keys[number % 5])
    everything = torch.arange(90)
    assert torch.equal(embeddings.table("u").read(everything), plain.table("u").read(everything))
    pinned = figures_of(embeddings)["pinned_bytes"]
    assert 0 < max(used) <= pinned and (dram is None or pinned == charged)
    with_it, budget = embeddings.budget.used, embeddings.budget
    del embeddings, lookup
    assert budget.used <= with_it - pinned


def test_a_budget_that_the_device_does_not_have_is_refused_with_one_that_it_has(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.cache.free_bytes", lambda device: 1 << 20)
    with pytest.raises(MemoryBudgetError, match=r"hbm=2\.0 MiB does not fit .* give hbm= at most 896\.0 KiB"):
        one_table(Memory(hbm="2MiB"), device)
    one_table(Memory(hbm="896KiB"), device)


@pytest.mark.parametrize("where", ["compact_keys", "gather", "update"])
def test_hbm_that_runs_out_says_which_budget_to_change(
    device: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = one_table(Memory(hbm="64KiB"), device)
    train_on(embeddings, MANY)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 139 GiB")

    monkeypatch.setattr(f"hotrow.tiers.hbm.group_batch.{where}", full)
    with pytest.raises(MemoryBudgetError, match=r"beside hbm=64\.0 KiB: .*2\.00 GiB\. Give hbm= at most 56\.0 KiB"):
        train_on(embeddings, MANY + 5)
