"""Random inputs of jagged attention in every variant, and the reference's outputs and gradients for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.attention.backward import backward
from hotrow.kernels.attention.forward import forward
from hotrow.nn.jagged import reference

NAMES = ("q", "k", "v", "own_k", "own_v", "position_bias", "time_bias")


@dataclass(frozen=True)
class Case:
    """What is drawn. `padding` rows follow the last user's."""

    layer: str  # "causal", "bidirectional", "visible", "own" or "visible and own"
    kind: str = "softmax"
    heads: int = 2
    dim: int = 5
    value_dim: int = 3
    positions: int | None = 7
    buckets: int | None = 6
    padding: int = 3
    scale: float = 0.7
    sorted_times: bool = True


def draw(case: Case, q_lengths: Sequence[int], k_lengths: Sequence[int], seed: int = 0) -> tuple[Any, ...]:
    """The operator's inputs, float32 on the CPU. q, k and v are slices of wider matrices, as of one projection."""
    random = torch.Generator().manual_seed(seed)
    n, m = sum(q_lengths) + case.padding, sum(k_lengths) + case.padding

    def rows(count: int, width: int) -> Tensor:
        return torch.randn(count, case.heads, width + 3, generator=random)[:, :, 2 : 2 + width]

    def times(lengths: Sequence[int]) -> Tensor:
        parts = [torch.randint(0, 40_000, (length,), generator=random) for length in (*lengths, case.padding)]
        drawn = torch.cat([part.sort().values if case.sorted_times else part for part in parts])
        return drawn + 1_700_000_000_000

    self_attention = case.layer in ("causal", "bidirectional")
    q_times, k_times = times(q_lengths), times(k_lengths)
    if self_attention:
        q_times = k_times
    own = "own" in case.layer
    visible = None
    if "visible" in case.layer:
        longest = torch.tensor([*k_lengths, 1]).repeat_interleave(torch.tensor([*q_lengths, case.padding]))
        visible = (torch.rand(n, generator=random) * (longest + 2)).long()  # some beyond the user's keys
    return (
        rows(n, case.dim), rows(m, case.dim), rows(m, case.value_dim),
        torch.tensor(q_lengths, dtype=torch.int64), torch.tensor(k_lengths, dtype=torch.int64),
        rows(n, case.dim) if own else None, rows(n, case.value_dim) if own else None, visible,
        None if case.buckets is None else q_times, None if case.buckets is None else k_times,
        None if case.positions is None else torch.randn(case.heads, case.positions, generator=random),
        None if case.buckets is None else torch.randn(case.heads, case.buckets, generator=random),
        case.kind, case.layer == "causal", case.scale, 4.0 if case.kind == "silu" else 1.0,
    )  # fmt: skip


def converted(inputs: Sequence[Any], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The inputs on a device: q, k, v and own keys in a dtype, tables in float32 (in float64 if that is the dtype)."""
    made = []
    for at, value in enumerate(inputs):
        if isinstance(value, Tensor):
            value = value.to(device)
            if value.is_floating_point():
                value = value.to(dtype if at < 7 or dtype == torch.float64 else torch.float32)
        made.append(value)
    return tuple(made)


def expected(inputs: Sequence[Any], gradient: Tensor) -> dict[str, Tensor]:
    """What the reference gives in float64."""
    exact = converted(inputs, torch.float64, gradient.device)
    out, log_sums = reference.forward(*exact)
    found = reference.backward(gradient.double(), out, log_sums, *exact)
    return {"out": out, "log_sums": log_sums, **dict(zip(NAMES, found, strict=True))}


def computed(inputs: Sequence[Any], gradient: Tensor) -> dict[str, Tensor]:
    """What the kernels give."""
    out, log_sums = forward(*inputs)
    found = backward(gradient, out, log_sums, *inputs)
    return {"out": out, "log_sums": log_sums, **dict(zip(NAMES, found, strict=True))}


def compare(inputs: Sequence[Any], tolerance: float, seed: int = 1) -> None:
    """The kernels' results differ from the reference's by at most `tolerance` of the largest magnitude of each; tables'
    gradients by three times that, since they add up the rounding of `out` over all events."""
    q, v = inputs[0], inputs[2]
    random = torch.Generator().manual_seed(seed)
    gradient = torch.randn(q.shape[0], q.shape[1], v.shape[2], generator=random).to(q.device, q.dtype)
    wanted, got = expected(inputs, gradient), computed(inputs, gradient)
    for name, value in wanted.items():
        other = got[name]
        assert other.shape == value.shape, name
        finite = value.isfinite()
        assert torch.equal(finite, other.isfinite()), name
        value, other = value[finite], other[finite].double()
        if value.numel():
            largest = max(float(value.abs().max()), 1e-3)
            allowed = 3 * tolerance if name.endswith("bias") else tolerance
            assert float((value - other).abs().max()) <= allowed * largest, name
