"""Work that a cache in HBM has to finish before it changes anything: rows of batches that are still on their way up.

A plan puts tasks here and the cache finishes them. A task knows groups of tables and a batch's parts in them. It knows
neither the plan nor the cache, so neither calls the other back.

    StagedBatch    a later batch: its rows have slots, and the index names rows that may not be there yet
    DeferredFetch  the batch in work: the host does not know yet whether rows are missing

Several threads come here. The fetch thread adds a staged batch. The stage thread, the training thread or a reader of
the cache finishes it, whichever is first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from hotrow.device.streams import on, wait_for
from hotrow.tiers.hbm.group_batch import Part

PATIENCE = 16  # batches that come up at their turn, after one that was staged and lacked something


class StagedBatch:
    """A batch whose rows have slots and may be on their way.

    `generation` is the one in which all its rows got slots, -1 if some rows come at the batch's turn. `keeper` is the
    batch's plan. It is never called. It is held so that no garbage collector releases the plan, and with it these
    parts, while they wait or while their rows move.
    """

    def __init__(self, parts: Sequence[Part], generation: int, keeper: object) -> None:
        self.parts, self.generation, self.keeper = list(parts), generation, keeper
        self.ready: list[Any] = []  # events: the rows are there
        self.running = threading.Lock()  # held by the thread that brings the rows


class StagingQueue:
    """Staged batches whose rows are not all there yet, in order."""

    def __init__(self, fits: AbstractContextManager[None]) -> None:
        self.fits = fits
        self._patience = 0  # batches not to stage: the last one had unseen keys, for which all must wait
        self._waiting: list[StagedBatch] = []

    def skips_next(self) -> bool:
        """Whether the next batch is not to be staged. Counts it."""
        skips = self._patience > 0
        self._patience = max(0, self._patience - 1)
        return skips

    def add(self, staged: StagedBatch) -> None:
        """Rows of this batch have slots now."""
        self._waiting.append(staged)

    def finish(self, staged: StagedBatch) -> None:
        """Bring the rows up. The first thread that calls it does so, others wait for that thread."""
        keeper = staged.keeper  # released after `running`, which the plan's release takes
        with staged.running:
            if staged not in self._waiting:
                return
            try:
                for part in staged.parts:
                    with self.fits, on(part.group.up):
                        if not part.raise_rows():
                            staged.generation, self._patience = -1, PATIENCE
                staged.ready = [part.group.up.record_event() for part in staged.parts if part.group.up is not None]
            except BaseException:
                self._drop(staged)
                raise
            self._remove(staged)
        del keeper

    def finish_all(self) -> None:
        """Bring up the rows of every batch that waits."""
        waiting = list(self._waiting)
        keepers = [staged.keeper for staged in waiting]
        for staged in waiting:
            self.finish(staged)
        del keepers

    def give_up(self, staged: StagedBatch) -> None:
        """Rows of this batch that are not there yet will not come."""
        with staged.running:
            self._drop(staged)

    def _drop(self, staged: StagedBatch) -> None:
        self._remove(staged)
        staged.generation = -1
        for part in staged.parts:
            part.give_up()

    def _remove(self, staged: StagedBatch) -> None:
        if staged in self._waiting:
            self._waiting.remove(staged)
        staged.keeper = None


class DeferredFetch:
    """A batch at its turn of which the host does not know yet whether rows are missing. `keeper` as in StagedBatch."""

    def __init__(self, parts: Sequence[Part], step: int, keeper: object) -> None:
        self.parts, self.step, self.keeper = list(parts), step, keeper
        self.done = False

    def finish(self) -> bool:
        """Bring up what is missing. Waits for the device. Returns whether anything was missing. After an error it may
        be called again."""
        if self.done:
            return False
        keeper, self.keeper = self.keeper, None
        counts = [part.missing() for part in self.parts]
        for part, count in zip(self.parts, counts, strict=True):
            part.group.missed = count > 0
            part.bring(count, self.step)
            wait_for(part.group.up)
        self.done = True
        del keeper
        return any(counts)

    def abandon(self) -> None:
        """The batch comes to nothing. The numbers of missing rows that are on their way are taken, so that the next
        batch does not get them."""
        self.done, self.keeper = True, None
        for part in self.parts:
            part.missing()
