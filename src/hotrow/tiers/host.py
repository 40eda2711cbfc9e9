"""Rows in DRAM: the checked way into the C++ core.

`HostStore` is one table's rows; `HostPlan` takes one batch through the rows of several tables. Every array is checked
here (dtype, shape, layout) before its address goes down, so the core never sees a wrong one; the core's own errors come
up as HotRow's. Calls release the interpreter lock and use the core's thread pool. Reads may run beside a writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow import _core
from hotrow.batch import Jagged
from hotrow.config import Initial
from hotrow.errors import BatchError, GradientError, MemoryBudgetError
from hotrow.optim import Optimizer

POOLINGS = {"none": 0, "sum": 1, "mean": 2}


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
    """One table's rows in DRAM: key → values, optimizer state, count and last step."""

    def __init__(self, name: str, dim: int, optimizer: Optimizer, initial: Initial, seed: int, budget: Budget) -> None:
        state = [(part.width, part.initial) for part in optimizer.state(dim)]
        self.core = _core.Table(
            name, dim, optimizer.code, state, initial.to_core(), seed & 0xFFFFFFFFFFFFFFFF, budget.core
        )
        self.dim = dim
        self.width = int(self.core.width)

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

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Values [n, dim] of the keys and whether each has a row; those without one read their initial values."""
        keys = _keys(keys)
        values = torch.empty(keys.numel(), self.dim, dtype=torch.float32, device="cpu")
        found = torch.empty(keys.numel(), dtype=torch.bool, device="cpu")
        self.core.read(keys, values, found)
        return values, found

    def assign(
        self, keys: Tensor, values: Tensor, counts: Tensor | None = None, last_steps: Tensor | None = None
    ) -> None:
        """Set rows, creating those that are missing. `values` is [n, dim], or [n, width] with optimizer state."""
        keys = _keys(keys)
        if values.dim() != 2 or values.shape[0] != keys.numel() or values.shape[1] not in (self.dim, self.width):
            raise BatchError(
                f"values have shape {list(values.shape)} for {keys.numel()} keys; "
                f"give [{keys.numel()}, {self.dim}], or [{keys.numel()}, {self.width}] with optimizer state"
            )
        values = values.detach().to(torch.float32).contiguous()
        if not bool(torch.isfinite(values).all()):
            raise BatchError("values have NaN or infinite elements; no row was changed. Clean them with nan_to_num()")
        if counts is not None and bool((counts < 0).any()):
            raise BatchError("a count is negative; no row was changed. Give counts of 0 or above")
        if last_steps is not None and bool(((last_steps < 0) | (last_steps >= 0xFFFFFFFF)).any()):
            raise BatchError("a last step is out of range; no row was changed. Give steps from 0 to 4294967294")
        with core_errors():
            self.core.assign(keys, values, _int64(counts), _int64(last_steps))

    def erase(self, keys: Tensor) -> int:
        """Remove rows; returns how many there were."""
        return int(self.core.erase(_keys(keys)))

    def scan(self, chunk: int = 65536) -> Iterator[Rows]:
        """All rows in slot order, in chunks; rows created meanwhile may or may not be seen."""
        start = 0
        while True:
            keys, counts, steps = (torch.empty(chunk, dtype=torch.int64, device="cpu") for _ in range(3))
            values = torch.empty(chunk, self.width, dtype=torch.float32, device="cpu")
            start, count = self.core.scan(start, values, keys, counts, steps)
            if count == 0:
                return
            yield Rows(keys[:count], values[:count], counts[:count], steps[:count])

    def memory(self) -> dict[str, int]:
        """Rows and bytes: payload (what rows hold), and what rows, headers and index take."""
        return dict(self.core.memory())


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


class HostPlan:
    """One batch's way through several tables: route, fetch or read, gather, update (core/rows/plan.h)."""

    def __init__(self) -> None:
        self.core = _core.Plan()

    def route(self, jobs: Sequence[tuple[HostStore, Sequence[tuple[Jagged, str]]]]) -> None:
        """Deduplicate the keys of each table's features; each feature is given with its pooling."""
        with core_errors():
            self.core.route([(store.core, [_feature(jagged, pooling) for jagged, pooling in fs]) for store, fs in jobs])

    def fetch(self) -> None:
        """Find the rows, creating those of unseen keys."""
        with core_errors():
            self.core.fetch()

    def read(self) -> None:
        """Copy the rows without creating or counting anything."""
        self.core.read()

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Pool into one [bags, dim] matrix per feature (for pooling "none", one row per id)."""
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
                [(0, 0, 0, 0) if gradient is None else _matrix(gradient) for gradient in gradients],
                [_matrix(matrix) for matrix in checked],
                [(list(u.coefficients), u.clip_value, u.clip_norm) for u in updates],
                step,
                grad_scale,
            )

    @property
    def ids(self) -> int:
        """Ids in the batch."""
        return int(self.core.ids)

    @property
    def unique(self) -> int:
        """Unique keys in the batch, table by table."""
        return int(self.core.unique)


@contextmanager
def core_errors() -> Iterator[None]:
    """The core's exceptions as HotRow's."""
    try:
        yield
    except _core.BudgetExceeded as error:
        raise MemoryBudgetError(str(error)) from None
    except _core.GradientNotFinite as error:
        raise GradientError(str(error)) from None
    except ValueError as error:
        raise BatchError(str(error)) from None


def _feature(jagged: Jagged, pooling: str) -> tuple[int, int, int, int, int, int]:
    values, offsets, weights = jagged.values, jagged.offsets, jagged.weights
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
    if tensor.dtype != torch.float32 or tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
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


def _int64(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.int64).contiguous()
