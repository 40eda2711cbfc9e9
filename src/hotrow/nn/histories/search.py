"""Two-stage search (SIM): which k events of a long history matter to a candidate.

Hard search takes the newest k events of the candidate's category. The user part sorts each history by category once
(`sort_by_category`); a candidate then finds its category's range by bisection (`newest_in_category`). Its cost grows
with the logarithm of the history's length.

Soft search takes the k events whose vectors have the largest inner product with the candidate's: exactly those, up to
rounding. `most_similar` is an operator, `hotrow::most_similar`, that takes one user's candidates and events at a time.
On a CPU with AVX-512 VNNI the core computes it (core/search/similar_events.h): products in 8 bits, and in float32 for
the events that 8 bits leave open. Elsewhere it is a matrix product and torch.topk of SCORES_AT_ONCE scores at most. It
reads the lengths on the host, so no CUDA graph can hold it.

Both give int64 `[rows, k]` and how many of the k are real, which come first. The choice has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow import _core
from hotrow.errors import BatchError
from hotrow.nn.histories.segments import first_events, users_of_events

SCORES_AT_ONCE = 1 << 22
"""Of soft search: 16 MiB of float32."""


def sort_by_category(categories: Tensor, lengths: Tensor) -> Tensor:
    """The order of events by user, category and age: int64 `[events]`, padding last.

    >>> sort_by_category(torch.tensor([7, 5, 7, 5, 9]), torch.tensor([3, 2]))
    tensor([1, 0, 2, 3, 4])
    """
    by_category = torch.argsort(categories, stable=True)
    users = users_of_events(lengths, categories.shape[0]).index_select(0, by_category)
    return by_category.index_select(0, torch.argsort(users, stable=True))


def newest_in_category(
    categories: Tensor, lengths: Tensor, users: Tensor, wanted: Tensor, keep: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """The newest `keep` events of category `wanted[row]` of user `users[row]`: `[rows, keep]`, and how many there are.

    `categories` are sorted as `sort_by_category` does. No history is longer than `max_length`.

    >>> sorted_categories, lengths = torch.tensor([5, 7, 7, 5, 9]), torch.tensor([3, 2])
    >>> newest_in_category(sorted_categories, lengths, torch.tensor([0, 1]), torch.tensor([7, 7]), 2, 10)
    (tensor([[1, 2],
            [0, 0]]), tensor([2, 0]))
    """
    begin = first_events(lengths).index_select(0, users)
    end = begin + lengths.index_select(0, users)
    first = _bisect(categories, begin, end, wanted, False, max_length)
    behind = _bisect(categories, begin, end, wanted, True, max_length)
    count = (behind - first).clamp(max=keep)
    place = torch.arange(keep, device=lengths.device)
    index = (behind - count).unsqueeze(1) + place
    return torch.where(place < count.unsqueeze(1), index, 0), count


def most_similar(
    candidates: Tensor, events: Tensor, rows: Tensor, lengths: Tensor, keep: int, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `keep` events of its user with the largest inner product with each candidate: `[rows, keep]`, and how many
    there are. User `u` has the next `rows[u]` candidates and the next `lengths[u]` events, of which a candidate sees
    the first `visible` (int64 `[rows]`), or all.

    >>> events = torch.tensor([[1.0], [3.0], [2.0], [9.0]])
    >>> most_similar(torch.ones(2, 1), events, torch.tensor([2, 0]), torch.tensor([3, 1]), 2)
    (tensor([[1, 2],
            [1, 2]]), tensor([2, 2]))
    """
    index, counts = torch.ops.hotrow.most_similar(candidates.detach(), events.detach(), rows, lengths, keep, visible)
    return index, counts


@torch.library.custom_op("hotrow::most_similar", mutates_args=())
def _most_similar(
    candidates: Tensor, events: Tensor, rows: Tensor, lengths: Tensor, keep: int, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    index = rows.new_zeros(candidates.shape[0], keep)
    counts = rows.new_zeros(candidates.shape[0])
    if int(rows.sum()) > candidates.shape[0] or int(lengths.sum()) > events.shape[0]:
        raise BatchError(
            f"soft search has {candidates.shape[0]} candidates and {events.shape[0]} events, but users have "
            f"{int(rows.sum())} and {int(lengths.sum())}; give the lengths of these candidates and events"
        )
    if candidates.device.type == "cpu" and _core.has_similar_events():
        _search_in_core(candidates, events, rows, lengths, keep, visible, index, counts)
        return index, counts
    first_row = first_event = 0
    for its_rows, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        most = min(keep, length)
        if its_rows and most:
            history = events[first_event : first_event + length]
            step = max(1, SCORES_AT_ONCE // length)
            for begin in range(first_row, first_row + its_rows, step):
                piece = slice(begin, min(begin + step, first_row + its_rows))
                counts[piece] = most if visible is None else visible[piece].clamp(0, most)
                if most == length:  # all that a candidate sees: the first
                    index[piece, :most] = torch.arange(first_event, first_event + length, device=index.device)
                    continue
                scores = candidates[piece] @ history.t()
                if visible is not None:
                    hidden = torch.arange(length, device=index.device) >= visible[piece].unsqueeze(1)
                    scores = scores.masked_fill(hidden, -torch.inf)
                index[piece, :most] = _largest(scores, most) + first_event
        first_row, first_event = first_row + its_rows, first_event + length
    return index, counts


@_most_similar.register_fake
def _(
    candidates: Tensor, events: Tensor, rows: Tensor, lengths: Tensor, keep: int, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(candidates.shape[0], keep), rows.new_empty(candidates.shape[0])


def _search_in_core(
    candidates: Tensor,
    events: Tensor,
    rows: Tensor,
    lengths: Tensor,
    keep: int,
    visible: Tensor | None,
    index: Tensor,
    counts: Tensor,
) -> None:
    """Fill `index` and `counts`. Events and candidates may be the first columns of a wider matrix."""
    candidates, events = (x if x.stride(1) == 1 else x.contiguous() for x in (candidates.float(), events.float()))
    rows, lengths = rows.contiguous(), lengths.contiguous()
    visible = None if visible is None else visible.contiguous()
    _core.similar_events(
        candidates.data_ptr(), candidates.stride(0), events.data_ptr(), events.stride(0), rows.data_ptr(),
        lengths.data_ptr(), 0 if visible is None else visible.data_ptr(), rows.shape[0], candidates.shape[1], keep,
        index.data_ptr(), counts.data_ptr(),
    )  # fmt: skip


def _largest(scores: Tensor, count: int) -> Tensor:
    """The places of the largest scores of each row, in order of place; hidden ones (-inf) last."""
    chosen = scores.topk(count, dim=1, sorted=False)
    hidden = torch.isneginf(chosen.values)
    return (chosen.indices + hidden * scores.shape[1]).sort(dim=1).values % scores.shape[1]


def _bisect(values: Tensor, begin: Tensor, end: Tensor, wanted: Tensor, right: bool, max_length: int) -> Tensor:
    """Where `wanted` would be inserted into each row's sorted range of `values`, before or (`right`) behind equals."""
    if values.shape[0] == 0:
        return begin
    low, high = begin, end
    for _ in range(max_length.bit_length()):
        middle = (low + high) // 2
        value = values.index_select(0, middle.clamp(max=values.shape[0] - 1))
        below = (value <= wanted if right else value < wanted) & (low < high)
        low, high = torch.where(below, middle + 1, low), torch.where(below, high, middle)
    return low
