"""The remote tier: rows that several servers share (Redis) or a full copy on local disk (RocksDB), behind one protocol.

A `RemoteStore` holds, by table, key → (publication number, values). The number is that of the publication that last
wrote the row; a write never replaces a row of a higher number, so writes may be repeated, and several writers may
write the same publication: nobody is elected. The price is 8 bytes a row and one comparison a write, at the store.
(An elected writer with a lease was the other choice. It needs clocks that agree, and numbers all the same for the
writer that lost its lease without noticing.)

A store has two marks: `started` ≥ `complete`. A publication is begun (started rises), written, then finished (complete
rises). After a crash in between, whoever comes next writes it again from its beginning. So every row that a reader gets
is at least as new as publication `complete`, and at most `started`: `Answer.lowest` and `Answer.highest`.

Reads have a deadline. Rows that have not come by then are `late`: neither found nor missing, and the caller's policy
says what to do. Nothing waits much longer than the deadline, and a dead server is waited for once (redis_nodes.py).

Threads: any number may read at once, beside one that writes. Values travel as fp32, fp16 or int8 (row_encoding.py).
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
SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "rocksdb")
MOST_NUMBER = (1 << 53) - 1  # Lua's numbers are doubles
MOST_BITS = 14
WRITTEN_TOGETHER = 65_536  # rows


class LostError(StorageError):
    """A part of a table is gone from the store; fill it anew."""


@dataclass(frozen=True)
class TableFormat:
    """How a table's rows lie in a store: `dim` values as `value`, spread over 2^`bits` partitions (Redis alone).

    A partition is one hash, in one slot of a cluster: it moves as a whole, so keep it below a million rows. More
    partitions make small batches slower (docs/remote.md has the figures).

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
    """How rows may be kept."""
    if value not in VALUES:
        raise OptionError(f"value={value!r}: {choices(value, VALUES)}")
    return value


def bits_for(rows: int) -> int:
    """Partition bits for a table that will have so many rows: half a million in each, 64 partitions at least.

    >>> bits_for(1_000_000), bits_for(1_000_000_000)
    (6, 11)
    """
    return min(MOST_BITS, max(6, (max(rows, 1) // 500_000).bit_length()))


@dataclass(frozen=True)
class Marks:
    """Publications that the store has whole (`complete`), and has begun to get (`started`).

    `filled`: whether anything was ever finished; before that, a row that is not there may still be on its way.
    """

    complete: int
    started: int
    filled: bool = True


@dataclass(frozen=True)
class Answer:
    """What a store said of a batch of keys, in their order.

    `values` are zeros and `versions` -1 where a row is not found; `late` are those of which nothing is known.
    """

    values: Values
    found: NDArray[np.bool_]
    late: NDArray[np.bool_]
    versions: Keys
    lowest: int  # every row found is as new as this publication
    bytes: int  # that came over the wire or from disk, roughly: those of the rows

    @property
    def highest(self) -> int:
        """No row found is newer than this publication."""
        return max(self.lowest, int(self.versions.max(initial=-1)))


class RemoteStore(Protocol):
    """Rows by table and key, outside this process."""

    @property
    def lowest(self) -> int:
        """A publication that the store has whole; at most a second behind `marks().complete`, and never waits."""

    def create(self, table: str, form: TableFormat) -> None:
        """Make room for a table; one that is there must have the same dim and value."""

    def tables(self) -> dict[str, TableFormat]:
        """What is there."""

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        """Rows of the keys (duplicates too), until `deadline` (time.monotonic())."""

    def write(self, table: str, keys: Keys, values: Values, version: int, filling: bool = False) -> int:
        """Set rows whose version is not above this one; returns how many were. Keys are unique.

        With `filling`, a table that lost a part of itself is written all the same; `stamp` it when it is whole again.
        """

    def stamp(self, table: str) -> None:
        """The table is filled: what is not found in it is not there."""

    def erase(self, table: str, keys: Keys, version: int) -> int:
        """Remove rows, as publication `version` did: an older write does not bring them back. Returns how many."""

    def purge(self, table: str, version: int) -> int:
        """Remove rows older than a publication with which the whole table was just filled; from now on nothing as old
        as that is taken. Returns how many."""

    def marks(self) -> Marks:
        """How far publications have come."""

    def begin(self, number: int, after: int) -> bool:
        """Publication `number`, which follows `after`, will be written. False: it is here already. A gap raises."""

    def finish(self, number: int) -> None:
        """All of publication `number` is written, and durable as far as the store is."""

    def health(self) -> dict[str, Any]:
        """For people and metrics: where it is, whether it answers, what failed."""

    def close(self) -> None:
        """Let go of everything."""


def open_remote(url: str, **options: Any) -> RemoteStore:
    """The store at a URL; `options` are those of RedisOptions, and may stand in the URL behind a `?` too.

    `redis://[user[:password]@]host[:port][/db][?password_file=/path]`, `rediss://` with TLS,
    `redis+cluster://host:port,host:port` and `rediss+cluster://` (any of its nodes), `rocksdb:/folder`.
    """
    scheme = url.partition(":")[0]
    if scheme in SCHEMES and scheme != "rocksdb":
        from hotrow.tiers.remote.redis_store import RedisStore

        return RedisStore(url, **options)
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
    """Bring a store to publication `number`, which follows `after` (the one before, by default).

    False: it was there already. Whatever happens in the middle, calling it again makes it whole. Several callers may
    write the same publication at once.
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
    """Write a whole table as publication `number` has it, chunk by chunk, so that memory is a chunk's.

    `progress(rows so far)` is called after each. Rows that the store had and the table has not are removed. Call
    `store.finish(number)` when all tables are in. Returns the rows.
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
    """A publication number."""
    if not isinstance(number, int) or not 0 <= number <= MOST_NUMBER:
        raise OptionError(f"{what}={number!r}: give a publication number from 0 to 2^53 - 1")
    return number


def check_same(table: str, there: TableFormat, wanted: TableFormat) -> None:
    """A table that exists must be what is asked for."""
    if (there.dim, there.value) != (wanted.dim, wanted.value):
        raise StorageError(
            f"table {table!r} is in the remote store with dim {there.dim} and {there.value} values, not with dim "
            f"{wanted.dim} and {wanted.value}; choose another namespace=, or drop it there first"
        )


def gap(number: int, after: int, complete: int) -> StorageError:
    """The error of a publication that does not follow what is there."""
    return StorageError(
        f"publication {number} follows {after}, but the remote store is complete up to {complete}; write publications "
        f"{complete + 1} to {after} first, or fill the store from an export that has them"
    )
