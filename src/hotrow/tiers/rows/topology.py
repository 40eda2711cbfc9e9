"""Topology: which row servers have which shards. Immutable; a new one replaces it when servers come or go.

Servers may divide the shards differently, as they do while a cluster moves to another division. The shards are cut at
every server's bounds; adjacent pieces with the same servers are one range. A batch uses one topology from its first
step to its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.features.hashing import hash_ints
from hotrow.tiers.host.store import SHARDS

SHARD_SHIFT = 54  # the top ten bits of a key's hash (core/hash/hash.h)


def shards_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The shard of each key.

    >>> shards = shards_of(np.arange(1000))
    >>> int(shards.min()) >= 0, int(shards.max()) < SHARDS
    (True, True)
    """
    hashes = hash_ints(keys, 1)  # hash_key is the bijection with seed 1
    return (hashes.view(np.uint64) >> np.uint64(SHARD_SHIFT)).astype(np.int64)


@dataclass(frozen=True)
class Topology:
    """Servers by range. `owner_of` has the range of each shard, int32."""

    servers: list[list[int]]
    bounds: list[tuple[int, int]]  # shards of each range, from begin to before end
    owner_of: Tensor

    @staticmethod
    def of(shards: Mapping[int, tuple[int, int]]) -> Topology:
        """The topology of servers with these shards. Shards that no server has are ranges without servers.

        >>> Topology.of({0: (0, 512), 1: (512, 1024), 2: (256, 1024)}).bounds
        [(0, 256), (256, 512), (512, 1024)]
        """
        cuts = sorted({0, SHARDS, *[bound for pair in shards.values() for bound in pair]})
        servers: list[list[int]] = []
        bounds: list[tuple[int, int]] = []
        for begin, end in pairwise(cuts):
            having = [number for number, (first, last) in shards.items() if first <= begin and end <= last]
            if servers and servers[-1] == having:
                bounds[-1] = (bounds[-1][0], end)
            else:
                servers.append(having)
                bounds.append((begin, end))
        owner_of = torch.empty(SHARDS, dtype=torch.int32)
        for number, (begin, end) in enumerate(bounds):
            owner_of[begin:end] = number
        return Topology(servers, bounds, owner_of)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Ranges without a server."""
        return [bounds for bounds, servers in zip(self.bounds, self.servers, strict=True) if not servers]
