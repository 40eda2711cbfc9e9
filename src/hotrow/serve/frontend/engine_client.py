"""RemoteBackend: the front end's side of the engines' sockets.

One event loop, one connection to each engine (engine_connection.py). A request goes to the ready engine with the fewest rows
under way. Numbers of models are each engine's own, so a frame is made for the engine that was chosen.

An engine that dies takes its requests along: they are refused with 503 and Retry-After at once, the others serve on,
and the connection is tried again until the engine is back. Until it is ready again, what it said about its models is
believed: they are known, and not available (503). A model is unknown (404) when an engine that is ready does not have
it, and none that is away had it. What engines say about a model is kept as ModelInfo; the same object as long as
nothing changed. Models are loaded and unloaded when all engines are there, or not at all.

All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.errors import choices
from hotrow.serve.frontend.engine_connection import RETRY_SECONDS, EngineLink, signature_of
from hotrow.serve.frontend.engine_statistics import add_figures, add_statistics
from hotrow.serve.protocol.backend import READY, UNAVAILABLE, Figures, IndexEntry, ModelInfo
from hotrow.serve.protocol.request import Answer, RefusedError, Request, Signature


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
            link.close()

    # --- Backend ---

    def models(self) -> Mapping[str, ModelInfo]:
        """Those that an engine has in service, or had before it went away."""
        if not self._models and not any(link.ready for link in self.links):
            raise _no_engine()
        return self._models

    async def infer(self, request: Request) -> Answer:
        """From the engine with the fewest rows under way."""
        if len(self.links) == 1 and self.links[0].ready:
            return await self.links[0].infer(request)
        able = [link for link in self.links if link.ready and (request.model, request.version) in link.numbers]
        if not able:
            raise self.missing(request.model, request.version)
        return await min(able, key=_rows).infer(request)

    def missing(self, model: str, version: str | None) -> RefusedError:
        """Why no engine that is ready has a model, or this version of it."""
        away = [link for link in self.links if not link.ready]
        if len(away) == len(self.links) or any((model, version) in link.numbers for link in away):
            return RefusedError(503, "the model's engine is starting; ask again", RETRY_SECONDS)
        names = sorted({name for link in self.links for name, _ in link.numbers})
        which = repr(model) + ("" if version is None else f" version {version}")
        return RefusedError(404, f"no model {which} in service; {choices(model, names)}")

    async def index(self) -> list[IndexEntry]:
        """The repository, as the first engine that is there sees it."""
        entries = await self._first().command(op="index")
        return [IndexEntry(**entry) for entry in entries]

    async def load(self, name: str, version: str | None = None) -> None:
        """On every engine; returns when all of them serve it."""
        self._check_all_ready()
        for reply in await self._on(self.links, op="load", name=name, version=version):
            if isinstance(reply, BaseException):
                raise reply

    async def unload(self, name: str) -> None:
        """On every engine that has it; returns when the last answer has left."""
        self._check_all_ready()
        replies = await self._on(self.links, op="unload", name=name)
        unknown = [reply for reply in replies if isinstance(reply, RefusedError) and reply.status == 404]
        for reply in unknown if len(unknown) == len(replies) else (r for r in replies if r not in unknown):
            if isinstance(reply, BaseException):
                raise reply

    async def statistics(self, name: str = "", version: str = "") -> list[Mapping[str, Any]]:
        """Of all engines that are there, added up."""
        ready = [link for link in self.links if link.ready]
        every = await self._on(ready, op="statistics", name=name, version=version)
        there = [entries for entries in every if not isinstance(entries, BaseException)]
        if not there:
            raise every[0] if every else _no_engine()
        return add_statistics([entry for entries in there for entry in entries])

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
        """An engine came, went, or said something about its models: make ModelInfo anew where it differs."""
        said: dict[str, dict[str, Any]] = {}
        for link in sorted(self.links, key=lambda link: not link.ready):  # those that answer come first
            for model in link.described:
                one = {**model, "ready": link.ready, "number": 0}  # numbers are an engine's own
                one["versions"] = [{**version, "number": 0} for version in model["versions"]]
                said[model["name"]] = _joined(said.get(model["name"]), one)
        texts = {name: json.dumps(model, sort_keys=True) for name, model in said.items()}
        self._models = {
            name: self._models[name] if self._known.get(name) == text else _info(said[name])
            for name, text in texts.items()
        }
        self._known = texts

    def link_lost(self, link: EngineLink) -> None:
        """An engine went away."""
        if not self._closed:
            self.models_changed()
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
            raise _no_engine()
        return link

    def _check_all_ready(self) -> None:
        if not all(link.ready for link in self.links):
            raise RefusedError(503, "an engine is starting; ask again when all are there", RETRY_SECONDS)

    @staticmethod
    async def _on(links: Sequence[EngineLink], **command: Any) -> list[Any]:
        """Every engine's reply, or its error."""
        return await asyncio.gather(*[link.command(**command) for link in links], return_exceptions=True)


def _rows(link: EngineLink) -> int:
    return link.rows


def _no_engine() -> RefusedError:
    return RefusedError(503, "no engine is ready; ask again", RETRY_SECONDS)


def _joined(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """What two engines say about a model: the first that has it in service, and all versions."""
    if one is None:
        return other
    if one["current"] is None and other["current"] is not None:
        one, other = other, one
    names = {version["name"] for version in one["versions"]}
    return {**one, "versions": one["versions"] + [v for v in other["versions"] if v["name"] not in names]}


def _info(model: Mapping[str, Any]) -> ModelInfo:
    versions = {version["name"]: version for version in model["versions"]}
    if model["current"] is None:  # it is being loaded, or does not load
        why = "; ".join(f"version {version}: {reason}" for version, reason in model["refused"].items())
        return ModelInfo(model["name"], "", Signature((), frozenset(), 0), state=UNAVAILABLE, reason=why or "it loads")
    current = versions[model["current"]]

    def info(version: Mapping[str, Any], others: Mapping[str, ModelInfo]) -> ModelInfo:
        return ModelInfo(
            model["name"],
            version["name"],
            signature_of(version),
            tuple(versions),
            version["spec"],
            version["config"],
            READY if model["ready"] else UNAVAILABLE,
            "" if model["ready"] else "its engine is starting",
            others,
        )

    layout = (signature_of(current), current["spec"])
    others = {
        name: info(version, {})
        for name, version in versions.items()
        if version is not current and (signature_of(version), version["spec"]) != layout
    }
    return info(current, others)
