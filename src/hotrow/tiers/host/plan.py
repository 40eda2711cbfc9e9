"""HostPlan: one batch's way through the rows of several tables in DRAM, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import Jagged
from hotrow.errors import BatchError
from hotrow.tiers.batch_values import ALL_EXAMPLES, BatchUpdate, Moved, Request, Routed, Summed, TableRule
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import LATE, HostStore
from hotrow.tiers.plan import ANY_PUBLICATION, Jobs

POOLINGS = {"none": 0, "sum": 1, "mean": 2}


Block = tuple[int, int, int, int]  # address, rows, columns, floats from row to row
_NOTHING: Block = (0, 0, 0, 0)


class HostPlan:
    """One batch's way through several tables: route, fetch or read, gather, update (core/plan/plan.h)."""

    def __init__(self) -> None:
        self.core = _core.Plan()

    late_ids = 0
    publications = ANY_PUBLICATION

    def route(self, jobs: Jobs, ahead: bool = False) -> Routed:
        """Deduplicate the keys of each table's features; each feature is given with its pooling."""
        with core_errors():
            self.core.route([(store.core, [_feature(jagged, pooling) for jagged, pooling in fs]) for store, fs in jobs])
        return ALL_EXAMPLES

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

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """As `gather`, with all features side by side in one matrix: each has its columns from begin to before end."""
        address, size, stride = pooled.data_ptr(), pooled.shape[0], pooled.stride(0)
        self.gather_blocks([(address + 4 * begin, size, end - begin, stride) for begin, end in columns])
        return True

    def update(self, update: BatchUpdate) -> None:
        """Apply gradients to the rows, after `checked` was tested for NaN and infinity."""
        gradients = [_NOTHING if gradient is None else _matrix(gradient) for gradient in update.gradients]
        checked = [_matrix(matrix) for matrix in update.checked]
        with core_errors():
            self.core.update(gradients, checked, _rules(update.rules), update.step, update.scale)

    # --- rows that other processes own (core/plan/plan.h): HostClient and HostOwner call these ---

    def keys_by_owner(self, owner_of: Tensor, owners: int, tables: int) -> Request:
        """The unique keys, owner by owner. `owner_of` has the owner of each shard, int32."""
        counts = torch.empty(owners, tables, dtype=torch.int64)
        with core_errors():
            self.core.deal(owner_of.data_ptr(), owners, counts.data_ptr())
        keys = torch.empty(self._unique, dtype=torch.int64)
        seen = torch.empty(self._unique, dtype=torch.int32)
        self.core.dealt(keys.data_ptr(), seen.data_ptr())
        return Request(counts.tolist(), keys, seen)

    def take_rows(self, rows: Tensor) -> None:
        """Rows of those keys, float32 one after another; `gather` takes them from there."""
        self.taken = rows  # the core has its address
        self.core.take_rows(rows.data_ptr())

    def sum(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> Summed:
        """The sum of each of those keys' gradients in batch order, laid out as for `take_rows`."""
        sums = torch.empty(floats, dtype=torch.float32)
        present = torch.empty(self._unique, dtype=torch.uint8)
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
        self, blocks: Sequence[Block], present: Sequence[int], rules: Sequence[TableRule], step: int, scale: float
    ) -> None:
        """As `update`, from float32 blocks by address, which have been checked. `present` are addresses of bytes, 0
        where a key has no gradient; without any, all have one."""
        with core_errors():
            self.core.update(blocks, [], _rules(rules), step, scale, present)

    @property
    def late(self) -> int:
        """Rows that `prefetch` was to have brought and `fetch` had to read after all."""
        return int(self.core.late)

    @property
    def _unique(self) -> int:
        return int(self.core.unique)  # keys of the batch, counted by table


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


def _rules(rules: Sequence[TableRule]) -> list[tuple[list[float], float, float]]:
    return [(list(rule.coefficients), rule.clip_value, rule.clip_norm) for rule in rules]


def _matrix(tensor: Tensor) -> tuple[int, int, int, int]:
    plain = tensor.dim() == 2 and (tensor.stride(1) == 1 or tensor.shape[1] <= 1 or tensor.numel() == 0)
    if tensor.dtype != torch.float32 or not plain:
        raise BatchError(f"a matrix of {tensor.dtype}, shape {list(tensor.shape)}; pass 2-d float32 with unit stride")
    return tensor.data_ptr(), tensor.shape[0], tensor.shape[1], tensor.stride(0)
