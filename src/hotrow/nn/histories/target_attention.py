"""Candidates that attend to a history, by softmax.

`TargetAttention` sees the whole history of the candidate's user. Keys and values are computed once for each event, in
the user part.

`SelectedAttention` sees a few events that a search chose for each candidate (`search.py`), of a history that may be
thousands long. Projecting all its events would cost more than the search, so no event is projected: q.(Wk e) equals
(Wk' q).e, and the weighted sum of Wv e equals Wv times the weighted sum of e. Queries and sums are projected instead,
once for each candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotrow.nn.histories.positions import TIME_BUCKETS, RelativeBias
from hotrow.nn.jagged import jagged_attention
from hotrow.nn.mlp import linear
from hotrow.nn.sizes import head_width, positive


class TargetAttention(nn.Module):
    """Multi-head attention of candidates over their user's events: `[rows, width]`. Zeros for an empty history.

    >>> attention = TargetAttention(8, heads=2)
    >>> keys = attention.keys(torch.randn(5, 8))
    >>> attention(torch.randn(3, 8), keys, torch.tensor([2, 1]), torch.tensor([5, 0])).shape
    torch.Size([3, 8])
    """

    def __init__(self, width: int, heads: int, *, positions: int = 0, times: bool = False) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_width(width, heads)
        self.queries = linear(width, width)
        self.events = linear(width, 2 * width)
        self.out = linear(width, width, bias=False)
        self.bias = RelativeBias(heads, positions, times)

    def keys(self, x: Tensor) -> Tensor:
        """Keys and values of events `[events, width]`: `[events, 2, heads, head_dim]`."""
        keys: Tensor = self.events(x).view(x.shape[0], 2, self.heads, self.head_dim)
        return keys

    def forward(
        self,
        candidates: Tensor,
        keys: Tensor,
        rows: Tensor,
        lengths: Tensor,
        times: Tensor | None = None,
        event_times: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Candidates `[rows, width]`, grouped by user: user `u` has `rows[u]` of them and `lengths[u]` events.

        `visible` int64 `[rows]`: how many events each candidate sees, if not all.
        """
        q = self.queries(candidates).view(-1, self.heads, self.head_dim)
        k, v = keys.to(q.dtype).unbind(1)
        if visible is None:
            visible = lengths.repeat_interleave(rows, output_size=candidates.shape[0])
        seen = jagged_attention(
            q, k, v, rows, lengths, visible=visible, q_times=times, k_times=event_times,
            position_bias=self.bias.by_position, time_bias=self.bias.by_time,
        )  # fmt: skip
        out: Tensor = self.out(seen.flatten(1))
        return out


class SelectedAttention(nn.Module):
    """Multi-head attention of each candidate over events selected for it: `[rows, width]`. Zeros if there is none.

    `events` is the width of an event as the tables give it. With `times` the distance in time has a learned bias.

    >>> attention = SelectedAttention(width=8, events=6, heads=2)
    >>> index, counts = torch.tensor([[4, 0], [1, 2]]), torch.tensor([1, 2])
    >>> attention(torch.randn(2, 8), torch.randn(5, 6), index, counts).shape
    torch.Size([2, 8])
    """

    edges: Tensor

    def __init__(self, width: int, events: int, heads: int, *, times: bool = False) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_width(width, heads)
        self.queries = linear(width, width)
        self.to_keys = nn.Parameter(torch.empty(heads, self.head_dim, positive("events", events)))
        self.to_values = nn.Parameter(torch.empty(heads, events, self.head_dim))
        nn.init.xavier_uniform_(self.to_keys.data.view(width, events))
        nn.init.xavier_uniform_(self.to_values.data.view(heads * events, self.head_dim))
        self.out = linear(width, width, bias=False)
        self.bias = RelativeBias(heads, 0, times)
        # Bucket b begins where 1 + whole seconds reach 2**b, as in jagged_attention.
        self.register_buffer("edges", (2 ** torch.arange(1, TIME_BUCKETS) - 1) * 1000, persistent=False)

    def forward(
        self,
        candidates: Tensor,
        events: Tensor,
        index: Tensor,
        counts: Tensor,
        times: Tensor | None = None,
        event_times: Tensor | None = None,
    ) -> Tensor:
        """Candidates `[rows, width]` over the first `counts[row]` of the events `index[row]`.

        Requires: `index` int64 `[rows, k]` is below the number of events everywhere, also beyond the counts.
        """
        most = index.shape[1]
        if events.shape[0] == 0:  # nothing to gather from
            events = events.new_zeros(1, events.shape[1])
            event_times = None if event_times is None else event_times.new_zeros(1)
        q = self.queries(candidates).view(-1, self.heads, self.head_dim)
        q = torch.einsum("rhd,hde->rhe", q, self.to_keys) * self.head_dim**-0.5
        chosen = nn.functional.embedding(index, events)  # [rows, k, events' width]
        scores = torch.bmm(q, chosen.to(q.dtype).transpose(1, 2))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        table = self.bias.by_time
        if table is not None and times is not None and event_times is not None:
            elapsed = (times.unsqueeze(1) - event_times[index]).clamp(min=0)
            buckets = torch.bucketize(elapsed, self.edges, right=True)
            scores = scores + nn.functional.embedding(buckets, table.t()).permute(0, 2, 1)
        hidden = torch.arange(most, device=index.device) >= counts.unsqueeze(1)
        scores = scores.masked_fill(hidden.unsqueeze(1), torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=2).masked_fill(hidden.unsqueeze(1), 0.0)
        sums = torch.bmm(weights.to(q.dtype), chosen.to(q.dtype))
        out: Tensor = self.out(torch.einsum("rhe,hed->rhd", sums, self.to_values).flatten(1))
        return out
