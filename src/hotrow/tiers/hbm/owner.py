"""HbmOwner: rows in HBM that other processes request.

It gives an HbmPlan the requested keys as one batch, with one feature for each table and requesting process, in the
order of processes. The keys come from the host, ahead of the batch's turn if there is time.

Restriction that DRAM does not have: if a batch has gradients for some keys of a table and none for others (a table with
two features, one of which no loss uses), update raises. Give such a feature its own table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.errors import GradientError
from hotrow.tiers.batch_values import BatchUpdate, ReceivedGradients, TransferStats
from hotrow.tiers.hbm.plan import HbmPlan
from hotrow.tiers.plan import ANY_PUBLICATION, Feature, RequestedRows


class HbmOwner:
    """The owner's half of a plan, in HBM (hotrow.tiers.plan.RowOwner)."""

    publications = ANY_PUBLICATION

    def __init__(self, plan: HbmPlan) -> None:
        self.plan = plan
        self.late_keys: dict[int, Tensor] = {}
        self._requests: Sequence[RequestedRows] = []

    def route(self, requests: Sequence[RequestedRows]) -> None:
        """Take the requested keys. They stay on the host until the lookup."""
        self._requests = requests
        stores = {
            number: store for one in requests for number, store in zip(one.table_numbers, one.stores, strict=True)
        }
        features: dict[int, list[Feature]] = {}
        seen: dict[int, list[Tensor]] = {}
        for one in requests:
            for keys, times, counts in zip(one.keys, one.occurrences, one.counts, strict=True):
                of_tables = zip(one.table_numbers, keys.split(counts), times.split(counts), strict=True)
                for number, some_keys, some_times in of_tables:
                    features.setdefault(number, []).append((Jagged(some_keys), "none"))
                    seen.setdefault(number, []).append(some_times)
        numbers = sorted(stores)
        jobs = [(stores[number], features[number]) for number in numbers]
        self.plan.route_unique(jobs, [times for number in numbers for times in seen[number]])

    def prefetch(self) -> TransferStats:
        """Bring rows from SSD to DRAM, or find them in HBM and assign slots to those missing."""
        return self.plan.prefetch()

    def stage(self) -> TransferStats:
        """Upload rows that exist and got a slot to HBM."""
        return self.plan.stage()

    @property
    def prefetch_misses(self) -> int:
        """Rows that got no slot ahead of the batch's turn."""
        return self.plan.prefetch_misses

    def fetch(self, step: int = 0) -> None:
        """Find the rows and create those of unseen keys."""
        self.plan.fetch(step)

    def read(self, late: str = "wait") -> None:
        """Only read the rows."""
        self.plan.read(late)

    def gather_rows(self) -> Iterator[Tensor]:
        """The rows of each request, from one gather over all of them."""
        buffers = [
            torch.empty(sum(map(sum, _floats(one))), dtype=torch.float32, device=self.plan.cache.device)
            for one in self._requests
        ]
        blocks: dict[int, list[Tensor]] = {}
        for one, buffer in zip(self._requests, buffers, strict=True):
            blocks |= _by_table(buffer, one)
        self.plan.gather([block for number in sorted(blocks) for block in blocks[number]])
        for one, buffer in zip(self._requests, buffers, strict=True):
            yield (
                buffer
                if one.reply_only_to is None
                else buffer.split([sum(floats) for floats in _floats(one)])[one.reply_only_to]
            )

    def apply_gradients(self, received: Iterable[ReceivedGradients], update: BatchUpdate) -> None:
        """Wait for all sums of gradients, then apply them in one update of all tables."""
        gradients: dict[int, list[Tensor | None]] = {}
        for one, (sums, present) in zip(self._requests, list(received), strict=True):
            gradients |= {number: list(of_table) for number, of_table in _by_table(sums, one).items()}
            if present is not None:
                _drop_absent(gradients, present, one)
        blocks = [block for number in sorted(gradients) for block in gradients[number]]
        self.plan.update(replace(update, gradients=blocks, checked=[]))

    def release(self) -> None:
        """Unpin the rows."""
        self.plan.release()


def _floats(requested: RequestedRows) -> list[list[int]]:
    """The number of floats of each table's rows, by requesting process."""
    return [[n * store.dim for n, store in zip(counts, requested.stores, strict=True)] for counts in requested.counts]


def _by_table(flat: Tensor, requested: RequestedRows) -> dict[int, list[Tensor]]:
    """Split a buffer that is ordered by process, then by table: a matrix for each process, by table number."""
    pieces = flat.split([floats for of_process in _floats(requested) for floats in of_process])
    tables = len(requested.stores)
    return {
        number: [piece.view(-1, requested.stores[table].dim) for piece in pieces[table::tables]]
        for table, number in enumerate(requested.table_numbers)
    }


def _drop_absent(gradients: dict[int, list[Tensor | None]], present: Tensor, requested: RequestedRows) -> None:
    """Replace a process's gradients of a table by None if no key of it has one."""
    for process, (counts, some) in enumerate(
        zip(requested.counts, present.split([sum(counts) for counts in requested.counts]), strict=True)
    ):
        for number, of_table in zip(requested.table_numbers, some.split(counts), strict=True):
            if not bool(of_table.any()):
                gradients[number][process] = None
            elif not bool(of_table.all()):
                raise GradientError(
                    "a table in HBM over ranks has a feature with gradients and one without; no row was changed. "
                    "Give the feature that no loss uses a table of its own, or leave hbm= out"
                )
