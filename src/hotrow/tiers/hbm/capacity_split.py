"""How a cache's sets are divided between the tables of a group.

The number of keys of a table is not known in advance, so all tables start with equal capacity. After batches 64, 128,
256 and so on, tables that use little of their capacity keep twice what they use. Full tables get the rest, in
proportion to the keys that they missed. Moving capacity flushes the whole cache, so it is done only if at least a tenth
of the cache would move. The split is a function of the batches alone, and no result depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotrow.kernels.index.sets import WAYS
from hotrow.tiers.hbm.group_cache import MIN_SETS

FIRST_CHECK = 64  # batches before the first check
FULL_SHARE = 0.5  # a table with more than this share of its slots in use is full (rows overflow from 0.6 on)
MIN_MOVED = 0.1  # the share of the cache that must move


def divide(sets: Sequence[int], used: Sequence[int], missed: Sequence[int]) -> list[int] | None:
    """Each table's new number of sets, from its present sets, its slots in use and its missed keys. None: no change.

    >>> divide([100, 100, 100], used=[8, 700, 700], missed=[8, 3000, 1000])
    [2, 174, 124]
    >>> divide([100, 100], used=[700, 700], missed=[3000, 1000]) is None
    True
    """
    full = [u > FULL_SHARE * WAYS * s and m > 0 for s, u, m in zip(sets, used, missed, strict=True)]
    kept = [s if f else min(s, max(MIN_SETS, -(-2 * u // WAYS))) for s, u, f in zip(sets, used, full, strict=True)]
    spare = sum(sets) - sum(kept)
    if not any(full) or spare < MIN_MOVED * sum(sets):
        return None
    wanted = sum(m for m, f in zip(missed, full, strict=True) if f)
    extra_sets = [spare * m // wanted if f else 0 for m, f in zip(missed, full, strict=True)]
    most = max(range(len(sets)), key=lambda t: extra_sets[t])
    extra_sets[most] += spare - sum(extra_sets)
    return [k + share for k, share in zip(kept, extra_sets, strict=True)]
