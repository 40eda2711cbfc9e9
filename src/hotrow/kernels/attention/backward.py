"""The backward pass of jagged attention: gradients of queries, then of keys and values, then of the bias tables."""

from __future__ import annotations

from torch import Tensor

from hotrow.kernels.attention.bias_gradients import bias_gradients
from hotrow.kernels.attention.key_gradients import key_gradients
from hotrow.kernels.attention.problem import Problem
from hotrow.kernels.attention.query_gradients import query_gradients


def backward(
    gradient: Tensor,
    out: Tensor,
    log_sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    visible: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    kind: str,
    causal: bool,
    scale: float,
    divisor: float,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, own_k, own_v, position_bias and time_bias, each in its tensor's dtype; empty for what
    is None. `out` and `log_sums` are what `forward` returned."""
    problem = Problem(
        q, k, v, q_lengths, k_lengths, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
        kind, causal, scale, divisor,
    )  # fmt: skip
    gradient, out = gradient.contiguous(), out.contiguous()
    of_q, of_own_k, of_own_v, deltas = query_gradients(problem, gradient, out, log_sums)
    of_k, of_v = key_gradients(problem, gradient, log_sums, deltas)
    return of_q, of_k, of_v, of_own_k, of_own_v, *bias_gradients(problem, gradient, log_sums, deltas)
