"""Uploads that a cache must finish before it changes anything else.

A plan adds tasks and the cache finishes them. A task holds table groups and a batch's part in each. It refers to
neither the plan nor the cache.

    StagedBatch    a later batch: its rows have slots and are in the index, but may not be uploaded yet
    DeferredFetch  the current batch: the host does not know yet whether rows are missing

Threads: the prefetch thread adds a staged batch. The stage thread, the training thread or a reader of the cache
finishes it, whichever comes first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from hotrow.device.streams import on, wait_for
from hotrow.tiers.hbm.group_batch import GroupBatch

BACKOFF = 16  # batches that are not staged after one that was staged and incomplete


class StagedBatch:
    """A later batch whose rows have slots and may still be in flight.

    `generation` is the one in which all its rows got slots, or -1 if some rows are fetched at the batch's turn.
    `keep_alive` is the batch's plan. It is never called. The reference keeps the garbage collector from releasing the
    plan, and with it these parts, during their uploads.
    """

    def __init__(self, parts: Sequence[GroupBatch], generation: int, keep_alive: object) -> None:
        self.parts, self.generation, self.keep_alive = list(parts), generation, keep_alive
        self.ready: list[Any] = []  # events: the rows are in HBM
        self.uploading = threading.Lock()  # held by the uploading thread


class StagingQueue:
    """Staged batches whose rows are not all in HBM yet, in order."""

    def __init__(self, budget_errors: AbstractContextManager[None]) -> None:
        self.budget_errors = budget_errors
        self._skips_left = 0  # batches not to stage: the last one had keys without a row
        self._waiting: list[StagedBatch] = []

    def skip_next(self) -> bool:
        """Whether to skip staging the next batch. Counts it."""
        skips = self._skips_left > 0
        self._skips_left = max(0, self._skips_left - 1)
        return skips

    def add(self, staged: StagedBatch) -> None:
        """Queue a batch whose rows have slots."""
        self._waiting.append(staged)

    def finish(self, staged: StagedBatch) -> None:
        """Upload the rows. The first thread that calls this does it; others block until it is done."""
        keep_alive = (
            staged.keep_alive
        )  # dropped after `uploading` is released, because the plan's release takes that lock
        with staged.uploading:
            if staged not in self._waiting:
                return
            try:
                for part in staged.parts:
                    with self.budget_errors, on(part.group.upload_stream):
                        if not part.stage():
                            staged.generation, self._skips_left = -1, BACKOFF
                staged.ready = [
                    part.group.upload_stream.record_event()
                    for part in staged.parts
                    if part.group.upload_stream is not None
                ]
            except BaseException:
                self._cancel(staged)
                raise
            self._remove(staged)
        del keep_alive

    def finish_all(self) -> None:
        """Upload the rows of every queued batch."""
        waiting = list(self._waiting)
        keepers = [staged.keep_alive for staged in waiting]
        for staged in waiting:
            self.finish(staged)
        del keepers

    def cancel(self, staged: StagedBatch) -> None:
        """Do not upload the rows of this batch that are still missing."""
        with staged.uploading:
            self._cancel(staged)

    def _cancel(self, staged: StagedBatch) -> None:
        self._remove(staged)
        staged.generation = -1
        for part in staged.parts:
            part.cancel()

    def _remove(self, staged: StagedBatch) -> None:
        if staged in self._waiting:
            self._waiting.remove(staged)
        staged.keep_alive = None


class DeferredFetch:
    """The fetch of the current batch, while the host does not know whether rows are missing. `keep_alive` as in
    StagedBatch."""

    def __init__(self, parts: Sequence[GroupBatch], step: int, keep_alive: object) -> None:
        self.parts, self.step, self.keep_alive = list(parts), step, keep_alive
        self.done = False

    def finish(self) -> bool:
        """Fetch the missing rows. Waits for the device. Returns whether rows were missing. May be called again after an
        error."""
        if self.done:
            return False
        keep_alive, self.keep_alive = self.keep_alive, None
        counts = [part.count_missing() for part in self.parts]
        for part, count in zip(self.parts, counts, strict=True):
            part.group.last_batch_missed = count > 0
            part.fetch(count, self.step)
            wait_for(part.group.upload_stream)
        self.done = True
        del keep_alive
        return any(counts)

    def cancel(self) -> None:
        """Drop the batch. Receives its counts of missing rows, so that the next batch does not get them."""
        self.done, self.keep_alive = True, None
        for part in self.parts:
            part.count_missing()
