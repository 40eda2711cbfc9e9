"""Who owns a key: its shard's rank. Keys fall into 1,024 fixed shards by hash (the core's); a rank owns whole shards,
one range of them without gaps.

Ranges, not every N-th shard: when a checkpoint of N ranks is loaded by M, a rank reads only the parts whose ranges
meet its own. The hash spreads keys evenly, so ranges are as even as anything else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow import _core
from hotrow.errors import OptionError
from hotrow.tiers.host import SHARDS


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
    return owner_of(torch.arange(SHARDS, dtype=torch.int32), world)


def owner_of(shards: Tensor, world: int) -> Tensor:
    """The rank that owns each of these shards."""
    return shards * world // SHARDS


def in_shards(keys: Tensor, begin: int, end: int) -> Tensor:
    """Which keys are in the shards from `begin` to before `end`."""
    shards = torch.empty(keys.numel(), dtype=torch.int32)
    _core.shards(keys.contiguous(), shards)
    return (shards >= begin) & (shards < end)
