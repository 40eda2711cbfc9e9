"""Calls that the collection refuses leave every row unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.errors import BatchError, GradientError, MemoryBudgetError, OptionError
from hotrow.nn import EmbeddingCollection
from hotrow.optim import SGD
from hotrow.table import Table


@pytest.fixture
def collection() -> EmbeddingCollection:
    """Two tables that have been trained for a step on keys 0 to 9."""
    collection = EmbeddingCollection([Table("user", dim=2), Table("item", dim=3)], SGD(lr=0.1))
    train(collection, torch.arange(10))
    return collection


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch_of(keys: Tensor) -> KeyedBatch:
    return KeyedBatch({"user": Jagged(keys), "item": Jagged(keys)})


def train(collection: EmbeddingCollection, keys: Tensor, factor: float = 1.0, grad_scale: float = 1.0) -> None:
    vectors = collection(batch_of(keys))
    (factor * (vectors["user"].sum() + vectors["item"].sum())).backward()
    collection.step(grad_scale)


def rows_of(collection: EmbeddingCollection) -> list[list[list[float]]]:
    return [
        [[key, *values, count, step] for key, values, count, step in zip(*parts, strict=True)]
        for rows in collection.tables
        for chunk in rows.scan()
        for parts in [[part.tolist() for part in (chunk.keys, chunk.values, chunk.counts, chunk.last_steps)]]
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_raises_and_changes_no_row(collection: EmbeddingCollection, bad: float) -> None:
    before = rows_of(collection)
    with pytest.raises(GradientError, match="a gradient is NaN or infinite; no row was changed"):
        train(collection, torch.arange(5), factor=bad)
    assert rows_of(collection) == before and collection.steps == 1
    train(collection, torch.arange(5))
    assert rows_of(collection) != before and collection.steps == 2


def test_a_bad_gradient_in_one_of_several_passes_changes_no_row(collection: EmbeddingCollection) -> None:
    before = rows_of(collection)
    for factor in (1.0, math.nan):
        (factor * collection(batch_of(torch.arange(5)))["item"].sum()).backward()
    with pytest.raises(GradientError):
        collection.step()
    assert rows_of(collection) == before
    collection.step()  # the bad gradients are gone
    assert rows_of(collection) == before


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_gradient_scale_that_is_not_finite_raises_and_changes_no_row(
    collection: EmbeddingCollection, scale: float
) -> None:
    before = rows_of(collection)
    with pytest.raises((GradientError, OptionError)):
        train(collection, torch.arange(5), grad_scale=scale)
    assert rows_of(collection) == before


def test_a_batch_beyond_the_budget_leaves_all_tables_as_they_were_and_usable() -> None:
    tables = [Table("small", dim=1), Table("large", dim=256)]
    collection = EmbeddingCollection(tables, SGD(lr=0.1), Memory(dram="16MiB"))

    def step(small: Tensor, large: Tensor) -> None:
        vectors = collection(KeyedBatch({"small": Jagged(small), "large": Jagged(large)}))
        (vectors["small"].sum() + vectors["large"].sum()).backward()
        collection.step()

    step(torch.arange(100), torch.arange(100))
    before, used, report = rows_of(collection), collection.budget.used, collection.memory_report()
    with pytest.raises(MemoryBudgetError, match=r"table 'large' needs .* new rows, but dram=16.0MiB has .* left"):
        step(torch.arange(60_000), torch.arange(60_000))
    assert rows_of(collection) == before
    assert collection.memory_report() == report
    assert collection.budget.used == used
    step(torch.arange(50), torch.arange(50))
    assert collection.steps == 2


def test_the_budget_is_never_passed_while_rows_are_added() -> None:
    collection = EmbeddingCollection([Table("user", dim=16), Table("item", dim=4)], SGD(lr=0.1), Memory(dram="8MiB"))
    with pytest.raises(MemoryBudgetError):
        for first in range(0, 10_000_000, 2000):
            train(collection, torch.arange(first, first + 2000))
            assert collection.budget.used <= 8 << 20
    assert collection.budget.used > 4 << 20  # most of it was put to use


def test_a_feature_that_the_batch_lacks_is_named(collection: EmbeddingCollection) -> None:
    with pytest.raises(BatchError, match=r"the batch has no feature 'item'; did you mean 'items'"):
        collection(KeyedBatch({"user": Jagged(torch.tensor([1])), "items": Jagged(torch.tensor([1]))}))


def test_a_table_that_is_not_there_is_named(collection: EmbeddingCollection) -> None:
    with pytest.raises(OptionError, match=r"there is no table 'usr'; did you mean 'user'"):
        collection.table("usr")


def test_ids_that_are_not_contiguous_are_refused(collection: EmbeddingCollection) -> None:
    with pytest.raises(BatchError, match="contiguous"):
        collection(batch_of(torch.arange(10)[::2]))


def test_tables_that_clash_are_refused() -> None:
    with pytest.raises(OptionError, match="needs at least one table"):
        EmbeddingCollection([])
    with pytest.raises(OptionError, match=r"tables must be hr.Table, got str"):
        EmbeddingCollection(["user"])  # type: ignore[list-item]
    with pytest.raises(OptionError, match=r"two tables are named 'a'"):
        EmbeddingCollection([Table("a", dim=2), Table("a", dim=2)])
    with pytest.raises(OptionError, match=r"feature 'x' is in tables 'a' and 'b'"):
        EmbeddingCollection([Table("a", dim=2, features=["x"]), Table("b", dim=2, features=["x"])])


def test_a_feature_named_like_the_mask_of_a_sequence_is_refused() -> None:
    with pytest.raises(OptionError, match="h_mask"):
        EmbeddingCollection([Table("t", dim=2, features={"h": "none", "h_mask": "sum"})])


@pytest.mark.usefixtures("double_by_default")
def test_training_works_whatever_torchs_default_dtype_is() -> None:
    collection = EmbeddingCollection([Table("user", dim=2), Table("item", dim=3)], SGD(lr=0.1))
    train(collection, torch.arange(3))
    assert collection(batch_of(torch.arange(3)))["user"].dtype == torch.float32
