"""EngineClient: the Backend of a server's front end, with one connection to each engine process.

A request goes to the ready engine with the fewest rows in flight; among equals, to the one whose last request is the
oldest. So a server with little traffic uses all its devices in turn, and the caches of all of them stay warm. An engine
numbers its models itself, so a frame is built after the engine is chosen.

When an engine dies, its requests are refused at once with 503 and Retry-After, the other engines continue, and the
front end tries to reconnect until the engine has restarted. Until it is ready again, its last description of its models
is kept: they are known and unavailable (503). A model is unknown (404) if no ready engine has it and no disconnected
engine had it. The engines' descriptions are kept as ModelInfo, the same object as long as nothing changes. Models are
loaded and unloaded only while all engines are ready, because otherwise engines would serve different models.

All methods are called on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.errors import choices
from hotrow.serve.frontend.engine_connection import RETRY_SECONDS, EngineConnection, signature_of
from hotrow.serve.frontend.engine_statistics import add_figures, add_statistics
from hotrow.serve.protocol.backend import READY, UNAVAILABLE, Figures, IndexEntry, ModelInfo
from hotrow.serve.protocol.request import Answer, RefusedError, Request, Signature


class EngineClient:
    """A Backend over engine processes."""

    def __init__(self, sockets: Sequence[str]) -> None:
        self.connections = [EngineConnection(self, path) for path in sockets]
        self.loop: asyncio.AbstractEventLoop
        self._models: dict[str, ModelInfo] = {}
        self._model_sources: dict[str, str] = {}  # model → the JSON from which its ModelInfo was built
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Connect to the engines in the background, and retry until each one is connected."""
        self.loop = asyncio.get_running_loop()
        for connection in self.connections:
            self._connect_soon(connection)

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for connection in self.connections:
            connection.close()

    # --- Backend ---

    def models(self) -> Mapping[str, ModelInfo]:
        """The models that an engine has in service, or had before its connection was lost."""
        if not self._models and not any(connection.ready for connection in self.connections):
            raise _no_engine()
        return self._models

    async def infer(self, request: Request) -> Answer:
        """Send the request to the engine with the fewest rows in flight."""
        if len(self.connections) == 1 and self.connections[0].ready:
            return await self.connections[0].infer(request)
        able = [
            connection
            for connection in self.connections
            if connection.ready and (request.model, request.version) in connection.numbers
        ]
        if not able:
            raise self.no_model_error(request.model, request.version)
        return await min(able, key=_order).infer(request)

    def no_model_error(self, model: str, version: str | None) -> RefusedError:
        """The error when no ready engine has a model, or this version of it."""
        away = [connection for connection in self.connections if not connection.ready]
        if len(away) == len(self.connections) or any((model, version) in connection.numbers for connection in away):
            return RefusedError(503, "the model's engine is starting; send the request again", RETRY_SECONDS)
        names = sorted({name for connection in self.connections for name, _ in connection.numbers})
        which = repr(model) + ("" if version is None else f" version {version}")
        return RefusedError(404, f"no model {which} in service; {choices(model, names)}")

    async def index(self) -> list[IndexEntry]:
        """The repository, as listed by the first ready engine."""
        entries = await self._first_ready().command(op="index")
        return [IndexEntry(**entry) for entry in entries]

    async def load(self, name: str, version: str | None = None) -> None:
        """Load on every engine; returns when all of them serve the model."""
        self._check_all_ready()
        for reply in await self._command_each(self.connections, op="load", name=name, version=version):
            if isinstance(reply, BaseException):
                raise reply

    async def unload(self, name: str) -> None:
        """Unload on every engine that has it; returns when the last answer has been sent."""
        self._check_all_ready()
        replies = await self._command_each(self.connections, op="unload", name=name)
        unknown = [reply for reply in replies if isinstance(reply, RefusedError) and reply.status == 404]
        for reply in unknown if len(unknown) == len(replies) else (r for r in replies if r not in unknown):
            if isinstance(reply, BaseException):
                raise reply

    async def statistics(self, name: str = "", version: str = "") -> list[Mapping[str, Any]]:
        """The statistics of all ready engines, added up."""
        ready = [connection for connection in self.connections if connection.ready]
        every = await self._command_each(ready, op="statistics", name=name, version=version)
        there = [entries for entries in every if not isinstance(entries, BaseException)]
        if not there:
            raise every[0] if every else _no_engine()
        return add_statistics([entry for entries in there for entry in entries])

    async def ready(self) -> bool:
        """Whether an engine is ready and can read all rows."""
        return any(connection.ready and connection.rows_up for connection in self.connections)

    async def live(self) -> bool:
        """Always true: a front end that answers is alive."""
        return True

    def figures(self) -> Figures:
        """The engines' figures of at most a second ago, added up."""
        return add_figures([connection.figures for connection in self.connections if connection.figures])

    # --- connections ---

    def models_changed(self) -> None:
        """Called when an engine connected, was lost, or its models changed: rebuild the ModelInfo of changed models."""
        descriptions: dict[str, dict[str, Any]] = {}
        for connection in sorted(self.connections, key=lambda connection: not connection.ready):  # ready engines first
            for model in connection.models:
                one = {**model, "ready": connection.ready, "number": 0}  # numbers differ between engines
                one["versions"] = [{**version, "number": 0} for version in model["versions"]]
                descriptions[model["name"]] = _merged(descriptions.get(model["name"]), one)
        descriptions_json = {name: json.dumps(model, sort_keys=True) for name, model in descriptions.items()}
        self._models = {
            name: self._models[name] if self._model_sources.get(name) == text else _model_info(descriptions[name])
            for name, text in descriptions_json.items()
        }
        self._model_sources = descriptions_json

    def engine_lost(self, connection: EngineConnection) -> None:
        """The connection to an engine was lost."""
        if not self._closed:
            self.models_changed()
            self._connect_soon(connection)

    def _connect_soon(self, connection: EngineConnection) -> None:
        task = self.loop.create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: EngineConnection) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                await self.loop.create_unix_connection(lambda: connection, connection.path)
                return
            await asyncio.sleep(0.05)

    def _first_ready(self) -> EngineConnection:
        connection = next((connection for connection in self.connections if connection.ready), None)
        if connection is None:
            raise _no_engine()
        return connection

    def _check_all_ready(self) -> None:
        if not all(connection.ready for connection in self.connections):
            raise RefusedError(503, "an engine is starting; retry when all engines are ready", RETRY_SECONDS)

    @staticmethod
    async def _command_each(connections: Sequence[EngineConnection], **command: Any) -> list[Any]:
        """Send a command to each of these engines; returns their replies or errors."""
        return await asyncio.gather(
            *[connection.command(**command) for connection in connections], return_exceptions=True
        )


def _order(connection: EngineConnection) -> tuple[bool, int, float]:
    """Engines that can read all rows first, then those with the fewest rows in flight, then the least recently used."""
    return not connection.rows_up, connection.rows_in_flight, connection.used


def _no_engine() -> RefusedError:
    return RefusedError(503, "no engine is ready; send the request again", RETRY_SECONDS)


def _merged(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Merge two engines' descriptions of a model: the first that has it in service, with the versions of both."""
    if one is None:
        return other
    if one["current"] is None and other["current"] is not None:
        one, other = other, one
    names = {version["name"] for version in one["versions"]}
    return {**one, "versions": one["versions"] + [v for v in other["versions"] if v["name"] not in names]}


def _model_info(model: Mapping[str, Any]) -> ModelInfo:
    versions = {version["name"]: version for version in model["versions"]}
    if model["current"] is None:  # it is loading, or failed to load
        why = "; ".join(f"version {version}: {reason}" for version, reason in model["refused"].items())
        return ModelInfo(
            model["name"], "", Signature((), frozenset(), 0), state=UNAVAILABLE, reason=why or "it is loading"
        )
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
            tuple(version["widths"]),
            model["aliases"],
            None if model["canary"] is None else (model["canary"][0], model["canary"][1]),
        )

    layout = (signature_of(current), current["spec"], current["widths"])
    others = {
        name: info(version, {})
        for name, version in versions.items()
        if version is not current and (signature_of(version), version["spec"], version["widths"]) != layout
    }
    return info(current, others)
