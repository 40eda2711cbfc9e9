"""Transport: the exchange of keys, rows and gradients between requesters and owners of rows.

All plans of a collection share one. LocalTransport is for a process that owns every row it requests;
parallel/rank_transport.py exchanges with other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotrow.tiers.batch_values import ALL_EXAMPLES, GradientSums, KeyRequest, RoutedBatch
from hotrow.tiers.host.store import SHARDS


class ReceivedRequests(NamedTuple):
    """What all requesters sent to this process, one element for each of them.

    `batch_sizes` are their numbers of examples; the others are as in tiers.plan.RequestedRows.
    """

    batch_sizes: list[int]
    counts: list[list[int]]
    keys: list[Tensor]
    occurrences: list[Tensor]


# Sends this process's request and its batch's number of examples; returns what this process received. The flag says
# that the tables are replicated.
ExchangeRequests = Callable[[KeyRequest, int, bool], ReceivedRequests]


class Transport(Protocol):
    """An exchange between `world` processes, of which this one is number `rank`.

    `rows`, `gradients` and `presence` send elements of one tensor: the first send_counts[0] to process 0, the next
    send_counts[1] to process 1, and so on. They return what arrived in the same order: receive_counts[r] elements from
    process r.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def world(self) -> int:
        """How many processes there are."""

    @property
    def owner_of(self) -> Tensor:
        """The process that owns each shard, int32."""

    @property
    def wire(self) -> torch.dtype:
        """The type in which rows and gradients are sent."""

    def routing(self, ahead: bool) -> AbstractContextManager[ExchangeRequests]:
        """The context in which one batch's requests are exchanged. `ahead` as for Plan.route."""

    def routed(self, size: int, sizes: Sequence[int]) -> RoutedBatch:
        """This process's part of the step. `size` is its number of examples, `sizes` every process's."""

    def check_policy(self, late: str) -> None:
        """Raise OptionError if late rows cannot be answered by this policy."""

    def rows(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send rows from owners to requesters."""

    def gradients(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send sums of gradients from requesters to owners."""

    def presence(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send a byte for each key from requesters to owners: whether it has a gradient."""

    def agree(self, sums: Sequence[GradientSums], scale: float) -> tuple[list[bool], float]:
        """For each of the sums: whether every key of every process has a gradient; and the scale of the update, as the
        first requester gave it. If a number of any process is not finite, every process raises GradientError."""


def _to_this_process(request: KeyRequest, size: int, replicated: bool) -> ReceivedRequests:
    return ReceivedRequests([size], request.counts, [request.keys], [request.occurrences])


class LocalTransport:
    """The owner is in this process: nothing is sent."""

    rank, world, wire = 0, 1, torch.float32

    def __init__(self) -> None:
        self.owner_of = torch.zeros(SHARDS, dtype=torch.int32)

    def routing(self, ahead: bool) -> AbstractContextManager[ExchangeRequests]:
        """The owner receives the request as it is."""
        return nullcontext(_to_this_process)

    def routed(self, size: int, sizes: Sequence[int]) -> RoutedBatch:
        """The batch is the whole step. An empty one does not end an evaluation."""
        return ALL_EXAMPLES

    def check_policy(self, late: str) -> None:
        """Do nothing: every policy is supported."""

    def rows(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """The tensor itself."""
        return send

    gradients = presence = rows

    def agree(self, sums: Sequence[GradientSums], scale: float) -> tuple[list[bool], float]:
        """This process's own answer. The owner checks that gradients are finite."""
        return [one.all_present for one in sums], scale
