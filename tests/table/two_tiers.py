"""The same training in two stores: all rows in DRAM, and a small DRAM over SSD. Both must have equal rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.nn import EmbeddingCollection
from hotrow.optim import Optimizer
from hotrow.table import Table, TableRows
from hotrow.tiers.host.store import Rows


def rows_of(rows: TableRows) -> Rows:
    """Every row, wherever it is, by rising key."""
    chunks = list(rows.scan())
    if not chunks:
        none = torch.empty(0, dtype=torch.int64)
        return Rows(none, torch.empty(0, rows.store.width), none, none)
    keys = torch.cat([chunk.keys for chunk in chunks])
    order = keys.argsort()
    keys = keys[order]
    assert bool((keys.diff() != 0).all()), "a key has two rows"
    parts = ("values", "counts", "last_steps")
    return Rows(keys, *(torch.cat([getattr(chunk, part) for chunk in chunks])[order] for part in parts))


def assert_same(a: Rows, b: Rows) -> None:
    """Bit for bit."""
    assert torch.equal(a.keys, b.keys)
    assert torch.equal(a.values.view(torch.int32), b.values.view(torch.int32))
    assert torch.equal(a.counts, b.counts) and torch.equal(a.last_steps, b.last_steps)


def shard_of(key: int) -> int:
    """docs/formats/hashing.md: the top ten bits of mix64(key + golden)."""
    x = (key + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 54


class TwoTiers:
    """A table named "t" in both; every batch goes to both."""

    def __init__(self, table: Table, optimizer: Optimizer, folder: Path, dram: str = "8MiB") -> None:
        self.dram = EmbeddingCollection([table], optimizer, seed=3)
        self.ssd = EmbeddingCollection([table], optimizer, seed=3, memory=Memory(dram=dram, ssd=folder / "rows"))
        self.both = (self.dram, self.ssd)
        self.random = torch.Generator().manual_seed(5)

    def train(self, keys: Tensor, time: Tensor | None = None, decay: float = 0.1) -> None:
        """One update, after which some rows are evicted from DRAM."""
        gradient = torch.randn(keys.numel(), self.dram.tables[0].table.dim, generator=self.random)
        for collection in self.both:
            vectors = collection(KeyedBatch({"t": Jagged(keys)}, time=time))["t"]
            (vectors * gradient * 0.1 + decay * vectors**2).sum().backward()
            collection.step()
        self.ssd.tables[0].store.core.evict(int(torch.randint(0, 3000, (), generator=self.random)))

    def draw(self, count: int, keys: int) -> Tensor:
        """Random keys, the lower ones more often."""
        share = torch.rand(count, generator=self.random) ** 3
        return (share * keys).to(torch.int64) * 7919 - 1000

    def same_rows(self) -> dict[int, tuple[int, int]]:
        """The count and last step of each key; both hold the same rows, and the budget is kept."""
        rows = rows_of(self.dram.tables[0])
        assert_same(rows_of(self.ssd.tables[0]), rows)
        assert self.ssd.budget.used <= self.ssd.budget.limit
        return dict(
            zip(rows.keys.tolist(), zip(rows.counts.tolist(), rows.last_steps.tolist(), strict=True), strict=True)
        )
