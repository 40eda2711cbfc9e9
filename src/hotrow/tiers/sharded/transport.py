"""How keys, rows and gradients travel between the processes that ask for rows and those that own them.

A Transport is shared by all plans of a collection. LocalTransport is the one of a process that owns what it asks for;
parallel/rank_transport.py exchanges with other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hotrow.tiers.batch_values import ALL_EXAMPLES, Request, Routed, Summed
from hotrow.tiers.host.store import SHARDS


class Delivered(NamedTuple):
    """What the askers sent to this process: their numbers of examples, and the keys they ask for (tiers.plan.Asked)."""

    sizes: list[int]
    counts: list[list[int]]
    keys: list[Tensor]
    seen: list[Tensor]


# Sends a request with the batch's number of examples, and receives what others ask. The flag says that the tables are
# replicated.
Deliver = Callable[[Request, int, bool], Delivered]


class Transport(Protocol):
    """An exchange between `world` processes, of which this one is number `rank`.

    `rows`, `gradients` and `marks` send elements of one tensor: `give[r]` of them to process r, in order. They return
    what came, `take[r]` from process r.
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
        """The type in which rows and gradients travel."""

    def routing(self, ahead: bool) -> AbstractContextManager[Deliver]:
        """Inside it requests can be delivered. `ahead` as for Plan.route."""

    def routed(self, size: int, sizes: Sequence[int]) -> Routed:
        """What is known of this process's batch when every process has told its number of examples."""

    def check_policy(self, late: str) -> None:
        """Refuse a policy for late rows that does not work here."""

    def rows(self, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Rows to those that asked."""

    def gradients(self, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Sums of gradients to the owners."""

    def marks(self, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Which keys have a gradient, to the owners."""

    def agree(self, summed: Sequence[Summed]) -> list[bool]:
        """Whether every key of all processes has a gradient, for each of these. If one is not finite on any process,
        all raise."""


def _hand_on(request: Request, size: int, replicated: bool) -> Delivered:
    return Delivered([size], request.counts, [request.keys], [request.seen])


class LocalTransport:
    """The owner is in this process: nothing travels."""

    rank, world, wire = 0, 1, torch.float32

    def __init__(self) -> None:
        self.owner_of = torch.zeros(SHARDS, dtype=torch.int32)

    def routing(self, ahead: bool) -> AbstractContextManager[Deliver]:
        """Hands a request on."""
        return nullcontext(_hand_on)

    def routed(self, size: int, sizes: Sequence[int]) -> Routed:
        """The batch is all there is. An empty one does not end an evaluation."""
        return ALL_EXAMPLES

    def check_policy(self, late: str) -> None:
        """Owners know every policy."""

    def rows(self, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """What was sent."""
        return send

    gradients = marks = rows

    def agree(self, summed: Sequence[Summed]) -> list[bool]:
        """As it is here."""
        return [one.whole for one in summed]
