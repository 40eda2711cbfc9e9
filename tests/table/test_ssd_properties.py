"""Any sequence of operations over SSD leaves the rows that a dict would have: evictions, compaction, saves, loads."""

from __future__ import annotations

import copy
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from plain_table import PlainTable, assert_same_bits, assert_same_rows
from test_store_properties import OPTIMIZERS, StoreMachine, few_keys, ids, key_lists

from hotrow.config import Memory
from hotrow.nn import EmbeddingCollection
from hotrow.optim import Optimizer
from hotrow.table import Table, TableRows
from hotrow.tiers.host.store import Budget, Snapshot


class SsdMachine(StoreMachine):
    """The operations of StoreMachine, and those that move rows and must change nothing."""

    @initialize(optimizer=st.sampled_from(OPTIMIZERS), dim=st.sampled_from([1, 8, 13]), seed=st.integers(-3, 3))
    def begin(self, optimizer: Optimizer, dim: int, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hotrow-test-"))
        self.table, self.optimizer, self.seed = Table("t", dim=dim), optimizer, seed
        memory = Memory(dram="4MiB", ssd=self.folder / "rows")
        self.collection = EmbeddingCollection([self.table], optimizer, memory=memory, seed=seed)
        self.rows = self.collection.table("t")
        self.plain = PlainTable(self.table, optimizer, seed)
        self.snapshot: tuple[Snapshot, dict, int] | None = None
        self.saved: list[tuple[Path, dict, int]] = []

    @rule(count=st.sampled_from([1, 3, 1000]))
    def evict(self, count: int) -> None:
        assert self.rows.store.core.evict(count) <= len(self.plain.rows)

    @rule(keys=key_lists)
    def prefetch(self, keys: list[int]) -> None:
        ticket = self.rows.prefetch(ids(keys))
        assert ticket.wait() <= len(set(keys) & set(self.plain.rows)) and ticket.done

    @rule(keys=st.lists(few_keys, min_size=1, max_size=8))
    def seal_and_compact(self, keys: list[int]) -> None:
        """Rows that come and go leave dead records; a snapshot seals the segment, so that it can be compacted."""
        if self.snapshot is None:
            self.save()
            self.finish(load=False)
        self.evict(1000)
        while self.rows.store.core.compact():
            pass
        assert_same_bits(self.rows.read(ids(keys)), self.plain.read(keys))

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def save(self) -> None:
        self.snapshot = self.rows.store.begin_snapshot(), copy.deepcopy(self.plain.rows), self.collection.steps

    @precondition(lambda self: self.snapshot is not None)
    @rule(load=st.booleans())
    def finish(self, load: bool) -> None:
        """A snapshot has the rows of the moment it began, whatever happened since; any budget can load them."""
        assert self.snapshot is not None
        snapshot, rows, steps = self.snapshot
        self.snapshot = None
        to = self.folder / f"snapshot-{len(self.saved)}"
        report = snapshot.finish(str(to), str(self.saved[-1][0]) if self.saved else "")
        assert report["rows"] == len(rows)
        self.saved.append((to, rows, steps))
        if load:
            loaded = TableRows(self.table, self.optimizer, self.seed, Budget())
            loaded.store.load_snapshot(str(to))
            saved = PlainTable(self.table, self.optimizer, self.seed)
            saved.rows = rows
            assert_same_rows(loaded, saved)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def abandon(self) -> None:
        assert self.snapshot is not None
        self.snapshot[0].abandon()
        self.snapshot = None

    @precondition(lambda self: self.saved and self.snapshot is None)
    @rule(which=st.integers(0, 100))
    def go_back(self, which: int) -> None:
        folder, rows, steps = self.saved[which % len(self.saved)]
        self.rows.store.load_snapshot(str(folder))
        self.plain.rows, self.collection.steps = copy.deepcopy(rows), steps

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            if self.snapshot is not None:
                self.snapshot[0].abandon()
            shutil.rmtree(self.folder, ignore_errors=True)


TestSsd = SsdMachine.TestCase
TestSsd.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
