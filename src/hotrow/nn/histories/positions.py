"""Where an event lies in its history: a learned vector of its place, or learned biases of distances.

`LearnedPositions` counts from the newest event, because histories are truncated at the oldest. A place then means the
same before and after truncation. It also means that an event's vector changes with every newer event, so a tower with
learned positions cannot reuse the encoding of a shorter history.

`RelativeBias` holds two tables for `jagged_attention`: by distance in events, and by the logarithm of the distance in
time. Both are equal for every cut of the history.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotrow.nn.histories.segments import places_from_newest
from hotrow.nn.sizes import at_least, positive

TIME_BUCKETS = 32
"""Bucket of a distance in time: floor(log2(1 + seconds)), so that the last begins at 68 years."""


class LearnedPositions(nn.Module):
    """Adds the learned vector of its place to each event: `[events, dim]` in and out.

    Places of `max_length` and more share the oldest place's vector.

    >>> LearnedPositions(8, 4)(torch.zeros(3, 4), torch.tensor([2, 1])).shape
    torch.Size([3, 4])
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.max_length = positive("max_length", max_length)
        self.table = nn.Parameter(torch.empty(max_length, positive("dim", dim)))
        nn.init.normal_(self.table, std=0.02)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """`x` `[events, dim]`, `lengths` int64 `[users]`."""
        places = places_from_newest(lengths, x.shape[0]).clamp(max=self.max_length - 1)
        return x + nn.functional.embedding(places, self.table)


class RelativeBias(nn.Module):
    """Learned biases of attention scores: by the distance in events, below `positions`, and by the distance in time.

    `positions=0` leaves out the first, `times=False` the second.

    >>> bias = RelativeBias(heads=2, positions=16, times=True)
    >>> bias.by_position.shape, bias.by_time.shape
    (torch.Size([2, 16]), torch.Size([2, 32]))
    """

    by_position: nn.Parameter | None
    by_time: nn.Parameter | None

    def __init__(self, heads: int, positions: int, times: bool) -> None:
        super().__init__()
        positive("heads", heads)
        self.by_position = _table(heads, positions) if at_least(0, "positions", positions) else None
        self.by_time = _table(heads, TIME_BUCKETS) if times else None


def _table(heads: int, entries: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(heads, entries) * 0.02)
