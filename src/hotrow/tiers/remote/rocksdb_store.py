"""RocksStore: rows in RocksDB, a full copy on a local disk, under the same protocol as Redis.

A table is a column family. A row maps 8 bytes of key to 8 bytes of publication number and the values. A write first
reads the stored numbers that it compares, under one lock for both. That is enough, because only one process can open a
RocksDB folder. The rows of one call are one atomic write batch. An erased row leaves its number, a tombstone, in the
column family `dead:` until its publication is complete. From then on older writes are ignored (docs/formats/remote.md).

`finish` syncs the log: complete publications survive a power failure, the rest survives a kill of the process. A
RocksDB read cannot be interrupted, so reads are split into parts and check the deadline between them.

Needs rocksdict: pip install 'hotrow[rocksdb]'. It holds Python's lock while it reads. HotRow's own SSD tier does not,
and is faster (`hotrow bench ssd`). Use RocksDB if you have its tools and files already.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import numpy as np

from hotrow.errors import OptionError, StorageError, choices
from hotrow.tiers.remote.row_encoding import decode, encode
from hotrow.tiers.remote.store import (
    Answer,
    Keys,
    Marks,
    TableFormat,
    Values,
    check_keys,
    check_number,
    check_same,
    check_values,
    gap,
)

PART = 4096  # keys between two checks of the deadline
DEAD, TABLE, FLOOR = "dead:", "table:", b"floor"


class RocksStore:
    """Rows in a RocksDB folder (see hotrow.tiers.remote.store.RemoteStore)."""

    def __init__(self, folder: str, **options: Any) -> None:
        for name in options:
            raise OptionError(f"remote='rocksdb:...' has no option {name!r}; {choices(name, ['(none)'])}")
        if not folder:
            raise OptionError("remote='rocksdb:' names no folder; write rocksdb:/data/rows")
        try:
            import rocksdict
        except ImportError:
            raise OptionError("remote='rocksdb:...' needs rocksdict: pip install 'hotrow[rocksdb]'") from None
        self._rocksdict: Any = rocksdict
        self.folder = folder
        self._lock = threading.RLock()
        self.counters = {"reads": 0, "rows": 0, "late": 0, "bytes": 0}
        os.makedirs(folder, exist_ok=True)
        try:
            names = rocksdict.Rdict.list_cf(folder) if os.path.exists(os.path.join(folder, "CURRENT")) else []
            families = {name: self._options() for name in names if name != "default"}
            self._db: Any = rocksdict.Rdict(folder, self._options(), column_families=families or None)
        except Exception as error:
            raise StorageError(
                f"RocksDB cannot open {folder!r}: {error}; one process has it at a time. Close the other one"
            ) from None
        self._families: dict[str, tuple[Any, Any]] = {}
        self._tables = {name: self._known(name) for name in self._names()}
        self._complete = self.marks().complete

    def _options(self) -> Any:
        options: Any = self._rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.increase_parallelism(2)
        return options

    def _names(self) -> list[str]:
        return [key.decode()[len(TABLE) :] for key in self._db.keys() if key.startswith(TABLE.encode())]  # noqa: SIM118

    def _known(self, table: str) -> TableFormat:
        return TableFormat(**json.loads(self._db[(TABLE + table).encode()]))

    def _family(self, name: str) -> tuple[Any, Any]:
        """A column family to read, and its handle for batches."""
        if name not in self._families:
            self._families[name] = (self._db.get_column_family(name), self._db.get_column_family_handle(name))
        return self._families[name]

    @property
    def lowest(self) -> int:
        """The last complete publication."""
        return self._complete

    def create(self, table: str, form: TableFormat) -> None:
        """Create a table. One that exists must have the same dim and value."""
        with self._lock:
            if table not in self._tables:
                existing = self._rocksdict.Rdict.list_cf(self.folder)
                for name in (TABLE + table, DEAD + table):
                    if name not in existing:
                        self._db.create_column_family(name, self._options())
                text = json.dumps({"dim": form.dim, "value": form.value, "bits": form.bits})
                self._db[(TABLE + table).encode()] = text.encode()
                self._tables[table] = form
            check_same(table, self._tables[table], form)

    def stamp(self, table: str) -> None:
        """Check that the table exists. A folder that opens has lost no part of a table, so nothing is recorded."""
        self._form(table)

    def tables(self) -> dict[str, TableFormat]:
        """The tables, by name."""
        return dict(self._tables)

    def _form(self, table: str) -> TableFormat:
        if table not in self._tables:
            raise StorageError(f"the remote store has no table {table!r}; it has {sorted(self._tables)}")
        return self._tables[table]

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        """Rows of the keys (duplicates too), until `deadline` (time.monotonic())."""
        form, lowest = self._form(table), self._complete
        keys = check_keys(keys)
        rows, _ = self._family(TABLE + table)
        raw = np.zeros((len(keys), 8 + form.row_bytes), np.uint8)
        found = np.zeros(len(keys), np.bool_)
        late = np.zeros(len(keys), np.bool_)
        for at in range(0, len(keys), PART):
            if time.monotonic() >= deadline:
                late[at:] = True
                break
            values = rows[_as_bytes(keys[at : at + PART])]
            present = np.fromiter((value is not None for value in values), np.bool_, len(values))
            joined = b"".join([value for value in values if value is not None])
            if len(joined) != int(present.sum()) * raw.shape[1]:
                raise StorageError(f"table {table!r} has rows of another size in {self.folder!r}; fill the folder anew")
            found[at : at + PART] = present
            raw[at : at + PART][present] = np.frombuffer(joined, np.uint8).reshape(-1, raw.shape[1])
        versions = np.where(found, np.ascontiguousarray(raw[:, :8]).view(np.int64)[:, 0], np.int64(-1))
        size = int(found.sum()) * form.row_bytes
        with self._lock:
            for name, more in (("reads", 1), ("rows", len(keys)), ("late", int(late.sum())), ("bytes", size)):
                self.counters[name] += more
        values_out = decode(np.ascontiguousarray(raw[:, 8:]), form.value)
        return Answer(values_out, found, late, versions, lowest, size)

    def write(self, table: str, keys: Keys, values: Values, version: int, filling: bool = False) -> int:
        """Set the rows whose version is not above this one. Returns how many were set. Requires: keys are unique."""
        form = self._form(table)
        keys = check_keys(keys)
        values = check_values(values, keys, form)
        raw = np.empty((len(keys), 8 + form.row_bytes), np.uint8)
        raw[:, :8] = np.frombuffer(np.int64(check_number(version)).tobytes(), np.uint8)
        raw[:, 8:] = encode(values, form.value)
        flat, size = raw.tobytes(), raw.shape[1]
        return self._change(table, keys, [flat[at : at + size] for at in range(0, len(flat), size)], version)

    def erase(self, table: str, keys: Keys, version: int) -> int:
        """Remove rows as of publication `version`: later writes of older versions are ignored. Returns how many."""
        keys = check_keys(keys)
        self._form(table)
        return self._change(table, keys, [None] * len(keys), check_number(version))

    def _change(self, table: str, keys: Keys, values: list[bytes | None], version: int) -> int:
        """Write or erase (None) rows in one write batch."""
        (rows, rows_handle), (dead, dead_handle) = self._family(TABLE + table), self._family(DEAD + table)
        names = _as_bytes(keys)
        mark = np.int64(version).tobytes()
        with self._lock:
            if version <= self._bury(dead, dead_handle) or not names:
                return 0
            batch: Any = self._rocksdict.WriteBatch(raw_mode=True)
            changed = 0
            for name, value, old, gone in zip(names, values, rows[names], dead[names], strict=True):
                if version < int.from_bytes((old or gone or bytes(8))[:8], "little"):
                    continue
                if value is not None:
                    batch.put(name, value, rows_handle)
                    if gone is not None:
                        batch.delete(name, dead_handle)
                else:
                    batch.put(name, mark, dead_handle)
                    if old is not None:
                        batch.delete(name, rows_handle)
                changed += value is not None or old is not None
            self._db.write(batch)
        return changed

    def _bury(self, dead: Any, handle: Any) -> int:
        """Remove the tombstones of complete publications. Returns the floor: writes at or below it are ignored."""
        mark = dead.get(FLOOR)
        floor = -1 if mark is None else int.from_bytes(mark, "little")
        if self._complete <= max(floor, 0):
            return floor
        batch: Any = self._rocksdict.WriteBatch(raw_mode=True)
        for name, mark in dead.items():
            if name != FLOOR and int.from_bytes(mark, "little") <= self._complete:
                batch.delete(name, handle)
                floor = self._complete
        if floor == self._complete:
            batch.put(FLOOR, np.int64(floor).tobytes(), handle)
            self._db.write(batch)
        return floor

    def purge(self, table: str, version: int) -> int:
        """Remove rows older than publication `version`, with which the table was just filled. Returns the count."""
        self._form(table)
        (rows, rows_handle), (dead, dead_handle) = self._family(TABLE + table), self._family(DEAD + table)
        with self._lock:
            batch: Any = self._rocksdict.WriteBatch(raw_mode=True)
            mark, gone = dead.get(FLOOR), 0
            if mark is None or int.from_bytes(mark, "little") < check_number(version):
                batch.put(FLOOR, np.int64(version).tobytes(), dead_handle)
            for name, row in rows.items():
                if int.from_bytes(row[:8], "little") < version:
                    batch.delete(name, rows_handle)
                    gone += 1
            self._db.write(batch)
        return gone

    def marks(self) -> Marks:
        """The last complete and the last begun publication."""
        said = [self._db.get(name) for name in (b"complete", b"started")]
        return Marks(int(said[0] or 0), int(said[1] or 0), said[0] is not None)

    def begin(self, number: int, after: int) -> bool:
        """Begin to write publication `number`, which follows `after`. Returns False if it is complete; a gap raises."""
        check_number(number, "number")
        with self._lock:
            marks = self.marks()
            if marks.complete >= number:
                return False
            if marks.complete != after:
                raise gap(number, after, marks.complete)
            self._db[b"started"] = b"%d" % max(marks.started, number)
        return True

    def finish(self, number: int) -> None:
        """Publication `number` is written completely. From now on it survives a power failure."""
        with self._lock:
            marks = self.marks()
            self._db[b"started"] = b"%d" % max(marks.started, check_number(number, "number"))
            self._db[b"complete"] = b"%d" % max(marks.complete, number)
            self._db.flush_wal(True)
            self._complete = max(marks.complete, number)

    def health(self) -> dict[str, Any]:
        """The folder's state and the counters of reads."""
        return {"ok": True, "nodes": {self.folder: "open"}, "complete": self._complete, **self.counters}

    def close(self) -> None:
        """Close the folder, so that another process may open it."""
        with self._lock:
            self._families.clear()
            self._db.close()


def _as_bytes(keys: Keys) -> list[bytes]:
    flat = keys.tobytes()
    return [flat[at : at + 8] for at in range(0, len(flat), 8)]
