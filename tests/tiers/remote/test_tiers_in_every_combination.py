"""Reads over {DRAM, DRAM and SSD} x {one store, two stores, a store and the export}, beside an array of all states.

A random sequence of reads, evictions, publications (to the server and, later or earlier, to each store), and failures
of stores. An answer names the publications that its rows lie between. The oracle has every key's value at every
publication, so it knows whether that is true.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hotrow as hr
from hotrow.bench.servers.redis_cluster import until
from hotrow.config import Initial
from hotrow.errors import LateError, LeftError, OptionError, StorageError
from hotrow.tiers.remote import fallback_store, ssd_limit
from hotrow.tiers.remote.cached_rows import CachedTable
from hotrow.tiers.remote.fallback_store import FallbackStore
from hotrow.tiers.remote.store import RemoteStore, TableFormat, open_remote, write_publication

pytest.importorskip("rocksdict")
DIM, KEYS, STEPS = 16, 500, 150
UNSEEN = -1.0
TABLE = hr.Table("user", dim=DIM, initial=Initial.constant(UNSEEN), values="fp32")


class Shows(torch.nn.Module):
    """The first number of the row."""

    def forward(self, vectors: dict[str, torch.Tensor], dense: torch.Tensor | None) -> torch.Tensor:
        return vectors["user"][:, 0]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows 0 ... KEYS - 1 with the value 1, as of publication 1."""
    folder = tmp_path_factory.mktemp("repository") / "ctr"
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=DIM, initial=Initial.constant(UNSEEN))])
    embeddings.table("user").assign(torch.arange(KEYS), torch.ones(KEYS, DIM))
    hr.export(hr.Recommender(embeddings, Shows()), folder, publication=1, dense_features=0)
    return folder / "1"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LONGEST_PAUSE", 0.02), ("FIRST_PAUSE", 0.01), ("WHOLE_AFTER", 0.02), ("CHECK", 0.01)):
        monkeypatch.setattr(fallback_store, name, seconds)


class Stack:
    """A server's collection over its stores, and the state of every key at every publication."""

    def __init__(self, folder: Path, export: Path, stores: str, ssd: bool, seed: int, hbm: str | None = None) -> None:
        self.draw = np.random.default_rng(seed)
        self.urls = [f"rocksdb:{folder / name}" for name in ("a", "b")[: 2 if stores == "two" else 1]]
        first = {"user": (np.arange(KEYS), np.ones((KEYS, DIM), np.float32))}
        for url in self.urls:
            store = open_remote(url)
            store.create("user", TableFormat(DIM))
            write_publication(store, 1, first)
            store.close()
        remote = [*self.urls, f"export:{export}"] if stores == "export" else self.urls
        memory = hr.Memory(dram="16MiB" if hbm else "4MiB", remote=remote, ssd=folder / "ssd" if ssd else None, hbm=hbm)
        self.embeddings = hr.EmbeddingCollection([TABLE], memory=memory, device="cpu").eval()
        assert self.embeddings.remote is not None
        self.tables = self.embeddings.remote
        self.rows: CachedTable = self.tables.rows[0]
        self.stores = [self._store(url) for url in self.urls]
        self.written = [1] * len(self.stores)  # the last publication of each
        self.broken = [False] * len(self.stores)
        for number, store in enumerate(self.stores):
            self._make_breakable(number, store)
        self.has_export = stores == "export"
        self.states = [np.full(KEYS + 50, UNSEEN, np.float32) for _ in range(2)]  # by publication, then by key
        self.states[1][:KEYS] = 1.0
        self.changes: list[tuple[Any, Any]] = [((), ())] * 2
        self.served, self.ids = 1, 60
        # With HBM few keys, so that rows in it are asked for and changed.
        self.universe = np.r_[0:60, KEYS : KEYS + 10] if hbm else np.arange(KEYS + 50)
        self.tables.begin(1)
        self.done = dict.fromkeys(("read", "late", "old", "newer", "left"), 0)

    def _store(self, url: str) -> RemoteStore:
        store = self.tables.store
        found = store.opened(url) if isinstance(store, FallbackStore) else store
        assert found is not None
        return found

    def _make_breakable(self, number: int, store: Any) -> None:
        read = store.read

        def breakable(table: str, keys: Any, deadline: float) -> Any:
            if self.broken[number]:
                raise StorageError("it is broken")
            return read(table, keys, deadline)

        store.read = breakable

    # --- the steps ---

    def publish(self) -> None:
        """The server applies the next publication, whether a store has it or not."""
        if self.served + 1 == len(self.states):
            self._invent()
        self.served += 1
        changed, gone = self.changes[self.served]
        values = np.full((len(changed), DIM), float(self.served), np.float32)
        cache = self.embeddings.hbm_cache
        if cache is None:
            self.rows.apply(self.served, changed, values, gone)
            return
        from hotrow.tiers.hbm.serving_reader import ReaderWriterGate, prepare_refresh

        touched = {id(self.rows.store): torch.from_numpy(np.concatenate([changed, gone]))}
        refresh = prepare_refresh(cache, touched)
        self.rows.apply(self.served, changed, values, gone)
        refresh(ReaderWriterGate(cache.device))

    def advance(self) -> None:
        """The server or a store gets its next publication: any of them, but none is far ahead of another."""
        at = [self.served, *self.written]
        number = int(np.argmin(at)) if max(at) - min(at) > 3 else int(self.draw.integers(len(at)))
        if number == 0:
            self.publish()
        else:
            self.write(number - 1)

    def write(self, number: int) -> None:
        """A store gets the publication after its last."""
        self.written[number] += 1
        if self.written[number] == len(self.states):
            self._invent()
        to = self.written[number]
        changed, gone = self.changes[to]
        values = np.full((len(changed), DIM), float(to), np.float32)
        write_publication(self.stores[number], to, {"user": (changed, values)}, {"user": gone})

    def _invent(self) -> None:
        some = np.sort(self.draw.choice(self.universe, 40, replace=False).astype(np.int64))
        changed, gone = some[::2], some[1::4]
        state = self.states[-1].copy()
        state[changed], state[gone] = float(len(self.states)), UNSEEN
        self.states.append(state)
        self.changes.append((changed, gone))

    def evict(self) -> None:
        self.rows.store.core.evict(int(self.draw.integers(1, 300)))

    def drop(self) -> None:
        """As SsdLimit does."""
        if self.rows.over_ssd:
            for shard in self.draw.integers(1024, size=200).tolist():
                self.rows.drop_cold(shard)

    def fail(self) -> None:
        self.broken[int(self.draw.integers(len(self.stores)))] = True

    def recover(self) -> None:
        self.broken = [False] * len(self.stores)
        store = self.tables.store
        if isinstance(store, FallbackStore):
            until(lambda: all(member.up for member in store.members), "all stores to be used again", 10)

    def read(self) -> None:
        keys = np.unique(self.draw.choice(self.universe, self.ids)).astype(np.int64)
        batch = hr.KeyedBatch({"user": hr.Jagged(torch.from_numpy(keys))})
        policy = str(self.draw.choice(["wait", "wait", "initial"]))
        lookup = self.embeddings.route(batch, ahead=False)
        all_down = all(self.broken) and not self.has_export
        try:
            if self.embeddings.hbm_cache is not None and policy == "wait":
                with suppress(LeftError):  # which says that some rows must be loaded
                    lookup.read(policy)
            if policy == "wait" or self.draw.random() < 0.7:
                lookup.prefetch()
            if self.draw.random() < 0.3:
                self.evict()
            lookup.read(policy)
        except LeftError:  # the eviction
            self.done["left"] += 1
            return
        except LateError:
            assert all_down
            self.done["late"] += 1
            return
        except StorageError:
            assert all_down and not isinstance(self.tables.store, FallbackStore)
            return
        got = lookup.gather()[0].numpy()
        late = np.zeros(len(keys), np.bool_)
        if lookup.late_by_example is not None:
            late = lookup.late_by_example.numpy() > 0
        self._check(keys, got, late, lookup.publications, policy)

    def read_on_lane(self, reader: Any, lane: Any) -> None:
        """As Engine._run_lane."""
        keys = self.draw.choice(self.universe, 16).astype(np.int64)
        batch = hr.KeyedBatch({"user": hr.Jagged(torch.from_numpy(keys))})
        policy, below = str(self.draw.choice(["wait", "wait", "initial"])), reader.cache.below.batch()
        for _ in range(20):
            try:
                below.begin()
                got, _ = lane.find(batch, policy, below)
                break
            except LeftError:
                try:
                    below.load()
                except StorageError:
                    assert all(self.broken) and not isinstance(self.tables.store, FallbackStore)
                    return
            except LateError:
                assert all(self.broken) and not self.has_export
                self.done["late"] += 1
                return
        else:
            raise AssertionError("rows were not found after they were loaded")
        self._check(keys, got.numpy(), lane.late[: len(keys)] > 0, below.publications, policy)
        if self.draw.random() < 0.5:
            reader.filler.run_round()

    def _check(self, keys: Any, got: Any, late: Any, publications: tuple[int, int], policy: str) -> None:
        lowest, highest = publications
        lowest, highest = min(lowest, self.served), max(highest, self.served)
        possible = np.stack(self.states[lowest : highest + 1])[:, keys]
        right = (possible == got[:, 0]).any(0) & (got == got[:, :1]).all(1)
        assert (right | late).all(), (keys[~right], got[~right, 0], lowest, highest)
        assert (got[late] == UNSEEN).all() and not (late.any() and policy == "wait")
        self.done["read"] += 1
        self.done["old"] += lowest < self.served
        self.done["newer"] += highest > self.served


@contextmanager
def opened(*arguments: Any) -> Iterator[Stack]:
    stack = Stack(*arguments)
    try:
        yield stack
    finally:
        stack.tables.close()


@pytest.mark.parametrize("ssd", [False, True], ids=["dram", "dram+ssd"])
@pytest.mark.parametrize("stores", ["one", "two", "export"])
def test_an_answer_is_what_its_publications_say(tmp_path: Path, export: Path, stores: str, ssd: bool) -> None:
    seed = ["one", "two", "export"].index(stores) * 2 + ssd
    with opened(tmp_path, export, stores, ssd, seed) as stack:
        steps = [stack.read] * 6 + [stack.advance] * 3 + [stack.evict, stack.drop, stack.fail, stack.recover]
        for _ in range(STEPS):
            steps[int(stack.draw.integers(len(steps)))]()
        stack.recover()
        for _ in range(10):
            stack.read()
        assert stack.done["read"] > STEPS / 5 and stack.done["old"] + stack.done["newer"] > 3
        assert stack.rows.counters["absent"] > 0
        if ssd:
            assert stack.rows.store.tier()["evicted_dirty"] > 0 and stack.rows.counters["dropped"] > 0


@pytest.mark.parametrize(("stores", "ssd"), [("one", False), ("export", True)])
def test_the_same_below_hbm(tmp_path: Path, export: Path, stores: str, ssd: bool) -> None:
    pytest.importorskip("triton")
    with opened(tmp_path, export, stores, ssd, 5, "8KiB") as stack:
        stack.ids = 12
        steps = [stack.read] * 3 + [stack.advance] * 2 + [stack.evict, stack.drop, stack.fail, stack.recover]
        for _ in range(26):
            steps[int(stack.draw.integers(len(steps)))]()
        stack.recover()
        for _ in range(3):
            stack.read()
        cache = stack.embeddings.hbm_cache
        assert cache is not None and cache.figures()["hits"] > 0 and stack.done["read"] > 3


@pytest.mark.parametrize(("stores", "ssd"), [("one", False), ("two", True)])
def test_the_same_on_a_servers_lane(tmp_path: Path, export: Path, stores: str, ssd: bool) -> None:
    pytest.importorskip("triton")
    from hotrow.tiers.hbm.serving_reader import ServingReader

    with opened(tmp_path, export, stores, ssd, 6, "8KiB") as stack:
        assert stack.embeddings.hbm_cache is not None
        reader = ServingReader(stack.embeddings.layout, stack.embeddings.hbm_cache)
        lane = reader.lane(16)

        def read() -> None:
            stack.read_on_lane(reader, lane)

        steps = [read] * 5 + [stack.advance] * 2 + [stack.evict, stack.drop, stack.fail, stack.recover]
        for _ in range(60):
            steps[int(stack.draw.integers(len(steps)))]()
        stack.recover()
        for _ in range(6):
            read()
        assert reader.filler.rows_inserted > 0 and stack.done["read"] > 8
        reader.close()


def test_a_row_that_is_in_no_memory_is_not_answered_as_unseen(tmp_path: Path, export: Path) -> None:
    pytest.importorskip("triton")
    with opened(tmp_path, export, "one", False, 0, "8KiB") as stack:
        batch = hr.KeyedBatch({"user": hr.Jagged(torch.arange(40))})
        lookup = stack.embeddings.route(batch, ahead=False)
        with pytest.raises(LeftError):
            lookup.read("wait")
        lookup.read("initial")
        assert lookup.gather()[0].eq(UNSEEN).all() and lookup.late_ids == 40
        lookup = stack.embeddings.route(batch, ahead=False)
        with pytest.raises(LeftError):
            lookup.read("wait")
        assert lookup.prefetch().rows == 40
        assert lookup.read("wait").gather()[0].eq(1.0).all() and lookup.late_ids == 0
        stack.rows.store.erase(torch.arange(KEYS))  # from DRAM alone
        stack.broken = [True]
        again = stack.embeddings.route(batch, ahead=False).read("initial")
        assert again.gather()[0].eq(1.0).all() and again.late_ids == 0  # HBM has them
        with pytest.raises(OptionError, match="are only read"):
            stack.embeddings.route(batch).fetch()


@pytest.mark.parametrize("stores", ["one", "two"])
def test_rows_that_left_dram_are_read_from_ssd_and_not_from_the_store(
    tmp_path: Path, export: Path, stores: str
) -> None:
    with opened(tmp_path, export, stores, True, 0) as stack:
        keys = torch.arange(KEYS)
        batch = hr.KeyedBatch({"user": hr.Jagged(keys)})
        stack.embeddings.route(batch, ahead=False).prefetch()
        for _ in range(5):
            stack.rows.store.core.evict(KEYS)
        assert int((stack.rows.store.find(keys) < 0).sum()) > KEYS / 2
        changed, gone = np.arange(0, 50), np.arange(50, 60)
        stack.rows.apply(2, changed, np.full((50, DIM), 2.0, np.float32), gone)  # reaches rows on SSD
        asked = stack.tables.metrics()["bytes"]
        stack.broken = [True] * len(stack.stores)
        late = stack.embeddings.route(batch, ahead=False).read("initial")  # without any disk access
        late.gather()
        assert late.late_ids > KEYS / 2
        there = hr.KeyedBatch({"user": hr.Jagged(torch.cat([keys[:50], keys[60:]]))})
        lookup = stack.embeddings.route(there, ahead=False)
        lookup.prefetch()
        got = lookup.read("wait").gather()[0][:, 0]
        assert got[:50].eq(2.0).all() and got[50:].eq(1.0).all()
        assert stack.tables.metrics()["bytes"] == asked
        removed = hr.KeyedBatch({"user": hr.Jagged(keys[50:60])})  # they are in no tier: the store would have to say so
        with pytest.raises((LeftError, LateError, StorageError)):
            stack.embeddings.route(removed, ahead=False).read("wait")


def test_the_ssd_folder_stays_below_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_limit, "PAUSE", 0.02)
    rows, limit = 60_000, 4 << 20  # 80 bytes a row: more than fits
    store = open_remote(f"rocksdb:{tmp_path / 'a'}")
    store.create("user", TableFormat(DIM))
    keys = np.arange(rows)
    write_publication(store, 1, {"user": (keys, np.repeat(keys[:, None], DIM, 1).astype(np.float32))})
    store.close()
    memory = hr.Memory(dram="4MiB", ssd=tmp_path / "ssd", ssd_limit=limit, remote=f"rocksdb:{tmp_path / 'a'}")
    embeddings = hr.EmbeddingCollection([TABLE], memory=memory).eval()
    tables = embeddings.remote
    assert tables is not None
    largest, generator = 0, np.random.default_rng(0)
    for _ in range(100):
        some = torch.from_numpy(generator.choice(rows, 2000))
        lookup = embeddings.route(hr.KeyedBatch({"user": hr.Jagged(some)}), ahead=False)
        for _ in range(20):  # as the engine does
            lookup.prefetch()
            try:
                lookup.read("wait")
                break
            except LeftError:  # dropped from SSD meanwhile
                continue
        assert torch.equal(lookup.gather()[0][:, 0], some.float())
        largest = max(largest, disk_bytes(tmp_path / "ssd"))
    assert tables.metrics()["dropped"] > 1000
    assert largest <= limit + 4 * 256 * 1024  # what is written between two checks
    assert embeddings.budget.used <= embeddings.budget.limit
    tables.close()


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("segment-*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # compacted meanwhile
            continue
    return total


def test_the_index_of_rows_on_ssd_has_a_share_of_dram(tmp_path: Path, export: Path) -> None:
    with opened(tmp_path, export, "one", True, 0) as stack:
        limit = stack.tables.ssd
        assert limit is not None and limit.most_rows == (4 << 20) // 4 // 16
        limit._closing.set()
        limit._thread.join()
        limit._closing.clear()
        stack.embeddings.route(hr.KeyedBatch({"user": hr.Jagged(torch.arange(KEYS))}), ahead=False).prefetch()
        for _ in range(5):
            stack.rows.store.core.evict(KEYS)
        cold = stack.rows.store.tier()["cold_rows"]
        limit.most_rows = cold // 2
        begin = time.monotonic()
        assert limit.check() >= cold // 2 and time.monotonic() - begin < 5
        assert stack.rows.store.tier()["cold_rows"] <= cold // 2 * 7 / 8
