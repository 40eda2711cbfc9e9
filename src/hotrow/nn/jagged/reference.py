"""Jagged attention in plain torch: a loop over users. The tests compare every implementation with this.

It is exact about what the operation means and keeps all scores in memory, so it is for small inputs. A device without
an implementation of its own runs it, too. float64 inputs are computed in float64, others in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.nn.jagged.input_checks import check_lengths, check_shapes


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
    visible: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    kind: str = "softmax",
    causal: bool = False,
    scale: float = 1.0,
    divisor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`out` and the log-sums of exponentials (zeros for silu). Differentiable by torch."""
    check_shapes(
        q, k, v, q_lengths, k_lengths, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
        kind, causal, scale, divisor,
    )  # fmt: skip
    queries, _ = check_lengths(q, k, q_lengths, k_lengths, causal)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    bidirectional = not causal and visible is None and own_k is None
    outs, sums = [], []
    q_begin = k_begin = 0
    for q_length, k_length in zip(q_lengths.tolist(), k_lengths.tolist(), strict=True):
        its_q, its_k = slice(q_begin, q_begin + q_length), slice(k_begin, k_begin + k_length)
        q_begin, k_begin = its_q.stop, its_k.stop
        number = torch.arange(q_length, device=q.device)
        place = torch.arange(k_length, device=q.device)
        if causal:
            seen = number + 1
        elif visible is not None:
            seen = visible[its_q].clamp(0, k_length)
        else:
            seen = torch.full_like(number, k_length)
        q_place = number if causal or bidirectional else seen
        distance = q_place[:, None] - place
        mask = place < seen[:, None]  # [queries, keys]
        keys, values = k[its_k].to(dtype), v[its_k].to(dtype)
        scores = scale * torch.einsum("qhd,khd->hqk", q[its_q].to(dtype), keys)
        if time_bias is not None and q_times is not None and k_times is not None:
            elapsed = q_times[its_q, None] - k_times[its_k]
        else:
            elapsed = torch.zeros_like(distance)
        if own_k is not None:
            own_scores = scale * (q[its_q].to(dtype) * own_k[its_q].to(dtype)).sum(2)
            scores = torch.cat([scores, own_scores.T.unsqueeze(2)], 2)
            nothing = distance.new_zeros(q_length, 1)
            distance, elapsed = (torch.cat([x, nothing], 1) for x in (distance, elapsed))
            mask = torch.cat([mask, mask.new_ones(q_length, 1)], 1)
        distance, elapsed = (x.abs() if bidirectional else x.clamp(min=0) for x in (distance, elapsed))
        if position_bias is not None:
            scores = scores + position_bias.to(dtype)[:, distance.clamp(max=position_bias.shape[1] - 1)]
        if time_bias is not None:
            scores = scores + time_bias.to(dtype)[:, time_bucket(elapsed).clamp(max=time_bias.shape[1] - 1)]
        if kind == "softmax":
            scores = scores.masked_fill(~mask, -torch.inf)
            log_sum = torch.logsumexp(scores, 2, keepdim=True)  # [heads, queries, 1]
            seeing = mask.any(1)[:, None]
            weights = torch.where(seeing, scores - log_sum.where(seeing, 0.0), -torch.inf).exp()
            sums.append(log_sum.squeeze(2).T)
        else:
            weights = torch.nn.functional.silu(scores).masked_fill(~mask, 0.0) / divisor
            sums.append(torch.zeros(q_length, q.shape[1], dtype=dtype, device=q.device))
        out = torch.einsum("hqk,khd->qhd", weights[:, :, :k_length], values)
        if own_v is not None:
            out = out + weights[:, :, -1].T.unsqueeze(2) * own_v[its_q].to(dtype)
        outs.append(out)
    padding = q.shape[0] - queries
    outs.append(torch.zeros(padding, q.shape[1], v.shape[2], dtype=dtype, device=q.device))
    sums.append(torch.zeros(padding, q.shape[1], dtype=dtype, device=q.device))
    return torch.cat(outs).to(q.dtype), torch.cat(sums)


def time_bucket(milliseconds: Tensor) -> Tensor:
    """floor(log2(1 + milliseconds / 1000)), exactly: the position of the highest bit of 1 + whole seconds."""
    seconds = torch.div(milliseconds, 1000, rounding_mode="floor") + 1
    return (torch.frexp(seconds.to(torch.float64)).exponent - 1).long()


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The operator's forward: `out` and log-sums in float32."""
    with torch.no_grad():
        out, log_sums = attend(*inputs)
    return out, log_sums.float()


def backward(gradient: Tensor, out: Tensor, log_sums: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The operator's backward: the gradients of q, k, v, own_k, own_v, position_bias, time_bias; empty where absent."""
    places = (0, 1, 2, 5, 6, 10, 11)
    leaves = list(inputs)
    for at in places:
        if leaves[at] is not None:
            leaves[at] = leaves[at].detach().requires_grad_()
    with torch.enable_grad():
        again, _ = attend(*leaves)
    given = [leaves[at] for at in places if leaves[at] is not None]
    if again.requires_grad:
        found = iter(torch.autograd.grad(again, given, gradient, materialize_grads=True))
    else:  # no user, so nothing was computed
        found = iter([torch.zeros_like(leaf) for leaf in given])
    return tuple(gradient.new_empty(0) if inputs[at] is None else next(found).contiguous() for at in places)
