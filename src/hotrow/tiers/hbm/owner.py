"""HbmOwner: rows in HBM that processes ask for.

A HotPlan over all tables is given what is asked for as it is given a batch, with one feature for each table and asker
in the order of askers: from the host, and ahead of its turn if there is time.

One thing is less than on the host: where some keys of a table have a gradient and others have none in the same batch (a
table with two features, of which no loss uses one), it is an error. Give such a feature a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.errors import GradientError
from hotrow.tiers.batch_values import Arrived, BatchUpdate, Moved
from hotrow.tiers.hbm.plan import HotPlan
from hotrow.tiers.plan import ANY_PUBLICATION, Asked, Feature


class HbmOwner:
    """The rows' half of a plan, in HBM (hotrow.tiers.plan.RowOwner)."""

    publications = ANY_PUBLICATION

    def __init__(self, plan: HotPlan) -> None:
        self.plan = plan
        self.late_keys: dict[int, Tensor] = {}
        self._asked: Sequence[Asked] = []

    def route(self, asked: Sequence[Asked]) -> None:
        """Take the keys that are asked for. They stay on the host until they are looked up."""
        self._asked = asked
        stores = {number: store for one in asked for number, store in zip(one.numbers, one.stores, strict=True)}
        features: dict[int, list[Feature]] = {}
        seen: dict[int, list[Tensor]] = {}
        for one in asked:
            for keys, times, counts in zip(one.keys, one.seen, one.counts, strict=True):
                of_tables = zip(one.numbers, keys.split(counts), times.split(counts), strict=True)
                for number, some_keys, some_times in of_tables:
                    features.setdefault(number, []).append((Jagged(some_keys), "none"))
                    seen.setdefault(number, []).append(some_times)
        numbers = sorted(stores)
        jobs = [(stores[number], features[number]) for number in numbers]
        self.plan.route_seen(jobs, [times for number in numbers for times in seen[number]])

    def prefetch(self) -> Moved:
        """Rows come up from SSD, or are looked for in HBM."""
        return self.plan.prefetch()

    def stage(self) -> Moved:
        """Rows that exist and find room come up to HBM."""
        return self.plan.stage()

    @property
    def late(self) -> int:
        """Rows that found no room ahead of the batch's turn."""
        return self.plan.late

    def fetch(self, step: int = 0) -> None:
        """Find the rows; unseen keys get theirs."""
        self.plan.fetch(step)

    def read(self, late: str = "wait") -> None:
        """Only read the rows."""
        self.plan.read(late)

    def give(self) -> Iterator[Tensor]:
        """The rows for each Asked, all found by one gather."""
        rooms = [
            torch.empty(sum(map(sum, _floats(one))), dtype=torch.float32, device=self.plan.hot.device)
            for one in self._asked
        ]
        blocks: dict[int, list[Tensor]] = {}
        for one, room in zip(self._asked, rooms, strict=True):
            blocks |= _by_table(room, one)
        self.plan.gather([block for number in sorted(blocks) for block in blocks[number]])
        for one, room in zip(self._asked, rooms, strict=True):
            yield room if one.only is None else room.split([sum(floats) for floats in _floats(one)])[one.only]

    def apply(self, arrived: Iterable[Arrived], update: BatchUpdate) -> None:
        """Apply sums of gradients when all have arrived: one update of the cache for all tables."""
        gradients: dict[int, list[Tensor | None]] = {}
        for one, (sums, present) in zip(self._asked, list(arrived), strict=True):
            gradients |= {number: list(of_table) for number, of_table in _by_table(sums, one).items()}
            if present is not None:
                _leave_out(gradients, present, one)
        blocks = [block for number in sorted(gradients) for block in gradients[number]]
        self.plan.update(replace(update, gradients=blocks, checked=[]))

    def release(self) -> None:
        """Let go of the rows."""
        self.plan.release()


def _floats(asked: Asked) -> list[list[int]]:
    """Floats of the rows of each table, by asker."""
    return [[n * store.dim for n, store in zip(counts, asked.stores, strict=True)] for counts in asked.counts]


def _by_table(flat: Tensor, asked: Asked) -> dict[int, list[Tensor]]:
    """A buffer that has asker after asker, there table after table: by the table's number, the askers' matrices."""
    pieces = flat.split([floats for of_asker in _floats(asked) for floats in of_asker])
    tables = len(asked.stores)
    return {
        number: [piece.view(-1, asked.stores[table].dim) for piece in pieces[table::tables]]
        for table, number in enumerate(asked.numbers)
    }


def _leave_out(gradients: dict[int, list[Tensor | None]], present: Tensor, asked: Asked) -> None:
    """Put None where an asker has no gradient for a table."""
    for asker, (counts, some) in enumerate(
        zip(asked.counts, present.split([sum(counts) for counts in asked.counts]), strict=True)
    ):
        for number, of_table in zip(asked.numbers, some.split(counts), strict=True):
            if not bool(of_table.any()):
                gradients[number][asker] = None
            elif not bool(of_table.all()):
                raise GradientError(
                    "a table in HBM over ranks has a feature with gradients and one without; no row was changed. "
                    "Give the feature that no loss uses a table of its own, or leave hbm= out"
                )
