"""GrpcServer: the Open Inference Protocol over gRPC (inference.GRPCInferenceService), over the Service that HTTP uses.

Handlers run on the front end's event loop (grpc.aio). A request's tensors are in raw_input_contents, one entry for each
input in order, or in typed contents, not both; answers have raw_output_contents. A RefusedError's status becomes gRPC's
code, its message the details, and its retry_after the trailing metadata `retry-after` in seconds. A request without a
deadline of its own takes the deadline of the gRPC call.

A message over the limit `body` is refused with INVALID_ARGUMENT and an error that names the limit. grpc itself refuses
to read a message of more than twice the limit (RESOURCE_EXHAUSTED); that error names no option.

When grpc stops a server, it answers CANCELLED to the calls that the event loop has not taken yet, and to those that
arrive before the client knows. Clients and proxies do not retry that. So `close` lets the event loop take all calls
first (`settle`), and these end with an answer or with UNAVAILABLE.

Message classes are made once in `_messages`; importing this module needs grpcio and protobuf.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from hotrow.serve.frontend.authorization import Caller
from hotrow.serve.frontend.canary import HEADER, routing_key
from hotrow.serve.frontend.descriptions import model_config, model_metadata, server_metadata
from hotrow.serve.frontend.grpc_messages import METHODS, SERVICE, build
from hotrow.serve.frontend.http_message import too_large
from hotrow.serve.frontend.service import Service
from hotrow.serve.protocol.inference_json import (
    DATATYPES,
    ParsedHeader,
    RequestOptions,
    RequestParser,
    answer_parameters,
    output_arrays,
    read_request_options,
)
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.request import Answer, RefusedError, Request
from hotrow.serve.protocol.tensors import (
    BYTES,
    DeclaredTensor,
    Elements,
    as_type,
    declare,
    decoded,
    from_bytes,
    invalid,
    shown,
)

log = logging.getLogger("hotrow.serve")

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
_PARAMETERS = ("bool_param", "int64_param", "string_param", "double_param", "uint64_param")
_MAX_DEADLINE = 3600.0
_QUIET_TICKS, _TICK_SECONDS = 4, 0.005  # without a new call, until `settle` returns
SETTLE_SECONDS = 0.3  # most
_MAX_MESSAGE_BYTES = (1 << 31) - 1  # bytes, by the type of grpc's option


@functools.cache
def _messages() -> dict[str, Any]:
    return build()


class GrpcServer:
    """The gRPC port of a front end."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._server: Any = None
        self._calls = GrpcCalls(service)

    async def start(self, host: str, port: int, reuse_port: bool = False) -> int:
        """Listen; returns the port, which the system chooses if `port` is 0."""
        limits = self.service.limits
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", min(2 * limits.body_bytes, _MAX_MESSAGE_BYTES)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", limits.header_bytes),
                ("grpc.max_concurrent_streams", limits.in_flight),
                ("grpc.so_reuseport", int(reuse_port)),
                ("grpc.keepalive_time_ms", int(limits.idle_seconds * 1000)),
                ("grpc.http2.max_ping_strikes", 2),
            ],
            maximum_concurrent_rpcs=limits.in_flight,
        )
        self._server.add_generic_rpc_handlers([self._handlers()])
        try:
            bound = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(f"gRPC port {port}: {error}") from error
        await self._server.start()
        return int(bound)

    async def settle(self) -> None:
        """Wait until no new call comes for a moment, for SETTLE_SECONDS at most."""
        loop = asyncio.get_running_loop()
        until, quiet = loop.time() + SETTLE_SECONDS, 0
        while self._server is not None and quiet < _QUIET_TICKS and loop.time() < until:
            before = self._calls.started
            await asyncio.sleep(_TICK_SECONDS)
            quiet = quiet + 1 if self._calls.started == before else 0

    async def close(self, grace: float) -> None:
        """Finish the calls in flight for up to `grace` seconds, then close. Requires: the service refuses requests."""
        if self._server is not None:
            await self.settle()
            await self._server.stop(grace)

    def _handlers(self) -> Any:
        classes, calls, methods = _messages(), self._calls, {}
        for name, (request, response) in METHODS.items():
            make = grpc.unary_unary_rpc_method_handler
            behaviour: Any = _with_error_codes(calls, name, classes[request])
            if name == "ModelStreamInfer":
                make, behaviour = grpc.stream_stream_rpc_method_handler, calls.ModelStreamInfer
            # The handler parses the bytes, because grpc replies UNKNOWN to malformed ones and logs a traceback.
            methods[name] = make(behaviour, None, classes[response].SerializeToString)
        return grpc.method_handlers_generic_handler(SERVICE, methods)


def _with_error_codes(calls: GrpcCalls, name: str, kind: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
    """A handler of the method `name` that takes the message's bytes and turns errors into gRPC's codes."""
    call, limits = getattr(calls, name), calls.service.limits

    async def answer(data: bytes, context: Any) -> Any:
        calls.started += 1
        try:
            return await call(_parse(kind, data, limits), context)
        except RefusedError as error:
            trailing = (
                () if error.retry_after is None else (("retry-after", str(max(1, math.ceil(error.retry_after)))),)
            )
            await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), error.message, trailing)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("a gRPC call failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the server failed to answer; its log says why")

    return answer


def _parse(kind: Any, data: bytes, limits: Limits) -> Any:
    if len(data) > limits.body_bytes:
        raise too_large(len(data), limits)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise invalid(f"the message is no {kind.DESCRIPTOR.full_name}; send what the protocol's .proto says") from error


class GrpcCalls:
    """One method for each of the gRPC service's methods, under the protocol's names."""

    def __init__(self, service: Service) -> None:
        self.service, self._make = service, _messages()
        self.started = 0  # calls

    async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether the server is alive."""
        return self._make["ServerLiveResponse"](live=await self.service.backend.live())

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether the server is ready for requests."""
        return self._make["ServerReadyResponse"](ready=await self.service.ready())

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether a model is ready."""
        return self._make["ModelReadyResponse"](ready=self.service.model_ready(request.name, request.version))

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The server's name, version and extensions."""
        return self._make["ServerMetadataResponse"](**server_metadata())

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        """A model's tensors."""
        return self._message_of(
            "ModelMetadataResponse", model_metadata(self.service.model(request.name, request.version))
        )

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        """A model's configuration."""
        config = model_config(self.service.model(request.name, request.version))
        return self._message_of("ModelConfigResponse", {"config": config})

    async def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        """A model's statistics."""
        statistics = await self.service.statistics(request.name, request.version)
        return self._message_of("ModelStatisticsResponse", {"model_stats": statistics})

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The repository's models."""
        entries = await self.service.index(request.ready)
        return self._make["RepositoryIndexResponse"](models=[asdict(entry) for entry in entries])

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Load a model."""
        if any(name == "config" or name.startswith("file:") for name in request.parameters):
            raise invalid(
                "a model is loaded from its folder as it is; export a new version instead of sending config or files"
            )
        await self.service.load(request.model_name, Caller(_metadata(context, "authorization")))
        return self._make["RepositoryModelLoadResponse"]()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Unload a model."""
        await self.service.unload(request.model_name, Caller(_metadata(context, "authorization")))
        return self._make["RepositoryModelUnloadResponse"]()

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer a request."""
        response, vectors = await self._infer(request, context)
        if vectors:  # held until the call has ended, and the client has its answer
            context.add_done_callback(lambda _: self.service.answer_bytes.give(vectors))
        return response

    async def _infer(self, request: Any, context: Any) -> tuple[Any, int]:
        """The response, and the bytes of its vectors, which are to be given back to `answer_bytes`."""
        size = request.ByteSize()
        self.service.counts.add("hotrow_request_bytes_total", "grpc", by=size)
        remaining = context.time_remaining()

        def parse(parser: RequestParser, version: str | None) -> tuple[Request, RequestOptions]:
            return parse_message(request, parser, version, remaining)

        def key(options: RequestOptions) -> str:
            return routing_key(_metadata(context, HEADER), options, request.SerializeToString)

        answer, options = await self.service.infer(request.model_name, request.model_version, size, parse, key)
        return self._response(answer, options), 0 if options.wanted is None else options.wanted.bytes

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer a stream of requests in order. An error answers one request; the stream continues."""
        make = self._make["ModelStreamInferResponse"]
        self.started += 1
        async for data in requests:
            name = ""
            try:
                request = _parse(self._make["ModelInferRequest"], data, self.service.limits)
                name = request.id
                response, vectors = await self._infer(request, context)
                try:
                    yield make(infer_response=response)
                finally:
                    self.service.answer_bytes.give(vectors)
            except RefusedError as error:
                yield make(error_message=error.message, infer_response={"id": name})
            except Exception:
                log.exception("a gRPC stream's request failed")
                yield make(error_message="the server failed to answer; its log says why")

    def _response(self, answer: Answer, options: RequestOptions) -> Any:
        names = [output.name for output in options.outputs]
        arrays = output_arrays(answer, names)
        response = self._make["ModelInferResponse"](
            model_name=answer.model,
            model_version=answer.version,
            id=options.id or "",
            outputs=[
                {"name": name, "datatype": DATATYPES[array.dtype.char], "shape": array.shape}
                for name, array in zip(names, arrays, strict=True)
            ],
            raw_output_contents=[array.tobytes() for array in arrays],
        )
        for name, value in answer_parameters(answer).items():
            kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
            setattr(response.parameters[name], kind, value)
        return response

    def _message_of(self, name: str, document: dict[str, Any]) -> Any:
        return json_format.ParseDict(document, self._make[name](), ignore_unknown_fields=True)


def parse_message(
    message: Any, parser: RequestParser, version: str | None, remaining: float | None
) -> tuple[Request, RequestOptions]:
    """The request and options in a ModelInferRequest."""
    options = read_request_options(
        message.id, _parameter_values(message.parameters), _outputs(message.outputs), parser.embeddings
    )
    if options.seconds is None and remaining is not None and remaining < _MAX_DEADLINE:
        options = replace(options, seconds=max(remaining, 1e-6))
    if not message.inputs:
        raise invalid("the request has no inputs; give tensors with name, datatype, shape and contents")
    tensors = []
    for entry in message.inputs:
        tensors.append(declare(entry.name, entry.datatype, list(entry.shape)))
        for name in entry.parameters:
            raise invalid(f"input {shown(entry.name)} has the parameter {shown(name)}; shared memory is not supported")
    plan = parser.plan(tensors, options)
    parsed = ParsedHeader(tuple(tensors), (), (), 0, options, plan, None)
    return parser.build(parsed, _tensor_elements(message, tensors), version), options


def _tensor_elements(message: Any, tensors: list[DeclaredTensor]) -> list[Elements]:
    raw = message.raw_input_contents
    if not raw:
        return [_typed_elements(tensor, entry.contents) for tensor, entry in zip(tensors, message.inputs, strict=True)]
    if len(raw) != len(tensors):
        raise invalid(
            f"raw_input_contents has {len(raw)} entries for {len(tensors)} inputs; give one for each, in order, and no "
            "typed contents beside them"
        )
    if any(entry.HasField("contents") for entry in message.inputs):
        raise invalid("the request has both raw_input_contents and typed contents; send one of them")
    return [from_bytes(tensor, data, 0, len(data)) for tensor, data in zip(tensors, raw, strict=True)]


def _typed_elements(tensor: DeclaredTensor, contents: Any) -> Elements:
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise invalid(
            f"input {shown(tensor.name)} is {tensor.datatype}, which has no typed contents; use raw_input_contents"
        )
    given = getattr(contents, field)
    if not given and tensor.size and contents.ListFields():
        found = ", ".join(descriptor.name for descriptor, _ in contents.ListFields())
        raise invalid(f"input {shown(tensor.name)} is {tensor.datatype} but its contents are {found}; use {field}")
    if tensor.datatype == BYTES:
        return decoded(tensor, given)
    return as_type(tensor, np.array(given, dtype=_typed_dtype(field)))


def _typed_dtype(field: str) -> Any:
    return {"bool": "?", "int": "i4", "int64": "i8", "uint": "u4", "uint64": "u8", "fp32": "f4", "fp64": "f8"}[
        field.removesuffix("_contents")
    ]


def _parameter_values(parameters: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        values[name] = getattr(value, kind) if kind in _PARAMETERS else None
    return values


def _outputs(outputs: Any) -> list[dict[str, Any]]:
    return [{"name": output.name, "parameters": _parameter_values(output.parameters)} for output in outputs]


def _metadata(context: Any, wanted: str) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name.lower() == wanted:
            return value if isinstance(value, str) else None
    return None
