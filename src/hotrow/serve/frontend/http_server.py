"""HttpServer: one port, its connections, and the limits that they share.

`HttpServer.held` counts the bytes of all requests in memory; a request that would exceed the limit `buffered` is
refused. Once per second a sweep closes connections that have been idle, slow to send or slow to read for too long, so a
request needs no timer of its own.
Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable

from hotrow.serve.frontend.http_connection import HttpConnection
from hotrow.serve.frontend.http_message import Call, Reply, error_reply
from hotrow.serve.frontend.load_shedding import SHED, LoadShedder
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.metrics import Counts

log = logging.getLogger("hotrow.serve")

_BACKLOG = 4096  # connections that the kernel queues until they are accepted
_ACCEPTED = 16  # connections accepted per iteration of the event loop

Handler = Callable[[Call], Awaitable[Reply]]


class HttpServer:
    """A port, its connections and their limits."""

    def __init__(
        self, handler: Handler, limits: Limits, counts: Counts, name: str, load_shedder: LoadShedder | None = None
    ) -> None:
        self.handler, self.limits, self.counts, self.name = handler, limits, counts, name
        self.load_shedder = load_shedder or LoadShedder(limits.connections)
        self.body_bytes, self.header_bytes = limits.body_bytes, limits.header_bytes
        self.buffered_bytes = limits.buffered_bytes
        shed = error_reply(SHED)
        self.shed_reply = shed.head(False, False) + shed.body
        self.connections: set[HttpConnection] = set()
        self.held = 0  # bytes of requests in memory, of all connections
        self.draining = False
        self._listening: list[socket.socket] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, reuse_port: bool = False) -> int:
        """Listen; returns the port, which the system chooses if `port` is 0."""
        loop = asyncio.get_running_loop()
        self._listening = listen(host, port, reuse_port)
        for each in self._listening:
            loop.add_reader(each.fileno(), self._accept, each)
        self._sweeper = loop.create_task(self._sweep())
        bound: int = self._listening[0].getsockname()[1]
        return bound

    def _accept(self, listening: socket.socket) -> None:
        """Accept up to _ACCEPTED waiting connections. uvloop's own server accepts one per iteration; under overload an
        iteration is long, and clients waited for seconds to connect."""
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED):
            try:
                accepted, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client has disconnected, or no file descriptor is free
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.warning("a connection cannot be accepted: %s", error)
                    loop.remove_reader(listening.fileno())
                    loop.call_later(1.0, self._accept_again, listening)
                    return
                continue
            accepted.setblocking(False)
            task = loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(lambda: HttpConnection(self, loop, accepted), accepted)

    def pause_idle_connections(self) -> None:
        """At the start of an overload, stop reading from all idle connections for a moment (load_shedding.py)."""
        paused = [connection for connection in self.connections if connection.pause_if_idle()]
        self.load_shedder.resume_later(paused, asyncio.get_running_loop())

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)

    async def close(self, grace: float) -> None:
        """Accept nothing new, finish requests in flight for up to `grace` seconds, then close."""
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
        """Gauges for the metrics page."""
        return {("hotrow_connections", self.name): len(self.connections), ("hotrow_buffered_bytes",): self.held}

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        period = min(1.0, self.limits.read_seconds / 2, self.limits.idle_seconds / 2, self.limits.answer_seconds / 2)
        while True:
            await asyncio.sleep(period)
            now = loop.time()
            for connection in list(self.connections):
                connection.check(now)


def listen(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    """A listening socket on each of the host's addresses, all on one port."""
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
