"""RemoteBackend: the front end's side of the engines' sockets.

One event loop, one connection to each engine. Requests written in one turn of the loop leave in one send; answers that
came in one read are given out in one turn. A request goes to the ready engine with the fewest rows under way. Numbers
of models are each engine's own, so a frame is made for the engine that was chosen.

An engine that dies takes its requests along: they are refused with 503 and Retry-After at once, the others serve on,
and the connection is tried again until the engine is back. What an engine says about its models is kept as ModelInfo;
the same object as long as nothing changed.

All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.errors import choices
from hotrow.serve import frames
from hotrow.serve.backend import READY, UNAVAILABLE, Figures, IndexEntry, ModelInfo
from hotrow.serve.request import Answer, RefusedError, Request, Signature

log = logging.getLogger(__name__)

_CHUNK = 256 << 10
_LONGEST_ANSWER = 1 << 30
_LONG = 0.002  # seconds that a frame may wait for the end of a turn: its time runs out meanwhile


class EngineLink(asyncio.BufferedProtocol):
    """One engine: what it said about itself, and the requests that it has."""

    def __init__(self, backend: RemoteBackend, path: str) -> None:
        self.backend, self.path = backend, path
        self.ready = False
        self.rows = 0  # under way
        self.numbers: dict[tuple[str, str | None], tuple[int, int]] = {}  # model, version → number, fingerprint
        self.names: dict[int, tuple[str, str]] = {}  # a version's number → model, version; never forgotten
        self.described: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, tuple[asyncio.Future[Any], int]] = {}  # request → who waits, its rows
        self._ids = itertools.count(1)
        self._out: list[bytes] = []
        self._since = 0.0  # when the first of them was written
        self._chunk, self._begin, self._end = bytearray(_CHUNK), 0, 0

    # --- requests ---

    async def infer(self, request: Request) -> Answer:
        """Ask this engine."""
        number, fingerprint = self.number(request)
        id = next(self._ids)
        self._send(frames.write_request(request, id, number, fingerprint, time.monotonic()))
        answer: frames.AnswerFrame = await self._wait(id, request.rows)
        model, version = self.names[answer.version]
        return Answer(
            answer.logits, model, version, answer.publication, answer.late_rows, answer.compiled, _says(answer)
        )

    def number(self, request: Request) -> tuple[int, int]:
        """The engine's number for the model or its version, and the signature's fingerprint."""
        found = self.numbers.get((request.model, request.version))
        if found is None:
            version = "" if request.version is None else f" version {request.version}"
            names = sorted({name for name, _ in self.numbers})
            raise RefusedError(404, f"no model {request.model!r}{version} in service; {choices(request.model, names)}")
        return found

    async def command(self, **command: Any) -> Any:
        """Ask for something that may take its time."""
        if self._transport is None:
            raise RefusedError(503, "an engine is starting; ask again", 1.0)
        id = next(self._ids)
        self._send(frames.write_json(frames.COMMAND, id, command))
        reply = await self._wait(id, 0)
        if "error" in reply:
            raise RefusedError(*reply["error"])
        return reply["result"]

    async def _wait(self, id: int, rows: int) -> Any:
        future = self.backend.loop.create_future()
        self._waiting[id] = (future, rows)
        self.rows += rows
        try:
            return await future
        finally:
            self._waiting.pop(id, None)  # whoever is cancelled forgets the answer
            self.rows -= rows

    def _send(self, frame: bytes) -> None:
        now = time.monotonic()
        if not self._out:
            self._since = now
            self.backend.loop.call_soon(self._flush)
        self._out.append(frame)
        if now - self._since > _LONG:
            self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.writelines(out)

    # --- asyncio's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._chunk, self._begin, self._end = bytearray(_CHUNK), 0, 0

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self.ready, self._out = None, False, []
        self.numbers, self.described = {}, []
        for future, _ in list(self._waiting.values()):
            if not future.done():
                future.set_exception(RefusedError(503, "the engine went away; ask again", 1.0))
        self.backend.link_lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._chunk)[self._end :]

    def buffer_updated(self, count: int) -> None:
        self._end += count
        try:
            found, self._begin, wanted = frames.scan(self._chunk, self._begin, self._end, _LONGEST_ANSWER)
            for frame in found:
                self._receive(*frame[:4])
        except Exception:
            log.exception("an engine sent what is no answer")
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
            return self._learn(frames.read_json(self._chunk, offset, length))
        found = self._waiting.get(id)
        if found is None or found[0].done():
            return
        if kind == frames.ANSWER:
            found[0].set_result(frames.read_answer(self._chunk, offset))
        elif kind == frames.REFUSAL:
            found[0].set_exception(frames.read_refusal(self._chunk, offset))
        else:
            found[0].set_result(frames.read_json(self._chunk, offset, length))

    def _learn(self, content: dict[str, Any]) -> None:
        if "figures" in content:
            self.figures = content["figures"]
            return
        self.ready, self.described = content["ready"], content["models"]
        self.numbers = {}
        for model in self.described:
            for version in model["versions"]:
                self.names[version["number"]] = (model["name"], version["name"])
                mark = _signature(version).fingerprint
                self.numbers[model["name"], version["name"]] = (version["number"], mark)
                if version["name"] == model["current"]:
                    self.numbers[model["name"], None] = (model["number"], mark)
        self.backend.models_changed()


class RemoteBackend:
    """Engines behind sockets, as a front end's Backend."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self.links = [EngineLink(self, path) for path in sockets]
        self.loop: asyncio.AbstractEventLoop
        self._models: dict[str, ModelInfo] = {}
        self._known: dict[str, str] = {}  # model → what its ModelInfo was made of
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Connect; engines that are not there yet are waited for in the background."""
        self.loop = asyncio.get_running_loop()
        for link in self.links:
            self._connect_soon(link)

    async def close(self) -> None:
        """Let go of the engines."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for link in self.links:
            if link._transport is not None:
                link._transport.close()

    # --- Backend ---

    def models(self) -> Mapping[str, ModelInfo]:
        """Those that an engine has in service."""
        return self._models

    async def infer(self, request: Request) -> Answer:
        """From the engine with the fewest rows under way."""
        if len(self.links) == 1 and self.links[0].ready:
            return await self.links[0].infer(request)
        ready = [link for link in self.links if link.ready and (request.model, request.version) in link.numbers]
        ready = ready or [link for link in self.links if link.ready]
        if not ready:
            raise RefusedError(503, "no engine is ready; ask again", 1.0)
        return await min(ready, key=_rows).infer(request)

    async def index(self) -> list[IndexEntry]:
        """The repository, as the first engine that is there sees it."""
        entries = await self._first().command(op="index")
        return [IndexEntry(**entry) for entry in entries]

    async def load(self, name: str, version: str | None = None) -> None:
        """On every engine; returns when all of them serve it."""
        await self._everywhere(op="load", name=name, version=version)

    async def unload(self, name: str) -> None:
        """On every engine; returns when the last answer has left."""
        await self._everywhere(op="unload", name=name)

    async def statistics(self, name: str = "", version: str = "") -> list[Mapping[str, Any]]:
        """Of all engines, added up."""
        every = await self._everywhere(op="statistics", name=name, version=version)
        return add_statistics([entry for entries in every for entry in entries])

    async def ready(self) -> bool:
        """Whether an engine would answer."""
        return any(link.ready for link in self.links)

    async def live(self) -> bool:
        """The front end answers, so it lives."""
        return True

    def figures(self) -> Figures:
        """What the engines counted, as of a second ago, added up."""
        return add_figures([link.figures for link in self.links if link.figures])

    # --- links ---

    def models_changed(self) -> None:
        """An engine said something about its models: make ModelInfo anew where it differs."""
        said: dict[str, dict[str, Any]] = {}
        for link in self.links:
            for model in link.described:
                if model["current"] is not None or model["name"] not in said:
                    said.setdefault(model["name"], model)
        texts = {name: json.dumps({**model, "number": 0}, sort_keys=True) for name, model in said.items()}
        self._models = {
            name: self._models[name] if self._known.get(name) == text and name in self._models else _info(said[name])
            for name, text in texts.items()
            if said[name]["current"] is not None
        }
        self._known = texts

    def link_lost(self, link: EngineLink) -> None:
        """An engine went away."""
        if not self._closed:
            self._connect_soon(link)

    def _connect_soon(self, link: EngineLink) -> None:
        task = self.loop.create_task(self._connect(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, link: EngineLink) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                await self.loop.create_unix_connection(lambda: link, link.path)
                return
            await asyncio.sleep(0.05)

    def _first(self) -> EngineLink:
        link = next((link for link in self.links if link.ready), None)
        if link is None:
            raise RefusedError(503, "no engine is ready; ask again", 1.0)
        return link

    async def _everywhere(self, **command: Any) -> list[Any]:
        replies = await asyncio.gather(*[link.command(**command) for link in self.links], return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies


def add_statistics(entries: Sequence[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Model statistics of several engines, one entry a version."""
    found: dict[tuple[str, str], Any] = {}
    for entry in entries:
        key = (entry["name"], entry["version"])
        found[key] = entry if key not in found else _add(found[key], entry)
    return list(found.values())


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, dict):
        return {
            key: max(a[key], b[key]) if key == "last_inference" else _add(a[key], b[key]) if key in b else a[key]
            for key in a
        }
    if isinstance(a, list):
        sizes = {entry["batch_size"]: entry for entry in a}
        for entry in b:
            size = entry["batch_size"]
            old = sizes.get(size)
            merged = entry if old is None else {**_add(old, entry), "batch_size": size}
            sizes[size] = merged
        return [sizes[size] for size in sorted(sizes)]
    return a + b if isinstance(a, (int, float)) else a


_COUNTERS = {  # a version's count → the metric's name and its unit
    "rows": (("nv_inference_count", 1), ("hotrow_rows_total", 1)),
    "executions": (("nv_inference_exec_count", 1),),
    "queue_seconds": (("nv_inference_queue_duration_us", 1e6),),
    "join_seconds": (("nv_inference_compute_input_duration_us", 1e6),),
    "run_seconds": (("nv_inference_compute_infer_duration_us", 1e6),),
    "answer_seconds": (("nv_inference_compute_output_duration_us", 1e6),),
}


def add_figures(engines: Sequence[dict[str, Any]]) -> Figures:
    """(metric, labels) → value, over all engines, by the names of metrics.TABLE."""
    totals: dict[tuple[str, ...], float] = {}

    def put(value: float, *key: str) -> None:
        totals[key] = totals.get(key, 0.0) + value

    for figures in engines:
        for model in figures["models"]:
            labels = (model["model"], model["version"])
            put(model["pending"], "nv_inference_pending_request_count", *labels)
            for why, count in model["shed"].items():
                put(count, "hotrow_shed_total", *labels, why)
        for version in figures["versions"]:
            labels = (version["model"], version["version"])
            for name, metrics in _COUNTERS.items():
                for metric, unit in metrics:
                    put(version[name] * unit, metric, *labels)
            put(version["executions"] - version["compiled"], "hotrow_fallback_total", *labels)
            for policy, count in version["late_by_policy"].items():
                put(count, "hotrow_late_rows_total", *labels, policy)
            tower = version.get("tower", {})
            for bucket, hits in tower.get("buckets", {}).items():
                put(hits, "hotrow_bucket_hits_total", *labels, bucket)
            if tower:
                put(tower["padded_rows"], "hotrow_padding_rows_total", *labels)
                put(tower["compile_queue"], "hotrow_compile_queue")
                put(tower["compile_seconds"], "hotrow_compile_seconds_total", *labels)
                put(tower["compiled_pieces"], "hotrow_compiled_pieces", *labels)
            for op, buckets in tower.get("eager_ops", {}).items():
                put(buckets, "hotrow_eager_ops", *labels, op)
            for name, metric in _REMOTE.items() if tower.get("remote") else ():
                put(tower["remote"][name], metric, *labels)
            put_freshness(totals, labels, version)
    return totals


def _says(answer: frames.AnswerFrame) -> dict[str, str | int | float]:
    """An answer's further parameters: how old it is, and the newest publication in it where there are several."""
    says: dict[str, str | int | float] = {}
    if answer.watermark is not None:
        says["freshness_ms"] = max(0, int(time.time() * 1000) - answer.watermark)
    if answer.highest != answer.publication:
        says["publication_highest"] = answer.highest
    return says


_REMOTE = {  # a remote store's figure → the metric's name
    "hits": "hotrow_remote_hits_total",
    "misses": "hotrow_remote_misses_total",
    "absent": "hotrow_remote_absent_total",
    "late": "hotrow_remote_late_total",
    "bytes": "hotrow_remote_bytes_total",
    "rows": "hotrow_remote_cached_rows",
    "up": "hotrow_remote_up",
}

_BUS = {  # a follower's count → the metric's name
    "publications": "hotrow_bus_publications_total",
    "rows": "hotrow_bus_rows_total",
    "switch_seconds": "hotrow_bus_switch_seconds_total",
    "corrupt": "hotrow_bus_bad_messages_total",
    "bus_errors": "hotrow_bus_errors_total",
    "reloads": "hotrow_bus_reloads_total",
}


def put_freshness(totals: dict[tuple[str, ...], float], labels: tuple[str, str], version: Mapping[str, Any]) -> None:
    """Of several engines the oldest counts: the lowest publication, the greatest age."""
    number = ("hotrow_publication", *labels)
    totals[number] = min(version["publication"], totals.get(number, version["publication"]))
    says = version.get("freshness") or {}

    def worst(value: float, *key: str) -> None:
        totals[key] = max(value, totals.get(key, 0.0))

    if says.get("age") is not None:
        worst(says["age"], "hotrow_freshness_seconds", *labels)
    for quantile, seconds in says.get("ages", {}).items():
        worst(seconds, "hotrow_freshness_quantile_seconds", *labels, quantile)
    follower = says.get("follower")
    if follower is not None:
        key = ("hotrow_stale", *labels)
        totals[key] = totals.get(key, 0.0) + says["stale"]
        for name, metric in _BUS.items():
            totals[(metric, *labels)] = totals.get((metric, *labels), 0.0) + follower[name]


def _rows(link: EngineLink) -> int:
    return link.rows


def _signature(version: Mapping[str, Any]) -> Signature:
    return Signature(
        tuple(version["features"]), frozenset(version["sequences"]), int(version["dense"]), int(version["tasks"])
    )


def _info(model: Mapping[str, Any]) -> ModelInfo:
    versions = {version["name"]: version for version in model["versions"]}
    current = versions[model["current"]]

    def info(version: Mapping[str, Any], others: Mapping[str, ModelInfo]) -> ModelInfo:
        return ModelInfo(
            model["name"],
            version["name"],
            _signature(version),
            tuple(versions),
            version["spec"],
            version["config"],
            READY if model["current"] else UNAVAILABLE,
            "",
            others,
        )

    others = {
        name: info(version, {})
        for name, version in versions.items()
        if version is not current and (_signature(version) != _signature(current) or version["spec"] != current["spec"])
    }
    return info(current, others)
