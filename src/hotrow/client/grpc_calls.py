"""Requests over gRPC, with the message classes that the server uses. Needs grpcio and protobuf."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import grpc

from hotrow.client.answer import Answer, ClientError
from hotrow.client.tensors import InferCall, array
from hotrow.serve.frontend.grpc_messages import SERVICE, build

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class GrpcCalls:
    """The protocol's calls to one address, "grpc://host:port", or "grpcs://host:port" for TLS."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(address)
        options = [("grpc.max_receive_message_length", -1)]
        self.address = address
        self._metadata = [(name.lower(), value) for name, value in headers.items()]
        if parts.scheme == "grpcs":
            self._channel = grpc.secure_channel(parts.netloc, grpc.ssl_channel_credentials(), options)
        else:
            self._channel = grpc.insecure_channel(parts.netloc, options)
        self._make = _messages()

    def metadata(self, model: str, version: str | None, timeout: float) -> dict[str, Any]:
        """A model's metadata."""
        request = self._make["ModelMetadataRequest"](name=model, version=version or "")
        found = self._call("ModelMetadata", request, timeout)
        return {"outputs": [{"name": output.name} for output in found.outputs]}

    def infer(self, call: InferCall, outputs: Sequence[str], timeout: float) -> Answer:
        """The answer to one request. Without `outputs` it has those of the tower."""
        request = self._make["ModelInferRequest"](
            model_name=call.model,
            model_version=call.version or "",
            inputs=[{"name": one.name, "datatype": one.datatype, "shape": one.shape} for one in call.inputs],
            outputs=[{"name": one} for one in outputs],
            raw_input_contents=[one.data for one in call.inputs],
        )
        for key, value in call.parameters.items():
            kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
            setattr(request.parameters[key], kind, value)
        reply = self._call("ModelInfer", request, timeout)
        arrays = {
            output.name: array(output.datatype, list(output.shape), data)
            for output, data in zip(reply.outputs, reply.raw_output_contents, strict=True)
        }
        given = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in reply.parameters.items()}
        return Answer(arrays, reply.model_name, reply.model_version, given)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _call(self, method: str, request: Any, timeout: float) -> Any:
        make: Callable[..., Any] = self._channel.unary_unary
        reply = self._make[type(request).DESCRIPTOR.name.replace("Request", "Response")]
        call = make(f"/{SERVICE}/{method}", type(request).SerializeToString, reply.FromString)
        try:
            return call(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            after = dict(error.trailing_metadata() or ()).get("retry-after")
            status = _STATUS.get(error.code(), 500)
            message = f"{self.address}: {error.code().name}: {error.details()}"
            raise ClientError(message, status, None if after is None else float(after)) from error


@functools.cache
def _messages() -> dict[str, Any]:
    return build()
