"""What every remote store does, against real servers: Redis, a three-master cluster, RocksDB."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotrow.errors import BatchError, OptionError, StorageError
from hotrow.tiers.remote.row_encoding import decode, encode
from hotrow.tiers.remote.store import (
    Answer,
    Keys,
    Marks,
    RemoteStore,
    TableFormat,
    Values,
    bits_for,
    fill,
    open_remote,
    write_publication,
)

DIM = 5


def later(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def some_keys(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).choice(1 << 40, count, replace=False).astype(np.int64) - (1 << 39)


def some_values(count: int, seed: int = 0, dim: int = DIM) -> Values:
    return np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)


@pytest.mark.parametrize("value", ["fp32", "fp16", "int8"])
def test_rows_come_back_as_they_were_stored(store: RemoteStore, value: str) -> None:
    store.create("user", TableFormat(DIM, value))
    keys, values = some_keys(3000), some_values(3000)
    assert store.write("user", keys, values, 4) == 3000
    asked = np.concatenate([keys[::-1], some_keys(100, seed=9), keys[:7]])
    answer = store.read("user", asked, later())
    stored = decode(encode(values, value), value)
    np.testing.assert_array_equal(answer.values, np.concatenate([stored[::-1], np.zeros((100, DIM)), stored[:7]]))
    np.testing.assert_array_equal(answer.found, np.r_[np.ones(3000), np.zeros(100), np.ones(7)].astype(bool))
    assert not answer.late.any()
    assert set(answer.versions[answer.found]) == {4} and set(answer.versions[~answer.found]) == {-1}


def test_no_keys_is_no_trouble(store: RemoteStore) -> None:
    store.create("t", TableFormat(DIM))
    nothing = np.empty(0, np.int64)
    assert store.read("t", nothing, later()).values.shape == (0, DIM)
    assert store.write("t", nothing, np.empty((0, DIM), np.float32), 1) == store.erase("t", nothing, 1) == 0


def test_tables_and_names_do_not_mix(store: RemoteStore) -> None:
    names = ["user", "user:1", "{x}", "näme/with space", "u"]
    key = np.array([7], np.int64)
    for number, name in enumerate(names):
        store.create(name, TableFormat(1, bits=number))
        store.write(name, key, np.full((1, 1), number, np.float32), 1)
    assert sorted(store.tables()) == sorted(names)
    for number, name in enumerate(names):
        assert store.read(name, key, later()).values.item() == number


def test_a_table_of_another_form_is_refused(store: RemoteStore) -> None:
    store.create("t", TableFormat(8))
    store.create("t", TableFormat(8, bits=3))  # the stored settings apply
    with pytest.raises(StorageError, match="dim 8 and fp32 values, not with dim 16"):
        store.create("t", TableFormat(16))
    with pytest.raises(StorageError, match="no table 'u'; it has \\['t'\\]"):
        store.read("u", np.array([1]), later())


def test_wrong_arrays_are_refused_and_change_nothing(store: RemoteStore) -> None:
    store.create("t", TableFormat(2))
    one = np.array([1], np.int64)
    with pytest.raises(BatchError, match="1-d array of int64"):
        store.read("t", np.array([1.0]), later())
    with pytest.raises(BatchError, match=r"give \[1, 2\]"):
        store.write("t", one, np.zeros((1, 3), np.float32), 1)
    with pytest.raises(BatchError, match="NaN or infinite"):
        store.write("t", one, np.full((1, 2), np.nan, np.float32), 1)
    with pytest.raises(OptionError, match="version=-1"):
        store.write("t", one, np.zeros((1, 2), np.float32), -1)
    store.create("half", TableFormat(2, "fp16"))
    with pytest.raises(BatchError, match="65504"):
        store.write("half", one, np.full((1, 2), 1e6, np.float32), 1)
    assert not store.read("t", one, later()).found.any() and not store.read("half", one, later()).found.any()


def test_an_older_write_never_replaces_a_newer_one(store: RemoteStore) -> None:
    store.create("t", TableFormat(1))
    key = np.array([3], np.int64)
    versions = [5, 3, 5, 9, 8, 1 << 52, 10]
    for version in versions:
        store.write("t", key, np.array([[version]], np.float32), version)
        highest = max(versions[: versions.index(version) + 1])
        answer = store.read("t", key, later())
        assert answer.versions.item() == highest and answer.values.item() == np.float32(highest)


def test_an_older_write_does_not_bring_an_erased_row_back(store: RemoteStore) -> None:
    store.create("t", TableFormat(1))
    keys = np.array([1, 2], np.int64)
    write_publication(store, 1, {"t": (keys, np.ones((2, 1), np.float32))})
    write_publication(store, 2, {}, {"t": keys[:1]})
    assert store.write("t", keys[:1], np.zeros((1, 1), np.float32), 1) == 0  # a writer that was delayed
    assert store.read("t", keys, later()).found.tolist() == [False, True]
    # The erased row's number is removed here, and a write as old is still ignored.
    write_publication(store, 3, {"t": (some_keys(500), np.ones((500, 1), np.float32))})
    assert store.write("t", keys[:1], np.zeros((1, 1), np.float32), 1) == 0
    assert store.read("t", keys, later()).found.tolist() == [False, True]
    write_publication(store, 4, {"t": (keys[:1], np.full((1, 1), 4, np.float32))})
    assert store.read("t", keys, later()).values.tolist() == [[4], [1]]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("we"), st.integers(0, 30), st.integers(0, 99)), max_size=25))
def test_any_mixture_of_calls_agrees_with_a_dict(store: RemoteStore, calls: list[tuple[str, int, int]]) -> None:
    name = f"t{time.monotonic_ns()}"
    store.create(name, TableFormat(2, bits=2))
    rows: dict[int, tuple[int, float]] = {}  # key → version, value
    dead: dict[int, int] = {}
    universe = np.arange(12, dtype=np.int64) * 977 - 5000
    for kind, version, seed in calls:
        keys = np.random.default_rng(seed).choice(universe, 4, replace=False)
        for key in keys.tolist():
            if version < max(rows.get(key, (-1, 0))[0], dead.get(key, -1)):
                continue
            if kind == "e":
                rows.pop(key, None)
                dead[key] = version
            else:
                rows[key] = (version, seed)
                dead.pop(key, None)
        if kind == "e":
            store.erase(name, keys, version)
        else:
            store.write(name, keys, np.full((4, 2), seed, np.float32), version)
    answer = store.read(name, universe, later())
    assert answer.found.tolist() == [key in rows for key in universe.tolist()]
    for key, values, version in zip(universe.tolist(), answer.values.tolist(), answer.versions.tolist(), strict=True):
        assert (version, values) == ((rows[key][0], [rows[key][1]] * 2) if key in rows else (-1, [0, 0]))


def test_publications_follow_each_other(store: RemoteStore) -> None:
    store.create("t", TableFormat(1))
    key = np.array([1], np.int64)
    one = {"t": (key, np.ones((1, 1), np.float32))}
    assert store.marks() == Marks(0, 0, filled=False)
    assert write_publication(store, 1, one)
    assert not write_publication(store, 1, one)
    with pytest.raises(StorageError, match="publication 5 follows 4, but the remote store is complete up to 1"):
        write_publication(store, 5, one)
    assert write_publication(store, 5, one, after=1)  # numbers may leave some out when the publisher says so
    assert store.marks() == Marks(5, 5)


class BreaksOffError(Exception):
    pass


def test_a_publication_that_broke_off_is_completed_by_the_next_try(store: RemoteStore) -> None:
    store.create("a", TableFormat(DIM))
    store.create("b", TableFormat(DIM))
    keys = some_keys(50)
    write_publication(store, 1, {name: (keys, some_values(50)) for name in "ab"})
    tables = {name: (keys, some_values(50, seed=2)) for name in "ab"}
    write = store.write

    def breaks(table: str, *rest: object) -> int:
        if table == "b":
            raise BreaksOffError
        return write(table, *rest)  # type: ignore[arg-type]

    store.write = breaks  # type: ignore[method-assign]
    with pytest.raises(BreaksOffError):
        write_publication(store, 2, tables, {"b": keys[:1]})
    store.write = write  # type: ignore[method-assign]
    assert store.marks() == Marks(1, 2)
    mixed = store.read("a", keys, later())
    assert (mixed.lowest, mixed.highest) == (1, 2)
    assert write_publication(store, 2, tables, {"b": keys[:1]})
    for name in "ab":
        answer = store.read(name, keys, later())
        np.testing.assert_array_equal(answer.values[1:], some_values(50, seed=2)[1:])
        assert (answer.lowest, answer.highest) == (2, 2)
    assert not store.read("b", keys[:1], later()).found.any()


def test_two_writers_of_the_same_publications_do_no_harm(store: RemoteStore) -> None:
    store.create("t", TableFormat(DIM))
    keys = some_keys(400)
    publications = [
        (number, {"t": (keys[number::2], some_values(len(keys[number::2]), seed=number))}, {"t": keys[number - 1 :: 7]})
        for number in range(1, 9)
    ]
    for _, tables, deletions in publications:  # no key is both
        gone = deletions["t"]
        wanted = ~np.isin(tables["t"][0], gone)
        tables["t"] = (tables["t"][0][wanted], tables["t"][1][wanted])

    def write_all() -> None:
        for number, tables, deletions in publications:
            write_publication(store, number, tables, deletions)

    def tolerate(work: Callable[[], None]) -> None:
        try:
            work()
        except StorageError as error:  # the other writer was faster: this one starts over from the store's state
            assert "complete up to" in str(error)
            tolerate(work)

    threads = [threading.Thread(target=tolerate, args=(write_all,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows: dict[int, np.ndarray] = {}
    for _, tables, deletions in publications:
        rows.update(zip(tables["t"][0].tolist(), tables["t"][1], strict=True))
        for key in deletions["t"].tolist():
            rows.pop(key, None)
    answer = store.read("t", keys, later())
    assert answer.found.tolist() == [key in rows for key in keys.tolist()]
    for key, values in zip(keys[answer.found].tolist(), answer.values[answer.found], strict=True):
        np.testing.assert_array_equal(values, rows[key])


def test_several_threads_read_while_one_writes(store: RemoteStore) -> None:
    store.create("t", TableFormat(DIM))
    keys = some_keys(500)
    store.write("t", keys, np.ones((500, DIM), np.float32), 1)
    problems: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            answer: Answer = store.read("t", keys, later())
            whole = (answer.values == answer.values[:, :1]).all() and (answer.values[:, 0] == answer.versions).all()
            if not answer.found.all() or not whole:
                problems.append("a row was missing or mixed")

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 12):
        store.write("t", keys, np.full((500, DIM), version, np.float32), version)
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems


def test_filling_counts_rows_and_tells_progress(store: RemoteStore) -> None:
    store.create("t", TableFormat(DIM, bits=bits_for(2000)))
    keys, values, told = some_keys(2000), some_values(2000), []
    chunks = ((keys[at : at + 300], values[at : at + 300]) for at in range(0, 2000, 300))
    assert fill(store, "t", chunks, 7, told.append) == 2000
    assert told[0] == 300 and told[-1] == 2000
    store.finish(7)
    assert store.marks() == Marks(7, 7)
    answer = store.read("t", keys, later())
    np.testing.assert_array_equal(answer.values, values)
    assert write_publication(store, 8, {})


def test_a_deadline_that_has_passed_makes_rows_late_not_missing(store: RemoteStore) -> None:
    store.create("t", TableFormat(DIM))
    keys = some_keys(20_000)
    store.write("t", keys, some_values(20_000), 1)
    answer = store.read("t", keys, time.monotonic() - 1)
    assert answer.late.any()
    assert not (answer.late & answer.found).any()
    assert (answer.late | answer.found).all()
    assert store.read("t", keys, later()).found.all()


def test_a_rocksdb_folder_keeps_its_rows_and_marks(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    store = open_remote(f"rocksdb:{tmp_path}")
    store.create("t", TableFormat(DIM, "fp16"))
    keys, values = some_keys(100), some_values(100)
    write_publication(store, 1, {"t": (keys, values)})
    with pytest.raises(StorageError, match="one process has it at a time"):
        open_remote(f"rocksdb:{tmp_path}")
    store.close()
    again = open_remote(f"rocksdb:{tmp_path}")
    assert again.tables() == {"t": TableFormat(DIM, "fp16")} and again.marks() == Marks(1, 1)
    np.testing.assert_array_equal(again.read("t", keys, later()).values, values.astype(np.float16).astype(np.float32))
    again.close()
