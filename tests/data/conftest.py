"""Small click logs on disk, and equality of streams of batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.features import Dense, FeatureSpec, Key, Sequence


def clicks(rows: int, start: int = 0) -> pa.Table:
    """Rows that differ in every column, with gaps."""
    numbers = range(start, start + rows)
    return pa.table(
        {
            "user": pa.array([f"user-{i % 7}" if i % 5 else None for i in numbers], pa.string()),
            "item": pa.array(numbers, pa.int64()),
            "seen": pa.array([list(range(i % 4)) if i % 6 else None for i in numbers], pa.list_(pa.int64())),
            "price": pa.array([i / 4 if i % 3 else None for i in numbers], pa.float64()),
            "click": pa.array([i % 2 for i in numbers], pa.int64()),
            "when": pa.array([1000 * i for i in numbers], pa.int64()),
        }
    )


@pytest.fixture
def spec() -> FeatureSpec:
    return FeatureSpec([Key("user"), Key("item"), Sequence("seen"), Dense("price")], label="click", time="when")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three Parquet files of 10, 1 and 12 rows, in row groups of 4."""
    start = 0
    for number, rows in enumerate((10, 1, 12)):
        pq.write_table(clicks(rows, start), tmp_path / f"part-{number}.parquet", row_group_size=4)
        start += rows
    return tmp_path


def _same_jagged(a: Jagged, b: Jagged) -> bool:
    return torch.equal(a.values, b.values) and torch.equal(a.lengths(), b.lengths())


def _same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))


@pytest.fixture
def same_batch() -> Callable[[KeyedBatch, KeyedBatch], bool]:
    def same(a: KeyedBatch, b: KeyedBatch) -> bool:
        return (
            list(a.ids) == list(b.ids)
            and all(_same_jagged(a.ids[name], b.ids[name]) for name in a.ids)
            and list(a.numbers) == list(b.numbers)
            and all(_same_jagged(a.numbers[name], b.numbers[name]) for name in a.numbers)
            and all(_same_tensor(getattr(a, part), getattr(b, part)) for part in ("dense", "labels", "time"))
        )

    return same


@pytest.fixture
def check_every_cut(same_batch: Callable[[KeyedBatch, KeyedBatch], bool]) -> Callable[[object], int]:
    """For every cut of a source: the head and the resumed tail are the uninterrupted stream, cursors too."""

    def check(make: Callable[[], object]) -> int:
        whole = list(make().batches())
        for cut in range(len(whole)):
            tail = list(make().batches(dict(whole[cut][1])))
            assert len(tail) == len(whole) - cut - 1
            for (batch, cursor), (expected, expected_cursor) in zip(tail, whole[cut + 1 :], strict=True):
                assert same_batch(batch, expected)
                assert cursor == expected_cursor
        return len(whole)

    return check
