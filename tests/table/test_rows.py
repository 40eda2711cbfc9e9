"""A table's rows by key: what can be set and seen, and what is refused without touching a row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hotrow.config import Initial
from hotrow.errors import BatchError, MemoryBudgetError
from hotrow.optim import SGD, Adam
from hotrow.table import Table, TableRows
from hotrow.table.rows import HotKey
from hotrow.tiers.host.store import Budget


@pytest.fixture
def rows() -> TableRows:
    return TableRows(Table("t", dim=2), Adam(), seed=1, budget=Budget())


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ids(*keys: int) -> Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def test_new_rows_depend_on_seed_table_and_key_alone() -> None:
    def values(name: str, seed: int, *keys: int) -> Tensor:
        rows = TableRows(Table(name, dim=4, initial=Initial.normal()), SGD(), seed, Budget())
        for key in keys:
            rows.create(ids(key))
        return rows.read(ids(1, 2, 3))

    want = values("a", 1, 1, 2, 3)
    assert torch.equal(values("a", 1, 3, 1, 2), want) and torch.equal(values("a", 1), want)
    assert not torch.equal(values("b", 1), want) and not torch.equal(values("a", 2), want)


@pytest.mark.parametrize(
    ("initial", "low", "high"),
    [
        (Initial.zeros(), 0.0, 0.0),
        (Initial.constant(0.25), 0.25, 0.25),
        (Initial.uniform(-0.5, 0.5), -0.5, 0.5),
        (Initial.normal(1.0, 0.0), 1.0, 1.0),
    ],
)
def test_initial_values_are_in_their_range(initial: Initial, low: float, high: float) -> None:
    rows = TableRows(Table("t", dim=5, initial=initial), SGD(), 0, Budget())
    values = rows.read(torch.arange(1000))
    assert low <= float(values.min()) and float(values.max()) <= high


def test_counts_and_last_steps_can_be_set_and_are_scanned(rows: TableRows) -> None:
    rows.assign(ids(5, -5), torch.ones(2, 2), counts=ids(4095, 3), last_steps=ids(10, (1 << 32) - 2))
    (scanned,) = rows.scan()
    assert dict(zip(scanned.keys.tolist(), scanned.counts.tolist(), strict=True)) == {5: 4095, -5: 3}
    assert dict(zip(scanned.keys.tolist(), scanned.last_steps.tolist(), strict=True)) == {5: 10, -5: (1 << 32) - 2}


@pytest.mark.parametrize("last_step", [-1, (1 << 32) - 1, 1 << 32])
def test_a_last_step_that_does_not_fit_is_refused(rows: TableRows, last_step: int) -> None:
    with pytest.raises(BatchError, match="last step"):
        rows.assign(ids(5), torch.ones(1, 2), last_steps=ids(last_step))
    assert len(rows) == 0


def test_a_negative_count_is_refused(rows: TableRows) -> None:
    with pytest.raises(BatchError, match="count"):
        rows.assign(ids(5), torch.ones(1, 2), counts=ids(-1))
    assert len(rows) == 0


def test_values_that_do_not_fit_are_refused_and_change_nothing(rows: TableRows) -> None:
    rows.assign(ids(1), torch.ones(1, 2))
    for values, why in (
        (torch.ones(2, 2), r"values have shape \[2, 2\] for 1 keys; give \[1, 2\], or \[1, 6\] with optimizer state"),
        (torch.ones(1, 3), r"shape \[1, 3\]"),
        (torch.ones(2), r"shape \[2\]"),
        (torch.tensor([[1.0, float("nan")]]), "NaN or infinite"),
        (torch.full((1, 2), 1e300, dtype=torch.float64), "NaN or infinite"),
    ):
        with pytest.raises(BatchError, match=why):
            rows.assign(ids(1), values)
    with pytest.raises(BatchError, match="1 duplicate keys; give each key once"):
        rows.assign(ids(1, 1), torch.zeros(2, 2))
    with pytest.raises(BatchError, match="one count per key"):
        rows.assign(ids(1), torch.zeros(1, 2), counts=ids(1, 2))
    assert rows.read(ids(1)).tolist() == [[1.0, 1.0]] and len(rows) == 1


def test_keys_that_are_no_vector_of_int64_are_refused(rows: TableRows) -> None:
    for keys in (torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([1], dtype=torch.int32), torch.tensor(1)):
        with pytest.raises(BatchError, match=r"pass a 1-d tensor of torch\.int64"):
            rows.read(keys)
        with pytest.raises(BatchError, match=r"pass a 1-d tensor of torch\.int64"):
            rows.create(keys)
    assert len(rows) == 0


def test_keys_that_lie_apart_in_memory_are_understood(rows: TableRows) -> None:
    rows.create(torch.arange(10)[::3])
    assert rows.contains(torch.arange(10)).nonzero().flatten().tolist() == [0, 3, 6, 9]


@pytest.mark.usefixtures("double_by_default")
def test_rows_are_float32_whatever_torchs_default_is(rows: TableRows) -> None:
    rows.assign(ids(1), torch.full((1, 2), 0.5))
    assert rows.read(ids(1)).dtype == torch.float32
    assert rows.read(ids(1)).tolist() == [[0.5, 0.5]]
    assert next(rows.scan()).values[:, :2].tolist() == [[0.5, 0.5]]


def test_a_scan_in_pieces_sees_every_row_once(rows: TableRows) -> None:
    rows.create(torch.arange(100))
    rows.erase(torch.arange(0, 100, 3))
    pieces = [chunk.keys.tolist() for chunk in rows.scan(chunk=7)]
    assert all(len(piece) <= 7 for piece in pieces)
    assert sorted(key for piece in pieces for key in piece) == [key for key in range(100) if key % 3]


def test_the_hottest_keys_come_first(rows: TableRows) -> None:
    counts = ids(3, 100, 7, 50)
    rows.assign(ids(1, 2, 3, 4), torch.zeros(4, 2), counts=counts, last_steps=ids(1, 1, 1, 2))
    assert rows.hottest(2) == [HotKey(2, 100, 1), HotKey(4, 50, 2)]
    assert [hot.key for hot in rows.hottest(10)] == [2, 4, 3, 1]


def test_state_of_scanned_rows_is_found_by_name(rows: TableRows) -> None:
    rows.assign(ids(1), torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]))
    state = rows.state(next(rows.scan()))
    assert {name: part.tolist() for name, part in state.items()} == {"m": [[3.0, 4.0]], "v": [[5.0, 6.0]]}


def test_memory_counts_the_rows_and_goes_to_the_budget(rows: TableRows) -> None:
    budget = Budget(64 << 20)
    table = TableRows(Table("t", dim=16), SGD(), 0, budget)
    table.create(torch.arange(5000))
    report = table.memory()
    assert report["rows"] == 5000 and report["payload_bytes"] == 5000 * 64
    assert report["total_bytes"] == report["row_bytes"] + report["header_bytes"] + report["index_bytes"]
    assert report["payload_bytes"] < budget.used <= report["total_bytes"]
    del table
    assert budget.used == 0


def test_a_table_that_outgrows_its_budget_is_unchanged_and_usable() -> None:
    budget = Budget(8 << 20)
    rows = TableRows(Table("t", dim=16), SGD(), 0, budget)
    rows.create(torch.arange(1000))
    before, used = rows.read(torch.arange(1000)), budget.used
    with pytest.raises(MemoryBudgetError, match=r"table 't' needs .* for 1000000 new rows.*Raise dram="):
        rows.create(torch.arange(1000, 1_001_000))
    with pytest.raises(MemoryBudgetError):
        rows.assign(torch.arange(1000, 1_001_000), torch.zeros(1_000_000, 16))
    assert len(rows) == 1000 and budget.used == used
    assert torch.equal(rows.read(torch.arange(1000)), before)
    rows.create(torch.arange(1000, 1100))
    assert len(rows) == 1100
