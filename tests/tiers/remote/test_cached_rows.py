"""A server's DRAM as a cache over a remote store: the store's rows, for any budget and any publisher."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hotrow.config import Initial
from hotrow.errors import OptionError
from hotrow.optim import Adam
from hotrow.table import Table, TableRows
from hotrow.table.remote_fill import fill_table
from hotrow.tiers.host.store import Budget
from hotrow.tiers.remote.cached_rows import CachedTable
from hotrow.tiers.remote.store import Answer, Keys, RemoteStore, TableFormat, open_remote, write_publication

pytest.importorskip("rocksdict")
DIM, ROWS = 64, 20_000
TABLE = Table("user", dim=DIM, initial=Initial.constant(-1.0))
KEYS = np.arange(ROWS, dtype=np.int64) * 7919 - 10_000


def later() -> float:
    return time.monotonic() + 20


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteStore]:
    store = open_remote(f"rocksdb:{tmp_path / 'rows'}")
    store.create("user", TableFormat(DIM))
    write_publication(store, 1, {"user": (KEYS, values_of(KEYS))})
    yield store
    store.close()


def values_of(keys: Keys, publication: int = 1) -> np.ndarray:
    return np.repeat((keys % 100_003 + publication * 0.5).astype(np.float32)[:, None], DIM, axis=1)


def test_a_small_cache_answers_as_the_store_does_and_keeps_its_budget(remote: RemoteStore) -> None:
    budget = Budget(3 << 20)  # for some thousand rows
    rows = CachedTable(TABLE, remote, 0, budget)
    generator = np.random.default_rng(0)
    asked = 0
    for _ in range(40):
        keys = np.concatenate([generator.choice(KEYS, 900), [5, 5]]).astype(np.int64)
        answer = rows.read(torch.from_numpy(keys), later())
        asked += len(np.unique(keys))
        there = np.isin(keys, KEYS)
        assert answer.found.tolist() == there.tolist() and not answer.late.any()
        np.testing.assert_array_equal(answer.values[answer.found], values_of(keys[there]))
        assert (answer.values[~answer.found] == -1).all()  # as an unseen key
        assert budget.used <= budget.limit
    metrics = rows.metrics()
    assert metrics["evicted"] > 1000 and metrics["rows"] < ROWS / 2
    assert metrics["hits"] > 0 and metrics["absent"] == 40
    assert metrics["hits"] + metrics["misses"] == asked


def test_what_was_read_is_answered_without_the_store(remote: RemoteStore) -> None:
    rows = CachedTable(TABLE, remote, 0, Budget(16 << 20))
    keys = torch.from_numpy(KEYS[:500])
    rows.read(keys, later())
    before = remote.health()["reads"]
    answer = rows.read(keys, time.monotonic() - 1)  # no time for any read
    assert answer.found.all() and remote.health()["reads"] == before
    np.testing.assert_array_equal(answer.values, values_of(KEYS[:500]))


def test_late_rows_are_told_and_not_kept(remote: RemoteStore) -> None:
    rows = CachedTable(TABLE, remote, 0, Budget(16 << 20))
    keys = torch.from_numpy(KEYS[:500])
    answer = rows.read(keys, time.monotonic() - 1)
    assert answer.late.all() and not answer.found.any() and rows.metrics()["late"] == 500
    assert len(rows.store) == 0
    assert rows.read(keys, later()).found.all()


def test_a_publication_changes_and_removes_what_is_cached(remote: RemoteStore) -> None:
    rows = CachedTable(TABLE, remote, 0, Budget(16 << 20))
    rows.read(torch.from_numpy(KEYS[:100]), later())
    changed, gone = KEYS[:50], KEYS[50:60]
    assert (
        rows.apply(2, np.concatenate([changed, KEYS[200:210]]), values_of(np.r_[changed, KEYS[200:210]], 2), gone) == 50
    )
    write_publication(remote, 2, {"user": (changed, values_of(changed, 2))}, {"user": gone})
    answer = rows.read(torch.from_numpy(KEYS[:100]), later())
    np.testing.assert_array_equal(answer.values[:50], values_of(changed, 2))
    np.testing.assert_array_equal(answer.values[60:], values_of(KEYS[60:100]))
    assert not answer.found[50:60].any()


class Slow:
    """A store whose answers are in flight while another call runs."""

    def __init__(self, store: RemoteStore) -> None:
        self.store, self.asked, self.go = store, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        answer = self.store.read(table, keys, deadline)
        self.asked.set()
        assert self.go.wait(10)
        return answer


def test_an_answer_that_a_publication_overtook_is_known_for_what_it_is(remote: RemoteStore) -> None:
    slow = Slow(remote)
    rows = CachedTable(TABLE, slow, 0, Budget(16 << 20))  # type: ignore[arg-type]
    keys = torch.from_numpy(KEYS[:10])
    reader = threading.Thread(target=rows.read, args=(keys, later()))
    reader.start()
    assert slow.asked.wait(10)
    rows.apply(2, KEYS[:5], values_of(KEYS[:5], 2))  # while the rows of publication 1 are in flight
    slow.go.set()
    reader.join()
    assert rows.metrics()["stale"] == 5
    # The store itself is behind now: its old rows are answered, with their number.
    behind = rows.read(keys, later())
    np.testing.assert_array_equal(behind.values, values_of(KEYS[:10]))
    assert behind.lowest == 1
    assert rows.read(keys[5:], later()).lowest == remote.lowest  # those that did not change are as new as anything
    write_publication(remote, 2, {"user": (KEYS[:5], values_of(KEYS[:5], 2))})
    answer = rows.read(keys, later())
    np.testing.assert_array_equal(answer.values[:5], values_of(KEYS[:5], 2))
    assert (answer.lowest, answer.highest) == (2, 2) and len(rows.store) == 10
    assert not rows._applied and not rows._stale  # the store has it: nothing to remember


def test_a_trained_table_fills_a_store(tmp_path: Path) -> None:
    trained = TableRows(Table("item", dim=3), Adam(lr=0.1), seed=5, budget=Budget())
    keys = torch.arange(1000)
    trained.create(keys)
    store = open_remote(f"rocksdb:{tmp_path}")
    assert fill_table(store, trained, 9, show=False) == 1000
    store.finish(9)
    answer = store.read("item", keys.numpy(), later())
    np.testing.assert_array_equal(answer.values, trained.read(keys).numpy())
    assert set(answer.versions) == {9} and answer.lowest == 9
    store.close()


def test_a_table_that_the_store_lacks_is_named(remote: RemoteStore) -> None:
    with pytest.raises(OptionError, match="table 'item' of dim 4 is not in the remote store; fill it first"):
        CachedTable(Table("item", dim=4), remote, 0, Budget(1 << 24))
    with pytest.raises(OptionError, match="dim 4 has dim 64 in the remote store"):
        CachedTable(Table("user", dim=4), remote, 0, Budget(1 << 24))
