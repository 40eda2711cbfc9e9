"""The HTTP side of the protocol: paths to calls of the Service, bodies to requests, answers to bodies.

No routing table: a path is split once and matched in the order of how often it comes. A model's name is only ever
looked up among the models in service, or checked before it is loaded, so a path cannot lead out of the repository.

Bodies may be compressed with gzip or deflate (zlib) and are then unpacked up to the limit and no further. Answers are
compressed when the client accepts it and they are long enough to gain (`_WORTH` bytes).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote

from hotrow.serve.frontend.http_message import Call, Reply, too_large
from hotrow.serve.frontend.service import Caller, Service, model_config, model_metadata, server_metadata
from hotrow.serve.protocol.inference_json import ModelInputs, parse_json, write
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.metrics import added, render
from hotrow.serve.protocol.request import Request
from hotrow.serve.protocol.tensors import bad, shown

_WORTH = 1024
_BYTES = b"application/octet-stream"
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_ENCODINGS = ("gzip", "deflate")


class HttpProtocol:
    """Answers the protocol's HTTP calls."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, call: Call) -> Reply:
        """The reply to a call, or RefusedError."""
        parts = _parts(call.path)
        if len(parts) >= 4 and parts[1] == "models" and parts[-1] == "infer":
            return await self._infer(call, parts)
        return await self._rest(call, parts)

    async def _infer(self, call: Call, parts: list[str]) -> Reply:
        _method(call, "POST")
        name, version, _ = _model(parts)
        body = unpacked(call.body, call.headers.get("content-encoding"), self.service.limits)
        header = _header_length(call.headers.get("inference-header-content-length"))
        self.service.counts.add("hotrow_request_bytes_total", "http", by=len(call.body))

        def read(inputs: ModelInputs, wanted: str | None) -> tuple[Request, Any]:
            return inputs.read(body, header, wanted)

        answer, wishes = await self.service.infer(name, version, len(body), read, call.waited)
        text, length = write(answer, wishes)
        return packed(text, length, call.headers.get("accept-encoding"))

    async def _rest(self, call: Call, parts: list[str]) -> Reply:
        service = self.service
        if not parts or parts[0] != "v2":
            raise bad(f"there is nothing at {shown(call.path)}; the protocol's paths begin with /v2", 404)
        if len(parts) > 1 and parts[1] == "repository":
            return await self._repository(call, parts)
        _method(call, "GET")
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
        raise bad(f"there is nothing at {shown(call.path)}; see the protocol's paths in docs/serving.md", 404)

    async def _model(self, parts: list[str]) -> Reply:
        name, version, what = _model(parts)
        match what:
            case "":
                return _json(model_metadata(self.service.model(name, version)))
            case "ready":
                return _health(self.service.model_ready(name, version))
            case "config":
                return _json(model_config(self.service.model(name, version)))
            case "stats":
                return _json({"model_stats": await self.service.statistics(name, version or "")})
        raise bad(f"a model has no {shown(what)}; ask for infer, ready, config or stats", 404)

    async def _repository(self, call: Call, parts: list[str]) -> Reply:
        _method(call, "POST")
        headers = call.headers
        caller = Caller(headers.get("authorization"), headers.get("origin"), headers.get("host"))
        match parts[2:]:
            case ["index"]:
                asked = parse_json(call.body) if call.body else {}
                entries = await self.service.index(asked.get("ready") is True)
                return _json([asdict(entry) for entry in entries])
            case ["models", name, "load"]:
                _no_parameters(call)
                await self.service.load(name, caller)
                return Reply()
            case ["models", name, "unload"]:
                await self.service.unload(name, caller)
                return Reply()
        raise bad(f"there is nothing at {shown(call.path)}; ask for index, models/<name>/load or .../unload", 404)


class MetricsPage:
    """Answers /metrics with this front end's figures and the engines'."""

    def __init__(self, service: Service, parts: Any) -> None:
        self._service, self._parts = service, parts

    async def __call__(self, call: Call) -> Reply:
        """The page."""
        _method(call, "GET")
        if _parts(call.path) != ["metrics"]:
            raise bad(f"there is nothing at {shown(call.path)}; the metrics are at /metrics", 404)
        figures = added([self._service.backend.figures(), *self._parts()])
        return Reply(render(figures).encode(), kind=_TEXT)


def unpacked(body: bytes, encoding: str | None, limits: Limits) -> bytes:
    """A body without its compression; it never grows beyond the limit."""
    encoding = (encoding or "identity").lower()
    if encoding == "identity":
        return body
    if encoding not in _ENCODINGS:
        raise bad(f"the body's Content-Encoding is {shown(encoding)}; send gzip, deflate or none", 415)
    unpacker = zlib.decompressobj(31 if encoding == "gzip" else 15)
    limit = limits.body_bytes
    try:
        whole = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise bad(f"the body is not {encoding} as its Content-Encoding says ({error}); compress it whole") from error
    if len(whole) > limit:
        raise too_large(limit, limits)
    if not unpacker.eof or unpacker.unused_data:
        raise bad(f"the {encoding} body is cut off, or bytes follow it; compress the whole body once")
    return whole


def packed(body: bytes, header: int | None, accepted: str | None) -> Reply:
    """The reply with this body, compressed if that is wanted and worth it."""
    headers = b"" if header is None else b"Inference-Header-Content-Length: %d\r\n" % header
    kind = b"application/json" if header is None else _BYTES
    if accepted is not None and len(body) >= _WORTH:
        encoding = next((name for name in _ENCODINGS if name in _wanted(accepted)), None)
        if encoding is not None:
            packer = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
            body = packer.compress(body) + packer.flush()
            headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return Reply(body, 200, kind, headers)


def _wanted(accepted: str) -> list[str]:
    """The codings that an Accept-Encoding names, without those of weight 0."""
    offers = [part.partition(";") for part in accepted.lower().split(",")]
    return [name.strip() for name, _, weight in offers if re.fullmatch(r"q=0(\.0*)?", weight.strip()) is None]


def _parts(path: str) -> list[str]:
    """A path's names, decoded one by one, so that an escaped slash stays inside a name."""
    path = path.partition("?")[0]
    parts = path.strip("/").split("/") if path.strip("/") else []
    return [unquote(part) for part in parts] if "%" in path else parts


def _model(parts: list[str]) -> tuple[str, str | None, str]:
    """Name, version and what is asked of it, out of /v2/models/<name>[/versions/<version>][/<what>]."""
    rest = parts[2:]
    name, rest = rest[0], rest[1:]
    version = None
    if rest and rest[0] == "versions":
        if len(rest) < 2:
            raise bad("the path ends behind versions; name one: /v2/models/<name>/versions/<version>", 404)
        version, rest = rest[1], rest[2:]
    if len(rest) > 1:
        raise bad(f"there is nothing at {shown('/'.join(parts))}; see the protocol's paths in docs/serving.md", 404)
    return name, version, rest[0] if rest else ""


def _header_length(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise bad(f"Inference-Header-Content-Length is {shown(text)}; give the number of bytes of the JSON part")
    return int(text)


def _no_parameters(call: Call) -> None:
    """Triton can load with another config or other files; here a version's files say it all."""
    given = parse_json(call.body).get("parameters") if call.body else None
    if isinstance(given, Mapping) and any(name == "config" or name.startswith("file:") for name in given):
        raise bad("a model is loaded from its folder as it is; export a new version instead of sending config or files")


def _method(call: Call, wanted: str) -> None:
    if call.method != wanted:
        raise bad(f"{call.method[:20]} does not work at {shown(call.path)}; use {wanted}", 405)


def _health(good: bool) -> Reply:
    return Reply() if good else Reply(json.dumps({"error": "not ready"}).encode(), 503)


def _json(document: Any) -> Reply:
    return Reply(json.dumps(document).encode())
