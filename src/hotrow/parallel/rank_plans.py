"""RankPlanFactory: makes the plans of a collection over ranks.

A plan over ranks is a ShardedPlan. In DRAM it has one part for the tables that are sharded over ranks and one for the
replicated tables. In HBM it has a part for each dim, because the device pools a matrix of one width; one owner, a
HbmPlan over all tables, has the rows of all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hotrow.parallel.rank_transport import RankTransport
from hotrow.parallel.ranks import Ranks
from hotrow.table.rows import TableRows
from hotrow.tiers.host.client import HostClient
from hotrow.tiers.host.owner import HostOwner
from hotrow.tiers.plan import RowClient, RowOwner, TableInputs
from hotrow.tiers.sharded.plan import ClientTables, ShardedPlan
from hotrow.tiers.sharded.rows_ahead import AheadStream, RowsAhead

if TYPE_CHECKING:
    from hotrow.tiers.hbm.cache import HbmCache


class RankPlanFactory:
    """Makes plans. They share one transport, and in HBM the stream of all routes that run ahead."""

    def __init__(self, tables: Sequence[TableRows], ranks: Ranks, hot: HbmCache | None) -> None:
        self.transport = RankTransport(ranks, ranks.roles)
        kinds = [(0 if hot is None else rows.table.dim, ranks.replicates(rows.table.replicate)) for rows in tables]
        self._kinds = list(dict.fromkeys(kinds))
        if hot is None:  # the part of sharded tables comes first, and exists even if it has none
            self._kinds = sorted({(0, False), *kinds})
        self._part_of = [self._kinds.index(kind) for kind in kinds]
        self._client, self._owner = _in_dram() if hot is None else _in_hbm(hot)
        # Row ranks send rows ahead of their batch: they wait for towers anyway. Where a rank does both, copying rows
        # ahead would take time from its tower.
        self.stream = AheadStream() if ranks.roles.are_apart else None

    def __call__(self) -> ShardedPlan:
        """A plan for one batch after another."""
        parts = [ClientTables(self._client(dim), replicated) for dim, replicated in self._kinds]
        if self.stream is None:
            return ShardedPlan(parts, self._part_of, self._owner(), self.transport)
        owner = HostOwner()
        ahead = RowsAhead(self.stream, owner, self.transport)
        return ShardedPlan(parts, self._part_of, owner, self.transport, ahead)

    def settle(self, inputs: TableInputs, end: Callable[[], object]) -> None:
        """End exchanges that run ahead at the same one on all ranks (AheadExchanges.settle). `inputs` are an empty
        batch's."""
        ranks, transport = self.transport.ranks, self.transport

        def route_missing() -> None:
            self().route_with(transport.exchange_missing(), inputs, ahead=True)

        def end_rows() -> None:
            ranks.rows_ahead.settle(ranks.rows, transport.rows_ahead_missing, end)

        ranks.routes.settle(ranks.rows, route_missing, end if self.stream is None else end_rows)


# What makes a plan's clients, each for the tables of one dim, and its owner.
Makers = tuple[Callable[[int], RowClient], Callable[[], RowOwner]]


def _in_dram() -> Makers:
    return lambda dim: HostClient(), HostOwner


def _in_hbm(hot: HbmCache) -> Makers:
    from hotrow.device.streams import new_stream
    from hotrow.tiers.hbm.client import DeviceClient  # these want Triton
    from hotrow.tiers.hbm.owner import HbmOwner
    from hotrow.tiers.hbm.plan import HbmPlan

    stream = new_stream(hot.device, urgent=True)
    return lambda dim: DeviceClient(hot.device, dim, stream), lambda: HbmOwner(HbmPlan(hot))
