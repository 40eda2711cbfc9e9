"""HTTP/1.1 connections: bytes in, one handler call at a time, bytes out, within limits of size and time.

The parser is aiohttp's (llhttp in C); the connection around it is ours. aiohttp's own server was measured first: it
takes 45 to 70 µs more for a request of 11 KB (a stream, a Request and a Response object, and several wake-ups each;
6,900 against 12,700 requests/s at 4 connections on 2 cores of an AMD EPYC, client included), and has no limit on the
time a client takes to send its request. `python benchmarks/frontend.py` shows both.

Invariants. A connection runs one handler at a time; what a client pipelines behind it waits, unread beyond a few
requests. All memory for bodies is counted in `HttpServer.held` before it grows past the limit. A connection is IDLE (no
byte of a request yet), READING or BUSY, and one sweep a second closes those that stay too long: no timer per request.
Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import re
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser

from hotrow.serve.door import AWAY, Door
from hotrow.serve.limits import Limits
from hotrow.serve.metrics import Counts
from hotrow.serve.request import RefusedError
from hotrow.serve.tensors import shown

log = logging.getLogger("hotrow.serve")

_PHRASES = {
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
}
_JSON = b"application/json"
_BACKLOG, _ACCEPTED = 4096, 16  # connections that may wait, and that are taken in one turn
_PIPELINED = 16  # requests that may wait behind the one being answered
_IDLE, _READING, _BUSY = 0, 1, 2
_PLAIN = re.compile(rb"POST /v2/models/[^ \r\n]{1,300}/infer HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,12})[ \t]*(?=\r\n|$)")
_SPECIAL = re.compile(rb"\r\n(?:transfer-encoding|expect|upgrade|connection|content-length[^:]|[ \t])")
_TOLD_BYTES, _LAST_CAME_AT, _LAST_CAME = 56, 52, struct.Struct("=I")  # of Linux's tcp_info: tcpi_last_data_recv, ms
_PARSER_BUFFER = 1 << 30  # we bound bodies ourselves; the parser must not pause the transport under us


class Call(NamedTuple):
    """A request as a handler sees it. Header names are found in any case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    waited: float = 0.0  # seconds that it lay in the socket


class Reply(NamedTuple):
    """What a handler gives back; `headers` are whole lines."""

    body: bytes = b""
    status: int = 200
    kind: bytes = _JSON
    headers: bytes = b""


Handler = Callable[[Call], Awaitable[Reply]]


def refusal(error: RefusedError) -> Reply:
    """The reply of an error: its status, Retry-After where it has one, and JSON with the cure."""
    headers = b""
    if error.retry_after is not None:
        headers += b"Retry-After: %d\r\n" % max(1, math.ceil(error.retry_after))
    if error.status == 401:
        headers += b"WWW-Authenticate: Bearer\r\n"
    return Reply(json.dumps({"error": error.message}).encode(), error.status, _JSON, headers)


class HttpServer:
    """A port, its connections and their limits."""

    def __init__(self, handler: Handler, limits: Limits, counts: Counts, name: str, door: Door | None = None) -> None:
        self.handler, self.limits, self.counts, self.name = handler, limits, counts, name
        self.door = door or Door(limits.connections)  # those who ask to infer come through it
        self.body_bytes, self.header_bytes = limits.body_bytes, limits.header_bytes
        self.buffered_bytes = limits.buffered_bytes
        refused = refusal(AWAY)
        self.turning_away = _head(refused, False, False) + refused.body
        self.connections: set[Connection] = set()
        self.held = 0
        self.draining = False
        self._listening: list[socket.socket] = []
        self._welcoming: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, reuse_port: bool = False) -> int:
        """Listen; gives the port, for those who asked for port 0."""
        loop = asyncio.get_running_loop()
        self._listening = listen(host, port, reuse_port)
        for each in self._listening:
            loop.add_reader(each.fileno(), self._accept, each)
        self._sweeper = loop.create_task(self._sweep())
        bound: int = self._listening[0].getsockname()[1]
        return bound

    def _accept(self, listening: socket.socket) -> None:
        """Take all who wait. The loop's own server takes one a turn, and in a flood turns are long: clients waited for
        seconds to be let in."""
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # a client that went away, or no file left
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("a connection cannot be taken: %s", error)
                    loop.remove_reader(listening.fileno())
                    loop.call_later(1.0, self._accept_again, listening)
                    return
                continue
            accepted.setblocking(False)
            task = loop.create_task(self._welcome(accepted))
            self._welcoming.add(task)
            task.add_done_callback(self._welcoming.discard)

    async def _welcome(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(lambda: Connection(self, loop, accepted), accepted)

    def hold_back(self) -> None:
        """A flood has begun: those who have not asked are not heard for a moment (door.py)."""
        held = [connection for connection in self.connections if connection.stop_hearing()]
        self.door.hold_back(held, asyncio.get_running_loop())

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)

    async def close(self, grace: float) -> None:
        """Take no new connection or request, finish what is in flight for up to `grace` seconds, close."""
        self.draining = True
        while self._listening:
            each = self._listening.pop()
            asyncio.get_running_loop().remove_reader(each.fileno())
            each.close()
        for connection in list(self.connections):
            connection.drain()
        until = asyncio.get_running_loop().time() + grace
        while self.connections and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def figures(self) -> dict[tuple[str, ...], float]:
        """What a moment's look shows."""
        return {("hotrow_connections", self.name): len(self.connections), ("hotrow_buffered_bytes",): self.held}

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        period = min(1.0, self.limits.read_seconds / 2, self.limits.idle_seconds / 2, self.limits.answer_seconds / 2)
        while True:
            await asyncio.sleep(period)
            now = loop.time()
            for connection in list(self.connections):
                connection.check(now)


class Connection(BaseProtocol):
    """One client's connection."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
        super().__init__(loop)
        self._server, self._socket = server, accepted
        self._http = HttpRequestParser(
            self,
            loop,
            _PARSER_BUFFER,
            max_line_size=min(server.header_bytes, 8190),
            max_field_size=min(server.header_bytes, 8190),
            auto_decompress=False,
        )
        self._state, self._since = _IDLE, loop.time()
        self._waiting: deque[tuple[Any, Any]] = deque()  # message, payload: the first is next
        self._task: asyncio.Task[None] | None = None
        self._held = 0  # bytes that count in server.held
        self._head = 0  # bytes of a message whose headers are not complete
        self._body = 0  # bytes since the last message's headers were
        self._unread = 0  # bytes to come of a request that is turned away
        self._waited = 0.0  # seconds that a request lay in the socket
        self._last = False  # close after what is waiting
        self._stuck = 0.0  # when the client stopped reading its answers

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        server = self._server
        server.connections.add(self)
        if len(server.connections) > server.limits.connections:
            server.counts.add("hotrow_connections_refused_total", "too_many")
            limit = server.limits.connections
            self._refuse(RefusedError(503, f"all {limit} connections are taken (connections=); ask again", 1.0))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._server.connections.discard(self)
        self._release(self._held)
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._last:
            return
        server, size = self._server, len(data)
        if self._unread:
            return self._throw_away(data)
        server.door.read(self._loop)
        if self._state == _IDLE:
            self._state, self._since, self._waited = _READING, self._loop.time(), lain(self._socket)
            if server.door.shut_for(self._waited) and (length := plain_length(data, server.body_bytes)):
                if not server.door.crowded:
                    server.hold_back()
                self._unread = length
                return self._throw_away(data)
        self._held += size
        server.held += size
        if server.held > server.buffered_bytes:
            self._refuse(RefusedError(503, "all memory for requests is taken (buffered=); ask again", 1.0))
            return
        try:
            messages, upgraded, _ = self._http.feed_data(data)
        except Exception as error:
            server.counts.add("hotrow_connections_refused_total", "bad")
            status = 431 if "too long" in str(error).lower() or type(error).__name__ == "LineTooLong" else 400
            self._refuse(RefusedError(status, f"this is no HTTP/1.1 request: {shown(str(error))}; see RFC 9112"))
            return
        if messages:
            long = self._head + size > server.header_bytes  # then the headers themselves may be
            self._head, self._body = 0, 0
            for message, payload in messages:
                if not self._accept(message, payload, long):
                    return
            if upgraded:
                self._last = True
        elif self._waiting and not self._waiting[-1][1].is_eof():
            self._body += size
            if self._body > server.body_bytes:  # chunked: no length was announced
                self._refuse(too_large(self._body, server.limits))
                return
        else:
            self._head += size
            if self._head > server.header_bytes:
                self._refuse(_headers_too_large(server.limits))
                return
        if self._state != _BUSY:
            self._next()
        elif len(self._waiting) > _PIPELINED and self.transport is not None:
            self.transport.pause_reading()

    def _throw_away(self, data: bytes) -> None:
        """Bytes of a request that is turned away unread; behind the last of them it gets its answer."""
        more, self._unread = data[self._unread :], max(0, self._unread - len(data))
        if self._unread:
            return
        self._state, self._since = _IDLE, self._loop.time()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(self._server.turning_away)
            self.transport.pause_reading()
            self._server.door.shut_out(self, self._loop)
        if more:
            self.data_received(more)

    def stop_hearing(self) -> bool:
        """Not to be read for a while, unless it has begun to say something. Whether that is so now."""
        if self._state != _IDLE or self._last or self.transport is None or self.transport.is_closing():
            return False
        self.transport.pause_reading()
        return True

    def let_in(self) -> None:
        """One that was shut out is read again."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """The client sends no more; what it sent whole is still answered."""
        if self._last:
            return True
        if self._waiting and not self._waiting[0][1].is_eof() and self._state != _BUSY:
            self._refuse(RefusedError(400, "the body ended before the length that its headers announce; send it whole"))
            return True
        self._last = True
        return self._state == _BUSY

    def pause_reading(self) -> None:
        """Nothing: the parser's streams ask for it by their own limits, and this class pauses by its own."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Nothing; the parser's base would feed the parser again from within, while a request is being taken."""

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self._loop.time()

    def check(self, now: float) -> None:
        """Close a connection that has taken too long."""
        limits, counts = self._server.limits, self._server.counts
        waited = now - self._since
        if self._paused and now - self._stuck > limits.answer_seconds:
            counts.add("hotrow_connections_refused_total", "slow")
            self.abort()
        elif self._last:
            if self._state != _BUSY and waited > limits.read_seconds:
                self.abort()
        elif self._state == _READING and waited > limits.read_seconds:
            counts.add("hotrow_connections_refused_total", "slow")
            self._refuse(
                RefusedError(408, f"the request was not whole after {limits.read_seconds:g} s; send it in one go")
            )
        elif self._state == _IDLE and waited > limits.idle_seconds:
            counts.add("hotrow_connections_refused_total", "idle")
            self._close()

    def drain(self) -> None:
        """Close when nothing is in flight."""
        if self._state == _BUSY:
            self._last = True
        elif not self._last:
            self._close()

    def abort(self) -> None:
        """Close now, whatever is in flight."""
        if self.transport is not None:
            self.transport.abort()

    def _accept(self, message: Any, payload: Any, long: bool) -> bool:
        """Whether a request whose headers have come may send its body."""
        server = self._server
        announced = message.headers.get("Content-Length")  # the parser has seen that it is a number
        if announced is not None and int(announced) > server.body_bytes:
            self._refuse(too_large(int(announced), server.limits))
            return False
        if long and sum(len(name) + len(value) + 4 for name, value in message.raw_headers) > server.header_bytes:
            self._refuse(_headers_too_large(server.limits))
            return False
        if message.upgrade or message.method == "CONNECT":
            self._refuse(RefusedError(501, "this server speaks HTTP/1.1 alone; send no Upgrade and no CONNECT"))
            return False
        if "Expect" in message.headers and self.transport is not None and not payload.is_eof():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._waiting.append((message, payload))
        return True

    def _next(self) -> None:
        """Answer the first request that waits, if it is whole."""
        if not self._waiting:
            self._state = _IDLE if self._head == 0 else _READING
            self._release(self._held)
            return
        message, payload = self._waiting[0]
        if not payload.is_eof():
            self._state = _READING
            return
        self._waiting.popleft()
        self._state = _BUSY
        try:
            body = payload.read_nowait()
        except Exception as error:
            self._state = _READING
            self._refuse(RefusedError(400, f"the body cannot be read: {shown(str(error))}; send it as its headers say"))
            return
        self._task = self._loop.create_task(self._answer(message, body))

    async def _answer(self, message: Any, body: bytes) -> None:
        try:
            reply = await self._server.handler(Call(message.method, message.path, message.headers, body, self._waited))
        except RefusedError as error:
            reply = refusal(error)
        except Exception:
            log.exception("%s %s failed", message.method, shown(message.path))
            reply = refusal(RefusedError(500, "the server failed to answer; its log says why"))
        self._task = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        more = self._waiting and self._waiting[0][1].is_eof()
        last = message.should_close or self._server.draining or (self._last and not more)
        transport.write(_head(reply, last, message.version == (1, 0)) + reply.body)
        self._since = self._loop.time()
        if last:
            self._last = True
            self._close()
            return
        self._release(len(body) if self._waiting else self._held)
        if self._waiting and len(self._waiting) <= _PIPELINED // 2:
            transport.resume_reading()
        self._next()

    def _refuse(self, error: RefusedError) -> None:
        """Say why, and close once it is said; nothing more is read."""
        self._last = True
        self._waiting.clear()
        self._release(self._held)
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._state == _BUSY:  # an earlier request is being answered: its answer comes first, then the end
            return
        reply = refusal(error)
        transport.write(_head(reply, True, False) + reply.body)
        self._state, self._since = _IDLE, self._loop.time()
        self._close_gently()

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _close_gently(self) -> None:
        """Close what we send and throw away what the client still sends for a moment: closing at once would reset the
        connection, and the client would lose the reason with it."""
        transport = self.transport
        assert transport is not None
        if transport.can_write_eof():
            transport.write_eof()
            self._loop.call_later(1.0, transport.abort)
        else:
            transport.close()

    def _release(self, size: int) -> None:
        size = min(size, self._held)
        self._held -= size
        self._server.held -= size


def lain(accepted: socket.socket) -> float:
    """Seconds since the last bytes came to this socket, as the kernel knows it, to some milliseconds; 0 where it does
    not say. What was just read came then: in a flood that is where requests grow old."""
    try:
        told = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOLD_BYTES)
    except (OSError, AttributeError):  # closed, or another system
        return 0.0
    return _LAST_CAME.unpack_from(told, _LAST_CAME_AT)[0] / 1000 if len(told) == _TOLD_BYTES else 0.0


def plain_length(data: bytes, most: int) -> int:
    """The length of a request to infer, head and body, as its first bytes announce it; 0 for one that is not plain,
    or not of at most so many bytes: such a one is read with care.

    >>> plain_length(b"POST /v2/models/ctr/infer HTTP/1.1\\r\\nContent-Length: 3\\r\\n\\r\\nab", 100)
    60
    """
    end = data.find(b"\r\n\r\n", 0, 8192)
    if end < 0 or _PLAIN.match(data) is None:
        return 0
    head = data[:end].lower()
    lengths = _LENGTH.findall(head)
    if len(lengths) != 1 or _SPECIAL.search(head) or int(lengths[0]) > most:
        return 0
    return end + 4 + int(lengths[0])


def too_large(size: int, limits: Limits) -> RefusedError:
    """The error of a body beyond the limit."""
    return RefusedError(413, f"a body of {size} bytes or more is over the limit body={limits.body}; send fewer rows")


def _headers_too_large(limits: Limits) -> RefusedError:
    return RefusedError(431, f"the headers are over the limit headers={limits.headers}; send fewer or shorter ones")


def _head(reply: Reply, last: bool, old: bool) -> bytes:
    ending = b"Connection: close\r\n\r\n" if last else b"Connection: keep-alive\r\n\r\n" if old else b"\r\n"
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b" % (
        reply.status,
        _PHRASES.get(reply.status, "Error").encode(),
        reply.kind,
        len(reply.body),
        reply.headers,
        ending,
    )


def listen(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    """A socket that listens on each of the host's addresses, all on one port."""
    found: list[socket.socket] = []
    kinds = dict.fromkeys(
        info[0::4] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    )
    try:
        for family, address in kinds:
            each = socket.socket(family, socket.SOCK_STREAM)
            found.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind((address[0], port, *address[2:]))
            port = each.getsockname()[1]
            each.listen(_BACKLOG)
            each.setblocking(False)
    except OSError:
        for each in found:
            each.close()
        raise
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on this address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    import ipaddress

    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)
