"""Frontend: one process's HTTP, gRPC and metrics ports over a Backend.

    frontend = Frontend(backend, FrontendOptions(host="127.0.0.1"))
    await frontend.start()
    ...
    await frontend.close()      # drains

It listens on loopback by default. `close` accepts no more connections and requests, lets those in flight finish for up
to `drain_seconds`, and drops the rest. Several front ends may share their ports (`reuse_port`). The figures of the
others are then passed in as `others`, so that one metrics page has the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotrow.errors import OptionError
from hotrow.serve.frontend.http_protocol import HttpProtocol, MetricsPage
from hotrow.serve.frontend.http_server import HttpServer, is_loopback
from hotrow.serve.frontend.service import Service
from hotrow.serve.protocol.backend import Backend, Figures
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.metrics import sum_figures

if TYPE_CHECKING:
    from hotrow.serve.frontend.grpc_server import GrpcServer


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a front end's coroutine on uvloop, or on asyncio's own loop where uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


@dataclass(frozen=True)
class FrontendOptions:
    """A front end's addresses and limits. Port 0 is chosen by the system; None is not opened."""

    host: str = "127.0.0.1"
    http_port: int | None = 8000
    grpc_port: int | None = 8001
    metrics_port: int | None = 8002
    token: str | None = field(default=None, repr=False)  # for loading and unloading; required beyond loopback
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0
    reuse_port: bool = False

    def __post_init__(self) -> None:
        for option in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(self, option)
            if port is not None and (type(port) is not int or not 0 <= port < 65536):
                raise OptionError(f"{option}={port!r}; give a port from 0 to 65535, or None")
        if self.token is not None and (len(self.token) < 16 or not self.token.isascii() or " " in self.token):
            raise OptionError(
                "the token is short or has spaces; give 16 or more ASCII characters: openssl rand -hex 32"
            )


class Frontend:
    """The ports of one process. After `start`, `ports` has the port numbers.

    `others` returns the figures of the server's other front ends, for the metrics page.
    """

    def __init__(
        self,
        backend: Backend,
        options: FrontendOptions | None = None,
        others: Callable[[], Iterable[Figures]] = tuple,
    ) -> None:
        self.options = options or FrontendOptions()
        limits = self.options.limits
        self.service = Service(backend, limits, self.options.token, is_loopback(self.options.host))
        self.ports: dict[str, int] = {}
        self._http = HttpServer(
            HttpProtocol(self.service), limits, self.service.counts, "http", self.service.load_shedder
        )
        page = MetricsPage(self.service, lambda: [self.figures(), *others()])
        self._metrics = HttpServer(page, limits, self.service.counts, "metrics")
        self._grpc: GrpcServer | None = None

    async def start(self) -> None:
        """Open the ports. The error for a port that cannot be opened gives its number."""
        options = self.options
        try:
            if options.http_port is not None:
                self.ports["http"] = await self._http.start(options.host, options.http_port, options.reuse_port)
            if options.grpc_port is not None:
                from hotrow.serve.frontend.grpc_server import GrpcServer

                self._grpc = GrpcServer(self.service)
                self.ports["grpc"] = await self._grpc.start(options.host, options.grpc_port, options.reuse_port)
            if options.metrics_port is not None:
                self.ports["metrics"] = await self._metrics.start(options.host, options.metrics_port)
        except OSError as error:
            await self.close()
            raise OptionError(
                f"a port on {options.host} cannot be opened ({error}); free it or pass another: http_port="
                f"{options.http_port}, grpc_port={options.grpc_port}, metrics_port={options.metrics_port}"
            ) from error

    async def close(self) -> None:
        """Drain and close; health is "not ready" from now on, and a moment later requests are refused."""
        self.service.draining = True
        if self._grpc is not None:
            await self._grpc.settle()
        self.service.refusing = True
        grace = self.options.drain_seconds
        closing = [self._http.close(grace)]
        if self._grpc is not None:
            closing.append(self._grpc.close(grace))
        await asyncio.gather(*closing)
        await self._metrics.close(0.1)

    def figures(self) -> dict[tuple[str, ...], float]:
        """The metrics of this front end, without the engines'."""
        return sum_figures([self.service.figures(), self._http.figures(), self._metrics.figures()])
