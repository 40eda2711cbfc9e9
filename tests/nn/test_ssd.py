"""Training with rows larger than memory: the same losses and the same rows, bit for bit, for every budget."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from torch import Tensor, nn

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.data import Cursor
from hotrow.errors import CheckpointError, MemoryBudgetError, OptionError, StorageError
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.optim import SGD, Adam
from hotrow.table import Admission, Table, TableRows
from hotrow.train.trainer import Trainer

TABLES = [
    Table("user", dim=32),
    Table("item", dim=48, features={"clicked": "mean", "history": "none"}),
    Table("tag", dim=24, features=["tags", "topics"], optimizer=SGD(lr=0.1)),
]
KEYS = 16_000  # of each table: some 17 MiB of rows
GENEROUS, MIDDLE, SMALL = "64MiB", "16MiB", "12MiB"


class Clicks:
    """Batches of random keys, the lower ones more often, for a Trainer."""

    def __init__(self, batches: int, size: int = 600, seed: int = 1) -> None:
        self.all = [batch_of(seed * 1000 + i, size) for i in range(batches)]
        self.examples = batches * size

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        for i, batch in enumerate(self.all):
            yield batch, {"batch": i + 1}


def batch_of(seed: int, size: int) -> KeyedBatch:
    generator = torch.Generator().manual_seed(seed)

    def keys(count: int) -> Tensor:
        return (torch.rand(count, generator=generator) ** 1.3 * KEYS).to(torch.int64) * 104_729 - 500_000_000

    def bags() -> Jagged:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        return Jagged(keys(int(lengths.sum())), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))

    return KeyedBatch(
        {"user": Jagged(keys(size)), **{name: bags() for name in ("clicked", "history", "tags", "topics")}},
        labels=(torch.rand(size, generator=generator) < 0.4).float(),
    )


class Tower(nn.Module):
    """Over pooled vectors and a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(32 + 48 + 48 + 24 + 24, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        history = (vectors["history"] * vectors["history_mask"].unsqueeze(-1)).sum(1)
        pooled = [vectors[name] for name in ("user", "clicked", "tags", "topics")]
        return self.top(torch.cat([*pooled, history], dim=1)).squeeze(1)


def trainer_of(memory: Memory | None = None, accumulate: int = 1) -> Trainer:
    torch.manual_seed(0)
    embeddings = EmbeddingCollection(TABLES, optimizer=Adam(lr=0.01), memory=memory, seed=4)
    return Trainer(Recommender(embeddings, Tower()), accumulate=accumulate)


def rows_of(rows: TableRows) -> list[Tensor]:
    """Keys, bits, counts and last steps, by rising key."""
    chunks = list(rows.scan())
    keys = torch.cat([chunk.keys for chunk in chunks])
    order = keys.argsort()
    bits = torch.cat([chunk.values for chunk in chunks]).view(torch.int32)
    rest = [torch.cat([getattr(chunk, part) for chunk in chunks])[order] for part in ("counts", "last_steps")]
    return [keys[order], bits[order], *rest]


def assert_same(a: EmbeddingCollection, b: EmbeddingCollection) -> None:
    for ours, theirs in zip(a.tables, b.tables, strict=True):
        assert len(ours) == len(theirs)
        for x, y in zip(rows_of(ours), rows_of(theirs), strict=True):
            assert torch.equal(x, y)


def evicted(collection: EmbeddingCollection) -> list[int]:
    return [rows.store.tier()["evicted"] for rows in collection.tables]


# --- the same bits


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dram", [GENEROUS, MIDDLE, SMALL])
def test_every_budget_gives_the_losses_and_rows_of_dram_alone(dram: str, accumulate: int, tmp_path: Path) -> None:
    clicks, held_out = Clicks(24), Clicks(2, seed=9)
    alone = trainer_of(accumulate=accumulate)
    tiered = trainer_of(Memory(dram=dram, ssd=tmp_path), accumulate)
    reports = [trainer.fit(clicks, evaluate=held_out, evaluate_every=5, progress=False) for trainer in (alone, tiered)]
    assert reports[0].losses == reports[1].losses
    assert reports[0].evaluations == reports[1].evaluations and reports[0].evaluations
    embeddings = tiered.model.embeddings
    assert_same(embeddings, alone.model.embeddings)
    for ours, theirs in zip(tiered.model.tower.parameters(), alone.model.tower.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert embeddings.budget.used <= embeddings.budget.limit
    if dram == SMALL:
        gone = evicted(embeddings)  # which batch's rows, depends on how far the earlier stages were
        assert sum(gone) > 5000
    elif dram == GENEROUS:
        assert evicted(embeddings) == [0, 0, 0]


def test_evaluation_creates_nothing_and_moves_nothing(tmp_path: Path) -> None:
    tiered = trainer_of(Memory(dram=SMALL, ssd=tmp_path))
    tiered.fit(Clicks(12), progress=False)
    embeddings = tiered.model.embeddings
    before = [rows.store.tier() for rows in embeddings.tables]
    rows_before = [rows_of(rows) for rows in embeddings.tables]
    used = embeddings.budget.used
    tiered.evaluate(Clicks(3, seed=7), progress=False)
    for rows, was, old in zip(embeddings.tables, before, rows_before, strict=True):
        now = rows.store.tier()
        moved = {name for name in was if was[name] != now[name]} - {"bytes_read", "blocks_read", "rows_read"}
        assert not moved & {"evicted", "arrivals", "cold_rows", "hits", "misses", "bytes_written"}, moved
        assert all(torch.equal(a, b) for a, b in zip(rows_of(rows), old, strict=True))
    assert embeddings.budget.used == used


def test_erasing_and_setting_rows_between_steps_reaches_those_on_ssd(tmp_path: Path) -> None:
    alone, tiered = trainer_of(), trainer_of(Memory(dram=SMALL, ssd=tmp_path))
    for seed in range(6):
        for trainer in (alone, tiered):
            trainer.fit(Clicks(4, seed=seed + 1), progress=False)
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randperm(KEYS, generator=generator)[:2000] * 104_729 - 500_000_000
        values = torch.randn(1000, 32, generator=generator)
        counts = []
        for trainer in (alone, tiered):
            user = trainer.model.embeddings.table("user")
            counts.append(user.erase(keys[:1000]))
            user.assign(keys[1000:], values)
            assert torch.equal(user.read(keys[1000:]), values)
            assert not user.contains(keys[:1000]).any()
        assert counts[0] == counts[1] > 0
    assert_same(tiered.model.embeddings, alone.model.embeddings)


def test_prefetching_at_random_moments_changes_nothing(tmp_path: Path) -> None:
    alone, tiered = trainer_of(), trainer_of(Memory(dram=MIDDLE, ssd=tmp_path))
    first, second = Clicks(16), Clicks(16, seed=2)
    for trainer in (alone, tiered):
        trainer.lookahead = 0  # whose own prefetching would be counted too
        trainer.fit(first, progress=False)
    tickets = []

    class WithPrefetch(Clicks):
        def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
            for i, (batch, after) in enumerate(second.batches(cursor)):
                following = second.all[min(i + 1, 15)]
                for rows in tiered.model.embeddings.tables:
                    some = [following.ids[feature].values for feature in rows.table.poolings]
                    tickets.append(rows.prefetch(torch.cat(some)))
                yield batch, after

    losses = alone.fit(second, progress=False).losses
    assert tiered.fit(WithPrefetch(0), progress=False).losses == losses
    came = [ticket.wait() for ticket in tickets]
    assert all(ticket.done for ticket in tickets) and sum(came) > 100
    assert sum(rows.store.tier()["prefetched"] for rows in tiered.model.embeddings.tables) == sum(came)
    assert_same(tiered.model.embeddings, alone.model.embeddings)


def test_a_prefetched_row_is_there_when_the_batch_comes(tmp_path: Path) -> None:
    collection = EmbeddingCollection([Table("t", dim=64)], memory=Memory(dram="8MiB", ssd=tmp_path))
    rows = collection.tables[0]
    rows.create(torch.arange(1000))
    rows.store.core.evict(1000)
    assert rows.store.tier()["cold_rows"] == 1000
    ticket = rows.prefetch(torch.cat([torch.arange(500), torch.arange(5000, 5100)]))
    assert ticket.wait() == 500 and ticket.done
    assert len(rows) == 1000  # keys without a row get none
    collection(KeyedBatch({"t": Jagged(torch.arange(500))}))
    assert rows.store.tier()["misses"] == 0 and rows.store.tier()["hits"] == 500
    assert rows.prefetch(torch.arange(500)).wait() == 0


def test_a_prefetch_beyond_the_budget_brings_what_fits(tmp_path: Path) -> None:
    collection = EmbeddingCollection([Table("t", dim=256)], memory=Memory(dram="12MiB", ssd=tmp_path))
    rows = collection.tables[0]
    rows.create(torch.arange(30_000))
    before = rows.read(torch.arange(30_000))
    lookup = collection.route(KeyedBatch({"t": Jagged(torch.arange(3000))})).fetch()
    assert 0 < rows.prefetch(torch.arange(30_000)).wait() < 30_000
    assert torch.equal(collection(lookup)["t"], before[:3000])
    assert torch.equal(rows.read(torch.arange(30_000)), before)
    assert collection.budget.used <= collection.budget.limit


def test_a_row_may_be_held_by_more_batches_than_a_byte_can_count(tmp_path: Path) -> None:
    """Gradient accumulation over 300 batches, all of which hold one row."""
    alone = EmbeddingCollection([Table("t", dim=64)], SGD(lr=0.1))
    tiered = EmbeddingCollection([Table("t", dim=64)], SGD(lr=0.1), memory=Memory(dram="8MiB", ssd=tmp_path))
    for collection in (alone, tiered):
        for _ in range(2):
            for _ in range(256):
                collection(KeyedBatch({"t": Jagged(torch.tensor([7]))}))["t"].sum().backward()
            collection.tables[0].store.core.evict(10)
            for _ in range(44):
                collection(KeyedBatch({"t": Jagged(torch.tensor([7, 8]))}))["t"].sum().backward()
            collection.step()
        collection.tables[0].create(torch.arange(100, 5000))
    assert_same(tiered, alone)


# --- budgets


def test_a_batch_that_cannot_fit_is_refused_and_everything_stays_usable(tmp_path: Path) -> None:
    alone, tiered = trainer_of(), trainer_of(Memory(dram=SMALL, ssd=tmp_path))
    for trainer in (alone, tiered):
        trainer.fit(Clicks(8), progress=False)
    embeddings = tiered.model.embeddings
    huge = batch_of(77, 60_000)
    with pytest.raises(MemoryBudgetError, match=r"table '.*' needs .* but dram=12\.0MiB has .* left.*Raise dram="):
        embeddings(KeyedBatch({name: Jagged(torch.arange(60_000)) for name in huge.ids}))
    assert_same(embeddings, alone.model.embeddings)
    assert embeddings.budget.used <= embeddings.budget.limit
    losses = [trainer.fit(Clicks(8, seed=3), progress=False).losses for trainer in (alone, tiered)]
    assert losses[0] == losses[1]
    assert_same(embeddings, alone.model.embeddings)


def test_a_budget_too_small_for_its_tables_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"dram=1\.0 MiB is too small for 3 tables over ssd=; give at least"):
        trainer_of(Memory(dram="1MiB", ssd=tmp_path))
    trainer_of(Memory(dram=SMALL, ssd=tmp_path))  # the folder is unlocked
    sketch = [Table("t", dim=4, admission=Admission(after=2, sketch="16MiB"))]
    with pytest.raises(
        MemoryBudgetError, match=r"dram=16\.0 MiB is too small for 1 tables over ssd=; give at least 19MiB"
    ):
        EmbeddingCollection(sketch, memory=Memory(dram="16MiB", ssd=tmp_path))


CHILD = """
import gc, sys, torch
from hotrow import _core
from hotrow.batch import Jagged, KeyedBatch
from hotrow.bench.storage.rows import resident
from hotrow.config import Memory
from hotrow.nn import EmbeddingCollection
from hotrow.optim import Adam
from hotrow.table import Table

torch.set_num_threads(1)
_core.set_threads(2)


def train(collection, steps, keys):
    worst = 0
    for step in range(steps):
        ids = torch.randint(0, keys, (8192,), generator=torch.Generator().manual_seed(step)) * 7919
        collection(KeyedBatch({"t": Jagged(ids)}))["t"].sum().backward()
        collection.step()
        worst = max(worst, resident())
    return worst


def collection_in(folder, dram):
    return EmbeddingCollection([Table("t", dim=64)], Adam(lr=0.01), memory=Memory(dram=dram, ssd=folder))


train(collection_in(sys.argv[1] + "/warm-up", "16MiB"), 6, 10_000)
gc.collect()
before = resident()
collection = collection_in(sys.argv[1] + "/rows", "64MiB")
worst = train(collection, 60, 2_000_000)
tier = collection.tables[0].store.tier()
print(worst - before, len(collection.tables[0]) * collection.tables[0].store.width * 4, collection.budget.used)
"""


def test_rows_indexes_and_buffers_stay_inside_the_budget_as_the_system_counts_them(tmp_path: Path) -> None:
    """Rows are nearly 5 times dram=. The allowance is for other memory: a batch's keys, vectors and gradients."""
    allowance = 24 << 20
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, timeout=120, env={**os.environ}
    )
    assert run.returncode == 0, run.stderr
    grown, payload, used = map(int, run.stdout.split())
    assert payload > 4.5 * (64 << 20)
    assert used <= 64 << 20
    assert grown < (64 << 20) + allowance, f"{grown / 2**20:.1f} MiB"


# --- options and folders


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ssd": "rows"}, r"ssd='rows' without dram=: say how much DRAM the cache over it may take"),
        ({"ssd": "", "dram": "1GiB"}, r"ssd='': give a folder on a local disk"),
        ({"ssd": 5, "dram": "1GiB"}, r"ssd=5: give a folder"),
        ({"ssd": "rows", "dram": "lots"}, r"dram='lots' is not a size"),
    ],
)
def test_a_memory_that_makes_no_sense_is_refused(options: dict[str, str], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        Memory(**options)


def test_a_folder_belongs_to_one_collection_at_a_time(tmp_path: Path) -> None:
    first = EmbeddingCollection([Table("t", dim=8)], memory=Memory(dram="16MiB", ssd=tmp_path))
    first.tables[0].create(torch.arange(100))
    with pytest.raises(StorageError, match=str(tmp_path)):
        EmbeddingCollection([Table("t", dim=8)], memory=Memory(dram="16MiB", ssd=tmp_path))
    code = (
        "from hotrow import EmbeddingCollection, Memory, Table\n"
        f"EmbeddingCollection([Table('t', dim=8)], memory=Memory(dram='16MiB', ssd={str(tmp_path)!r}))"
    )
    other = forked.python(code, log=tmp_path.with_suffix(".log"))
    assert other.wait(60) != 0 and "StorageError" in other.text()
    assert first.tables[0].contains(torch.arange(100)).all()
    del first
    again = EmbeddingCollection([Table("t", dim=8)], memory=Memory(dram="16MiB", ssd=tmp_path))
    assert len(again.tables[0]) == 0  # all state that must survive is in checkpoints


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="file"):
        EmbeddingCollection([Table("t", dim=8)], memory=Memory(dram="16MiB", ssd=tmp_path / "file" / "rows"))


def test_a_damaged_block_is_named_by_every_reader(tmp_path: Path) -> None:
    collection = EmbeddingCollection([Table("t", dim=64)], memory=Memory(dram="8MiB", ssd=tmp_path))
    rows = collection.tables[0]
    rows.create(torch.arange(30_000))
    rows.store.core.evict(30_000)
    segments = sorted((tmp_path / "t").glob("*.hrs"))
    with open(segments[0], "r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)
        file.seek(4096 + 100)
        file.write(bytes([byte[0] ^ 1]))
    damaged = next(keys for keys in torch.arange(30_000).split(500) if not readable(rows, keys))
    batch = KeyedBatch({"t": Jagged(damaged)})
    for meet in (
        lambda: rows.contains(damaged),
        lambda: rows.erase(damaged),
        lambda: rows.create(damaged),
        lambda: rows.assign(damaged, torch.zeros(500, 64)),
        lambda: list(rows.scan()),
        lambda: rows.prefetch(damaged).wait(),
        lambda: collection.train()(batch),
        lambda: collection.eval()(batch),
    ):
        with pytest.raises(CheckpointError, match=segments[0].name):
            meet()
    assert sum(readable(rows, keys) for keys in torch.arange(30_000).split(500)) == 59  # the others are as they were


def readable(rows: TableRows, keys: Tensor) -> bool:
    try:
        return bool(rows.contains(keys).all())
    except CheckpointError:
        return False
