"""Problem: the inputs of one call, as the kernels take them; and the sizes of their tiles.

All kernels take the same first arguments: the tensors, the strides of rows and heads, scale and divisor. A tensor that
is not there is replaced by another one, never read. Rows may be anywhere, as in slices of one projection, but the
floats of a head lie side by side; other tensors are copied.

Tile sizes follow from dtype, head dims and shapes alone, so equal shapes give equal bits. They keep a program within
the 99 KiB of shared memory that the smallest GPUs have. A tile of 16 queries is taken where users have few queries, or
where larger ones would leave most of the GPU idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import BatchError, OptionError
from hotrow.kernels.attention.tiles import tile_table
from hotrow.kernels.launch import cdiv, power_of_2

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256  # floats of a head
FEW = 16  # rows of a tile where queries are few; the least that a matrix product takes
ENOUGH = 256  # programs that fill a GPU


@dataclass(frozen=True)
class TileSizes:
    """Queries and keys of a tile, warps of a program, and how many loads a loop keeps in flight."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Problem:
    """The inputs of `hotrow::jagged_attention`, in its order. Requires: the shapes that the operator checks."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_lengths: Tensor
    k_lengths: Tensor
    own_k: Tensor | None
    own_v: Tensor | None
    visible: Tensor | None
    q_times: Tensor | None
    k_times: Tensor | None
    position_bias: Tensor | None
    time_bias: Tensor | None
    kind: str
    causal: bool
    scale: float
    divisor: float

    def __post_init__(self) -> None:
        if self.q.dtype not in DTYPES:
            raise OptionError(
                f"jagged_attention on a GPU takes {', '.join(map(str, DTYPES))}, q is {self.q.dtype}; "
                "convert q, k and v with .to(torch.float32)"
            )
        if self.widest > WIDEST:
            raise OptionError(
                f"jagged_attention on a GPU takes heads of at most {WIDEST} floats, q and v have {self.dim} and "
                f"{self.value_dim}; use more heads"
            )
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise BatchError(f"jagged_attention has tensors on {sorted(map(str, devices))}; move all to one device")

    @property
    def queries(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def dim(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[0]

    @property
    def value_dim(self) -> int:
        return self.v.shape[2]

    @property
    def widest(self) -> int:
        """Columns of the widest tile."""
        return max(16, power_of_2(max(1, self.dim, self.value_dim)))

    @property
    def silu(self) -> bool:
        return self.kind == "silu"

    @property
    def few_queries(self) -> bool:
        """Whether tiles of FEW queries are better than large ones."""
        return self.queries <= FEW * self.q_lengths.numel() or cdiv(self.queries, 64) * self.heads < ENOUGH

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of every kernel."""
        matrices = [_with_contiguous_floats(matrix) for matrix in (self.q, self.k, self.v)]
        for own, instead in ((self.own_k, matrices[0]), (self.own_v, matrices[2])):
            matrices.append(instead if own is None else _with_contiguous_floats(own))
        others = (self.visible, self.q_times, self.k_times, self.position_bias, self.time_bias)
        tensors = [matrices[0] if other is None else other.contiguous() for other in others]
        strides = [stride for matrix in matrices for stride in matrix.stride()[:2]]
        return (*matrices, *tensors, *strides, float(self.scale), float(self.divisor))

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The constants of every kernel."""
        bidirectional = not self.causal and self.visible is None and self.own_k is None
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return {
            "HEADS": self.heads,
            "DIM": self.dim,
            "D": max(16, power_of_2(max(1, self.dim))),
            "VALUE_DIM": self.value_dim,
            "VD": max(16, power_of_2(max(1, self.value_dim))),
            "POSITIONS": 0 if self.position_bias is None else self.position_bias.shape[1],
            "BUCKETS": 0 if self.time_bias is None else self.time_bias.shape[1],
            "SILU": self.silu,
            "CAUSAL": self.causal,
            "VISIBLE": self.visible is not None,
            "OWN": self.own_k is not None,
            "BIDIRECTIONAL": bidirectional,
            "PRECISION": "tf32" if tf32 and self.q.dtype == torch.float32 else "ieee",
        }

    def query_tiles(self, block: int) -> Tensor:
        """The tiles of queries."""
        return tile_table(self.q_lengths, self.k_lengths, self.queries, self.keys, block, self.causal)

    def key_tiles(self, block: int) -> Tensor:
        """The tiles of keys."""
        return tile_table(self.k_lengths, self.q_lengths, self.keys, self.queries, block, False)

    # fp32 products run without tensor cores unless tf32 is allowed: each thread multiplies, so tiles are small.

    def forward_sizes(self) -> TileSizes:
        """Tiles of the forward pass."""
        if self.q.dtype == torch.float32:
            return self._fp32_query_sizes()
        queries = FEW if self.few_queries else self._at_widths(64, 64, 32)
        return TileSizes(queries, self._at_widths(64, 32, 32), self._warps(64), self._at_widths(2, 2, 1))

    def query_gradient_sizes(self) -> TileSizes:
        """Tiles of the gradients of queries."""
        if self.q.dtype == torch.float32:
            return self._fp32_query_sizes()
        queries = FEW if self.few_queries else self._at_widths(64, 64, 32)
        return TileSizes(queries, self._at_widths(64, 32, 32), self._warps(64), 1)

    def key_gradient_sizes(self) -> TileSizes:
        """Tiles of the gradients of keys and values."""
        if self.q.dtype == torch.float32:
            side = self._at_widths(32, 32, 16)
            return TileSizes(side, side, self._warps(32), 1)
        queries = FEW if self.queries <= FEW * self.q_lengths.numel() else 32
        return TileSizes(queries, self._at_widths(64, 64, 32), self._warps(64), 1)

    def _fp32_query_sizes(self) -> TileSizes:
        queries = FEW if self.few_queries else self._at_widths(32, 16, 16)
        return TileSizes(queries, self._at_widths(32, 32, 16), self._warps(32), 1)

    def _at_widths(self, narrow: int, wide: int, widest: int) -> int:
        """A size for heads of at most 64, at most 128, and more floats."""
        return narrow if self.widest <= 64 else wide if self.widest <= 128 else widest

    def bias_gradient_sizes(self) -> TileSizes:
        """Tiles of the gradients of the biases; as many queries as keys."""
        side = 32 if self.widest <= 128 else 16
        return TileSizes(side, side, self._warps(32 if self.q.dtype == torch.float32 else 128), 1)

    def _warps(self, widest: int) -> int:
        """Warps of a program: more where heads have more floats than `widest`, since registers would not do."""
        return 4 if self.widest <= widest else 8


def _with_contiguous_floats(matrix: Tensor) -> Tensor:
    """The matrix, or a copy where the floats of a head do not lie side by side."""
    return matrix if matrix.shape[2] <= 1 or matrix.stride(2) == 1 else matrix.contiguous()
