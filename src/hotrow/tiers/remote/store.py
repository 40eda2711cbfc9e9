"""RemoteStore: the protocol of a store outside this process. Several servers share Redis; RocksDB is a local full copy.

For each table a store maps a key to (publication number, values). The number is that of the publication that last wrote
the row. A write never replaces a row with a higher number. So writes may be repeated, several writers may write the
same publication, and no writer has to be elected. The cost is 8 bytes a row, and one comparison a write at the store.
(Dropped: an elected writer with a lease. It needs synchronized clocks, and still needs the numbers, because a writer
may lose its lease without noticing.)

A store has two marks: `started` ≥ `complete`. `begin` raises started, then the rows are written, then `finish` raises
complete. After a crash in between, the next writer writes the publication again from its beginning. So every row that a
reader gets is at least as new as publication `complete` and at most as new as `started`: `Answer.lowest` and
`Answer.highest`.

Reads have a deadline. Rows that have not arrived by then are `late`: neither found nor missing, and the caller's policy
decides. No read takes much longer than its deadline, and only one request waits for a dead server (redis_nodes.py).

Threads: any number may read at once, beside one that writes. Values are sent and stored as fp32, fp16 or int8
(row_encoding.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotrow.credentials import public
from hotrow.errors import BatchError, OptionError, StorageError, choices
from hotrow.tiers.remote.row_encoding import VALUES, row_bytes

Keys = NDArray[np.int64]
Values = NDArray[np.float32]
SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "rocksdb", "export")  # and rows:, which `--rows` adds
MOST_NUMBER = (1 << 53) - 1  # Lua's numbers are doubles
MOST_BITS = 14
WRITTEN_TOGETHER = 65_536  # rows


class LostError(StorageError):
    """The store has lost a part of a table; fill the table anew."""


@dataclass(frozen=True)
class TableFormat:
    """The format of a table's rows in a store: `dim` values of type `value`, in 2^`bits` partitions (only in Redis).

    A partition is one hash, in one slot of a cluster. A cluster moves it as a whole, so keep it below a million rows.
    More partitions make small batches slower (docs/remote.md has the figures).

    >>> TableFormat(16).row_bytes
    64
    """

    dim: int
    value: str = "fp32"
    bits: int = 6

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or not 1 <= self.dim <= 1 << 16:
            raise OptionError(f"dim={self.dim!r}: give a number of values from 1 to 65536")
        check_kind(self.value)
        if not isinstance(self.bits, int) or not 0 <= self.bits <= MOST_BITS:
            raise OptionError(f"bits={self.bits!r}: give 0 to {MOST_BITS}, for 1 to {1 << MOST_BITS} partitions")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values in the store."""
        return row_bytes(self.dim, self.value)


def check_kind(value: str) -> str:
    """Check the type of stored values."""
    if value not in VALUES:
        raise OptionError(f"value={value!r}: {choices(value, VALUES)}")
    return value


def bits_for(rows: int) -> int:
    """Partition bits for a table of `rows` rows: half a million in each partition, at least 64 partitions.

    >>> bits_for(1_000_000), bits_for(1_000_000_000)
    (6, 11)
    """
    return min(MOST_BITS, max(6, (max(rows, 1) // 500_000).bit_length()))


@dataclass(frozen=True)
class Marks:
    """The last publication that the store has completely (`complete`) and the last one that was begun (`started`).

    `filled`: whether any publication was ever finished. Before that, a missing row may not have been written yet.
    """

    complete: int
    started: int
    filled: bool = True


@dataclass(frozen=True)
class Answer:
    """A store's answer for a batch of keys, in their order.

    `values` are zeros and `versions` -1 where a row is not found. `late` marks keys without an answer by the deadline.
    """

    values: Values
    found: NDArray[np.bool_]
    late: NDArray[np.bool_]
    versions: Keys
    lowest: int  # every row found is as new as this publication
    bytes: int  # approximate bytes received or read from disk: those of the rows
    lowest_by_key: Keys | None = None  # if several stores answered: the `lowest` of each key's store

    @property
    def highest(self) -> int:
        """No row found is newer than this publication."""
        return max(self.lowest, int(self.versions.max(initial=-1)))

    def newest(self, positions: NDArray[Any]) -> int:
        """The newest publication of the keys at these positions (or in this mask) that are not late. A key without a
        row may have lost it in any publication up to its store's `lowest`."""
        versions, late = self.versions[positions], self.late[positions]
        gone = np.where(~self.found[positions] & ~late, self.lowest_of(positions), -1)
        return max(0, int(versions.max(initial=-1)), int(gone.max(initial=-1)))

    def lowest_of(self, positions: NDArray[Any]) -> Keys | int:
        """The `lowest` of the keys at these positions (or in this mask), or one number for all."""
        return self.lowest if self.lowest_by_key is None else self.lowest_by_key[positions]


class RemoteStore(Protocol):
    """Rows by table and key, outside this process."""

    @property
    def lowest(self) -> int:
        """A publication that the store has completely, at most a second behind `marks().complete`. Never blocks."""

    def create(self, table: str, form: TableFormat) -> None:
        """Create a table. One that exists must have the same dim and value."""

    def tables(self) -> dict[str, TableFormat]:
        """What is there."""

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        """Rows of the keys (duplicates too), until `deadline` (time.monotonic())."""

    def write(self, table: str, keys: Keys, values: Values, version: int, filling: bool = False) -> int:
        """Set the rows whose version is not above this one. Returns how many were set. Requires: keys are unique.

        With `filling`, a table that has lost partitions may be written; call `stamp` when it is filled again.
        """

    def stamp(self, table: str) -> None:
        """The table is filled: from now on a key that is not found has no row."""

    def erase(self, table: str, keys: Keys, version: int) -> int:
        """Remove rows as of publication `version`: later writes of older versions are ignored. Returns how many."""

    def purge(self, table: str, version: int) -> int:
        """Remove rows older than publication `version`, with which the whole table was just filled. Later writes of
        older versions are ignored. Returns how many rows were removed."""

    def marks(self) -> Marks:
        """The last complete and the last begun publication."""

    def begin(self, number: int, after: int) -> bool:
        """Begin to write publication `number`, which follows `after`. Returns False if it is complete; a gap raises."""

    def finish(self, number: int) -> None:
        """Publication `number` is written completely. When this returns, it is as durable as the store can make it."""

    def health(self) -> dict[str, Any]:
        """For operators and metrics: addresses, whether they answer, last errors, counters."""

    def close(self) -> None:
        """Close connections and files."""


def open_remote(url: str, **options: Any) -> RemoteStore:
    """The store at a URL. `options` are those of RedisOptions; they may also follow a `?` in the URL.

    `redis://[user[:password]@]host[:port][/db][?password_file=/path]`, `rediss://` with TLS,
    `redis+cluster://host:port,host:port` and `rediss+cluster://` (any of its nodes), `rocksdb:/folder`,
    `export:/repository/ctr/3` (an exported version's own rows, read-only).
    """
    scheme = url.partition(":")[0]
    if scheme in ("redis", "rediss", "redis+cluster", "rediss+cluster"):
        from hotrow.tiers.remote.redis_store import RedisStore

        return RedisStore(url, **options)
    if scheme == "export":
        from hotrow.tiers.remote.export_store import ExportStore

        return ExportStore(url.partition(":")[2], **options)
    if scheme == "rows":
        from hotrow.tiers.remote.row_server_store import RowServerStore

        return RowServerStore(url, **options)
    if scheme == "rocksdb":
        from hotrow.tiers.remote.rocksdb_store import RocksStore

        return RocksStore(url.partition(":")[2], **options)
    raise OptionError(f"remote={public(url)!r} is of no kind that HotRow knows; {choices(scheme, SCHEMES)}")


def write_publication(
    store: RemoteStore,
    number: int,
    tables: Mapping[str, tuple[Keys, Values]],
    deletions: Mapping[str, Keys] | None = None,
    after: int | None = None,
) -> bool:
    """Write publication `number`, which follows `after` (default: `number` - 1), to a store.

    Returns False if the store had it already. After a crash or an error, call it again. Several callers may write the
    same publication at once.
    """
    if not store.begin(number, number - 1 if after is None else after):
        return False
    for table, (keys, values) in tables.items():
        for at in range(0, len(keys), WRITTEN_TOGETHER):
            store.write(table, keys[at : at + WRITTEN_TOGETHER], values[at : at + WRITTEN_TOGETHER], number)
    for table, keys in (deletions or {}).items():
        for at in range(0, len(keys), WRITTEN_TOGETHER):
            store.erase(table, keys[at : at + WRITTEN_TOGETHER], number)
    store.finish(number)
    return True


def fill(
    store: RemoteStore,
    table: str,
    chunks: Iterable[tuple[Keys, Values]],
    number: int,
    progress: Any = None,
) -> int:
    """Write a whole table as of publication `number`, with one chunk at a time in memory.

    Calls `progress(rows so far)` after each chunk. Then removes rows that the store has and the table lacks. After the
    last table call `store.finish(number)`. Returns the number of rows.
    """
    rows = 0
    for keys, values in chunks:
        for at in range(0, len(keys), WRITTEN_TOGETHER):
            store.write(table, keys[at : at + WRITTEN_TOGETHER], values[at : at + WRITTEN_TOGETHER], number, True)
        rows += len(keys)
        if progress is not None:
            progress(rows)
    store.stamp(table)
    store.purge(table, number)
    return rows


# --- checks that every store makes ---


def check_keys(keys: Any) -> Keys:
    """Keys as a contiguous int64 vector (torch tensors too)."""
    array = np.asarray(keys)
    if array.dtype != np.int64 or array.ndim != 1:
        raise BatchError(f"keys are {array.dtype} of shape {list(array.shape)}; pass a 1-d array of int64")
    return np.ascontiguousarray(array)


def check_values(values: Any, keys: Keys, form: TableFormat) -> Values:
    """Values as a contiguous float32 matrix, a row for each key."""
    array = np.asarray(values)
    if array.shape != (len(keys), form.dim):
        raise BatchError(f"values have shape {list(array.shape)} for {len(keys)} keys; give [{len(keys)}, {form.dim}]")
    array = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(array).all():
        raise BatchError("values have NaN or infinite elements; no row was written. Clean them with nan_to_num()")
    return array


def check_number(number: int, what: str = "version") -> int:
    """Check a publication number."""
    if not isinstance(number, int) or not 0 <= number <= MOST_NUMBER:
        raise OptionError(f"{what}={number!r}: give a publication number from 0 to 2^53 - 1")
    return number


def check_same(table: str, there: TableFormat, wanted: TableFormat) -> None:
    """Check that an existing table has the wanted format."""
    if (there.dim, there.value) != (wanted.dim, wanted.value):
        raise StorageError(
            f"table {table!r} is in the remote store with dim {there.dim} and {there.value} values, not with dim "
            f"{wanted.dim} and {wanted.value}; choose another namespace=, or drop it there first"
        )


def gap(number: int, after: int, complete: int) -> StorageError:
    """The error for a publication that does not follow the last complete one."""
    return StorageError(
        f"publication {number} follows {after}, but the remote store is complete up to {complete}; write publications "
        f"{complete + 1} to {after} first, or fill the store from an export that has them"
    )
