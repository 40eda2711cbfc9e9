"""HttpConnection: one client's HTTP/1.1 connection: parse, call the handler, write the reply, within limits.

httptools (a public API over llhttp, in C) parses; this class is its callback object and keeps the connection's state. A
general HTTP server costs more per request: docs/decisions/0007-http-front-end.md has the table, and
`python benchmarks/frontend.py` measures it again.

States:
    IDLE     no byte of a request yet
    READING  a request has begun and is incomplete
    BUSY     a handler is answering the first request

One handler runs at a time. Pipelined requests queue in `_waiting`; when more than `_PIPELINED` wait, the socket is not
read. After an error nothing more is read: requests that were complete before it are answered, then the error is sent,
then the connection closes.
Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from hotrow.serve.frontend.http_message import HttpRequest, error_reply, headers_too_large, too_large
from hotrow.serve.protocol.request import RefusedError
from hotrow.serve.protocol.tensors import shown

if TYPE_CHECKING:
    from hotrow.serve.frontend.http_server import HttpServer

log = logging.getLogger("hotrow.serve")

_PIPELINED = 16  # requests that may queue behind the one being answered
_REQUEST_BYTES = 1024  # memory of a request object, roughly; a pipelined request can be 30 bytes long
_LINGER_SECONDS, _LINGER_ROUNDS = 1.0, 10  # of reading and dropping what a client still sends after its last reply
_IDLE, _READING, _BUSY = 0, 1, 2
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_INFO_BYTES, _LAST_RECEIVED_AT, _LAST_RECEIVED = 56, 52, struct.Struct("=I")  # tcp_info.tcpi_last_data_recv, ms


class HttpConnection(asyncio.Protocol):
    """One client's connection, and the parser's callbacks (`on_...`)."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
        self._server, self._loop, self._socket = server, loop, accepted
        self._parser = HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._state, self._since = _IDLE, loop.time()
        self._request = HttpRequest()  # being read, or the last that was
        self._request.complete = True
        self._in_head = False  # whether its head has begun and is not complete
        self._head_bytes = self._header_size = 0  # of a head that has begun: as received, and as parsed
        self._waiting: deque[HttpRequest] = deque()  # in order; the last may be incomplete
        self._task: asyncio.Task[None] | None = None
        self._held = 0  # its part of server.held
        self._shedding = False  # whether new inference requests are shed
        self._waited = 0.0  # seconds that the request was in the socket's buffer
        self._ending = False  # read nothing more; close after the waiting requests are answered
        self._final: RefusedError | None = None  # the error to send last
        self._eof = False
        self._dropped = 0  # bytes received after the end
        self._writing_paused_at: float | None = None
        self._unsent: Callable[[], None] | None = None  # `sent` of the reply that the client has yet to read

    # --- callbacks of asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        server = self._server
        server.connections.add(self)
        if len(server.connections) > server.limits.connections:
            server.counts.add("hotrow_connections_refused_total", "too_many")
            limit = server.limits.connections
            self._refuse(
                RefusedError(503, f"all {limit} connections are taken (connections=); send the request again", 1.0)
            )

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.connections.discard(self)
        self._release(self._held)
        self._end_reply()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        self._transport = None
        del self._parser  # breaks a reference cycle, which would keep the connection until a garbage collection

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._dropped += len(data)
            return
        server = self._server
        server.load_shedder.time_turn(self._loop)
        if self._state == _IDLE:
            self._state, self._since = _READING, self._loop.time()
            self._waited = seconds_since_last_received(self._socket)
            self._shedding = server.load_shedder.should_shed(self._waited)
        self._hold(len(data))
        if self._in_head:
            self._head_bytes += len(data)
        elif not self._request.complete:
            self._request.received += len(data)
        try:
            self._parse(data)
            if self._in_head and self._head_bytes > server.header_bytes:
                raise headers_too_large(server.limits)
            if self._request.overhead > server.header_bytes:
                raise RefusedError(400, "the chunked body has more framing and trailers than data; send larger chunks")
            if server.held > server.buffered_bytes:
                raise RefusedError(503, "all memory for requests is taken (buffered=); send the request again", 1.0)
        except RefusedError as error:
            return self._refuse(error)
        if self._state != _BUSY:
            self._next()
        elif len(self._waiting) > _PIPELINED and self._transport is not None:
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The client sends nothing more; complete requests are still answered."""
        self._eof = True
        if not self._ending:
            self._ending = True
            if self._in_head or (self._waiting and not self._waiting[-1].complete):
                ended = "the request ended before its headers and the length that they announce; send it whole"
                self._refuse(RefusedError(400, ended))
        return self._state == _BUSY

    def pause_writing(self) -> None:
        self._writing_paused_at = self._loop.time()

    def resume_writing(self) -> None:
        self._writing_paused_at = None
        self._end_reply()

    def _end_reply(self) -> None:
        if self._unsent is not None:
            unsent, self._unsent = self._unsent, None
            unsent()

    # --- the parser ---

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Raises RefusedError for a malformed request."""
        while True:
            try:
                return self._parser.feed_data(data)
            except HttpParserUpgrade as upgrade:  # the offer of another protocol is ignored, as RFC 9110, 7.8 allows
                data = data[upgrade.args[0] :]
                if self._request.body_skipped:
                    self._expect_body(self._request)
                if not data:
                    return
            except HttpParserError as error:
                if self._ending:  # bytes after a request with "Connection: close"
                    return
                if isinstance(error.__context__, RefusedError):
                    raise error.__context__ from None
                self._server.counts.add("hotrow_connections_refused_total", "bad")
                message = f"this is no HTTP/1.1 request: {shown(str(error))}; see RFC 9112"
                raise RefusedError(400, message) from None

    def _expect_body(self, request: HttpRequest) -> None:
        """Read the body of a request with an Upgrade header. httptools treats the bytes after such a head as the other
        protocol's, so a new parser gets a head with the same framing and no Upgrade."""
        length = request.headers.get("content-length")
        lines = [
            b"POST / HTTP/1.1",
            b"Transfer-Encoding: chunked" if length is None else b"Content-Length: " + length.encode(),
        ]
        lines += [] if request.keep_alive else [b"Connection: close"]
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))
        request.body_skipped = False

    def on_message_begin(self) -> None:
        if self._request.body_skipped:
            return
        self._request, self._in_head = HttpRequest(), True
        self._head_bytes = self._header_size = 0
        self._hold(_REQUEST_BYTES)

    def on_url(self, part: bytes) -> None:
        if self._in_head:
            self._request.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is dropped
            self._request.add_header(name, value)
            self._header_size += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        request, parser, server = self._request, self._parser, self._server
        if request.body_skipped:
            return
        self._in_head = False
        version = parser.get_http_version()
        request.method = parser.get_method().decode("latin-1")
        line = len(f"{request.method}  HTTP/{version}\r\n\r\n") + len(request.target)  # and the empty line at the end
        if line + self._header_size > server.header_bytes:
            raise headers_too_large(server.limits)
        request.http10 = version == "1.0"
        request.keep_alive = parser.should_keep_alive() and not request.asks_to_close
        request.check(version, server.limits)
        request.body_skipped = parser.should_upgrade() and request.announces_body
        request.shed = self._shedding and request.is_inference
        self._waiting.append(request)

    def on_body(self, part: bytes) -> None:
        request = self._request
        if request.shed:
            self._release(len(part))
        else:
            request.parts.append(part)
        request.size += len(part)
        if request.size > self._server.body_bytes:  # chunked: no length was announced
            raise too_large(request.size, self._server.limits)

    def on_message_complete(self) -> None:
        if self._request.body_skipped:
            return
        self._request.keep_alive = self._request.keep_alive and self._parser.should_keep_alive()
        self._request.complete = True
        if not self._request.keep_alive:
            self._ending = True

    # --- requests ---

    def _next(self) -> None:
        """Answer the first waiting request if it is complete; otherwise read on, or end."""
        waiting = self._waiting
        while waiting and waiting[0].complete and waiting[0].shed:
            self._shed(waiting.popleft())
        if waiting and waiting[0].complete:
            self._state = _BUSY
            self._task = self._loop.create_task(self._answer(waiting.popleft()))
        elif self._final is not None:
            self._send_final(self._final)
        elif self._ending:
            self._close()
        elif waiting:
            self._state = _READING
            if waiting[0].expects_continue and self._transport is not None:
                del waiting[0].headers["expect"]
                self._transport.write(_CONTINUE)
        else:
            self._state = _READING if self._in_head else _IDLE
            self._release(self._held)

    async def _answer(self, request: HttpRequest) -> None:
        call = request.call(self._waited)
        request.parts.clear()
        try:
            reply = await self._server.handler(call)
        except RefusedError as error:
            reply = error_reply(error)
        except Exception:
            log.exception("%s %s failed", request.method, shown(call.path))
            reply = error_reply(RefusedError(500, "the server failed to answer; its log says why"))
        self._task = None
        transport = self._transport
        if reply.sent is not None:
            self._end_reply()
            self._unsent = reply.sent
        if transport is None or transport.is_closing():
            return self._end_reply()
        more = self._final is not None or (self._waiting and self._waiting[0].complete)
        close = not request.keep_alive or self._server.draining or (self._ending and not more)
        head = reply.head(close, request.http10)
        transport.write(head if request.method == "HEAD" else head + reply.body)
        if self._unsent is not None and self._writing_paused_at is None:
            self._end_reply()
        self._since = self._loop.time()
        if close:
            self._ending = True
            self._waiting.clear()
            self._state = _IDLE
            return self._close()
        self._release(request.size + _REQUEST_BYTES if self._waiting else self._held)
        if not self._ending and len(self._waiting) <= _PIPELINED // 2:
            transport.resume_reading()
        self._next()

    # --- load shedding (serve/frontend/load_shedding.py) ---

    def _shed(self, request: HttpRequest) -> None:
        """Refuse a request whose body was dropped while it was received, and pause reading."""
        server, transport = self._server, self._transport
        if transport is None or transport.is_closing():
            return
        if not server.load_shedder.has_paused:
            server.pause_idle_connections()
        self._since = self._loop.time()
        if request.keep_alive and not server.draining:
            transport.write(server.shed_reply)
            transport.pause_reading()
            server.load_shedder.shed_and_pause(self, self._loop)
        else:
            reply = server.load_shedder.shed()
            self._ending, self._final = True, reply
            self._waiting.clear()

    def pause_if_idle(self) -> bool:
        """Stop reading unless a request has begun; returns whether reading has stopped."""
        if self._state != _IDLE or self._ending or self._transport is None or self._transport.is_closing():
            return False
        self._transport.pause_reading()
        return True

    def resume(self) -> None:
        """Read again after `pause_if_idle` or a refusal."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # --- closing ---

    def check(self, now: float) -> None:
        """Close the connection if one of its time limits has passed."""
        limits, counts = self._server.limits, self._server.counts
        elapsed = now - self._since
        if self._writing_paused_at is not None and now - self._writing_paused_at > limits.answer_seconds:
            counts.add("hotrow_connections_refused_total", "slow")
            self.abort()
        elif self._ending:
            if self._state != _BUSY and elapsed > limits.read_seconds:
                self.abort()
        elif self._state == _READING and elapsed > limits.read_seconds:
            counts.add("hotrow_connections_refused_total", "slow")
            self._refuse(
                RefusedError(408, f"the request was not whole after {limits.read_seconds:g} s; send it in one go")
            )
        elif self._state == _IDLE and elapsed > limits.idle_seconds:
            counts.add("hotrow_connections_refused_total", "idle")
            self._close()

    def drain(self) -> None:
        """Close when nothing is in flight."""
        if self._state == _BUSY:
            self._ending = True
        elif not self._ending:
            self._ending = True
            self._close()

    def abort(self) -> None:
        """Close now, whatever is in flight."""
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, error: RefusedError) -> None:
        """Read nothing more; answer complete requests, send the error, close."""
        self._ending, self._final = True, error
        while self._waiting and not self._waiting[-1].complete:
            self._waiting.pop()
        if self._state != _BUSY:
            self._next()

    def _send_final(self, error: RefusedError) -> None:
        transport = self._transport
        self._release(self._held)
        self._state, self._since, self._final = _IDLE, self._loop.time(), None
        if transport is None or transport.is_closing():
            return
        reply = error_reply(error)
        transport.write(reply.head(True, False) + reply.body)
        if self._eof or not transport.can_write_eof():
            return transport.close()
        transport.write_eof()
        transport.resume_reading()
        self._loop.call_later(_LINGER_SECONDS, self._linger, self._dropped, _LINGER_ROUNDS)

    def _linger(self, dropped: int, rounds: int) -> None:
        """Read and drop more bytes before closing. Closing at once would reset the connection, and a client that is
        still sending would not receive the error."""
        if self._transport is None or self._transport.is_closing():
            return
        if rounds and self._dropped > dropped and not self._server.draining:
            self._loop.call_later(_LINGER_SECONDS, self._linger, self._dropped, rounds - 1)
        else:
            self._transport.abort()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _hold(self, size: int) -> None:
        self._held += size
        self._server.held += size

    def _release(self, size: int) -> None:
        size = min(size, self._held)
        self._held -= size
        self._server.held -= size


def seconds_since_last_received(accepted: socket.socket) -> float:
    """Seconds since the kernel received this socket's last bytes, to some milliseconds; 0 if the kernel does not report
    it. Under overload a request waits longest here, and nothing else measures it."""
    try:
        info = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):  # closed, or not Linux
        return 0.0
    return _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT)[0] / 1000 if len(info) == _TCP_INFO_BYTES else 0.0
