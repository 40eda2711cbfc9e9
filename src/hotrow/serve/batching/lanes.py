"""The engine's half of the path of a request: take a batch → choose the version → join → run → split → send.

The first steps run on the thread that reads a front end's connection (serve/processes/request_admission.py):

    TensorBatch.admit       refuse a request that cannot be answered before its deadline     tensorbatch.py
    MissQueue.defer_cold    hold a request while its rows are read from SSD or remote        miss_queue.py
    TensorBatch.enqueue     queue it with the requests that may share its batch              tensorbatch.py

This file has the other steps, top to bottom: a lane takes a batch and runs `Lanes.run_batch`.

A lane is one Python thread with its own number of intra-op threads for the tower. The core and torch release the
interpreter lock in every long call, so lanes run in parallel with each other and with connection readers. torch keeps
the number of intra-op threads per thread, but the first computation of a thread overwrites it with the number that was
set last in the process. So a lane triggers that first, and then sets its own number.

If a batch fails, each of its requests is run again in a batch of its own: only the bad request gets an error. A request
ends exactly once: `finish_pieces` returns the requests that are now complete, except those that were already refused
because one of their pieces expired in the queue.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hotrow.batch import KeyedBatch
from hotrow.errors import HotRowError, LateError, OptionError
from hotrow.serve.batching import lookups
from hotrow.serve.batching.shadow import ShadowQueue
from hotrow.serve.batching.tensorbatch import Batch, Piece, QueuedRequest, TensorBatch
from hotrow.serve.batching.versions import Model, Version
from hotrow.serve.load_estimate import Histogram
from hotrow.serve.protocol import frames
from hotrow.serve.protocol.request import Array, RefusedError, Wanted
from hotrow.serve.updates.freshness import Freshness

log = logging.getLogger(__name__)

LEAST_READ = 0.5  # part of the time to a deadline that rows on other machines get, however long towers take


class Sender(Protocol):
    """A front end's connection, to which answers are sent."""

    def send(self, data: bytes) -> None:
        """Never blocks for long, never raises."""
        ...


class RequestFrame(NamedTuple):
    """The content of a QueuedRequest: its connection, its id there, and where its bytes are."""

    sender: Sender
    id: int
    chunk: frames.Chunk
    offset: int
    length: int
    half: bool = False  # whether it wants its vectors as FP16


class BatchKey(NamedTuple):
    """Requests with equal keys may share a batch. `pinned` is the version that the requests named, if they did.
    `wanted` has the outputs of lookups, without what may differ among them."""

    model: Model
    pinned: Version | None
    fingerprint: int
    policy: str
    wanted: Wanted | None = None


class _Result(NamedTuple):
    """What a version returned for joined rows, with the logits as a float32 array."""

    logits: Array
    late: Any
    compiled: bool
    fresh: Freshness


class _Times(NamedTuple):
    """The end times of a batch's steps, by time.monotonic."""

    begin: float
    joined: float
    run: float
    sent: float


class Lanes:
    """`count` lanes that take batches from one TensorBatch."""

    def __init__(self, count: int, threads: int, tensorbatch: TensorBatch) -> None:
        self.tensorbatch, self.threads = tensorbatch, threads
        self.latency = Histogram()
        self.shadows = ShadowQueue(tensorbatch.wake)
        tensorbatch.background = self._shadow_work
        self._threads = [
            threading.Thread(target=self._work, name=f"hotrow-lane-{number}", daemon=True) for number in range(count)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the threads to end, after the TensorBatch was closed."""
        for thread in self._threads:
            thread.join(timeout)
        self.shadows.close()

    # --- the path of a batch, top to bottom ---

    def _work(self) -> None:
        """A lane's thread."""
        torch.get_num_threads()  # the first use in a thread copies the process's number; do that before setting ours
        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            while (batch := self.tensorbatch.take()) is not None:
                ok = False
                try:
                    ok = self.run_batch(batch)
                except Exception:  # a bug: the requests get an error, the lane continues
                    log.exception("a batch failed")
                    for piece in batch.pieces:
                        refuse(self.tensorbatch, piece.request, RefusedError(500, "the server failed; see its log"))
                finally:
                    self.tensorbatch.done(batch, ok)

    def run_batch(self, batch: Batch) -> bool:
        """Answer all requests of a batch; returns whether one run answered them all."""
        key: BatchKey = batch.queue.key
        version = key.model.version_for(key.fingerprint, key.pinned)
        if version is None:
            why = RefusedError(503, f"model {key.model.name!r} takes other inputs now; send the request again", 0.1)
            for piece in batch.pieces:
                refuse(self.tensorbatch, piece.request, why)
            return False
        try:
            self._run_pieces(batch, batch.pieces, version, key)
            return True
        except Exception as error:
            version.counts.failed += 1
            log.warning("a batch of %d requests failed; each is run separately: %s", len(batch.pieces), error)
        for piece in batch.pieces:
            try:
                self._run_pieces(batch, [piece], version, key)
            except Exception as error:
                refuse(self.tensorbatch, piece.request, _refusal(error))
        return False

    def _run_pieces(self, batch: Batch, pieces: Sequence[Piece], version: Version, key: BatchKey) -> None:
        begin = time.monotonic()
        joined = lookups.join(pieces, version, key)
        joined_at = time.monotonic()
        until = _rows_late_at(pieces, key) if version.waits_for_rows else None
        if key.wanted is not None:
            found = lookups.run(joined, version, key, until)
            run_at = time.monotonic()
            self._send_vectors(pieces, joined, found, version, key.wanted)
            times = _Times(begin, joined_at, run_at, time.monotonic())
            self._count(version, batch, pieces, _Result(found.logits, found.late, found.compiled, found.fresh), times)
            version.ages.note(found.fresh, len(pieces))
            return
        logits, late, compiled, fresh = version.run(joined, key.policy, until)
        values: Array = logits.float().numpy() if logits.device.type == "cpu" else logits.float().cpu().numpy()
        run_at = time.monotonic()
        if len(values) != joined.size:
            raise OptionError(f"the tower gave {len(values)} logits for {joined.size} rows")
        result = _Result(values, late, compiled, fresh)
        self._send_answers(pieces, result, version)
        self._count(version, batch, pieces, result, _Times(begin, joined_at, run_at, time.monotonic()))
        version.ages.note(fresh, len(pieces))
        if key.model.shadow is not None and version is key.model.current:  # after the answers were sent
            load = self.tensorbatch.recent_load.now(self.tensorbatch.clock())
            self.shadows.offer(key.model, pieces, values, _late_by_piece(pieces, late), load)

    def _shadow_work(self, load: float) -> Callable[[], None] | None:
        """A few copies for this lane to run, which has no batch."""
        copies = self.shadows.take(load)
        return functools.partial(self.shadows.run, copies) if copies else None

    def _send_answers(self, pieces: Sequence[Piece], result: _Result, version: Version) -> None:
        """Split the logits and send them: one message per front end, and one for each request of several pieces."""
        late_ids = _late_by_piece(pieces, result.late)
        whole: dict[int, tuple[Sender, list[frames.AnswerPart]]] = {}  # by connection
        joined: list[tuple[QueuedRequest, int]] = []  # requests of several pieces; their logits are in the request
        complete = {
            id(piece) for piece in self.tensorbatch.finish_pieces(pieces, result.logits, late_ids, result.fresh)
        }
        row = 0
        for piece, count in zip(pieces, late_ids, strict=True):
            request = piece.request
            if id(piece) in complete:
                if request.logits is None:
                    content: RequestFrame = request.content
                    known = whole.get(id(content.sender))
                    if known is None:
                        known = whole[id(content.sender)] = (content.sender, [])
                    known[1].append((content.id, row, piece.rows, count))
                else:
                    joined.append((request, request.late))
            row += piece.rows
        for sender, parts in whole.values():
            sender.send(_answer_frame(parts, result.logits, version, result.compiled, result.fresh))
        for request, count in joined:
            parts = [(request.content.id, 0, request.rows, count)]
            frame = _answer_frame(parts, request.logits, version, result.compiled, request.fresh)
            request.content.sender.send(frame)

    def _send_vectors(
        self,
        pieces: Sequence[Piece],
        batch: KeyedBatch,
        result: lookups.LookupResult,
        version: Version,
        wanted: Wanted,
    ) -> None:
        """Split the vectors of lookups and send them, a message for each request: they may be large."""
        late = _late_by_piece(pieces, result.late)
        found = lookups.answers(pieces, batch, result, version, wanted, late)
        complete = {id(piece) for piece in self.tensorbatch.finish_pieces(pieces, result.logits, late, result.fresh)}
        for piece, frame in zip(pieces, found, strict=True):
            if id(piece) in complete:
                piece.request.content.sender.send(frame)
                version.counts.lookups += 1
                version.counts.lookup_rows += piece.rows
                version.counts.lookup_bytes += len(frame)
        version.counts.without_tower += not wanted.logits

    # --- statistics ---

    def _count(self, version: Version, batch: Batch, pieces: Sequence[Piece], result: _Result, times: _Times) -> None:
        # Lanes add without a lock, so a sum may lose an increment. It is statistics only; nothing depends on it.
        counts = version.counts
        rows = sum([piece.rows for piece in pieces])
        requests = sum([piece.first == 0 for piece in pieces])
        run_seconds = times.run - times.joined
        counts.requests += requests
        counts.rows += rows
        counts.executions += 1
        policy = batch.queue.key.policy
        counts.late_by_policy[policy] = counts.late_by_policy.get(policy, 0) + _total(result.late)
        counts.compiled += result.compiled
        counts.queue_seconds += sum([batch.taken - piece.request.arrived for piece in pieces])
        counts.join_seconds += (times.joined - times.begin) * requests
        counts.run_seconds += run_seconds * requests
        counts.answer_seconds += (times.sent - times.run) * requests
        counts.last = time.time()
        for piece in pieces:
            if piece.first == 0:
                self.latency.note(times.sent - piece.request.arrived)
        size = version.sizes.setdefault(max(0, rows - 1).bit_length(), [0, 0.0, 0])
        size[0] += 1
        size[1] += run_seconds
        size[2] += rows


def _rows_late_at(pieces: Sequence[Piece], key: BatchKey) -> float:
    """When a batch stops waiting for rows on other machines: what is left until the earliest deadline, less the time
    that a batch takes here."""
    now = time.monotonic()
    left = max(0.0, min([piece.request.deadline for piece in pieces]) - now)
    group = key.model.group if key.wanted is None else key.model.lookups
    needed = group.service_time.of(sum([piece.rows for piece in pieces]))
    return now + max(left - needed, left * LEAST_READ)


def refuse(tensorbatch: TensorBatch, request: QueuedRequest, why: RefusedError) -> None:
    """End a request with an error, unless it has ended already."""
    if tensorbatch.finish(request):
        request.content.sender.send(frames.write_refusal(request.content.id, why))


def _refusal(error: Exception) -> RefusedError:
    if isinstance(error, LateError):
        return RefusedError(503, str(error), 0.1)
    status = 400 if isinstance(error, (HotRowError, frames.FrameError)) else 500
    return RefusedError(status, f"{type(error).__name__}: {error}")


def _answer_frame(
    parts: list[frames.AnswerPart], logits: Array, version: Version, compiled: bool, fresh: Freshness
) -> bytes:
    publication, watermark, highest = fresh
    return frames.write_answers(parts, logits, version.number, publication, compiled, highest, watermark)


def _total(late: Any) -> int:
    return 0 if late is None else int(late) if isinstance(late, int) else int(np.sum(np.asarray(late)))


def _late_by_piece(pieces: Sequence[Piece], late: Any) -> list[int]:
    """How many ids of each piece a policy answered. If only the batch's total is known, every piece gets that total."""
    if late is None or (isinstance(late, int) and not late):
        return [0] * len(pieces)
    if isinstance(late, int):
        return [late] * len(pieces)
    by_row = np.asarray(late)
    bounds = np.cumsum([0, *[piece.rows for piece in pieces]])
    return [int(by_row[a:b].sum()) for a, b in itertools.pairwise(bounds)]
