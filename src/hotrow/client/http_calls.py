"""Requests over HTTP: JSON heads and binary tensors, on kept connections of the standard library.

A call takes an idle connection or opens one, so any number of threads may call. A connection that failed is closed. One
that the server closed while it was idle fails at its first use; the caller tries again (client.py).
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from hotrow.client.answer import Answer, ClientError
from hotrow.client.tensors import InferCall, array

HEADER = "Inference-Header-Content-Length"
_LONGEST_ERROR = 2000


class HttpCalls:
    """The protocol's calls to one address, "http://host:port" or "https://host:port"."""

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(address)
        self.address, self.headers, self.prefix = address, dict(headers), parts.path.rstrip("/")
        self.secure, self.host = parts.scheme == "https", parts.hostname or ""
        self.port = parts.port or (443 if self.secure else 80)
        self._idle: deque[http.client.HTTPConnection] = deque()

    def metadata(self, model: str, version: str | None, timeout: float) -> dict[str, Any]:
        """A model's metadata."""
        _, body = self._exchange("GET", _path(model, version), b"", {}, timeout)
        document: dict[str, Any] = json.loads(body)
        return document

    def infer(self, call: InferCall, outputs: Sequence[str], timeout: float) -> Answer:
        """The answer to one request. Without `outputs` it has those of the tower."""
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": tensor.name,
                        "datatype": tensor.datatype,
                        "shape": tensor.shape,
                        "parameters": {"binary_data_size": len(tensor.data)},
                    }
                    for tensor in call.inputs
                ],
                "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
                "parameters": {**call.parameters, "binary_data_output": True},
            }
        ).encode()
        body = b"".join([head, *(tensor.data for tensor in call.inputs)])
        path = f"{_path(call.model, call.version)}/infer"
        headers, data = self._exchange("POST", path, body, {HEADER: str(len(head))}, timeout)
        length = int(headers.get(HEADER.lower(), len(data)))
        document = json.loads(data[:length])
        arrays, at = {}, length
        for output in document["outputs"]:
            size = output["parameters"]["binary_data_size"]
            arrays[output["name"]] = array(output["datatype"], output["shape"], data[at : at + size])
            at += size
        return Answer(arrays, document["model_name"], document["model_version"], document.get("parameters", {}))

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _exchange(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], timeout: float
    ) -> tuple[dict[str, str], bytes]:
        connection = self._connection(timeout)
        try:
            connection.request(method, self.prefix + path, body or None, {**self.headers, **headers})
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            kind = type(error).__name__
            raise ClientError(f"{self.address} does not answer ({kind}: {error}); is it running there?") from error
        except BaseException:
            connection.close()
            raise
        if reply.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        if reply.status != 200:
            raise _error(self.address, reply, data)
        return {name.lower(): value for name, value in reply.getheaders()}, data

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = (
                http.client.HTTPSConnection(self.host, self.port, context=ssl.create_default_context())
                if self.secure
                else http.client.HTTPConnection(self.host, self.port)
            )
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection


def _path(model: str, version: str | None) -> str:
    return f"/v2/models/{quote(model, safe='')}" + ("" if version is None else f"/versions/{quote(version, safe='')}")


def _error(address: str, reply: http.client.HTTPResponse, data: bytes) -> ClientError:
    """The error in a reply. A server behind a proxy may send another than the protocol's JSON."""
    try:
        text = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        text = data[:_LONGEST_ERROR].decode(errors="replace") or reply.reason
    after = reply.getheader("Retry-After", "")
    return ClientError(f"{address}: {reply.status}: {text}", reply.status, float(after) if after.isdigit() else None)
