"""HTTP messages as values: HttpRequest while it is read, Call for handlers, Reply with its bytes.

The parser (httptools, which wraps llhttp) rejects most malformed input. `HttpRequest.check` rejects messages that
llhttp accepts but a server behind a proxy must not: versions other than 1.0 and 1.1, Transfer-Encoding in HTTP/1.0, a
missing or second Host. If proxy and server parse such a message differently, they may disagree about where the next one
starts (request smuggling).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.request import RefusedError
from hotrow.serve.protocol.tensors import shown

PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    417: "Expectation Failed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}
_JSON = b"application/json"


class Call(NamedTuple):
    """A complete request, as a handler sees it. Header names are lower case; values of a repeated header are joined."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    waited: float = 0.0  # seconds that its first bytes were in the socket's buffer before they were read


class Reply(NamedTuple):
    """A handler's answer. `headers` are whole lines. `sent` is called once, when the system has taken nearly all of the
    reply, or the client is gone."""

    body: bytes = b""
    status: int = 200
    kind: bytes = _JSON
    headers: bytes = b""
    sent: Callable[[], None] | None = None

    def head(self, close: bool, http10: bool) -> bytes:
        """The status line and headers. `close` announces that the connection ends after this reply."""
        connection = b"Connection: close\r\n\r\n" if close else b"Connection: keep-alive\r\n\r\n" if http10 else b"\r\n"
        return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b" % (
            self.status,
            PHRASES.get(self.status, "Error").encode(),
            self.kind,
            len(self.body),
            self.headers,
            connection,
        )


class HttpRequest:
    """A request while it is read: the parser's callbacks fill it."""

    __slots__ = (
        "body_skipped",
        "complete",
        "headers",
        "http10",
        "keep_alive",
        "method",
        "parts",
        "received",
        "shed",
        "size",
        "target",
    )

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.headers: dict[str, str] = {}
        self.http10 = False
        self.keep_alive = True
        self.parts: list[bytes] = []
        self.size = 0  # bytes of the body so far
        self.received = 0  # bytes received after the headers, including the framing of chunks and trailers
        self.complete = False
        self.shed = False  # refused before its body is read; the body is dropped
        self.body_skipped = False  # whether the parser has taken the body for another protocol's bytes

    def add_header(self, name: bytes, value: bytes) -> None:
        """A header line. A second one of the same name is joined with a comma, as RFC 9110 says."""
        key, text = name.decode("latin-1").lower(), value.strip(b" \t").decode("latin-1")
        self.headers[key] = text if key not in self.headers else f"{self.headers[key]}, {text}"

    def check(self, version: str, limits: Limits) -> None:
        """Raise RefusedError for a head that this server must not accept."""
        headers = self.headers
        if version not in ("1.1", "1.0"):
            raise RefusedError(505, f"this server speaks HTTP/1.1 and HTTP/1.0, not HTTP/{version}; send HTTP/1.1")
        if self.method == "CONNECT":
            raise RefusedError(501, "this server is no proxy; send no CONNECT")
        host = headers.get("host")
        if (host is None and version == "1.1") or (host is not None and "," in host):
            raise RefusedError(400, "a request has exactly one Host header (RFC 9112, section 3.2); send one")
        coding = headers.get("transfer-encoding")
        if coding is not None and (coding.lower() != "chunked" or version == "1.0" or "content-length" in headers):
            raise RefusedError(400, "the only Transfer-Encoding taken is chunked, in HTTP/1.1, without Content-Length")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise RefusedError(400, f"Content-Length is {shown(length)}; send one number of bytes")
        if len(length) > 18 or int(length) > limits.body_bytes:
            raise too_large(length, limits)
        if headers.get("expect", "100-continue").lower() != "100-continue":
            raise RefusedError(417, f"Expect is {shown(headers['expect'])}; only 100-continue is understood")

    @property
    def is_inference(self) -> bool:
        """Whether it is an inference request. Only these are shed under overload."""
        return self.method == "POST" and self.target.partition(b"?")[0].rstrip(b"/").endswith(b"/infer")

    @property
    def asks_to_close(self) -> bool:
        """Whether the Connection header has "close", which wins over "keep-alive"."""
        return "close" in (part.strip() for part in self.headers.get("connection", "").lower().split(","))

    @property
    def announces_body(self) -> bool:
        """Whether the head says that a body follows."""
        return "transfer-encoding" in self.headers or int(self.headers.get("content-length", "0")) > 0

    @property
    def overhead(self) -> int:
        """Bytes received beyond the body plus eight per body byte: more framing and trailers than any client needs."""
        return 0 if self.complete else self.received - 9 * self.size

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for "100 Continue" before it sends the body."""
        return "expect" in self.headers and not self.http10 and not self.complete and not self.size

    def call(self, waited: float) -> Call:
        """The request for a handler. HEAD becomes GET; the connection leaves the body out of its reply."""
        method = "GET" if self.method == "HEAD" else self.method
        parts = self.parts
        return Call(method, self._path(), self.headers, parts[0] if len(parts) == 1 else b"".join(parts), waited)

    def _path(self) -> str:
        """The target's path; the target may be an absolute URI (RFC 9112, section 3.2.2)."""
        target = self.target.decode("latin-1")
        if target[:1] != "/" and target.lower().startswith(("http://", "https://")):
            slash = target.find("/", target.index("//") + 2)
            return target[slash:] if slash >= 0 else "/"
        return target


def error_reply(error: RefusedError) -> Reply:
    """The reply to an error: its status, Retry-After if the error has one, and its message as JSON."""
    headers = b""
    if error.retry_after is not None:
        headers += b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after))
    if error.status == 401:
        headers += b"WWW-Authenticate: Bearer\r\n"
    return Reply(json.dumps({"error": error.message}).encode(), error.status, _JSON, headers)


def too_large(size: int | str, limits: Limits) -> RefusedError:
    """The error of a body over the limit."""
    return RefusedError(413, f"a body of {size} bytes or more is over the limit body={limits.body}; send fewer rows")


def headers_too_large(limits: Limits) -> RefusedError:
    """The error of a head over the limit."""
    return RefusedError(431, f"the headers are over the limit headers={limits.headers}; send fewer or shorter ones")
