"""How much of a cache each of its tables gets: equal shares at first, then what the batches so far have shown.

Nobody knows beforehand how many keys a table has. A table that has left much of its share empty gives up what it is not
likely to need (it keeps twice what it uses), and tables that are full get that in proportion to the keys they have
missed. Looked at after batches 64, 128, 256 and so on, and done only where it moves a tenth of the cache, because
everything goes down for it and comes back when it is met. It follows from the batches alone, and no result depends on
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotrow.kernels.index.sets import WAYS
from hotrow.tiers.hbm.slots import LEAST_SETS

FIRST = 64  # batches before the first look
FULL = 0.5  # of its share in use, from which on a table may want more (sets fill to 0.6 before rows lose their place)
WORTH = 0.1  # of the cache that must move


def divide(sets: Sequence[int], used: Sequence[int], missed: Sequence[int]) -> list[int] | None:
    """New numbers of sets, given those of now, the slots in use and the keys missed of each table; None: leave it.

    >>> divide([100, 100, 100], used=[8, 700, 700], missed=[8, 3000, 1000])
    [2, 174, 124]
    >>> divide([100, 100], used=[700, 700], missed=[3000, 1000]) is None
    True
    """
    full = [u > FULL * WAYS * s and m > 0 for s, u, m in zip(sets, used, missed, strict=True)]
    kept = [s if f else min(s, max(LEAST_SETS, -(-2 * u // WAYS))) for s, u, f in zip(sets, used, full, strict=True)]
    spare = sum(sets) - sum(kept)
    if not any(full) or spare < WORTH * sum(sets):
        return None
    wanted = sum(m for m, f in zip(missed, full, strict=True) if f)
    shares = [spare * m // wanted if f else 0 for m, f in zip(missed, full, strict=True)]
    most = max(range(len(sets)), key=lambda t: shares[t])
    shares[most] += spare - sum(shares)
    return [k + share for k, share in zip(kept, shares, strict=True)]
