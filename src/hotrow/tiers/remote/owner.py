"""RemoteOwner: rows of a remote store, with a cache in DRAM. They are only read.

    prefetch   ask the store for what DRAM lacks, all tables at once: the only verb that waits, for READ seconds
    read       rows from DRAM and from what prefetch brought; the policy for the others. Never waits

`prefetch` may be left out: then rows that are not in DRAM are late. After an error `read` and `prefetch` may be called
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.errors import LateError, LeftError, OptionError
from hotrow.tiers.batch_values import Arrived, BatchUpdate, Moved
from hotrow.tiers.plan import ANY_PUBLICATION, Asked
from hotrow.tiers.remote.cached_rows import Brought, RemoteRows
from hotrow.tiers.remote.store import RemoteStore
from hotrow.tiers.remote.tables import READ, RemoteTables

ONLY_READ = "rows over remote= are only read: train with dram= and ssd=, and publish to the remote store"
NO_ROWS = torch.empty(0)


class RemoteOwner:
    """The rows' half of a plan, in a remote store (hotrow.tiers.plan.RowOwner)."""

    late = 0

    def __init__(self, tables: RemoteTables) -> None:
        self.tables = tables
        self.publications = ANY_PUBLICATION
        self.release()

    def release(self) -> None:
        """Let go of the rows."""
        self.late_keys: dict[int, np.ndarray[Any, Any]] = {}
        self._keys: list[tuple[RemoteRows, Tensor]] = []
        self._brought: list[Brought | None] = []
        self._rows = NO_ROWS

    def route(self, asked: Sequence[Asked]) -> None:
        """Take the keys that this process asks for."""
        self.release()
        for one in asked:
            stores = [self.tables.by_store[id(store)] for store in one.stores]
            for keys, counts in zip(one.keys, one.counts, strict=True):
                self._keys += zip(stores, keys.split(counts), strict=True)

    def prefetch(self) -> Moved:
        """Ask the store for the rows that are not in DRAM."""
        self._brought = self.tables.bring([(rows.store, keys) for rows, keys in self._keys], READ)
        came = [one.answer for one in self._brought if one is not None]
        return Moved(sum([int(a.found.sum()) for a in came]), sum([a.bytes for a in came]))

    def stage(self) -> Moved:
        """Nothing: there is no tier above DRAM."""
        return Moved()

    def fetch(self, step: int = 0) -> None:
        """Refused."""
        raise OptionError(ONLY_READ)

    def read(self, late: str = "wait") -> None:
        """Rows from DRAM, from what was prefetched, by the policy. With "wait" a row that did not come is an error."""
        amounts = [keys.numel() for _, keys in self._keys]
        ends = np.cumsum([0, *[n * rows.table.dim for n, (rows, _) in zip(amounts, self._keys, strict=True)]]).tolist()
        flat, found = torch.empty(ends[-1]), torch.empty(sum(amounts), dtype=torch.bool)
        founds = found.split(amounts)
        (lowest, highest), self.late_keys = ANY_PUBLICATION, {}
        for number, ((rows, keys), (begin, end)) in enumerate(zip(self._keys, pairwise(ends), strict=True)):
            if not keys.numel():
                continue
            values = flat[begin:end].view(-1, rows.table.dim)
            rows.store.read_into(keys, values, founds[number])
            brought = self._brought[number] if self._brought else None
            seen = rows.look(keys, values, founds[number], late, brought)
            lowest, highest = min(lowest, seen.lowest), max(highest, seen.highest)
            if seen.late is not None:
                self.late_keys[number] = keys.numpy()[seen.late]
        self.publications = lowest, highest
        if self.late_keys and late == "wait":
            self._refuse()
        self._rows = flat

    def _refuse(self) -> None:
        """Say why rows that are waited for are not there."""
        count = sum([len(keys) for keys in self.late_keys.values()])
        names = ", ".join([self._keys[number][0].table.name for number in self.late_keys])
        for number, keys in self.late_keys.items():
            brought = self._brought[number] if self._brought else None
            if brought is None or not brought.places(keys)[1].all():
                raise LeftError(f"rows of {names} left memory between being looked for and being read; ask again")
        raise LateError(
            f"{count} rows of {names} did not come from the remote store ({_state(self.tables.store)}); ask again, or "
            "with the policy initial or default"
        )

    def give(self) -> Iterator[Tensor]:
        """The rows that were read. There is one asker: this process."""
        yield self._rows

    def apply(self, arrived: Iterable[Arrived], update: BatchUpdate) -> None:
        """Refused."""
        raise OptionError(ONLY_READ)


def _state(store: RemoteStore) -> str:
    health = store.health()
    down = [f"{name} {state}" for name, state in health["nodes"].items() if state.startswith("down")]
    return ", ".join(down) or "it answers too slowly"
