"""RankPlans: makes the plans of a collection over ranks.

A plan over ranks is a ShardedPlan. In DRAM it has one part for the tables that are spread over ranks and one for the
replicated tables. In HBM it has a part for each dim, because what is pooled on the device is a matrix; one owner, a
HotPlan over all tables, has the rows of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hotrow.parallel.rank_transport import RankTransport
from hotrow.parallel.ranks import Ranks
from hotrow.table.rows import TableRows
from hotrow.tiers.host.client import HostClient
from hotrow.tiers.host.owner import HostOwner
from hotrow.tiers.plan import Jobs, RowClient, RowOwner
from hotrow.tiers.sharded.plan import Part, ShardedPlan

if TYPE_CHECKING:
    from hotrow.tiers.hbm.cache import HotRows


class RankPlans:
    """Makes plans. They share one transport, and in HBM the stream of all routes that run ahead."""

    def __init__(self, tables: Sequence[TableRows], ranks: Ranks, hot: HotRows | None) -> None:
        self.transport = RankTransport(ranks, ranks.roles)
        kinds = [(0 if hot is None else rows.table.dim, rows.table.replicate) for rows in tables]
        self._kinds = list(dict.fromkeys(kinds))
        if hot is None:  # the spread part comes first, and is there even if it is empty
            self._kinds = sorted({(0, False), *kinds})
        self._part_of = [self._kinds.index(kind) for kind in kinds]
        self._client, self._owner = _in_dram() if hot is None else _in_hbm(hot)

    def __call__(self) -> ShardedPlan:
        """A plan for one batch after another."""
        parts = [Part(self._client(dim), replicated) for dim, replicated in self._kinds]
        return ShardedPlan(parts, self._part_of, self._owner(), self.transport)

    def make_up(self, jobs: Jobs) -> None:
        """Answer a route of other ranks that this one does not make: Ranks.routes has been closed."""
        self().route_with(self.transport.making_up(), jobs, ahead=True)


# What makes a plan's clients, each for the tables of one dim, and its owner.
Makers = tuple[Callable[[int], RowClient], Callable[[], RowOwner]]


def _in_dram() -> Makers:
    return lambda dim: HostClient(), HostOwner


def _in_hbm(hot: HotRows) -> Makers:
    from hotrow.device.streams import new_stream
    from hotrow.tiers.hbm.client import DeviceClient  # these want Triton
    from hotrow.tiers.hbm.owner import HbmOwner
    from hotrow.tiers.hbm.plan import HotPlan

    stream = new_stream(hot.device, urgent=True)
    return lambda dim: DeviceClient(hot.device, dim, stream), lambda: HbmOwner(HotPlan(hot))
