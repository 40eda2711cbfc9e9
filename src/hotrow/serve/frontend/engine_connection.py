"""EngineConnection: a front end's connection to one engine, its requests in flight, and the engine's models.

Frames that are written in one iteration of the event loop are sent together; one read may return several answers. When
the connection is lost, the requests in flight are refused with 503 at once. The engine's description of its models is
kept until the engine is ready again.

All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotrow.serve.protocol import frames, lookup_frames
from hotrow.serve.protocol.request import Answer, Array, RefusedError, Request, Signature

if TYPE_CHECKING:
    from hotrow.serve.frontend.engine_client import EngineClient

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # Retry-After, while an engine restarts
_CHUNK = 256 << 10
_LONGEST_ANSWER = 1 << 30
_MAX_FLUSH_DELAY = 0.002  # seconds that a frame may wait for the end of an event loop iteration


class EngineConnection(asyncio.BufferedProtocol):
    """One engine: its models and figures as it last sent them, and the requests in flight."""

    def __init__(self, backend: EngineClient, path: str) -> None:
        self.backend, self.path = backend, path
        self.ready = False  # it answers requests
        self.rows_up = True  # it can read all rows; without them its policy answers
        self.rows_in_flight = 0
        self.used = 0.0  # when the last request was sent
        self.numbers: dict[tuple[str, str | None], tuple[int, int]] = {}  # model, version → number, fingerprint
        self.names: dict[int, tuple[str, str]] = {}  # a version's number → model, version; never removed
        self.kinds: dict[int, tuple[str, ...]] = {}  # a version's number → the kinds of its named tasks; as `names`
        self.models: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, tuple[asyncio.Future[Any], int]] = {}  # request id → its future, its rows
        self._ids = itertools.count(1)
        self._out: list[bytes] = []
        self._since = 0.0  # when the first of these frames was written
        self._chunk, self._begin, self._end = bytearray(_CHUNK), 0, 0

    # --- requests ---

    async def infer(self, request: Request) -> Answer:
        """Send a request to this engine and wait for its answer."""
        number, fingerprint = self.number(request)
        id = next(self._ids)
        self.used = now = time.monotonic()
        if request.wanted is None:
            self._send(frames.write_request(request, id, number, fingerprint, now))
            answer: frames.AnswerFrame = await self._wait(id, request.rows)
            vectors: tuple[Array, ...] = ()
        else:
            self._send(lookup_frames.write_lookup(request, id, number, fingerprint, now))
            answer, vectors = await self._wait(id, request.rows)
        model, version = self.names[answer.version]
        return Answer(
            answer.logits,
            model,
            version,
            answer.publication,
            answer.late_rows,
            answer.compiled,
            _answer_parameters(answer),
            vectors,
            self.kinds[answer.version],
        )

    def number(self, request: Request) -> tuple[int, int]:
        """The engine's number for the model or its version, and the signature's fingerprint."""
        found = self.numbers.get((request.model, request.version))
        if found is None:
            raise self.backend.no_model_error(request.model, request.version)
        return found

    async def command(self, **command: Any) -> Any:
        """Send a command, which may take long, and wait for its result."""
        if self._transport is None:
            raise RefusedError(503, "an engine is starting; send the request again", RETRY_SECONDS)
        id = next(self._ids)
        self._send(frames.write_json(frames.COMMAND, id, command))
        reply = await self._wait(id, 0)
        if "error" in reply:
            raise RefusedError(*reply["error"])
        return reply["result"]

    async def _wait(self, id: int, rows: int) -> Any:
        future = self.backend.loop.create_future()
        self._waiting[id] = (future, rows)
        self.rows_in_flight += rows
        try:
            return await future
        finally:
            self._waiting.pop(id, None)  # after a cancellation the answer is dropped
            self.rows_in_flight -= rows

    def _send(self, frame: bytes) -> None:
        now = time.monotonic()
        if not self._out:
            self._since = now
            self.backend.loop.call_soon(self._flush)
        self._out.append(frame)
        if now - self._since > _MAX_FLUSH_DELAY:
            self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.writelines(out)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    # --- callbacks of asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._chunk, self._begin, self._end = bytearray(_CHUNK), 0, 0

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self.ready, self._out = None, False, []
        for future, _ in list(self._waiting.values()):
            if not future.done():
                why = "the connection to the engine was lost; send the request again"
                future.set_exception(RefusedError(503, why, RETRY_SECONDS))
        self.backend.engine_lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._chunk)[self._end :]

    def buffer_updated(self, count: int) -> None:
        self._end += count
        try:
            found, self._begin, wanted = frames.scan(self._chunk, self._begin, self._end, _LONGEST_ANSWER)
            for frame in found:
                self._receive(*frame[:4])
        except Exception:
            log.exception("an engine sent a malformed frame")
            if self._transport is not None:
                self._transport.abort()
            return
        if len(self._chunk) - self._begin < wanted or len(self._chunk) - self._end < _CHUNK // 4:
            rest = memoryview(self._chunk)[self._begin : self._end]
            fresh = bytearray(max(_CHUNK, wanted + _CHUNK // 4))
            fresh[: len(rest)] = rest
            self._chunk, self._begin, self._end = fresh, 0, len(rest)

    def _receive(self, kind: int, id: int, offset: int, length: int) -> None:
        if id == 0:
            return self._update(frames.read_json(self._chunk, offset, length))
        found = self._waiting.get(id)
        if found is None or found[0].done():
            return
        if kind == frames.ANSWER:
            found[0].set_result(frames.read_answer(self._chunk, offset))
        elif kind == lookup_frames.VECTORS:
            found[0].set_result(lookup_frames.read_vectors(self._chunk, offset))
        elif kind == frames.REFUSAL:
            found[0].set_exception(frames.read_refusal(self._chunk, offset))
        else:
            found[0].set_result(frames.read_json(self._chunk, offset, length))

    def _update(self, content: dict[str, Any]) -> None:
        if "figures" in content:
            self.figures = content["figures"]
            return
        self.ready, models = content["ready"], content["models"]
        self.rows_up = content.get("rows_up", True)
        for model in models:
            self.names.update({v["number"]: (model["name"], v["name"]) for v in model["versions"]})
            self.kinds.update({v["number"]: signature_of(v).kinds for v in model["versions"]})
        if not self.ready:  # after a restart it may not have loaded all its models yet
            models = models + [model for model in self.models if all(model["name"] != m["name"] for m in models)]
        self.models, self.numbers = models, {}
        for model in models:
            for version in model["versions"]:
                mark = signature_of(version).fingerprint
                self.numbers[model["name"], version["name"]] = (version["number"], mark)
                if version["name"] == model["current"]:
                    self.numbers[model["name"], None] = (model["number"], mark)
        self.backend.models_changed()


def _answer_parameters(answer: frames.AnswerFrame) -> dict[str, str | int | float]:
    """An answer's extra parameters: the age of its data, and the newest publication in it if there are several."""
    parameters: dict[str, str | int | float] = {}
    if answer.watermark is not None:
        parameters["freshness_ms"] = max(0, int(time.time() * 1000) - answer.watermark)
    if answer.highest != answer.publication:
        parameters["publication_highest"] = answer.highest
    return parameters


def signature_of(version: Mapping[str, Any]) -> Signature:
    """The signature in an engine's description of a version."""
    return Signature.from_json(version)
