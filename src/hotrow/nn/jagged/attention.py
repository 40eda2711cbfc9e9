"""jagged_attention: attention of queries over the keys of their user, without padding.

One operation serves self-attention over a history (causal or bidirectional), attention of candidates over a history,
and HSTU's pointwise attention. Work follows the sum over users of queries x keys, saved memory the number of events;
nothing is batch x longest. The backward pass recomputes the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hotrow.nn.jagged.attention_op  # noqa: F401  registers the operators


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    *,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
    visible: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    kind: str = "softmax",
    causal: bool = False,
    scale: float | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Attend to the keys of each query's user: `[n, heads, value_dim]`, in the dtype of `q`.

    `q` is `[n, heads, dim]`, `k` `[m, heads, dim]`, `v` `[m, heads, value_dim]`. User `u` has the next `q_lengths[u]`
    queries and the next `k_lengths[u]` keys. Rows beyond the sums are padding: their outputs and gradients are zero.

    A query sees all keys of its user; with `causal` those up to its own place (then the lengths are equal); with
    `visible` (int64 `[n]`) the first so many. `own_k` `[n, heads, dim]` and `own_v` `[n, heads, value_dim]` are one
    more key that only this query sees. A query that sees no key gives zeros.

    `kind` is "softmax", or "silu": the sum of `silu(score) * v`, divided by `divisor` (1 if None). The score of query i
    and key j is `scale * q_i.k_j` (`dim ** -0.5` if None), plus
        `position_bias[h, min(p_i - p_j, P - 1)]`, and
        `time_bias[h, min(T - 1, floor(log2(1 + (t_i - t_j) / 1000)))]` for times in milliseconds (int64).
    A key's place `p_j` is its number among the user's keys. A query's place depends on the layer:
        causal                               its number among the user's queries; times that run backwards count as 0
        bidirectional (no visible, no own)   its number among the user's queries; distances are absolute
        candidates (visible or own keys)     the number of the user's keys that it sees; own keys have distance 0

    >>> q = k = v = torch.ones(5, 2, 4)
    >>> lengths = torch.tensor([3, 2])
    >>> jagged_attention(q, k, v, lengths, lengths, causal=True).shape
    torch.Size([5, 2, 4])
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        own_k = None if own_k is None else own_k.to(dtype)
        own_v = None if own_v is None else own_v.to(dtype)
    out: Tensor = torch.ops.hotrow.jagged_attention(
        q, k, v, q_lengths, k_lengths, own_k, own_v, visible, q_times, k_times, position_bias, time_bias,
        kind, causal, q.shape[-1] ** -0.5 if scale is None else scale, 1.0 if divisor is None else divisor,
    )  # fmt: skip
    return out
