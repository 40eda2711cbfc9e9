"""HostPlan: one batch's way through the rows of several tables in DRAM, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import Jagged
from hotrow.errors import BatchError
from hotrow.optim import Optimizer
from hotrow.tiers.core_errors import core_errors
from hotrow.tiers.host import LATE, HostStore

POOLINGS = {"none": 0, "sum": 1, "mean": 2}


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
