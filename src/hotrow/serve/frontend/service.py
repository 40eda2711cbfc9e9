"""Service: the rules that HTTP and gRPC share: model lookup, authorization, load shedding, metrics.

A transport (http_protocol.py, grpc_server.py) decodes bytes into calls of this object and encodes the results. `infer`
is the front end's part of the path of a request. Everything runs on the front end's event loop.

**Large bodies** (over `LARGE_BYTES`) are parsed by `_LARGE_BODY_THREADS` threads, so that one client's 50 MiB do not
delay every answer, and so that only a few large JSON documents are in memory as Python objects at once. Small bodies
are parsed on the event loop, which is faster than another thread.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hotrow.serve.frontend import canary
from hotrow.serve.frontend.answer_bytes import AnswerBytes
from hotrow.serve.frontend.authorization import Authorization, Caller
from hotrow.serve.frontend.descriptions import model_statistics
from hotrow.serve.frontend.load_shedding import LoadShedder
from hotrow.serve.protocol.backend import READY, Backend, Figures, IndexEntry, ModelInfo
from hotrow.serve.protocol.inference_json import RequestOptions, RequestParser
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.metrics import Counts, sum_figures
from hotrow.serve.protocol.request import Answer, RefusedError, Request
from hotrow.serve.protocol.tensors import invalid, shown

LARGE_BYTES, _LARGE_BODY_THREADS = 1 << 20, 2
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}(@[a-z][a-z0-9_\-]{0,63})?")  # with an alias
_RETRY_SECONDS = 1.0

_T = TypeVar("_T")
ParsedRequest = tuple[Request, RequestOptions]
Parse = Callable[[RequestParser, str | None], ParsedRequest]  # of a version, from a request's bytes
RoutingKey = Callable[[RequestOptions], str]  # canary.routing_key of a request; called only if the model has a canary


class Service:
    """The rules of one front end over its backend."""

    def __init__(self, backend: Backend, limits: Limits, token: str | None = None, loopback: bool = True) -> None:
        self.backend, self.limits, self.counts = backend, limits, Counts()
        self.draining = False  # not ready, so that proxies send no more requests
        self.refusing = False  # requests are refused
        self.load_shedder = LoadShedder(limits.in_flight)
        self.answer_bytes = AnswerBytes(limits)
        self._authorization = Authorization(token, loopback)
        self._parsers: dict[tuple[str, str], RequestParser] = {}
        self._large_body_threads = ThreadPoolExecutor(_LARGE_BODY_THREADS, "hotrow-large-body")

    def resolve(self, name: str, version: str | None) -> tuple[str, str | None]:
        """Model and version of a name that may be `model@alias`. Raises 404 if the alias is unknown."""
        model, at, alias = name.partition("@")
        if not at:
            return name, version
        info = self.backend.models().get(model)
        found = None if info is None else info.aliases.get(alias)
        if info is not None and found is None:
            known = ", ".join(map(repr, sorted(info.aliases)[:20])) or "none"
            raise invalid(f"model {model!r} has no alias {shown(alias)}; these are: {known}", 404)
        if version and found is not None and version != found:
            raise invalid(f"{name!r} is version {found}, but the request names version {shown(version)}; name one")
        return model, found or version

    def model(self, name: str, version: str | None) -> ModelInfo:
        """The model of this name, which may be `model@alias`, and version. Raises 404 if it is unknown, 503 if no
        version of it has ever loaded."""
        name, version = self.resolve(name, version)
        info = self.backend.models().get(name)
        if info is None:
            known = ", ".join(map(repr, sorted(self.backend.models())[:20])) or "none"
            raise invalid(f"there is no model {shown(name)} in service; these are: {known}", 404)
        if not info.version:
            raise _unavailable(info)
        if version and version != info.version:
            if version not in info.versions and version not in info.others:
                raise invalid(
                    f"model {name!r} has no version {shown(version)} in service; these are: "
                    f"{', '.join(info.versions or (info.version,))}",
                    404,
                )
            return info.others.get(version, info)
        return info

    def parser(self, name: str, version: str | None) -> RequestParser:
        """The parser of this model version's requests, cached while its ModelInfo is the same object."""
        info = self.model(name, version)
        cached = self._parsers.get((info.name, info.version))
        if cached is None or cached.info is not info:
            if info.state != READY:
                self.counts.failed(info.name, info.version, 503)
                raise _unavailable(info)
            self._drop_stale_parsers()
            cached = self._parsers[info.name, info.version] = RequestParser(info, self.limits)
        return cached

    async def infer(
        self, name: str, version: str | None, size: int, parse: Parse, key: RoutingKey, waited: float = 0.0
    ) -> tuple[Answer, RequestOptions]:
        """Shed, parse, deduct the wait, choose the canary or not, send to an engine, count: the front end's part of the
        path of a request.

        `size` is the body's length in bytes, `waited` the seconds that the request waited in its socket. If the options
        have `wanted`, the caller gives `wanted.bytes` back to `answer_bytes` when the answer has been sent.
        """
        began = time.perf_counter()
        if "@" in name:
            name, version = self.resolve(name, version)
        parser = self.parser(name, version)
        info = parser.info
        if self.refusing:
            raise RefusedError(503, "the server is shutting down; use another, or retry in a moment", _RETRY_SECONDS)
        shedder = self.load_shedder
        if shedder.at_limit:
            self.counts.failed(info.name, info.version, 429)
            raise shedder.shed()
        in_flight, end, usual, taken = shedder.begin(), shedder.end, False, 0
        try:
            request, options = await self._parse(parse, parser, version or None, size)
            usual = shedder.has_usual_deadline(request)
            request = shedder.deduct_waiting(request, waited)
            trial = None
            if info.canary is not None and not version:
                trial = await self._trial(info, request, parse, size, key(options))
            if request.wanted is not None:
                taken = self._take_answer_bytes(request, trial)
            if trial is None:
                answer = await self.backend.infer(request)
            else:
                answer = await canary.answer(self.backend, trial, request, self.counts)
            if options.wanted is not None:
                options = replace(options, wanted=options.wanted._replace(bytes=taken))
            end, taken = shedder.end_answered, 0
        except RefusedError as error:
            if error.status == 429 and usual:
                end = partial(shedder.end_refused, in_flight)
            self.counts.failed(info.name, info.version, error.status)
            raise
        except Exception:
            self.counts.failed(info.name, info.version, 500)
            raise
        finally:
            end()
            self.answer_bytes.give(taken)
        self.counts.answered(answer.model, answer.version, request.rows, time.perf_counter() - began)
        return answer, options

    async def run_large(self, work: Callable[[], _T]) -> _T:
        """Run something that takes long on a thread for large bodies."""
        return await asyncio.get_running_loop().run_in_executor(self._large_body_threads, work)

    async def _parse(self, parse: Parse, parser: RequestParser, version: str | None, size: int) -> ParsedRequest:
        return parse(parser, version) if size <= LARGE_BYTES else await self.run_large(partial(parse, parser, version))

    async def _trial(self, info: ModelInfo, request: Request, parse: Parse, size: int, key: str) -> Request | None:
        """The request as the canary takes it, if it goes there."""
        assert info.canary is not None
        version, share = info.canary
        if not canary.is_chosen(info.name, version, share, key):
            return None
        if not canary.is_available(info, self.counts):
            return None
        if version not in info.others:  # it takes the same inputs
            return replace(request, version=version)
        try:
            trial, _ = await self._parse(parse, self.parser(info.name, version), version, size)
        except RefusedError:
            canary.count_fallback(self.counts, info.name, version, canary.INPUTS)
            return None
        return replace(trial, deadline=request.deadline)

    def _take_answer_bytes(self, *possible: Request | None) -> int:
        """Take the bytes of the vectors in the largest of the possible answers; returns how many."""
        wanted = [request.wanted for request in possible if request is not None and request.wanted is not None]
        size = max([one.bytes for one in wanted], default=0)
        self.answer_bytes.take(size)
        return size

    async def load(self, name: str, caller: Caller) -> None:
        """Load a model, if the caller is allowed to."""
        self._authorization.check(caller)
        await self.backend.load(_checked_name(name))

    async def unload(self, name: str, caller: Caller) -> None:
        """Unload a model, if the caller is allowed to."""
        self._authorization.check(caller)
        await self.backend.unload(_checked_name(name))

    async def index(self, ready: bool) -> list[IndexEntry]:
        """The repository's models and versions; with `ready` only those in service."""
        entries = await self.backend.index()
        return [entry for entry in entries if not ready or entry.state == READY]

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Triton's model_stats; fields that an engine leaves out are 0."""
        if name:
            name, resolved = self.resolve(name, version or None)
            version = resolved or ""
            self.model(name, version)
        return [model_statistics(entry) for entry in await self.backend.statistics(name, version)]

    async def ready(self) -> bool:
        """Whether the server accepts requests."""
        return not self.draining and await self.backend.ready()

    def model_ready(self, name: str, version: str | None) -> bool:
        """Whether this model is ready."""
        try:
            return self.model(name, version).state == READY
        except RefusedError:
            return False

    def figures(self) -> dict[tuple[str, ...], float]:
        """The metrics of this front end, without the engines'."""
        own: Figures = {
            ("hotrow_requests_in_flight",): self.load_shedder.in_flight,
            ("hotrow_turned_away_total",): self.load_shedder.shed_total,
            ("hotrow_lookup_bytes_in_flight",): self.answer_bytes.held,
            ("hotrow_draining",): float(self.draining),
        }
        return sum_figures([self.counts.figures(), own])

    def _drop_stale_parsers(self) -> None:
        """Drop the parsers of versions that are no longer in service."""
        live = {id(info) for known in self.backend.models().values() for info in (known, *known.others.values())}
        for key in [key for key, cached in self._parsers.items() if id(cached.info) not in live]:
            del self._parsers[key]


def _unavailable(info: ModelInfo) -> RefusedError:
    return RefusedError(503, f"model {info.name!r} is not in service: {info.reason}", _RETRY_SECONDS)


def _checked_name(name: str) -> str:
    """A model's name that is safe as the name of a folder, perhaps with an alias."""
    if _MODEL_NAME.fullmatch(name) is None:
        raise invalid(
            f"{shown(name)} is no model's name; use letters, digits, '_', '-' and '.', not starting with '.' or '-'; "
            "an alias follows '@'"
        )
    return name
