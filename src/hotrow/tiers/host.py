"""Rows in DRAM: the checked way into the C++ core.

`HostStore` is one table's rows; `HostPlan` takes one batch through the rows of several tables. Every array is checked
here (dtype, shape, layout) before its address goes down, so the core never sees a wrong one; the core's own errors come
up as HotRow's. Calls release the interpreter lock and use the core's thread pool. Reads may run beside a writer.
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
from hotrow.batch import Jagged
from hotrow.config import Initial
from hotrow.errors import BatchError, CheckpointError, GradientError, MemoryBudgetError, StorageError
from hotrow.optim import Optimizer

SHARDS = 1024
POOLINGS = {"none": 0, "sum": 1, "mean": 2}
TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "bf16": 3}  # of a row's values (core/rows/row_type.h)
VALUES = ("fp32", "fp16", "int8")  # those of rows that are only read
LATE = {"wait": 0, "initial": 1, "default": 2}  # what a reader gets of a row that is on SSD alone
MOST = {"fp16": 65520.0, "bf16": 2.0**128 - 2.0**119}  # what would be rounded to infinity


Words = npt.NDArray[np.float32]


class Budget:
    """Bytes that rows may take, shared by several tables. A limit of 0 is no limit."""

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
    """Whole rows as they were at one moment: keys, values with optimizer state, counts and last steps."""

    keys: Tensor
    values: Tensor
    counts: Tensor
    last_steps: Tensor


class HostStore:
    """One table's rows in DRAM: key → values, optimizer state, count and last step.

    `dtype` ("fp32", "fp16" or "bf16") is the type of the values; the optimizer's state is fp32. With `values` ("fp32",
    "fp16" or "int8") rows are values of that type alone: they are read (as float32), assigned and erased, and what
    would create or train one is refused; `dtype` is then what they were trained in, and unseen keys read accordingly.
    Any number of threads may read, prefetch and ask what is cold at once.
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
        self.width = int(self.core.width)  # floats of a whole row, as it is read and assigned
        self.row_bytes = int(self.core.row_bytes)  # as it is kept

    def __len__(self) -> int:
        return len(self.core)

    def find(self, keys: Tensor) -> Tensor:
        """Slots of the keys, -1 where there is no row."""
        keys = _keys(keys)
        slots = torch.empty_like(keys)
        self.core.find(keys, slots)
        return slots

    def find_or_create(self, keys: Tensor) -> Tensor:
        """Slots of the keys; unseen ones get their initial row."""
        keys = _keys(keys)
        slots = torch.empty_like(keys)
        with core_errors():
            self.core.find_or_create(keys, slots)
        return slots

    def create(self, keys: Tensor) -> None:
        """Give unseen keys their initial row."""
        with core_errors():
            self.core.create(_keys(keys))

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Values [n, dim] of the keys and whether each has a row; those without one read their initial values."""
        keys = _keys(keys)
        values = torch.empty(keys.numel(), self.dim, dtype=torch.float32, device="cpu")
        found = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
        self.read_into(keys, values, found)
        return values, found

    def read_into(self, keys: Tensor, values: Tensor, found: Tensor) -> None:
        """As `read`, into float32 [n, dim] and bool [n]. All are contiguous, on the CPU."""
        with core_errors():
            self.core.read(keys, values, found)

    def read_late(self, keys: Tensor, late: str) -> tuple[Tensor, Tensor]:
        """As `read`, without the disk: values, and which keys (bool) were answered by the policy `late`, "initial" or
        "default", because their rows are on SSD alone."""
        keys = _keys(keys)
        values = torch.empty(keys.numel(), self.dim, dtype=torch.float32, device="cpu")
        answered = torch.empty(keys.numel(), dtype=torch.uint8, device="cpu")
        self.core.read_warm(keys, LATE[late], values, answered)
        return values, answered.view(torch.bool)

    def read_raw(self, keys: Tensor, out: Tensor) -> Tensor:
        """Rows of the keys that are in DRAM as they are kept, into `out` (float32 words [n, row_bytes / 4]); which
        those are. For a store of values alone, beside any writer."""
        found = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
        self.core.read_raw(keys, out, found)
        return found

    def check_trainable(self) -> None:
        """An error with the cure, where rows are only read."""
        with core_errors():
            self.core.check_trainable()

    def cold(self, keys: Tensor) -> Tensor:
        """Which keys have rows on SSD alone. Quick: the disk is not asked, so that one unseen key in thousands is taken
        for one of them."""
        keys = _keys(keys)
        out = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
        self.core.cold(keys, out)
        return out

    @property
    def default_row(self) -> Tensor:
        """What the policy "default" reads."""
        return torch.tensor(self.core.default_row, dtype=torch.float32)

    @default_row.setter
    def default_row(self, row: Tensor) -> None:
        with core_errors():
            self.core.set_default_row(row.tolist())

    def assign(
        self, keys: Tensor, values: Tensor, counts: Tensor | None = None, last_steps: Tensor | None = None
    ) -> None:
        """Set rows, creating those that are missing. `values` is [n, dim], or [n, width] with optimizer state.

        They are rounded to the store's type.
        """
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
        """Whether the store's type has these numbers."""
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
        """All rows, in chunks: those in DRAM in slot order, then those on SSD alone. For a table at rest."""
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
        """Rows and bytes: payload (what rows hold), and what rows, headers and index take."""
        return dict(self.core.memory())

    # --- a GPU above ---

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
        """Where rows lie: address of slot 0, bytes in use, bytes from slot to slot. The address never changes."""
        address, used, stride = self.core.row_memory()
        return int(address), int(used), int(stride)

    # --- SSD ---

    def attach(self, folder: str, evicts: bool, buffer: int = 1 << 20, lock: Any = None) -> None:
        """Keep a log of the rows in `folder`; with `evicts`, DRAM becomes a cache over it.

        `lock` is held for as long as anybody uses the rows: a batch or a save may outlive this store.
        """
        with core_errors():
            self.core.attach(folder, evicts, buffer, lock=lock)

    def attach_cache(self, folder: str) -> None:
        """DRAM becomes a cache over another store: rows that leave it are forgotten.

        The core wants an empty folder for the log that every tier has; nothing is ever written to it, and it may be
        removed afterwards. The budget needs a limit for rows to leave at all.
        """
        with core_errors():
            self.core.attach(folder, True, 1 << 16, drops=True)

    @property
    def has_log(self) -> bool:
        """Whether there is a log below the rows, so that snapshots can be taken."""
        return bool(self.core.has_log)

    def set_admission(self, after: int, probability: float, sketch_bytes: int) -> None:
        """Which keys get a row."""
        with core_errors():
            self.core.set_admission(after, probability, sketch_bytes)

    def sweep(self, **rules: float) -> int:
        """Remove rows by the rules; returns how many went at once (those on SSD go when they are met)."""
        with core_errors():
            return int(self.core.sweep(**rules))

    def staying(self, **rules: float) -> int:
        """How many rows no rule but the cap would remove at a sweep; those on SSD are read for it."""
        with core_errors():
            return int(self.core.staying(**rules))

    def prefetch(self, keys: Tensor) -> int:
        """Bring rows up from SSD; returns how many came. No result depends on it."""
        with core_errors():
            return int(self.core.prefetch(_keys(keys)))

    # --- what changed, for publications (core/rows/changed_keys.h) ---

    def begin_changes(self, everything: bool = False) -> None:
        """From now on the keys of changed rows are noted; with `everything`, rows of now count as changed."""
        with core_errors():
            self.core.begin_changes(everything)

    def end_changes(self) -> None:
        """Note them no more."""
        self.core.end_changes()

    def take_changes(self) -> Tensor:
        """Keys whose rows changed, came or went since the last call, rising. Rows in HBM are flushed first."""
        return torch.from_numpy(self.core.take_changes())

    def tier(self) -> dict[str, int]:
        """What the SSD tier has done and holds: hits, misses, evictions, bytes on disk, reads and writes.

        Space amplification is disk_bytes / live_bytes; compaction keeps it near 2 at most.
        """
        return dict(self.core.tier())

    @property
    def notes(self) -> str:
        """A few words that are saved and loaded with the rows."""
        return str(self.core.notes)

    @notes.setter
    def notes(self, text: str) -> None:
        self.core.notes = text

    def begin_snapshot(self) -> Snapshot:
        """The rows of this moment, to be written by `finish` while they go on changing."""
        with core_errors():
            self.core.begin_snapshot()
        return Snapshot(self)

    def load_snapshot(self, folder: str) -> None:
        """The store's rows become the snapshot's."""
        self.clear()
        with core_errors():
            self.core.load_snapshot(folder)

    def load_state(self, folder: str, shards: tuple[int, int] = (0, SHARDS)) -> None:
        """What a snapshot has beside the rows: sketch and caps (of some shards), cutoffs and notes.

        Call it when the rows are there.
        """
        with core_errors():
            self.core.load_state(folder, *shards)

    def clear(self) -> None:
        """Remove every row, on SSD too."""
        with core_errors():
            self.core.clear()

    @staticmethod
    def snapshot_info(folder: str) -> dict[str, Any]:
        """What a snapshot's folder says about itself: table, row_bytes, rows."""
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
    """Keys and values (float32 [n, dim]) of a table's files, chunk by chunk, in whatever type they are stored."""
    with core_errors():
        reader = _core.SnapshotReader(folder)
        while (found := reader.next(chunk)) is not None:
            values = np.ascontiguousarray(floats_of(found[3], reader.row_type, dim)[:, :dim])
            yield torch.from_numpy(found[0]), torch.from_numpy(values)


def floats_of(words: Words, row_type: int, dim: int) -> Words:
    """Rows as files have them (words of 4 bytes, core/rows/row_type.h) as values and, behind them, state: float32."""
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
    """How many of some tables' keys (int64, contiguous) have rows on SSD alone, duplicates counted. See `cold`."""
    return int(_core.count_cold([(store.core, *_address(keys)) for store, keys in parts]))


def prefetch_all(parts: Sequence[tuple[HostStore, Tensor]]) -> int:
    """Bring rows of several tables up from SSD at once; returns how many came. Any thread, beside readers.

    It creates no row and touches no count, and keeps the budget: rows that nobody asked for lately leave.
    """
    with core_errors():
        return int(_core.prefetch_all([(store.core, *_address(keys)) for store, keys in parts]))


class Ticket:
    """Rows on their way up from SSD."""

    def __init__(self, store: HostStore, keys: Tensor) -> None:
        self._future = _prefetcher().submit(store.prefetch, keys)

    def wait(self) -> int:
        """Until they are there; returns how many came."""
        return self._future.result()

    @property
    def done(self) -> bool:
        """Whether they are there."""
        return self._future.done()


@functools.cache
def _prefetcher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="hotrow-prefetch")


class Snapshot:
    """A store's rows at the moment it was begun. Finish or abandon it, once."""

    def __init__(self, store: HostStore) -> None:
        self.store = store

    def finish(self, folder: str, previous: str = "") -> dict[str, int]:
        """Write what is left to write and make `folder` hold the rows. Any thread; training may go on."""
        with core_errors():
            return dict(self.store.core.finish_snapshot(folder, previous))

    def abandon(self) -> None:
        """Give it up."""
        self.store.core.abandon_snapshot()


@dataclass(frozen=True)
class Update:
    """How one table's rows are to change: its optimizer's coefficients and clipping at this step."""

    coefficients: tuple[float, ...]
    clip_value: float
    clip_norm: float

    @staticmethod
    def of(optimizer: Optimizer, step: int) -> Update:
        """The update of `optimizer` at update number `step`, counted from 1."""
        return Update(optimizer.coefficients(step), optimizer.clip_value or 0.0, optimizer.clip_norm or 0.0)


@dataclass(frozen=True)
class Moved:
    """What an early stage of a batch moved up a tier, and whether it was short of room for more."""

    rows: int = 0
    bytes: int = 0
    short: bool = False


Block = tuple[int, int, int, int]  # address, rows, columns, floats from row to row
_NOTHING: Block = (0, 0, 0, 0)


@dataclass(frozen=True)
class Summed:
    """Gradients summed by unique key: the sums, which keys had one, and whether all were finite and all had one."""

    sums: Tensor
    present: Tensor
    finite: bool
    whole: bool


class HostPlan:
    """One batch's way through several tables: route, fetch or read, gather, update (core/rows/plan.h)."""

    def __init__(self) -> None:
        self.core = _core.Plan()

    late_ids = 0
    share = 1.0  # of the step's examples that this batch has
    over = False  # whether there is nothing left to train on
    examples: int | None = None  # of the step, where that is more than the batch's

    def route(self, jobs: Sequence[tuple[HostStore, Sequence[tuple[Jagged, str]]]], ahead: bool = False) -> None:
        """Deduplicate the keys of each table's features; each feature is given with its pooling."""
        with core_errors():
            self.core.route([(store.core, [_feature(jagged, pooling) for jagged, pooling in fs]) for store, fs in jobs])

    def prefetch(self) -> Moved:
        """Bring rows up from SSD and keep them in DRAM until `fetch` or `release`, if nobody before needs the room.

        Any thread, beside other batches' calls.
        """
        with core_errors():
            return Moved(*self.core.prefetch())

    def stage(self) -> Moved:
        """Nothing: there is no tier above DRAM."""
        return Moved()

    def fetch(self, step: int = 0) -> None:
        """Find the rows, bring those on SSD up, create those of unseen keys; `step` is the update they are for."""
        with core_errors():
            self.core.fetch(step)

    def release(self) -> None:
        """Let go of the slots: rows of this batch may leave DRAM again."""
        self.core.release()

    def read(self, late: str = "wait") -> None:
        """Copy the rows without creating or counting anything. What is on SSD alone is waited for, or answered by the
        policy `late` ("initial" or "default") without touching the disk; `late_ids` is how many ids were so answered.
        """
        with core_errors():
            self.late_ids = int(self.core.read(LATE[late]))

    def late_by_example(self, examples: int) -> Tensor:
        """After `read`: how many of its ids a policy answered, for each example, int32."""
        counts = torch.empty(examples, dtype=torch.int32)
        with core_errors():
            self.core.count_late(counts)
        return counts

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one [bags, dim] matrix per feature (for pooling "none", one row per id)."""
        with core_errors():
            self.core.gather([_matrix(output) for output in outputs])

    def update(
        self,
        gradients: Sequence[Tensor | None],
        checked: Sequence[Tensor],
        updates: Sequence[Update],
        step: int,
        grad_scale: float,
    ) -> None:
        """Apply gradients, one matrix or None per feature. `checked` are the matrices to test for NaN first."""
        with core_errors():
            self.core.update(
                [_NOTHING if gradient is None else _matrix(gradient) for gradient in gradients],
                [_matrix(matrix) for matrix in checked],
                [(list(u.coefficients), u.clip_value, u.clip_norm) for u in updates],
                step,
                grad_scale,
            )

    # --- rows that other processes own (core/rows/plan.h) ---

    def deal(self, owner_of: Tensor, world: int, tables: int) -> tuple[Tensor, Tensor, Tensor]:
        """The unique keys by owner: how many for each, [world, tables]; the keys in that order; their sightings."""
        counts = torch.empty(world, tables, dtype=torch.int64)
        with core_errors():
            self.core.deal(owner_of.data_ptr(), world, counts.data_ptr())
        keys = torch.empty(self.unique, dtype=torch.int64)
        seen = torch.empty(self.unique, dtype=torch.int32)
        self.core.dealt(keys.data_ptr(), seen.data_ptr())
        return counts, keys, seen

    def take_rows(self, rows: Tensor) -> None:
        """Rows of the dealt keys, float32 one after another; `gather` takes them from there."""
        self.taken = rows  # the core has its address
        self.core.take_rows(rows.data_ptr())

    def sum(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> Summed:
        """The sum of each dealt key's gradients in batch order, laid out as for `take_rows`."""
        sums = torch.empty(floats, dtype=torch.float32)
        present = torch.empty(self.unique, dtype=torch.uint8)
        with core_errors():
            finite, whole = self.core.sum(
                [_NOTHING if gradient is None else _matrix(gradient) for gradient in gradients],
                [_matrix(matrix) for matrix in checked],
                sums.data_ptr(),
                present.data_ptr(),
            )
        return Summed(sums, present, finite, whole)

    def route_seen(self, stores: Sequence[HostStore], asked: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """For each table what each process asks for: addresses of its keys and of how often it saw them, and how many.

        Several may ask for one key; their gradients are summed in that order.
        """
        with core_errors():
            self.core.route_seen([(store.core, list(of_store)) for store, of_store in zip(stores, asked, strict=True)])

    def gather_blocks(self, blocks: Sequence[Block]) -> None:
        """As `gather`, into float32 blocks by address; one without an address is passed over."""
        with core_errors():
            self.core.gather(blocks)

    def update_blocks(
        self, blocks: Sequence[Block], present: Sequence[int], updates: Sequence[Update], step: int, grad_scale: float
    ) -> None:
        """As `update`, from float32 blocks by address, which have been checked. `present` are addresses of bytes, 0
        where a key has no gradient; without any, all have one."""
        coefficients = [(list(u.coefficients), u.clip_value, u.clip_norm) for u in updates]
        with core_errors():
            self.core.update(blocks, [], coefficients, step, grad_scale, present)

    @property
    def late(self) -> int:
        """Rows that `prefetch` was to have brought and `fetch` had to read after all."""
        return int(self.core.late)

    @property
    def ids(self) -> int:
        """Ids in the batch."""
        return int(self.core.ids)

    @property
    def unique(self) -> int:
        """Unique keys in the batch, table by table."""
        return int(self.core.unique)


@dataclass
class Places:
    """Rows of several tables by their slots in DRAM, bounds[t] to bounds[t + 1] table t's. All int32, on the CPU."""

    stores: Sequence[HostStore]
    bounds: Sequence[int]
    slots: Tensor
    steps: Tensor
    counts: Tensor
    block: Tensor | None = None  # the three as one matrix, where they are

    def part(self, begin: int, end: int) -> Places:
        """Numbers `begin` to `end` of them: the same memory."""
        if (begin, end) == (0, self.slots.numel()):
            return self
        bounds = [min(max(bound, begin), end) - begin for bound in self.bounds]
        return Places(self.stores, bounds, *(of_all[begin:end] for of_all in (self.slots, self.steps, self.counts)))

    def apart(self, begin: int, end: int) -> Places:
        """Room for as many as `begin` to `end`, one matrix of its own; `take_part` brings back what was found."""
        pinned = self.block is not None and self.block.is_pinned()
        return HostLift(pinned).nowhere(self.stores, self.part(begin, end).bounds, end - begin)

    def take_part(self, begin: int, part: Places) -> None:
        """What was found of those from `begin` on."""
        for ours, theirs in zip(
            (self.slots, self.steps, self.counts), (part.slots, part.steps, part.counts), strict=True
        ):
            ours.numpy()[begin : begin + theirs.numel()] = theirs.numpy()

    def of_tables(self) -> list[tuple[HostStore, int, int]]:
        """Each table with where its rows begin and end, where it has any."""
        pairs = zip(self.stores, self.bounds, self.bounds[1:], strict=False)
        return [(store, begin, end) for store, begin, end in pairs if begin < end]

    @functools.cached_property
    def parts(self) -> list[tuple[Any, int, int]]:
        """As the core takes them."""
        return [(store.core, begin, end) for store, begin, end in self.of_tables()]

    def seek(self, keys: Tensor, begin: int, end: int, out: Tensor | None = None) -> int:
        """Find keys number `begin` to `end` in DRAM, with `out` their rows too; returns how many are not there."""
        there = [tensor.data_ptr() for tensor in (self.slots, self.steps, self.counts)]
        rows = (0, 0) if out is None else (out.data_ptr(), out.stride(0))
        return int(_core.seek_rows(self.parts, keys.data_ptr(), begin, end, *there, *rows))

    def copy_rows(self, begin: int, end: int, out: Tensor) -> None:
        """Whole rows of numbers `begin` to `end` into `out`, a float32 matrix."""
        _core.copy_rows(self.parts, self.slots.data_ptr(), begin, end, out.data_ptr(), out.stride(0))

    def lower(self, rows: Tensor, begin: int, end: int, clean: int) -> None:
        """Rows come back from a GPU, with their steps and counts: those with a slot, updated after step `clean`."""
        with core_errors():
            _core.lower_rows(
                self.parts,
                self.slots.data_ptr(),
                self.steps.data_ptr(),
                self.counts.data_ptr(),
                clean,
                begin,
                end,
                rows.data_ptr(),
                rows.stride(0),
            )

    def unhold(self) -> None:
        """The rows may leave DRAM again."""
        for store, begin, end in self.of_tables():
            if store.evicts:
                store.core.unhold(self.slots[begin:end])


class HostLift:
    """A batch's missing keys on their way up to a GPU: found, read from SSD or created, and held in DRAM meanwhile."""

    def __init__(self, pinned: bool = False) -> None:
        self.core: Any = None
        self.pinned = pinned

    def nowhere(self, stores: Sequence[HostStore], bounds: Sequence[int], count: int) -> Places:
        """Room for where so many rows are."""
        block = torch.empty(3, count, dtype=torch.int32, pin_memory=self.pinned)
        slots, steps, counts = block.unbind()
        return Places(stores, bounds, slots, steps, counts, block)

    def fetch(self, found: Places, keys: Tensor, seen: Tensor, step: int) -> None:
        """Where the rows of unique keys are (table by table), seen so often in the batch that update `step` is for.

        A key that admission refuses has step -1; its slot has its initial row until `commit` or `release`.
        """
        with core_errors():
            self.core = _core.Plan()
            self.core.route_unique(
                [
                    (table, keys.data_ptr() + 8 * begin, seen.data_ptr() + 4 * begin, end - begin)
                    for table, begin, end in found.parts
                ]
            )
            self.core.fetch(step)
            self.core.places(found.slots.data_ptr(), found.steps.data_ptr(), found.counts.data_ptr())
            self.core.hold()

    def commit(self) -> None:
        """The batch's update has landed: sightings of refused keys count."""
        if self.core is not None:
            self.core.commit()

    def release(self) -> None:
        """The batch came to nothing."""
        if self.core is not None:
            self.core.release()


class core_errors:  # noqa: N801 - it reads as a verb, and a generator would cost a microsecond a call
    """The core's exceptions as HotRow's, inside a `with`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        for core_kind, ours in _ERRORS:
            if isinstance(error, core_kind):
                raise ours(str(error)) from None


_ERRORS: list[tuple[type[BaseException], type[Exception]]] = [
    (_core.BudgetExceeded, MemoryBudgetError),
    (_core.CorruptFile, CheckpointError),
    (_core.IoError, StorageError),
    (_core.GradientNotFinite, GradientError),
    (ValueError, BatchError),
]


def _feature(jagged: Jagged, pooling: str) -> tuple[int, int, int, int, int, int]:
    values, offsets, weights = jagged.values, jagged.offsets, jagged.weights
    if (
        offsets is None and weights is None and values.is_cpu and values.is_contiguous()
    ):  # most features of most batches
        count = values.numel()
        return values.data_ptr(), count, 0, count, 0, POOLINGS[pooling]
    for tensor in (values, offsets, weights):
        if tensor is not None and not (tensor.is_contiguous() and tensor.device.type == "cpu"):
            raise BatchError("ids, offsets and weights must be contiguous CPU tensors; call .cpu().contiguous()")
    return (
        values.data_ptr(),
        values.numel(),
        0 if offsets is None else offsets.data_ptr(),
        jagged.size,
        0 if weights is None else weights.data_ptr(),
        POOLINGS[pooling],
    )


def _matrix(tensor: Tensor) -> tuple[int, int, int, int]:
    plain = tensor.dim() == 2 and (tensor.stride(1) == 1 or tensor.shape[1] <= 1 or tensor.numel() == 0)
    if tensor.dtype != torch.float32 or not plain:
        raise BatchError(f"a matrix of {tensor.dtype}, shape {list(tensor.shape)}; pass 2-d float32 with unit stride")
    return tensor.data_ptr(), tensor.shape[0], tensor.shape[1], tensor.stride(0)


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
