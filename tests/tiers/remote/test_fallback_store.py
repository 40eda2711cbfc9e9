"""Several stores in order: the next one answers for one that fails, and the first one is used again when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotrow.bench.servers.redis_cluster import RedisServers, until
from hotrow.errors import OptionError, StorageError
from hotrow.tiers.remote import fallback_store
from hotrow.tiers.remote.fallback_store import FallbackStore, StoreSource
from hotrow.tiers.remote.store import Answer, Keys, RemoteStore, TableFormat, open_remote, write_publication

pytest.importorskip("rocksdict")
DIM = 3
KEYS = np.arange(300, dtype=np.int64) * 31 - 1000


def later(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def values_of(number: int, keys: Keys = KEYS) -> np.ndarray:
    return np.repeat((keys + number * 0.25).astype(np.float32)[:, None], DIM, axis=1)


class Breakable:
    """A store that a test can break: it raises, or keeps silent for some keys until the deadline."""

    def __init__(self, store: RemoteStore) -> None:
        self.store, self.broken, self.silent = store, False, np.empty(0, np.int64)
        self.reads = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        if threading.current_thread().name != "hotrow-store":  # a probe
            self.reads += 1
        if self.broken:
            raise StorageError("it is broken")
        answer = self.store.read(table, keys, deadline)
        quiet = np.isin(keys, self.silent)
        if quiet.any():
            time.sleep(max(0.0, deadline - time.monotonic()))
            answer.late[quiet], answer.found[quiet] = True, False
        return answer


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Breakable]]:
    """Two stores: the first has publication 3, the second publication 1."""
    made = []
    for name, numbers in (("first", (1, 2, 3)), ("second", (1,))):
        store = open_remote(f"rocksdb:{tmp_path / name}")
        store.create("t", TableFormat(DIM))
        for number in numbers:
            write_publication(store, number, {"t": (KEYS, values_of(number))})
        made.append(Breakable(store))
    yield made
    for one in made:
        one.store.close()


@pytest.fixture
def both(pair: list[Breakable]) -> Iterator[FallbackStore]:
    def source(number: int) -> StoreSource:
        return StoreSource(f"store-{number}", lambda: pair[number], lambda _: None)  # type: ignore[arg-type, return-value]

    opened = FallbackStore([source(0), source(1)], {"t": DIM})
    yield opened
    opened.close()


def test_the_first_store_answers_alone_while_it_is_up(pair: list[Breakable], both: FallbackStore) -> None:
    answer = both.read("t", np.r_[KEYS, 7], later())
    np.testing.assert_array_equal(answer.values[:-1], values_of(3))
    assert answer.found[:-1].all() and not answer.found[-1] and not answer.late.any()  # absent there is absent
    assert (answer.lowest, answer.highest, both.lowest) == (3, 3, 3)
    assert pair[1].reads == 0 and both.health()["ok"] and both.counters["fallback"] == 0


def test_a_store_that_raises_is_passed_over_until_it_answers_a_probe(
    pair: list[Breakable], both: FallbackStore
) -> None:
    pair[0].broken = True
    for _ in range(5):
        answer = both.read("t", KEYS, later())
        np.testing.assert_array_equal(answer.values, values_of(1))
        assert answer.found.all() and (answer.lowest, answer.highest) == (1, 1)
    assert pair[0].reads == 1  # one request, the others passed it over
    assert both.lowest == 1 and not both.health()["ok"]
    assert "down: it is broken" in both.health()["stores"]["store-0"]
    assert both.counters["fallback"] == 5 * len(KEYS)
    pair[0].broken = False
    until(lambda: both.lowest == 3, "the probe to find it again", 10)
    np.testing.assert_array_equal(both.read("t", KEYS, later()).values, values_of(3))


def test_a_silent_store_costs_a_part_of_the_deadline_and_only_once(pair: list[Breakable], both: FallbackStore) -> None:
    pair[0].silent = KEYS
    begin = time.monotonic()
    answer = both.read("t", KEYS, begin + 1.0)
    assert 0.4 < time.monotonic() - begin < 0.95  # SHARE of the second
    np.testing.assert_array_equal(answer.values, values_of(1))
    assert both.read("t", KEYS, time.monotonic() + 1.0).found.all()
    assert pair[0].reads <= 2  # on a busy machine a check may find it up again before the second read
    assert both.members[0].up or "no answer in 0.25 s" in str(both.health()["stores"])


def test_keys_of_a_part_that_is_down_come_from_the_next_store_with_its_publication(
    pair: list[Breakable], both: FallbackStore
) -> None:
    """As with one node of a cluster that is down."""
    pair[0].silent = KEYS[::3]
    asked = np.r_[KEYS, KEYS[:4], 7]
    answer = both.read("t", asked, time.monotonic() + 1.0)
    old = np.isin(asked, KEYS[::3])
    expected = np.where(old[:, None], values_of(1, asked), values_of(3, asked))
    np.testing.assert_array_equal(answer.values[:-1], expected[:-1])
    assert answer.found[:-1].all() and not answer.found[-1] and not answer.late.any()
    np.testing.assert_array_equal(answer.lowest_of(np.arange(len(asked))), np.where(old, 1, 3))
    assert (answer.lowest, answer.highest) == (1, 3)
    assert both.lowest == 1  # a part of the rows is as old as that
    pair[0].silent = np.empty(0, np.int64)
    until(lambda: both.lowest == 3, "the first store to count as whole", 10)


def test_rows_are_late_when_every_store_is_down(pair: list[Breakable], both: FallbackStore) -> None:
    pair[0].broken = pair[1].broken = True
    for _ in range(2):
        begin = time.monotonic()
        answer = both.read("t", KEYS, begin + 5)
        assert answer.late.all() and not answer.found.any() and time.monotonic() - begin < 1
    pair[1].broken = False
    until(lambda: both.read("t", KEYS, later(1)).found.all(), "the second store to be found", 10)


def test_a_store_that_is_gone_at_the_start_is_opened_later(pair: list[Breakable]) -> None:
    gone = threading.Event()
    gone.set()

    def open_first() -> RemoteStore:
        if gone.is_set():
            raise StorageError("nobody listens")
        return pair[0]  # type: ignore[return-value]

    sources = [
        StoreSource("a", open_first, lambda _: None),
        StoreSource("b", lambda: pair[1], lambda _: None),  # type: ignore[arg-type, return-value]
    ]
    store = FallbackStore(sources, {"t": DIM})
    np.testing.assert_array_equal(store.read("t", KEYS, later()).values, values_of(1))
    assert "nobody listens" in str(store.health()["nodes"])
    gone.clear()
    until(lambda: store.lowest == 3, "it to be opened", 10)
    np.testing.assert_array_equal(store.read("t", KEYS, later()).values, values_of(3))
    store.close()


def test_stores_that_cannot_be_used_are_named_at_the_start(pair: list[Breakable], tmp_path: Path) -> None:
    def source(name: str, opened: RemoteStore) -> StoreSource:
        return StoreSource(name, lambda: opened, lambda _: None)

    empty = open_remote(f"rocksdb:{tmp_path / 'empty'}")
    with pytest.raises(StorageError, match=r"none of the stores.*a: remote='a' has no rows yet.*publish-remote"):
        FallbackStore([source("a", empty)], {"t": DIM})
    with pytest.raises(OptionError, match="remote='b': table 't' of dim 4 has dim 3 there"):
        FallbackStore([source("a", empty), source("b", pair[0])], {"t": 4})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="table 'u' of dim 4 is not there"):
        FallbackStore([source("b", pair[0])], {"u": 4})  # type: ignore[arg-type]
    empty.close()


def test_a_list_of_stores_is_not_written(both: FallbackStore) -> None:
    with pytest.raises(OptionError, match="write each Redis by itself"):
        write_publication(both, 4, {"t": (KEYS, values_of(4))})


def test_a_redis_server_that_dies_and_returns(redis_installed: None, pair: list[Breakable]) -> None:
    with RedisServers(options=["--appendonly", "yes"]) as servers:
        redis = open_remote(servers.url)
        redis.create("t", TableFormat(DIM))
        write_publication(redis, 5, {"t": (KEYS, values_of(5))}, after=0)
        sources = [StoreSource("redis", lambda: redis), StoreSource("rocks", lambda: pair[0], lambda _: None)]  # type: ignore[arg-type, return-value]
        store = FallbackStore(sources, {"t": DIM})
        assert store.read("t", KEYS, later()).lowest == 5
        servers.servers[0].kill()
        for _ in range(20):
            begin = time.monotonic()
            answer = store.read("t", KEYS, begin + 1)
            assert answer.found.all() and answer.lowest == answer.highest == 3
            assert time.monotonic() - begin < 0.4  # it refuses connections: nothing is waited for
        servers.servers[0].start()
        until(lambda: store.read("t", KEYS, later(1)).lowest == 5, "Redis to be used again", 15)
        servers.servers[0].pause()
        waited = []
        for _ in range(12):
            begin = time.monotonic()
            assert store.read("t", KEYS, begin + 0.4).found.all()
            waited.append(time.monotonic() - begin)
        assert sum(waited) < fallback_store.SILENCE + 2 * 0.4 + 0.6  # its silence, once
        servers.servers[0].resume()
        until(lambda: store.read("t", KEYS, later(1)).lowest == 5, "Redis to be used again", 15)
        store.close()
