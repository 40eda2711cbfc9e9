"""Lanes: threads that take a joined batch to its answers: join, find rows and run the tower, split, answer.

A lane is one thread of Python with its own budget of threads for the tower. The core and torch release the interpreter
lock for all that is long, so lanes run side by side, and readers beside them. torch keeps the number of intra-op
threads per thread, but a thread takes the number that was set last anywhere in the process over when it first
computes, even if it has set its own before: so a lane lets that happen first, and then sets its own.

A batch that fails is run again, each request alone: one bad request gets its error and the others their answers.

Requests end exactly once: `finish_pieces` says which of a batch's requests are to be answered now, and one that was
refused meanwhile (a piece of it expired in line) is not among them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hotrow.errors import HotRowError, LateError, OptionError
from hotrow.serve.batching.tensorbatch import Ask, Batch, Piece, TensorBatch
from hotrow.serve.batching.versions import Model, Version
from hotrow.serve.load_estimate import Histogram
from hotrow.serve.protocol import frames
from hotrow.serve.protocol.request import Array, RefusedError
from hotrow.serve.updates.cut_over import Fresh

log = logging.getLogger(__name__)


class Sender(Protocol):
    """Where answers go: a front end's connection."""

    def send(self, data: bytes) -> None:
        """Never blocks for long, never raises."""
        ...


class Frame(NamedTuple):
    """What an Ask holds here: where the request came from and where its bytes are."""

    sender: Sender
    id: int
    chunk: frames.Chunk
    offset: int
    length: int


class LineKey(NamedTuple):
    """Requests with the same may share a batch. `pinned` is the version that they named."""

    model: Model
    pinned: Version | None
    fingerprint: int
    policy: str


class Lanes:
    """So many lanes, which take from one TensorBatch."""

    def __init__(self, count: int, threads: int, queue: TensorBatch) -> None:
        self.queue, self.threads = queue, threads
        self.latency = Histogram()
        self._threads = [
            threading.Thread(target=self._work, name=f"hotrow-lane-{number}", daemon=True) for number in range(count)
        ]

    def start(self) -> None:
        """Begin to take batches."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the lanes' end, after the queue was closed."""
        for thread in self._threads:
            thread.join(timeout)

    def _work(self) -> None:
        torch.get_num_threads()  # a thread's first use takes the process's number over: let that be past
        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            while (batch := self.queue.take()) is not None:
                ok = False
                try:
                    ok = self.serve(batch)
                except Exception:  # a bug of ours: those who wait get an end, the lane goes on
                    log.exception("a batch failed")
                    for piece in batch.pieces:
                        refuse(self.queue, piece.ask, RefusedError(500, "the server failed; its log says why"))
                finally:
                    self.queue.done(batch, ok)

    def serve(self, batch: Batch) -> bool:
        """Run a batch and answer; whether it went in one go."""
        key: LineKey = batch.line.key
        version = key.model.serving(key.fingerprint, key.pinned)
        if version is None:
            why = RefusedError(503, f"model {key.model.name!r} takes other inputs now; ask again", 0.1)
            for piece in batch.pieces:
                refuse(self.queue, piece.ask, why)
            return False
        try:
            self._run(batch, batch.pieces, version, key)
            return True
        except Exception as error:
            version.counts.failed += 1
            log.warning("a batch of %d requests failed, each is run alone: %s", len(batch.pieces), error)
        for piece in batch.pieces:
            try:
                self._run(batch, [piece], version, key)
            except Exception as error:
                refuse(self.queue, piece.ask, _refusal(error))
        return False

    def _run(self, batch: Batch, pieces: Sequence[Piece], version: Version, key: LineKey) -> None:
        begin = time.monotonic()
        joined = frames.join(
            [(c.chunk, c.offset, c.length, piece.first, piece.rows) for piece in pieces for c in [piece.ask.content]],
            version.signature,
            key.fingerprint,
        )
        start = time.monotonic()
        logits, late, compiled, fresh = version.run(joined, key.policy)
        values: Array = logits.float().numpy() if logits.device.type == "cpu" else logits.float().cpu().numpy()
        end = time.monotonic()
        if len(values) != joined.size:
            raise OptionError(f"the tower gave {len(values)} logits for {joined.size} rows")
        self._answer(pieces, values, late, version, (compiled, fresh))
        self._count(version, batch, pieces, late, compiled, (begin, start, end, time.monotonic()))
        version.ages.note(fresh, len(pieces))

    def _answer(
        self, pieces: Sequence[Piece], logits: Array, late: Any, version: Version, made: tuple[bool, Fresh]
    ) -> None:
        """Split the logits; one send for each front end."""
        lates, (compiled, fresh) = _late_by_piece(pieces, late), made
        whole: dict[int, tuple[Sender, list[frames.AnswerPart]]] = {}
        parts_of: list[tuple[Ask, int]] = []
        ready = {id(piece) for piece in self.queue.finish_pieces(pieces, logits, lates, fresh)}
        row = 0
        for piece, count in zip(pieces, lates, strict=True):
            ask = piece.ask
            if id(piece) in ready:
                if ask.logits is None:
                    content: Frame = ask.content
                    known = whole.get(id(content.sender))
                    if known is None:
                        known = whole[id(content.sender)] = (content.sender, [])
                    known[1].append((content.id, row, piece.rows, count))
                else:
                    parts_of.append((ask, ask.late))
            row += piece.rows
        for sender, parts in whole.values():
            sender.send(_frame(parts, logits, version, compiled, fresh))
        for ask, count in parts_of:
            parts = [(ask.content.id, 0, ask.rows, count)]
            ask.content.sender.send(_frame(parts, ask.logits, version, compiled, ask.fresh))

    def _count(
        self,
        version: Version,
        batch: Batch,
        pieces: Sequence[Piece],
        late: Any,
        compiled: bool,
        times: tuple[float, float, float, float],
    ) -> None:
        counts = version.counts  # sums that may lose an increment to another lane: figures, nothing decides by them
        begin, start, end, last = times
        rows = sum([piece.rows for piece in pieces])
        requests = sum([piece.first == 0 for piece in pieces])
        counts.requests += requests
        counts.rows += rows
        counts.executions += 1
        policy = batch.line.key.policy
        counts.late_by_policy[policy] = counts.late_by_policy.get(policy, 0) + _total(late)
        counts.compiled += compiled
        counts.queue_seconds += sum([batch.taken - piece.ask.arrived for piece in pieces])
        counts.join_seconds += (start - begin) * requests
        counts.run_seconds += (end - start) * requests
        counts.answer_seconds += (last - end) * requests
        counts.last = time.time()
        for piece in pieces:
            if piece.first == 0:
                self.latency.note(last - piece.ask.arrived)
        size = version.sizes.setdefault(max(0, rows - 1).bit_length(), [0, 0.0, 0])
        size[0] += 1
        size[1] += end - start
        size[2] += rows


def refuse(queue: TensorBatch, ask: Ask, why: RefusedError) -> None:
    """End a request without an answer, unless it has ended."""
    if queue.finish(ask):
        ask.content.sender.send(frames.write_refusal(ask.content.id, why))


def _refusal(error: Exception) -> RefusedError:
    if isinstance(error, LateError):
        return RefusedError(503, str(error), 0.1)
    status = 400 if isinstance(error, (HotRowError, frames.FrameError)) else 500
    return RefusedError(status, f"{type(error).__name__}: {error}")


def _frame(parts: list[frames.AnswerPart], logits: Array, version: Version, compiled: bool, fresh: Fresh) -> bytes:
    publication, watermark, highest = fresh
    return frames.write_answers(parts, logits, version.number, publication, compiled, highest, watermark)


def _total(late: Any) -> int:
    return 0 if late is None else int(late) if isinstance(late, int) else int(np.sum(np.asarray(late)))


def _late_by_piece(pieces: Sequence[Piece], late: Any) -> list[int]:
    if late is None or (isinstance(late, int) and not late):
        return [0] * len(pieces)
    if isinstance(late, int):  # of the whole batch: each answer says what its batch had at most
        return [late] * len(pieces)
    found = np.asarray(late)
    bounds = np.cumsum([0, *[piece.rows for piece in pieces]])
    return [int(found[a:b].sum()) for a, b in itertools.pairwise(bounds)]
