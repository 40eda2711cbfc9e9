"""HostStore: one table's rows in DRAM and on SSD. Checks every argument and calls the C++ core.

plan.py runs a batch over several tables, and row_staging.py moves rows to a GPU and back. All three check the dtype,
shape and layout of every array before they pass its address to the core. core_errors.py turns the core's exceptions
into HotRow's. Calls release Python's lock and use the core's thread pool. Reads may run beside a writer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow import _core
from hotrow.config import Initial
from hotrow.errors import BatchError
from hotrow.optim import Optimizer
from hotrow.tiers.host.core_errors import core_errors

SHARDS = 1024
SEGMENT = 64 << 20  # bytes of a segment of a log
TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "bf16": 3}  # types of a row's values (core/rows/row_type.h)
VALUES = ("fp32", "fp16", "int8")  # types of read-only rows
LATE = {"wait": 0, "initial": 1, "default": 2}  # policies for a row that is only on SSD (core: ColdReadPolicy)
MOST = {"fp16": 65520.0, "bf16": 2.0**128 - 2.0**119}  # the least absolute value that would be rounded to infinity


Words = npt.NDArray[np.float32]


class Budget:
    """A limit on the bytes of several tables' rows together. 0 is no limit."""

    def __init__(self, limit: int = 0) -> None:
        self.core = _core.Budget(limit)

    @property
    def limit(self) -> int:
        """The limit in bytes; 0 is none."""
        return int(self.core.limit)

    @property
    def used(self) -> int:
        """Bytes taken now."""
        return int(self.core.used)


@dataclass(frozen=True)
class Rows:
    """Copies of whole rows: keys, values followed by optimizer state, counts and last steps."""

    keys: Tensor
    values: Tensor
    counts: Tensor
    last_steps: Tensor


class HostStore:
    """One table's rows in DRAM: key → values, optimizer state, count and last step.

    `dtype` ("fp32", "fp16" or "bf16") is the type of the values; the optimizer's state is fp32. With `values` ("fp32",
    "fp16" or "int8") the rows are read-only for training: values of that type without state, which can be read (as
    float32), assigned and erased. `dtype` is then the type that they were trained in; the initial values of unseen keys
    are rounded to it. Any number of threads may call read, prefetch and cold at once.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        optimizer: Optimizer,
        initial: Initial,
        seed: int,
        budget: Budget,
        values: str | None = None,
        dtype: str = "fp32",
    ) -> None:
        state = [] if values else [(part.width, part.initial) for part in optimizer.state(dim)]
        self.core = _core.Table(
            name,
            dim,
            optimizer.code,
            state,
            initial.to_core(),
            seed & 0xFFFFFFFFFFFFFFFF,
            budget.core,
            frozen=values is not None,
            type=TYPES[values or dtype],
            drawn=TYPES[dtype],
        )
        self.name = name
        self.dim = dim
        self.values = values
        self.type = values or dtype
        self.width = int(self.core.width)  # floats of a row with its state, as scan returns and assign takes it
        self.row_bytes = int(self.core.row_bytes)  # of a stored row

    def __len__(self) -> int:
        return len(self.core)

    def find(self, keys: Tensor) -> Tensor:
        """Slots of the keys, -1 where there is no row."""
        keys = _keys(keys)
        slots = torch.empty_like(keys)
        self.core.find(keys, slots)
        return slots

    def find_or_create(self, keys: Tensor) -> Tensor:
        """Slots of the keys. Creates the initial rows of unseen keys."""
        keys = _keys(keys)
        slots = torch.empty_like(keys)
        with core_errors():
            self.core.find_or_create(keys, slots)
        return slots

    def create(self, keys: Tensor) -> None:
        """Create the initial rows of unseen keys."""
        with core_errors():
            self.core.create(_keys(keys))

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Values [n, dim] of the keys, and whether each has a row. A key without one reads its initial values."""
        keys = _keys(keys)
        values = torch.empty(keys.numel(), self.dim, dtype=torch.float32, device="cpu")
        found = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
        self.read_into(keys, values, found)
        return values, found

    def read_into(self, keys: Tensor, values: Tensor, found: Tensor) -> None:
        """As `read`, into float32 [n, dim] and bool [n]. Requires: all are contiguous and on the CPU."""
        with core_errors():
            self.core.read(keys, values, found)

    def read_late(self, keys: Tensor, late: str) -> tuple[Tensor, Tensor]:
        """As `read`, without disk access. Returns values, and which keys (bool) the policy `late` ("initial" or
        "default") answered because their rows are only on SSD."""
        keys = _keys(keys)
        values = torch.empty(keys.numel(), self.dim, dtype=torch.float32, device="cpu")
        answered = torch.empty(keys.numel(), dtype=torch.uint8, device="cpu")
        self.core.read_warm(keys, LATE[late], values, answered)
        return values, answered.view(torch.bool)

    def read_raw(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy the stored bytes of the keys' rows in DRAM into `out` (float32 words [n, row_bytes / 4]). Returns which
        keys are in DRAM. For a store of values alone. May run beside a writer."""
        found = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
        self.core.read_raw(keys, out, found)
        return found

    def check_trainable(self) -> None:
        """Raise if the rows are read-only; the error names the cure."""
        with core_errors():
            self.core.check_trainable()

    def cold(self, keys: Tensor) -> Tensor:
        """Which keys have rows only on SSD. Does not access the disk, so about one unseen key in thousands is wrongly
        reported."""
        keys = _keys(keys)
        out = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
        self.core.cold(keys, out)
        return out

    @property
    def default_row(self) -> Tensor:
        """The row that the policy "default" answers with."""
        return torch.tensor(self.core.default_row, dtype=torch.float32)

    @default_row.setter
    def default_row(self, row: Tensor) -> None:
        with core_errors():
            self.core.set_default_row(row.tolist())

    def assign(
        self, keys: Tensor, values: Tensor, counts: Tensor | None = None, last_steps: Tensor | None = None
    ) -> None:
        """Set rows, and create those that are missing. `values` is [n, dim], or [n, width] with optimizer state. They
        are rounded to the store's type."""
        keys = _keys(keys)
        if values.dim() != 2 or values.shape[0] != keys.numel() or values.shape[1] not in (self.dim, self.width):
            raise BatchError(
                f"values have shape {list(values.shape)} for {keys.numel()} keys; "
                f"give [{keys.numel()}, {self.dim}], or [{keys.numel()}, {self.width}] with optimizer state"
            )
        values = values.detach().to(torch.float32).contiguous()
        if not bool(torch.isfinite(values).all()):
            raise BatchError("values have NaN or infinite elements; no row was changed. Clean them with nan_to_num()")
        self._check_fits(values)
        if counts is not None and bool((counts < 0).any()):
            raise BatchError("a count is negative; no row was changed. Give counts of 0 or above")
        if last_steps is not None and bool(((last_steps < 0) | (last_steps >= 0xFFFFFFFF)).any()):
            raise BatchError("a last step is out of range; no row was changed. Give steps from 0 to 4294967294")
        with core_errors():
            self.core.assign(keys, values, _int64(counts), _int64(last_steps))

    def _check_fits(self, values: Tensor) -> None:
        """Raise if a value would become infinite in the store's type."""
        if self.type == "fp32" or not values.numel():
            return
        values = values[:, : self.dim]
        largest = float((values.amax(1) - values.amin(1)).max() if self.type == "int8" else values.abs().max())
        if largest >= MOST.get(self.type, math.inf):
            raise BatchError(
                f"table {self.name!r} keeps {self.type} values, which do not reach {largest:g}; no row was changed. "
                f'Use {"dtype" if self.values is None else "values"}="fp32", or clamp them'
            )

    def erase(self, keys: Tensor) -> int:
        """Remove rows; returns how many there were."""
        with core_errors():
            return int(self.core.erase(_keys(keys)))

    def scan(self, chunk: int = 65536) -> Iterator[Rows]:
        """All rows, in chunks: those in DRAM in slot order, then those only on SSD. Requires: no writer meanwhile."""
        start = 0
        while True:
            keys, counts, steps = (torch.empty(chunk, dtype=torch.int64, device="cpu") for _ in range(3))
            values = torch.empty(chunk, self.width, dtype=torch.float32, device="cpu")
            start, count = self.core.scan(start, values, keys, counts, steps)
            if count == 0:
                break
            yield Rows(keys[:count], values[:count], counts[:count], steps[:count])
        for shard in range(SHARDS if self.core.evicts else 0):
            with core_errors():
                cold = [torch.from_numpy(array) for array in self.core.scan_cold(shard)]
            if cold[0].numel():
                yield Rows(cold[0], cold[3], cold[1], cold[2])

    def memory(self) -> dict[str, int]:
        """Numbers of rows and bytes: payload (values and state), rows, headers and index."""
        return dict(self.core.memory())

    # --- for the HBM tier ---

    def alive(self, slots: Tensor) -> Tensor:
        """Whether each slot still holds a row."""
        out = torch.empty(slots.numel(), dtype=torch.bool, device="cpu")
        self.core.alive(slots, out)
        return out

    @property
    def evicts(self) -> bool:
        """Whether rows may leave DRAM for SSD."""
        return bool(self.core.evicts)

    def row_memory(self) -> tuple[int, int, int]:
        """The memory of the rows: address of slot 0, bytes in use, bytes per slot. The address never changes."""
        address, used, stride = self.core.row_memory()
        return int(address), int(used), int(stride)

    # --- SSD ---

    def attach(
        self, folder: str, evicts: bool, buffer: int = 1 << 20, lock: Any = None, segment: int = SEGMENT
    ) -> None:
        """Keep a log of the rows in `folder`, in files of `segment` bytes. With `evicts`, DRAM becomes a cache over the
        log.

        The core holds a reference to `lock` for as long as a batch or a save uses the rows: these may outlive this
        store.
        """
        with core_errors():
            self.core.attach(folder, evicts, buffer, segment, lock=lock)

    def attach_cache(self, folder: str) -> None:
        """Make DRAM a cache over a remote store: evicted rows are discarded.

        The core needs an empty folder for a log to which it never writes; the folder may be removed afterwards. Rows
        are evicted only if the budget has a limit.
        """
        with core_errors():
            self.core.attach(folder, True, 1 << 16, drops=True)

    @property
    def has_log(self) -> bool:
        """Whether the rows have a log, which snapshots need."""
        return bool(self.core.has_log)

    def set_admission(self, after: int, probability: float, sketch_bytes: int) -> None:
        """Set admission control: which unseen keys get a row."""
        with core_errors():
            self.core.set_admission(after, probability, sketch_bytes)

    def sweep(self, **rules: float) -> int:
        """Remove expired rows: those in DRAM now, those on SSD when they are next read. Returns how many were removed
        now."""
        with core_errors():
            return int(self.core.sweep(**rules))

    def staying(self, **rules: float) -> int:
        """How many rows a sweep would keep if there were no cap. Reads the rows on SSD."""
        with core_errors():
            return int(self.core.staying(**rules))

    def prefetch(self, keys: Tensor) -> int:
        """Load rows from SSD into DRAM. Returns how many were loaded. No result depends on it."""
        with core_errors():
            return int(self.core.prefetch(_keys(keys)))

    # --- changed keys, for publications (core/table/changed_keys.h) ---

    def begin_changes(self, everything: bool = False) -> None:
        """Record the keys of changed rows from now on. With `everything`, all present rows count as changed."""
        with core_errors():
            self.core.begin_changes(everything)

    def end_changes(self) -> None:
        """Stop recording."""
        self.core.end_changes()

    def take_changes(self) -> Tensor:
        """Keys whose rows were changed, created or removed since the last call, ascending. Flush HBM first."""
        return torch.from_numpy(self.core.take_changes())

    def tier(self) -> dict[str, int]:
        """Counters and sizes of the SSD tier: hits, misses, evictions, bytes on disk, reads and writes.

        Space amplification is disk_bytes / live_bytes; compaction keeps it near 2 at most.
        """
        return dict(self.core.tier())

    @property
    def notes(self) -> str:
        """A text that is saved and loaded with the rows."""
        return str(self.core.notes)

    @notes.setter
    def notes(self, text: str) -> None:
        self.core.notes = text

    def begin_snapshot(self) -> Snapshot:
        """Begin a snapshot of the rows as they are now. `finish` writes it; rows may change meanwhile."""
        with core_errors():
            self.core.begin_snapshot()
        return Snapshot(self)

    def load_snapshot(self, folder: str) -> None:
        """Replace all rows by those of a snapshot."""
        self.clear()
        with core_errors():
            self.core.load_snapshot(folder)

    def load_state(self, folder: str, shards: tuple[int, int] = (0, SHARDS)) -> None:
        """Load what a snapshot has beside the rows: sketch and caps (of some shards), cutoffs and notes. Call it after
        the rows are loaded."""
        with core_errors():
            self.core.load_state(folder, *shards)

    def clear(self) -> None:
        """Remove every row, on SSD too."""
        with core_errors():
            self.core.clear()

    @staticmethod
    def snapshot_info(folder: str) -> dict[str, Any]:
        """What a snapshot's header says: table, row_bytes, rows, and the type of the values."""
        with core_errors():
            reader = _core.SnapshotReader(folder)
        types = {number: name for name, number in TYPES.items()}
        return {
            "table": reader.table,
            "row_bytes": reader.row_bytes,
            "rows": reader.rows,
            "values": types.get(reader.row_type, f"type {reader.row_type}"),
        }


def scan_snapshot(folder: str, dim: int, chunk: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values (float32 [n, dim]) of a snapshot, chunk by chunk. The stored type may be any."""
    with core_errors():
        reader = _core.SnapshotReader(folder)
        while (found := reader.next(chunk)) is not None:
            values = np.ascontiguousarray(floats_of(found[3], reader.row_type, dim)[:, :dim])
            yield torch.from_numpy(found[0]), torch.from_numpy(values)


def floats_of(words: Words, row_type: int, dim: int) -> Words:
    """Stored rows (words of 4 bytes, core/rows/row_type.h) as float32: values, then state."""
    raw = words.view(np.uint8).reshape(len(words), -1)
    if row_type == TYPES["int8"]:
        return raw[:, :dim].astype(np.float32) * words[:, -2:-1] + words[:, -1:]
    if row_type == TYPES["fp32"]:
        return words
    packed = np.ascontiguousarray(raw[:, : 2 * dim])
    if row_type == TYPES["fp16"]:
        values = packed.view("<f2").astype(np.float32)
    else:
        values = (packed.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return np.concatenate([values, words[:, -(-dim // 2) :]], axis=1)


def count_cold(parts: Sequence[tuple[HostStore, Tensor]]) -> int:
    """How many of some tables' keys (int64, contiguous) have rows only on SSD, duplicates counted. See `cold`."""
    return int(_core.count_cold([(store.core, *_address(keys)) for store, keys in parts]))


def prefetch_all(parts: Sequence[tuple[HostStore, Tensor]]) -> int:
    """Load rows of several tables from SSD into DRAM. Returns how many were loaded. Any thread, beside readers.

    It creates no row, changes no count and stays within the budget: rows that were not used lately are evicted.
    """
    with core_errors():
        return int(_core.prefetch_all([(store.core, *_address(keys)) for store, keys in parts]))


class PrefetchHandle:
    """A prefetch from SSD that runs on a background thread."""

    def __init__(self, store: HostStore, keys: Tensor) -> None:
        self._future = _prefetcher().submit(store.prefetch, keys)

    def wait(self) -> int:
        """Block until the rows are loaded. Returns how many were loaded."""
        return self._future.result()

    @property
    def done(self) -> bool:
        """Whether the rows are loaded."""
        return self._future.done()


@functools.cache
def _prefetcher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="hotrow-prefetch")


class Snapshot:
    """A snapshot of a store's rows. Requires: exactly one call of `finish` or `abandon`."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    def finish(self, folder: str, previous: str = "") -> dict[str, int]:
        """Write the rows that are not on disk yet and complete `folder`. Any thread, while training continues."""
        with core_errors():
            return dict(self.store.core.finish_snapshot(folder, previous))

    def abandon(self) -> None:
        """Drop the snapshot."""
        self.store.core.abandon_snapshot()


def _keys(keys: Any) -> Tensor:
    if not isinstance(keys, Tensor):
        keys = torch.as_tensor(keys)
        keys = keys.to(torch.int64) if keys.numel() == 0 else keys
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise BatchError(f"keys are {keys.dtype} of shape {list(keys.shape)}; pass a 1-d tensor of torch.int64")
    contiguous: Tensor = keys.cpu().contiguous()
    return contiguous


def _address(keys: Tensor) -> tuple[int, int]:
    if keys.dtype != torch.int64 or keys.dim() != 1 or not keys.is_contiguous() or keys.device.type != "cpu":
        raise BatchError(f"keys are {keys.dtype} of shape {list(keys.shape)}; pass contiguous 1-d int64 on the CPU")
    return keys.data_ptr(), keys.numel()


def _int64(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int64).contiguous()
