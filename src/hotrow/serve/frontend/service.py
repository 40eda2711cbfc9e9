"""Service: what HTTP and gRPC have in common. Which model, who may, how many at once, and what is counted.

A transport turns bytes into calls of this object and its results into bytes; every rule that must hold for both lives
here, once. All of it runs on the front end's event loop.

**Who may change the server.** Loading and unloading need the token wherever one is set. Without a token they are open
on loopback and closed elsewhere. A browser can send requests to loopback for any web page, so without a token a call is
refused when its Origin is not this server, or when its Host is not a loopback name (a page whose domain resolves to
127.0.0.1, known as DNS rebinding).

**Large bodies** (over `_LARGE` bytes) are parsed by `_LARGE_READERS` threads, so that one client's 50 MiB do not delay
every answer, and so that only a few large JSON documents are in memory as Python objects at once. Small bodies are
parsed on the loop, which is faster than handing them to a thread.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import hotrow
from hotrow.serve.frontend.load_shedding import Door
from hotrow.serve.protocol.backend import READY, Backend, Figures, IndexEntry, ModelInfo
from hotrow.serve.protocol.inference_json import OUTPUTS, ModelInputs, Wishes
from hotrow.serve.protocol.input_layout import DENSE, KEYS
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.metrics import Counts, added
from hotrow.serve.protocol.request import Answer, RefusedError, Request
from hotrow.serve.protocol.tensors import bad, shown

EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration", "statistics")
_LARGE, _LARGE_READERS = 1 << 20, 2
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_RETRY_SECONDS = 1.0

Result = TypeVar("Result")
Reader = Callable[[ModelInputs, str | None], tuple[Request, Wishes]]


class Caller(NamedTuple):
    """What a call says about who sends it: the HTTP headers of these names."""

    authorization: str | None = None
    origin: str | None = None
    host: str | None = None


class Service:
    """The rules of a front end over a backend."""

    def __init__(self, backend: Backend, limits: Limits, token: str | None = None, loopback: bool = True) -> None:
        self.backend, self.limits, self.counts = backend, limits, Counts()
        self.draining = False
        self.door = Door(limits.in_flight)
        self._token = None if token is None else token.encode()
        self._loopback = loopback
        self._inputs: dict[tuple[str, str], ModelInputs] = {}
        self._large_readers = ThreadPoolExecutor(_LARGE_READERS, "hotrow-large-body")

    def model(self, name: str, version: str | None) -> ModelInfo:
        """The model under this name and version: 404 if there is none, 503 if there is and it never was in service."""
        info = self.backend.models().get(name)
        if info is None:
            known = ", ".join(map(repr, sorted(self.backend.models())[:20])) or "none"
            raise bad(f"there is no model {shown(name)} in service; these are: {known}", 404)
        if not info.version:
            raise _unavailable(info)
        if version and version != info.version:
            if version not in info.versions and version not in info.others:
                raise bad(
                    f"model {name!r} has no version {shown(version)} in service; these are: "
                    f"{', '.join(info.versions or (info.version,))}",
                    404,
                )
            return info.others.get(version, info)
        return info

    def inputs(self, name: str, version: str | None) -> ModelInputs:
        """The way from tensors to this model's requests, kept while its ModelInfo is the same."""
        info = self.model(name, version)
        kept = self._inputs.get((info.name, info.version))
        if kept is None or kept.info is not info:
            if info.state != READY:
                self.counts.failed(info.name, info.version, 503)
                raise _unavailable(info)
            self._forget()
            kept = self._inputs[info.name, info.version] = ModelInputs(info, self.limits)
        return kept

    async def infer(
        self, name: str, version: str | None, size: int, read: Reader, waited: float = 0.0
    ) -> tuple[Answer, Wishes]:
        """Read a request with `read`, ask the backend, count it. `size` is what it weighs in bytes, `waited` how many
        seconds of its time may be gone."""
        began = time.perf_counter()
        inputs = self.inputs(name, version)
        info = inputs.info
        if self.draining:
            raise RefusedError(503, "the server is shutting down; ask another, or again in a moment", _RETRY_SECONDS)
        door = self.door
        if door.shut:
            self.counts.failed(info.name, info.version, 429)
            raise door.refusal()
        under_way, end, ordinary = door.entered(), door.left, False
        try:
            if size > _LARGE:
                loop = asyncio.get_running_loop()
                request, wishes = await loop.run_in_executor(self._large_readers, read, inputs, version or None)
            else:
                request, wishes = read(inputs, version or None)
            ordinary = door.ordinary(request)
            answer = await self.backend.infer(door.hastened(request, waited))
            end = door.answered
        except RefusedError as error:
            if error.status == 429 and ordinary:
                end = partial(door.refused, under_way)
            self.counts.failed(info.name, info.version, error.status)
            raise
        except Exception:
            self.counts.failed(info.name, info.version, 500)
            raise
        finally:
            end()
        self.counts.answered(answer.model, answer.version, request.rows, time.perf_counter() - began)
        return answer, wishes

    async def load(self, name: str, caller: Caller) -> None:
        """Load a model, if the caller may."""
        self._authorize(caller)
        await self.backend.load(_checked_name(name))

    async def unload(self, name: str, caller: Caller) -> None:
        """Unload a model, if the caller may."""
        self._authorize(caller)
        await self.backend.unload(_checked_name(name))

    async def index(self, ready: bool) -> list[IndexEntry]:
        """The repository's models and versions; with `ready` those in service alone."""
        entries = await self.backend.index()
        return [entry for entry in entries if not ready or entry.state == READY]

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Triton's model_stats, with every field."""
        if name:
            self.model(name, version)
        return [_statistics(entry) for entry in await self.backend.statistics(name, version)]

    async def ready(self) -> bool:
        """Whether the server takes requests."""
        return not self.draining and await self.backend.ready()

    def model_ready(self, name: str, version: str | None) -> bool:
        """Whether this model answers."""
        try:
            return self.model(name, version).state == READY
        except RefusedError:
            return False

    def figures(self) -> dict[tuple[str, ...], float]:
        """What this front end counted, without the engines' figures."""
        own: Figures = {
            ("hotrow_requests_in_flight",): self.door.inside,
            ("hotrow_turned_away_total",): self.door.turned_away,
            ("hotrow_draining",): float(self.draining),
        }
        return added([self.counts.figures(), own])

    def _forget(self) -> None:
        """Drop what was derived from versions that are gone."""
        live = {id(info) for known in self.backend.models().values() for info in (known, *known.others.values())}
        for key in [key for key, kept in self._inputs.items() if id(kept.info) not in live]:
            del self._inputs[key]

    def _authorize(self, caller: Caller) -> None:
        if self._token is None:
            if not self._loopback:
                raise bad(
                    "this server listens beyond loopback and has no token, so models cannot be loaded or unloaded; "
                    "start it with --token-file, or load models at its start",
                    403,
                )
            if caller.host is not None and not is_loopback_host(caller.host):
                raise bad(
                    f"Host is {shown(caller.host)}, which is not this machine's loopback; call localhost, or start the "
                    "server with --token-file",
                    403,
                )
            if caller.origin is not None and caller.origin.lower() != f"http://{caller.host}".lower():
                raise bad("a web page may not load or unload models here; start the server with --token-file", 403)
            return
        scheme, _, given = (caller.authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token):
            raise bad(
                "loading and unloading need the header 'Authorization: Bearer <token>' with the server's token", 401
            )


def is_loopback_host(host: str) -> bool:
    """Whether a Host header names loopback. No name is resolved: a name can resolve to anything.

    >>> [is_loopback_host(host) for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "evil.example:8000")]
    [True, True, True, False]
    """
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) and not host.endswith("]") else host
    name = name.strip("[]").rstrip(".").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _unavailable(info: ModelInfo) -> RefusedError:
    return RefusedError(503, f"model {info.name!r} is not in service: {info.reason}", _RETRY_SECONDS)


def server_metadata() -> dict[str, Any]:
    """The server, in the protocol's words."""
    return {"name": "hotrow", "version": hotrow.__version__, "extensions": list(EXTENSIONS)}


def model_metadata(info: ModelInfo) -> dict[str, Any]:
    """The model's tensors, in the protocol's words. -1 is any number of rows."""
    return {
        "name": info.name,
        "versions": list(info.versions or (info.version,)),
        "platform": "hotrow",
        "inputs": [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in _tensors(info)],
        "outputs": [{"name": name, "datatype": "FP32", "shape": _logits_shape(info)} for name in OUTPUTS],
    }


def model_config(info: ModelInfo) -> dict[str, Any]:
    """The model's configuration as Triton's clients read it; the export's own fields stand among the parameters."""
    return {
        "name": info.name,
        "platform": "hotrow",
        "backend": "hotrow",
        "max_batch_size": 0,
        "input": [
            {"name": name, "data_type": f"TYPE_{kind}", "dims": shape, "optional": name != DENSE}
            for name, kind, shape in _tensors(info)
        ],
        "output": [{"name": name, "data_type": "TYPE_FP32", "dims": _logits_shape(info)} for name in OUTPUTS],
        "parameters": {key: {"string_value": str(value)} for key, value in info.config.items()},
    }


def _tensors(info: ModelInfo) -> list[tuple[str, str, list[int]]]:
    signature = info.signature
    tensors = [(name, "INT64", [-1, -1] if name in signature.sequences else [-1]) for name in signature.features]
    if signature.features and KEYS not in signature.features:
        tensors.append((KEYS, "INT64", [-1, len(signature.features)]))
    if signature.dense:
        tensors.append((DENSE, "FP32", [-1, signature.dense]))
    return tensors


def _logits_shape(info: ModelInfo) -> list[int]:
    return [-1] if info.signature.tasks == 1 else [-1, info.signature.tasks]


_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


def _statistics(entry: Mapping[str, Any]) -> dict[str, Any]:
    stats = entry.get("inference_stats", {})
    return {
        "name": entry.get("name", ""),
        "version": entry.get("version", ""),
        "last_inference": entry.get("last_inference", 0),
        "inference_count": entry.get("inference_count", 0),
        "execution_count": entry.get("execution_count", 0),
        "inference_stats": {name: {"count": 0, "ns": 0, **stats.get(name, {})} for name in _DURATIONS},
        "batch_stats": list(entry.get("batch_stats", [])),
    }


def _checked_name(name: str) -> str:
    """A model's name that may become a folder's name."""
    if _MODEL_NAME.fullmatch(name) is None:
        raise bad(
            f"{shown(name)} is no model's name; use letters, digits, '_', '-' and '.', not starting with '.' or '-'"
        )
    return name
