"""EncoderBlock: what one layer of an encoder over histories does, apart from its formulas.

A layer serves two callers. The user part runs it over the events of a history (`forward`). The candidate part runs it
over candidates (`candidates`): each candidate is one more event behind the history, which sees the keys of the history
in that layer and its own. Events never see a candidate. So the history is encoded once, whatever the number of its
candidates, and the user part leaves only the keys and values of each layer behind (`[events, 2, heads, head_dim]`).

The candidate part needs no more than those. So a user part that has no other reader stops at the keys of its last
layer (`keys`), without the attention over the events in that layer.

With `checkpoint=True` training keeps only the input of the layer and computes the rest again in the backward pass. The
results have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from hotrow.nn.histories.positions import RelativeBias
from hotrow.nn.jagged import jagged_attention
from hotrow.nn.mlp import linear
from hotrow.nn.sizes import fraction, head_width, positive


class EncoderBlock(nn.Module):
    """The base of TransformerBlock and HSTUBlock. They say what happens after attention (`_finished`).

    `projection` gives `gates` x `width` gates, then queries, keys and values, each `width` wide.
    """

    kind = "softmax"
    projection: nn.Linear

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        gates: int,
        causal: bool,
        positions: int,
        times: bool,
        dropout: float,
        checkpoint: bool,
    ) -> None:
        super().__init__()
        self.width = positive("width", width)
        self.heads, self.head_dim = heads, head_width(width, heads)
        self.causal = causal
        self.checkpoint = checkpoint
        self.norm = nn.LayerNorm(width)
        self.projection = linear(width, (gates + 3) * width)
        self.bias = RelativeBias(heads, positions, times)
        self.dropout = nn.Dropout(fraction("dropout", dropout))

    def forward(self, x: Tensor, lengths: Tensor, times: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Events `[events, width]` after this layer, and their keys and values, `[events, 2, heads, head_dim]`.

        `lengths` int64 `[users]`; `times` int64 `[events]`, milliseconds, if the layer has a bias of time.
        """
        if self.checkpoint and self.training and torch.is_grad_enabled():
            out: tuple[Tensor, Tensor] = recomputed(self._events, x, lengths, times, use_reentrant=False)
            return out
        return self._events(x, lengths, times)

    def keys(self, x: Tensor) -> Tensor:
        """The keys and values alone, `[events, 2, heads, head_dim]`."""
        begin = self.projection.out_features - 2 * self.width
        normed = self.norm(x)
        raw = nn.functional.linear(normed, self.projection.weight[begin:], self.projection.bias[begin:])
        return self._activated(raw).view(x.shape[0], 2, self.heads, self.head_dim)

    def candidates(
        self,
        x: Tensor,
        keys: Tensor,
        rows: Tensor,
        lengths: Tensor,
        times: Tensor | None = None,
        event_times: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Candidates `[rows, width]` after this layer; each sees the keys of its user and its own.

        `keys` are those of the events. User `u` has the next `rows[u]` candidates and the next `lengths[u]` events.
        `visible` int64 `[rows]`: how many events each candidate sees, if not all.
        """
        if self.checkpoint and self.training and torch.is_grad_enabled():
            out: Tensor = recomputed(
                self._candidates, x, keys, rows, lengths, times, event_times, visible, use_reentrant=False
            )
            return out
        return self._candidates(x, keys, rows, lengths, times, event_times, visible)

    def _events(self, x: Tensor, lengths: Tensor, times: Tensor | None) -> tuple[Tensor, Tensor]:
        gate, q, keys = self._split(x)
        k, v = keys.unbind(1)
        seen = jagged_attention(
            q, k, v, lengths, lengths,
            q_times=times, k_times=times, position_bias=self.bias.by_position, time_bias=self.bias.by_time,
            kind=self.kind, causal=self.causal,
        )  # fmt: skip
        return self._finished(x, gate, seen.flatten(1)), keys

    def _candidates(
        self,
        x: Tensor,
        keys: Tensor,
        rows: Tensor,
        lengths: Tensor,
        times: Tensor | None,
        event_times: Tensor | None,
        visible: Tensor | None,
    ) -> Tensor:
        gate, q, own = self._split(x)
        own_k, own_v = own.unbind(1)
        k, v = keys.to(q.dtype).unbind(1)
        seen = jagged_attention(
            q, k, v, rows, lengths, own_k=own_k, own_v=own_v, visible=visible,
            q_times=times, k_times=event_times, position_bias=self.bias.by_position, time_bias=self.bias.by_time,
            kind=self.kind,
        )  # fmt: skip
        return self._finished(x, gate, seen.flatten(1))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate `[n, gates * width]`, queries `[n, heads, head_dim]`, and keys and values."""
        raw = self._activated(self.projection(self.norm(x)))
        gates = self.projection.out_features - 3 * self.width
        gate, qkv = raw[:, :gates], raw[:, gates:].unflatten(1, (3, self.heads, self.head_dim))
        return gate, qkv[:, 0], qkv[:, 1:]

    def _activated(self, raw: Tensor) -> Tensor:
        return raw

    def _finished(self, x: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
        raise NotImplementedError
