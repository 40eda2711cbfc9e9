"""HttpProtocol: the Open Inference Protocol over HTTP: paths to calls of the Service, results to replies.

There is no routing table: a path is split once, and `infer`, the most frequent operation, is matched first. A model's
name is only looked up among the models in service, or checked before the model is loaded, so a path cannot lead out of
the repository.

Bodies may be compressed with gzip or deflate (zlib). Decompression stops at the limit `body`. Answers of
`_MIN_COMPRESSED_BYTES` or more are compressed if the client accepts it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

from hotrow.serve.frontend.authorization import Caller
from hotrow.serve.frontend.canary import HEADER, routing_key
from hotrow.serve.frontend.descriptions import model_config, model_metadata, server_metadata
from hotrow.serve.frontend.http_message import Call, Reply, too_large
from hotrow.serve.frontend.service import LARGE_BYTES, Service
from hotrow.serve.protocol.inference_json import RequestOptions, RequestParser, parse_json, write_answer
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.metrics import render, sum_figures
from hotrow.serve.protocol.request import Answer, Request, Wanted
from hotrow.serve.protocol.tensors import invalid, shown

_MIN_COMPRESSED_BYTES = 1024
_BYTES = b"application/octet-stream"
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_ENCODINGS = ("gzip", "deflate")


class HttpProtocol:
    """The handler of the HTTP port."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, call: Call) -> Reply:
        """The reply to a call, or RefusedError."""
        parts = _split_path(call.path)
        if len(parts) >= 4 and parts[1] == "models" and parts[-1] == "infer":
            return await self._infer(call, parts)
        return await self._dispatch(call, parts)

    async def _infer(self, call: Call, parts: list[str]) -> Reply:
        _require_method(call, "POST")
        name, version, _ = _split_model_path(parts)
        body = decompressed(call.body, call.headers.get("content-encoding"), self.service.limits)
        header = _header_length(call.headers.get("inference-header-content-length"))
        self.service.counts.add("hotrow_request_bytes_total", "http", by=len(call.body))

        def parse(parser: RequestParser, version: str | None) -> tuple[Request, RequestOptions]:
            return parser.parse(body, header, version)

        def key(options: RequestOptions) -> str:
            return routing_key(call.headers.get(HEADER), options, lambda: body)

        answer, options = await self.service.infer(name, version, len(body), parse, key, call.waited)
        if options.wanted is not None:
            return await self._lookup_reply(answer, options, options.wanted, call)
        text, length = write_answer(answer, options)
        return compressed_reply(text, length, call.headers.get("accept-encoding"))

    async def _lookup_reply(self, answer: Answer, options: RequestOptions, wanted: Wanted, call: Call) -> Reply:
        """The reply with vectors. A large one is written on another thread."""

        def write() -> Reply:
            text, length = write_answer(answer, options)
            return compressed_reply(text, length, call.headers.get("accept-encoding"))

        service = self.service
        try:
            reply = await service.run_large(write) if wanted.bytes > LARGE_BYTES else write()
        except BaseException:
            service.answer_bytes.give(wanted.bytes)
            raise
        return reply._replace(sent=lambda: service.answer_bytes.give(wanted.bytes))

    async def _dispatch(self, call: Call, parts: list[str]) -> Reply:
        service = self.service
        if not parts or parts[0] != "v2":
            raise invalid(f"there is nothing at {shown(call.path)}; the protocol's paths begin with /v2", 404)
        if len(parts) > 1 and parts[1] == "repository":
            return await self._repository(call, parts)
        _require_method(call, "GET")
        match parts[1:]:
            case []:
                return _json(server_metadata())
            case ["health", "live"]:
                return _health(await service.backend.live())
            case ["health", "ready"]:
                return _health(await service.ready())
            case ["models", "stats"]:
                return _json({"model_stats": await service.statistics("", "")})
            case ["models", _, *_]:
                return await self._model(parts)
        raise invalid(f"there is nothing at {shown(call.path)}; see the protocol's paths in docs/serving.md", 404)

    async def _model(self, parts: list[str]) -> Reply:
        name, version, operation = _split_model_path(parts)
        match operation:
            case "":
                return _json(model_metadata(self.service.model(name, version)))
            case "ready":
                return _health(self.service.model_ready(name, version))
            case "config":
                return _json(model_config(self.service.model(name, version)))
            case "stats":
                return _json({"model_stats": await self.service.statistics(name, version or "")})
        raise invalid(f"a model has no {shown(operation)}; use infer, ready, config or stats", 404)

    async def _repository(self, call: Call, parts: list[str]) -> Reply:
        _require_method(call, "POST")
        headers = call.headers
        caller = Caller(headers.get("authorization"), headers.get("origin"), headers.get("host"))
        match parts[2:]:
            case ["index"]:
                content = parse_json(call.body) if call.body else {}
                entries = await self.service.index(content.get("ready") is True)
                return _json([asdict(entry) for entry in entries])
            case ["models", name, "load"]:
                _refuse_file_overrides(call)
                await self.service.load(name, caller)
                return Reply()
            case ["models", name, "unload"]:
                await self.service.unload(name, caller)
                return Reply()
        raise invalid(f"there is nothing at {shown(call.path)}; use index, models/<name>/load or .../unload", 404)


class MetricsPage:
    """The handler of the metrics port: this front end's figures and the engines'."""

    def __init__(self, service: Service, all_figures: Any) -> None:
        self._service, self._all_figures = service, all_figures

    async def __call__(self, call: Call) -> Reply:
        """The page."""
        _require_method(call, "GET")
        if _split_path(call.path) != ["metrics"]:
            raise invalid(f"there is nothing at {shown(call.path)}; the metrics are at /metrics", 404)
        figures = sum_figures([self._service.backend.figures(), *self._all_figures()])
        return Reply(render(figures).encode(), kind=_TEXT)


def decompressed(body: bytes, encoding: str | None, limits: Limits) -> bytes:
    """The decompressed body. Decompression stops at the limit."""
    encoding = (encoding or "identity").lower()
    if encoding == "identity":
        return body
    if encoding not in _ENCODINGS:
        raise invalid(f"the body's Content-Encoding is {shown(encoding)}; send gzip, deflate or none", 415)
    decompressor = zlib.decompressobj(31 if encoding == "gzip" else 15)
    limit = limits.body_bytes
    try:
        whole = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise invalid(
            f"the body is not {encoding} as its Content-Encoding says ({error}); compress it whole"
        ) from error
    if len(whole) > limit:
        raise too_large(limit, limits)
    if not decompressor.eof or decompressor.unused_data:
        raise invalid(f"the {encoding} body is cut off, or bytes follow it; compress the whole body once")
    return whole


def compressed_reply(body: bytes, header: int | None, accepted: str | None) -> Reply:
    """The reply with this body, compressed if the client accepts it and the body is long enough."""
    headers = b"" if header is None else b"Inference-Header-Content-Length: %d\r\n" % header
    kind = b"application/json" if header is None else _BYTES
    if accepted is not None and len(body) >= _MIN_COMPRESSED_BYTES:
        encoding = next((name for name in _ENCODINGS if name in _accepted_encodings(accepted)), None)
        if encoding is not None:
            compressor = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
            body = compressor.compress(body) + compressor.flush()
            headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return Reply(body, 200, kind, headers)


def _accepted_encodings(accepted: str) -> list[str]:
    """The encodings in an Accept-Encoding header, without those of weight 0."""
    offers = [part.partition(";") for part in accepted.lower().split(",")]
    return [name.strip() for name, _, weight in offers if re.fullmatch(r"q=0(\.0*)?", weight.strip()) is None]


def _split_path(path: str) -> list[str]:
    """A path's parts. Each is unquoted by itself, so that an escaped slash stays inside its part."""
    path = path.partition("?")[0]
    parts = path.strip("/").split("/") if path.strip("/") else []
    return [unquote(part) for part in parts] if "%" in path else parts


def _split_model_path(parts: list[str]) -> tuple[str, str | None, str]:
    """Name, version and the operation, out of /v2/models/<name>[/versions/<version>][/<operation>]."""
    rest = parts[2:]
    name, rest = rest[0], rest[1:]
    version = None
    if rest and rest[0] == "versions":
        if len(rest) < 2:
            raise invalid("the path ends after versions; name one: /v2/models/<name>/versions/<version>", 404)
        version, rest = rest[1], rest[2:]
    if len(rest) > 1:
        raise invalid(f"there is nothing at {shown('/'.join(parts))}; see the protocol's paths in docs/serving.md", 404)
    return name, version, rest[0] if rest else ""


def _header_length(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise invalid(f"Inference-Header-Content-Length is {shown(text)}; give the number of bytes of the JSON part")
    return int(text)


def _refuse_file_overrides(call: Call) -> None:
    """Raise if a load request overrides the version's config or files, as Triton allows; HotRow does not."""
    given = parse_json(call.body).get("parameters") if call.body else None
    if isinstance(given, Mapping) and any(name == "config" or name.startswith("file:") for name in given):
        raise invalid(
            "a model is loaded from its folder as it is; export a new version instead of sending config or files"
        )


def _require_method(call: Call, wanted: str) -> None:
    if call.method != wanted:
        raise invalid(f"{call.method[:20]} does not work at {shown(call.path)}; use {wanted}", 405)


def _health(good: bool) -> Reply:
    return Reply() if good else Reply(json.dumps({"error": "not ready"}).encode(), 503)


def _json(document: Any) -> Reply:
    return Reply(json.dumps(document).encode())
