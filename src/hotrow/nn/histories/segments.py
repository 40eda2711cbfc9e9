"""Users, events and rows: which belongs to which.

Everything follows from `lengths` (events of each user) by sums and searches whose sizes are known beforehand, so that
torch.export keeps the numbers of users and events free, and nothing waits for a GPU.

An event beyond the sum of the lengths is padding. Its user is `users`, one more than the last. Tables indexed by user
have one entry more for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def users_of_events(lengths: Tensor, events: int) -> Tensor:
    """The user of each event, int64 `[events]`; the number of users where the event is padding.

    >>> users_of_events(torch.tensor([2, 0, 1]), 4)
    tensor([0, 0, 2, 3])
    """
    places = torch.arange(events, device=lengths.device)
    return torch.searchsorted(lengths.cumsum(0), places, right=True)


def first_events(lengths: Tensor) -> Tensor:
    """Where each user's events begin, int64 `[users]`.

    >>> first_events(torch.tensor([2, 0, 1]))
    tensor([0, 2, 2])
    """
    return lengths.cumsum(0) - lengths


def places_from_newest(lengths: Tensor, events: int) -> Tensor:
    """How many events of its user are newer than each event, int64 `[events]`; 0 where the event is padding.

    >>> places_from_newest(torch.tensor([2, 0, 1]), 4)
    tensor([1, 0, 0, 0])
    """
    ends = torch.cat([lengths.cumsum(0), lengths.new_zeros(1)])
    places = ends.index_select(0, users_of_events(lengths, events)) - 1
    return (places - torch.arange(events, device=lengths.device)).clamp(min=0)


def last_events(x: Tensor, lengths: Tensor) -> Tensor:
    """The newest event of each user, `[users, dim]`; zeros for a user without events.

    >>> last_events(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 1])).squeeze(1)
    tensor([2., 0., 3.])
    """
    if x.shape[0] == 0:
        return x.new_zeros(lengths.shape[0], x.shape[1])
    newest = x.index_select(0, (lengths.cumsum(0) - 1).clamp(min=0))
    return newest.masked_fill((lengths == 0).unsqueeze(1), 0)


def mean_events(x: Tensor, lengths: Tensor) -> Tensor:
    """The mean of each user's events, `[users, dim]`; zeros for a user without events.

    >>> mean_events(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 1])).squeeze(1)
    tensor([1.5000, 0.0000, 3.0000])
    """
    users = lengths.shape[0]
    total = x.new_zeros(users + 1, x.shape[1]).index_add(0, users_of_events(lengths, x.shape[0]), x)
    return total[:users] / lengths.clamp(min=1).to(x.dtype).unsqueeze(1)


def newest_seen(values: Tensor, lengths: Tensor, users: Tensor, seen: Tensor) -> Tensor:
    """For rows that see the first `seen` events of their user: the newest of those, `[rows, ...]`; 0 if there is none.

    `values` has one entry per event.

    >>> newest_seen(torch.tensor([5, 6, 7]), torch.tensor([2, 1]), torch.tensor([0, 0, 1]), torch.tensor([2, 1, 0]))
    tensor([6, 5, 0])
    """
    if values.shape[0] == 0:
        return values.new_zeros(users.shape[0], *values.shape[1:])
    newest = first_events(lengths).index_select(0, users) + seen - 1
    nothing = (seen == 0).view(-1, *(1 for _ in values.shape[1:]))
    return values.index_select(0, newest.clamp(min=0)).masked_fill(nothing, 0)


class RowGroups(NamedTuple):
    """Rows in the order of their users.

    `order` are the rows of user 0, then of user 1, and so on; `inverse` undoes it. User `u` has the next `lengths[u]`
    of them. `users` are the users of the rows in that order.
    """

    order: Tensor
    inverse: Tensor
    lengths: Tensor
    users: Tensor

    def sort(self, rows: Tensor) -> Tensor:
        """Rows `[rows, ...]` in the order of their users."""
        return rows.index_select(0, self.order)

    def restore(self, rows: Tensor) -> Tensor:
        """Rows in the order of their users, back in the order in which they came."""
        return rows.index_select(0, self.inverse)


def group_rows(user_of: Tensor, users: int) -> RowGroups:
    """Group rows by user. Rows of one user keep their order.

    >>> groups = group_rows(torch.tensor([1, 0, 1]), 3)
    >>> groups.order, groups.lengths
    (tensor([1, 0, 2]), tensor([1, 2, 0]))
    """
    sorted_users, order = torch.sort(user_of, stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    bounds = torch.searchsorted(sorted_users, torch.arange(users + 1, device=user_of.device))
    return RowGroups(order, inverse, bounds.diff(), sorted_users)
