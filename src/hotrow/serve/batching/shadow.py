"""ShadowQueue: copies of answered requests, which a lane with nothing else to do runs on another version.

Path of a copy: a lane has sent the answer → `offer` keeps the request's bytes and the logits → rows on SSD or in a
remote store are loaded by a thread of the queue → an idle lane takes a few copies (`take`) → `run` joins them, runs the
shadow's tower, and counts the differences of the probabilities.

A copy never fails or changes an answer, which was sent before. What a copy may cost other requests is bounded:

- Copies are dropped, never queued up, when the server is busy: when `LOAD` of the lanes' recent time went into answers,
  or more than MAX_ROWS or MAX_BYTES wait, or a copy is older than MAX_SECONDS. They have no part in admission control.
- A lane takes copies only if no request waits and, where there are several lanes, another one stays free. It takes as
  many copies as run in SLICE_SECONDS by the measured times, at least one. So a request that arrives on an idle server
  with one lane waits at most for that.
- A run waits for rows on other machines at most twice as long as a batch of the answering version takes, or
  SLICE_SECONDS if that is more. Then they are late.

Copies are left out where a row was late in either version, because a policy and not the model gave those probabilities.
Lookups (lookups.py) are not copied.

Threads: lanes call all methods; the queue's own thread loads rows. A lock guards the queue; counts are kept under it.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hotrow.serve.load_estimate import ServiceTime
from hotrow.serve.protocol import frames, user_join
from hotrow.serve.protocol.metrics import DIFFERENCE_BOUNDS as BOUNDS
from hotrow.serve.protocol.predictions import predictions
from hotrow.serve.protocol.request import Array

if TYPE_CHECKING:
    from hotrow.serve.batching.tensorbatch import Piece
    from hotrow.serve.batching.versions import Model, Version

log = logging.getLogger(__name__)

LOAD = 0.7  # of the lanes' time in answers: above it, copies are dropped
SLICE_SECONDS = 0.002
MAX_ROWS, MAX_BYTES, MAX_SECONDS = 16_384, 64 << 20, 1.0
_SPAN = 30.0  # seconds of one window of the maximum


@dataclass
class ShadowCounts:
    """Totals of a version's runs as a shadow. A value is one row's prediction of one task."""

    requests: int = 0
    rows: int = 0
    values: int = 0
    total: float = 0.0  # of |difference|
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))  # values by |difference|
    dropped: dict[str, int] = field(default_factory=lambda: {"busy": 0, "late": 0, "failed": 0, "not finite": 0})
    maxima: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of this window and the one before
    times: ServiceTime = field(default_factory=ServiceTime)  # of its runs
    since: float = 0.0  # time.monotonic of this window's begin; 0: it was never a shadow

    def note(self, answered: Array, shadowed: Array, now: float) -> None:
        """Count the differences between two arrays of probabilities."""
        differences = np.abs(shadowed.astype(np.float64) - answered).reshape(-1)
        finite = np.isfinite(differences)
        self.dropped["not finite"] += int(finite.size - finite.sum())
        differences = differences[finite]
        if not differences.size:
            return
        counts = np.bincount(np.searchsorted(BOUNDS, differences), minlength=len(self.buckets))
        self.buckets = [old + int(new) for old, new in zip(self.buckets, counts, strict=True)]
        self.values += differences.size
        self.total += float(differences.sum())
        self._turn(now)
        self.maxima[0] = max(self.maxima[0], float(differences.max()))

    def figures(self, now: float) -> dict[str, Any]:
        """The totals, and the largest difference of the last half to whole minute."""
        self._turn(now)
        names = ("requests", "rows", "values", "total", "buckets", "dropped")
        return {**{name: getattr(self, name) for name in names}, "max": max(self.maxima)}

    def _turn(self, now: float) -> None:
        if now - self.since >= _SPAN:
            self.maxima = [0.0, self.maxima[0] if now - self.since < 2 * _SPAN else 0.0]
            self.since = now


class _Copy(NamedTuple):
    """A part of an answered request, and what the answering version said."""

    model: Model
    version: Version
    frame: bytes
    first: int
    rows: int
    logits: Array
    arrived: float


class ShadowQueue:
    """Copies that wait for an idle lane. `wake` is called when there are some."""

    def __init__(self, wake: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self._wake, self._clock = wake, clock
        self._copies: deque[_Copy] = deque()
        self._rows = self._bytes = 0  # of these and of those whose rows are being loaded
        self._lock = threading.Lock()
        self._loader: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        """Whether copies wait for a lane."""
        return bool(self._copies)

    # --- called by lanes ---

    def offer(self, model: Model, pieces: Sequence[Piece], logits: Array, late: Sequence[int], load: float) -> None:
        """Copy the sampled ones of these answered pieces. `logits` are those of all pieces, in order; `load` is the
        share of the lanes' recent time that went into answers."""
        shadow = model.shadow
        if shadow is None:
            return
        version, share = shadow
        version.shadow.since = version.shadow.since or self._clock()
        row, now, waiting = 0, self._clock(), False
        for piece, count in zip(pieces, late, strict=True):
            begin, row = row, row + piece.rows
            content = piece.request.content
            if share < 1 and _draw(content.id) >= share:
                continue
            if count:
                self._drop(version, "late")
                continue
            if load > LOAD or self._rows + piece.rows > MAX_ROWS or self._bytes + content.length > MAX_BYTES:
                self._drop(version, "busy")
                continue
            frame = bytes(memoryview(content.chunk)[content.offset : content.offset + content.length])
            copy = _Copy(model, version, frame, piece.first, piece.rows, logits[begin:row].copy(), now)
            with self._lock:
                self._rows += copy.rows
                self._bytes += len(frame)
            if version.can_be_cold:
                self._load_later(copy)
            else:
                self._copies.append(copy)
                waiting = True
        if waiting:
            self._wake()

    def take(self, load: float) -> list[_Copy]:
        """The next copies for an idle lane, all of one version; empty if there is nothing to run."""
        taken: list[_Copy] = []
        with self._lock:
            now = self._clock()
            while self._copies:
                copy = self._copies[0]
                if taken and copy.version is not taken[0].version:
                    break
                if copy.model.shadow is None or copy.model.shadow[0] is not copy.version:  # it is no shadow any more
                    self._remove_first()
                    continue
                if load > LOAD or now - copy.arrived > MAX_SECONDS:
                    copy.version.shadow.dropped["busy"] += 1
                    self._remove_first()
                    continue
                times = copy.version.shadow.times if copy.version.shadow.times.known else copy.model.group.service_time
                seconds = times.of(copy.rows + sum([other.rows for other in taken]))
                if taken and seconds > SLICE_SECONDS:
                    break
                taken.append(self._remove_first())
        return taken

    def run(self, copies: Sequence[_Copy]) -> None:
        """Run copies on their version and count the differences. Never raises."""
        version, began = copies[0].version, self._clock()
        try:
            joined = user_join.join(_pieces(copies), version.signature, version.fingerprint)
            logits, late, _, _ = version.run(joined, "initial", _rows_late_at(copies, self._clock()))
            values: Array = logits.float().cpu().numpy()
            answered = np.concatenate([copy.logits for copy in copies])
            if values.shape != answered.shape:
                raise ValueError(f"the shadow gave logits {values.shape} where the answer has {answered.shape}")
        except Exception as error:
            if copies[0].model.shadow is not None and copies[0].model.shadow[0] is version:  # it was not just replaced
                log.warning("version %s of %s failed as a shadow: %s", version.name, copies[0].model.name, error)
                self._drop(version, "failed", len(copies))
            return
        counted = _in_time(copies, late)
        rows = np.repeat(counted, [copy.rows for copy in copies])
        with self._lock:
            counts = version.shadow
            counts.times.note(len(answered), self._clock() - began)
            counts.dropped["late"] += int(len(copies) - counted.sum())
            counts.requests += sum([copy.first == 0 for copy, ok in zip(copies, counted, strict=True) if ok])
            counts.rows += int(rows.sum())
            kinds = version.signature.kinds
            counts.note(predictions(answered[rows], kinds), predictions(values[rows], kinds), self._clock())

    def close(self) -> None:
        """Drop all copies and end the thread."""
        with self._lock:
            self._copies.clear()
        if self._loader is not None:
            self._loader.shutdown(wait=False, cancel_futures=True)

    def _remove_first(self) -> _Copy:
        copy = self._copies.popleft()
        self._rows -= copy.rows
        self._bytes -= len(copy.frame)
        return copy

    def _drop(self, version: Version, why: str, copies: int = 1) -> None:
        with self._lock:
            version.shadow.dropped[why] += copies

    # --- rows on SSD or in a remote store ---

    def _load_later(self, copy: _Copy) -> None:
        with self._lock:
            if self._loader is None:
                self._loader = ThreadPoolExecutor(1, thread_name_prefix="hotrow-shadow")
            loader = self._loader
        try:
            loader.submit(self._load, copy)
        except RuntimeError:  # closed
            return

    def _load(self, copy: _Copy) -> None:
        try:
            if self._clock() - copy.arrived <= MAX_SECONDS:
                version = copy.version
                batch = user_join.join(_pieces([copy]), version.signature, version.fingerprint)
                if version.servable.cold(batch) is not None:
                    version.servable.prefetch(batch)
        except Exception as error:
            log.warning("rows of a shadow could not be loaded: %s", error)
        self._copies.append(copy)
        self._wake()


def _pieces(copies: Sequence[_Copy]) -> list[frames.Piece]:
    return [(copy.frame, 0, len(copy.frame), copy.first, copy.rows) for copy in copies]


def _rows_late_at(copies: Sequence[_Copy], now: float) -> float | None:
    """When a run of these copies stops waiting for rows on other machines; None if it reads none.

    The answering version's times decide, because the shadow's own would grow with each run that waited in vain.
    """
    if not copies[0].version.waits_for_rows:
        return None
    usual = copies[0].model.group.service_time.of(sum([copy.rows for copy in copies]))
    return now + max(2 * usual, SLICE_SECONDS)


def _in_time(copies: Sequence[_Copy], late: Any) -> Array:
    """Which copies had no late row in the shadow, bool [copies]."""
    if late is None or isinstance(late, int):
        return np.full(len(copies), not late)
    starts = np.cumsum([0, *[copy.rows for copy in copies]])[:-1]
    in_time: Array = np.add.reduceat(np.asarray(late, np.int64), starts) == 0
    return in_time


def _draw(id: int) -> float:
    """A number from 0 to 1 that is the same for all pieces of a request."""
    return zlib.crc32(id.to_bytes(8, "little")) / 2**32
