"""HostPlan: the plan of one batch, for rows in DRAM and on SSD (core/plan/plan.h).

The core does the work; this file checks the batch's tensors and passes their addresses. HostPlan is the plan protocol
where this process owns the rows. HostClient and HostOwner use its second half, where requester and owner are two
objects. The threads are those of the plan protocol (tiers/plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import Jagged
from hotrow.errors import BatchError
from hotrow.tiers.batch_values import (
    ALL_EXAMPLES,
    BatchUpdate,
    GradientSums,
    KeyRequest,
    RoutedBatch,
    TableRule,
    TransferStats,
)
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import LATE, HostStore
from hotrow.tiers.plan import ANY_PUBLICATION, TableInputs

POOLINGS = {"none": 0, "sum": 1, "mean": 2}

Block = tuple[int, int, int, int]  # address, rows, columns, floats from row to row
KeyArrays = tuple[int, int, int]  # address of keys, address of occurrences, number of keys
_NOTHING: Block = (0, 0, 0, 0)


class HostPlan:
    """The plan of one batch over several tables (hotrow.tiers.plan.Plan)."""

    def __init__(self) -> None:
        self.core = _core.Plan()

    late_ids = 0
    publications = ANY_PUBLICATION

    def route(self, inputs: TableInputs, ahead: bool = False, examples: int | None = None) -> RoutedBatch:
        """Deduplicate the keys of each table's features."""
        with core_errors():
            self.core.route(
                [(store.core, [_feature(jagged, pooling) for jagged, pooling in fs]) for store, fs in inputs]
            )
        return ALL_EXAMPLES

    def prefetch(self) -> TransferStats:
        """Load rows from SSD and pin them until `fetch` or `release`, as far as earlier batches leave DRAM slots.

        Any thread, beside other batches' calls.
        """
        with core_errors():
            return TransferStats(*self.core.prefetch())

    def stage(self) -> TransferStats:
        """Do nothing: there is no tier above DRAM."""
        return TransferStats()

    def fetch(self, step: int = 0) -> None:
        """Find and pin the rows, load those on SSD, create those of unseen keys. `step` is the update they are for."""
        with core_errors():
            self.core.fetch(step)

    def release(self) -> None:
        """Unpin the slots: DRAM may evict the rows again."""
        self.core.release()

    def read(self, late: str = "wait") -> None:
        """Copy the rows; create and count nothing. A row that is only on SSD is waited for, or the policy `late`
        ("initial" or "default") answers for it without a disk access; `late_ids` is how many ids it answered.
        """
        with core_errors():
            self.late_ids = int(self.core.read(LATE[late]))

    def late_by_example(self, examples: int) -> Tensor:
        """After `read`: how many of its ids the late policy answered, for each example, int32."""
        counts = torch.empty(examples, dtype=torch.int32)
        with core_errors():
            self.core.count_late(counts)
        return counts

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one [bags, dim] matrix for each feature (for pooling "none", one row for each id)."""
        with core_errors():
            self.core.gather([_matrix(output) for output in outputs])

    def gather_matrix(self, pooled: Tensor, columns: Sequence[tuple[int, int]]) -> bool:
        """As `gather`, with all features side by side in one matrix: each has its columns from begin to before end."""
        address, size, stride = pooled.data_ptr(), pooled.shape[0], pooled.stride(0)
        self.gather_blocks([(address + 4 * begin, size, end - begin, stride) for begin, end in columns])
        return True

    def update(self, update: BatchUpdate) -> None:
        """Apply gradients to the rows, after testing `checked` for NaN and infinity."""
        gradients = [_NOTHING if gradient is None else _matrix(gradient) for gradient in update.gradients]
        checked = [_matrix(matrix) for matrix in update.checked]
        with core_errors():
            self.core.update(gradients, checked, _rules(update.rules), update.step, update.scale)

    # --- the requester's half: HostClient calls these ---

    def partition_by_owner(self, owner_of: Tensor, owners: int, tables: int) -> KeyRequest:
        """The unique keys, owner by owner. `owner_of` has the owner of each shard, int32."""
        counts = torch.empty(owners, tables, dtype=torch.int64)
        with core_errors():
            self.core.partition_by_owner(owner_of.data_ptr(), owners, counts.data_ptr())
        keys = torch.empty(self._unique, dtype=torch.int64)
        occurrences = torch.empty(self._unique, dtype=torch.int32)
        self.core.partitioned_keys(keys.data_ptr(), occurrences.data_ptr())
        return KeyRequest(counts.tolist(), keys, occurrences)

    def set_received_rows(self, rows: Tensor) -> None:
        """Make `gather` read those keys' rows from this buffer: float32, one row after another."""
        self._received_rows = rows  # keeps the memory that the core reads
        self.core.set_received_rows(rows.data_ptr())

    def sum_gradients(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> GradientSums:
        """The sum of each of those keys' gradients in batch order, laid out as for `set_received_rows`."""
        sums = torch.empty(floats, dtype=torch.float32)
        present = torch.empty(self._unique, dtype=torch.uint8)
        with core_errors():
            finite, all_present = self.core.sum_gradients(
                [_NOTHING if gradient is None else _matrix(gradient) for gradient in gradients],
                [_matrix(matrix) for matrix in checked],
                sums.data_ptr(),
                present.data_ptr(),
            )
        return GradientSums(sums, present, finite, all_present)

    # --- the owner's half: HostOwner calls these ---

    def route_unique(self, stores: Sequence[HostStore], requests: Sequence[Sequence[KeyArrays]]) -> None:
        """Look up keys that each requester has deduplicated. `requests` has the arrays of every requester, by table.

        Several may request one key; their gradients are added in the order of requesters.
        """
        with core_errors():
            self.core.route_unique(
                [(store.core, list(of_store)) for store, of_store in zip(stores, requests, strict=True)]
            )

    def gather_blocks(self, blocks: Sequence[Block]) -> None:
        """As `gather`, into float32 blocks by address; a block without an address is skipped."""
        with core_errors():
            self.core.gather(blocks)

    def update_blocks(
        self, blocks: Sequence[Block], present: Sequence[int], rules: Sequence[TableRule], step: int, scale: float
    ) -> None:
        """As `update`, from float32 blocks by address, known to be finite. `present` are addresses of bytes, 0 where a
        key has no gradient; an empty list says that every key has one."""
        with core_errors():
            self.core.update(blocks, [], _rules(rules), step, scale, present)

    def note_in_flight(self, keys: Any, number: int, done: int) -> None:
        """Note the keys in `keys` (a _core.InFlightKeys) under the batch's number."""
        self.core.note_in_flight(keys, number, done)

    def copy_ahead(self, done: int, step: int, rows: Tensor, masks: Tensor) -> list[int]:
        """Copy the rows in DRAM that no batch after `done` has, requester by requester, and say which in `masks`.
        Returns the number of floats by requester. Beside any thread."""
        with core_errors():
            return list(self.core.copy_ahead(done, step, rows.data_ptr(), masks.data_ptr()))

    def copy_changed(self, rows: Tensor, masks: Tensor) -> list[int]:
        """After `fetch`: the same for the rows that were not copied ahead, or have changed since."""
        with core_errors():
            return list(self.core.copy_changed(rows.data_ptr(), masks.data_ptr()))

    @property
    def prefetch_misses(self) -> int:
        """How many rows `fetch` had to read from SSD because `prefetch` had not."""
        return int(self.core.prefetch_misses)

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
    unit_stride = tensor.dim() == 2 and (tensor.stride(1) == 1 or tensor.shape[1] <= 1 or tensor.numel() == 0)
    if tensor.dtype != torch.float32 or not unit_stride:
        raise BatchError(f"a matrix of {tensor.dtype}, shape {list(tensor.shape)}; pass 2-d float32 with unit stride")
    return tensor.data_ptr(), tensor.shape[0], tensor.shape[1], tensor.stride(0)
