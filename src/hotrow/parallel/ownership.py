"""Which rank owns a key: the owner of its shard. The core hashes keys into 1,024 fixed shards; a rank owns one
contiguous range of them.

Ranges, not every N-th shard: when M ranks load a checkpoint of N, a rank reads only the parts whose ranges overlap its
own. The hash spreads keys evenly, so ranges are as balanced as any other split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow import _core
from hotrow.errors import OptionError
from hotrow.tiers.host.store import SHARDS


def shard_range(rank: int, world: int) -> tuple[int, int]:
    """The shards that a rank owns, from the first to before the second.

    >>> [shard_range(rank, 3) for rank in range(3)]
    [(0, 342), (342, 683), (683, 1024)]
    """
    return -(-rank * SHARDS // world), -(-(rank + 1) * SHARDS // world)


def owners(world: int) -> Tensor:
    """The rank that owns each shard, int32.

    >>> owners(2)[[0, 511, 512, 1023]].tolist()
    [0, 0, 1, 1]
    """
    if not 1 <= world <= SHARDS:
        raise OptionError(f"{world} ranks: there are {SHARDS} shards, so use 1 to {SHARDS} ranks")
    return torch.arange(SHARDS, dtype=torch.int32) * world // SHARDS


@dataclass(frozen=True)
class Roles:
    """Which ranks request rows and which own them. A plan takes it as a value.

    The rank `owners[i]` owns the shards of `shard_range(i, len(owners))`. A key's gradients are added in the order of
    the ranks that request it, so bits depend on `requesters` alone.
    """

    world: int
    requesters: tuple[int, ...]
    owners: tuple[int, ...]

    @staticmethod
    def everyone(world: int) -> Roles:
        """Every rank requests and owns."""
        return Roles(world, tuple(range(world)), tuple(range(world)))

    @staticmethod
    def apart(world: int, rows: int) -> Roles:
        """The last `rows` ranks own, the others request. With 0 rows every rank does both.

        >>> Roles.apart(3, rows=1)
        Roles(world=3, requesters=(0, 1), owners=(2,))
        """
        if rows == 0:
            return Roles.everyone(world)
        if not 1 <= rows < world:
            raise OptionError(
                f"rows={rows} of {world} ranks: give at least 1 row rank, and leave at least 1 tower rank; start "
                "as many ranks as there are towers and row ranks"
            )
        owners(rows)
        return Roles(world, tuple(range(world - rows)), tuple(range(world - rows, world)))

    @property
    def are_apart(self) -> bool:
        """Whether some ranks have one role only."""
        return self.requesters != self.owners

    def owner_number(self, rank: int) -> int | None:
        """The number of a rank among the owners; None if it owns nothing."""
        return self.owners.index(rank) if rank in self.owners else None

    def requester_number(self, rank: int) -> int | None:
        """The number of a rank among the requesters; None if it requests nothing."""
        return self.requesters.index(rank) if rank in self.requesters else None

    def shards(self, rank: int) -> tuple[int, int]:
        """The shards that a rank owns, from the first to before the second.

        >>> [Roles.apart(3, rows=2).shards(rank) for rank in range(3)]
        [(0, 0), (0, 512), (512, 1024)]
        """
        number = self.owner_number(rank)
        return (0, 0) if number is None else shard_range(number, len(self.owners))

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The shards of each owner."""
        return [shard_range(number, len(self.owners)) for number in range(len(self.owners))]

    def name(self, rank: int) -> str:
        """How messages call a rank.

        >>> Roles.apart(3, rows=2).name(2)
        'rank 2 (row rank 1)'
        """
        if not self.are_apart:
            return f"rank {rank}"
        tower = self.requester_number(rank)
        role = f"row rank {self.owner_number(rank)}" if tower is None else f"tower rank {tower}"
        return f"rank {rank} ({role})"

    @property
    def owner_of(self) -> Tensor:
        """The rank that owns each shard, int32.

        >>> Roles(3, requesters=(0, 1, 2), owners=(0, 2)).owner_of[[0, 511, 512, 1023]].tolist()
        [0, 0, 2, 2]
        """
        return torch.tensor(self.owners, dtype=torch.int32)[owners(len(self.owners)).long()]


def in_shards(keys: Tensor, begin: int, end: int) -> Tensor:
    """Which keys are in the shards from `begin` to before `end`."""
    shards = torch.empty(keys.numel(), dtype=torch.int32)
    _core.shards(keys.contiguous(), shards)
    return (shards >= begin) & (shards < end)
