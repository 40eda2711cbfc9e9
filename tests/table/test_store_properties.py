"""Any sequence of operations leaves a table with the rows that a dict of tensors would have, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plain_table import HIGHEST, LOWEST, PlainTable, assert_same_bits, assert_same_rows
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.nn import EmbeddingCollection
from hotrow.optim import FTRL, SGD, Adagrad, Adam, AdamW, Optimizer, RowWiseAdagrad, Schedule
from hotrow.table import Table

OPTIMIZERS: list[Optimizer] = [
    SGD(lr=0.1),
    Adagrad(lr=0.1, initial_accumulator=0.1, clip_value=0.5),
    RowWiseAdagrad(lr=Schedule(0.1, warmup=3), clip_norm=0.7),
    Adam(lr=Schedule(0.01, decay="exponential", steps=10)),
    AdamW(lr=0.01, weight_decay=0.1),
    FTRL(lr=0.1, l1=0.05, l2=0.01),
]

# Few enough to meet again, with both ends of int64 and neighbours across the 32-bit boundary.
few_keys = st.sampled_from(
    [0, 1, -1, 7, LOWEST, LOWEST + 1, HIGHEST, HIGHEST - 1, 1 << 32, -(1 << 32), *range(100, 120)]
)
key_lists = st.lists(few_keys | st.integers(LOWEST, HIGHEST), max_size=12)
bags = st.lists(st.lists(few_keys, max_size=4), max_size=6)
seeds = st.integers(0, 1 << 30)


def ids(keys: list[int]) -> Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def some_floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class StoreMachine(RuleBasedStateMachine):
    """Random operations on a collection of one table and on its oracle."""

    @initialize(optimizer=st.sampled_from(OPTIMIZERS), dim=st.sampled_from([1, 2, 3, 8, 13]), seed=st.integers(-3, 3))
    def begin(self, optimizer: Optimizer, dim: int, seed: int) -> None:
        table = Table("t", dim=dim)
        self.collection = EmbeddingCollection([table], optimizer, seed=seed)
        self.rows = self.collection.table("t")
        self.plain = PlainTable(table, optimizer, seed)

    @rule(keys=key_lists)
    def create(self, keys: list[int]) -> None:
        self.rows.create(ids(keys))
        self.plain.create(keys)

    @rule(keys=key_lists)
    def read(self, keys: list[int]) -> None:
        assert_same_bits(self.rows.read(ids(keys)), self.plain.read(keys))
        assert self.rows.contains(ids(keys)).tolist() == [key in self.plain.rows for key in keys]

    @rule(keys=key_lists, seed=seeds, whole=st.booleans())
    def assign(self, keys: list[int], seed: int, whole: bool) -> None:
        unique = list(dict.fromkeys(keys))
        width = self.rows.store.width if whole else self.plain.dim
        values = some_floats(seed, len(unique), width).abs()  # a state that sums squares is never negative
        self.rows.assign(ids(unique), values)
        self.plain.assign(unique, values)

    @rule(keys=key_lists)
    def erase(self, keys: list[int]) -> None:
        assert self.rows.erase(ids(keys)) == self.plain.erase(keys)

    @rule(rows=bags, seed=seeds)
    def train(self, rows: list[list[int]], seed: int) -> None:
        gradient = some_floats(seed, len(rows), self.plain.dim)
        vectors = self.collection(KeyedBatch({"t": Jagged.from_lists(rows)}))["t"]
        (vectors * gradient).sum().backward()
        self.collection.step()
        positions = [(key, gradient[i]) for i, row in enumerate(rows) for key in row]
        self.plain.train([key for key, _ in positions], [g for _, g in positions], self.collection.steps)

    @rule(rows=bags)
    def evaluate(self, rows: list[list[int]]) -> None:
        with torch.no_grad():
            vectors = self.collection(KeyedBatch({"t": Jagged.from_lists(rows)}))["t"]
        for vector, row in zip(vectors, rows, strict=True):
            want = torch.zeros(self.plain.dim)
            for i, values in enumerate(self.plain.read(row)):
                want = values if i == 0 else want + values
            assert_same_bits(vector, want)

    @invariant()
    def same_rows(self) -> None:
        if hasattr(self, "rows"):
            assert_same_rows(self.rows, self.plain)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_a_long_training_with_erasures_matches_the_dict(optimizer: Optimizer) -> None:
    """More keys than hypothesis draws: shards grow, slots are used again, batches pass the partition size."""
    table = Table("t", dim=3)
    collection = EmbeddingCollection([table], optimizer, seed=9)
    plain = PlainTable(table, optimizer, seed=9)
    generator = torch.Generator().manual_seed(1)
    for size in (300, 0, 1, 9000, 500):
        keys = torch.randint(-400, 400, (size,), generator=generator) * ((1 << 62) // 401)
        gradient = torch.randn(size, 3, generator=generator)
        (collection(KeyedBatch({"t": Jagged(keys)}))["t"] * gradient).sum().backward()
        collection.step()
        plain.train(keys.tolist(), list(gradient), collection.steps)
        gone = keys[::5]
        assert collection.table("t").erase(gone) == plain.erase(gone.tolist())
    assert_same_rows(collection.table("t"), plain)
