"""Requests/s of HTTP servers in front of the same protocol code, with a backend that answers at once.

    hotrow    serve/frontend/http_connection.py: our connection over httptools' public parser
    aiohttp   aiohttp's own web.Server
    uvicorn   uvicorn with httptools and uvloop, an ASGI application
    granian   granian (Rust, hyper) with uvloop, an RSGI application

Every server runs HttpProtocol, so only the HTTP layer differs. Each is a process of its own; all are up at once and are
asked in turns by one load process with kept-alive connections, one request in flight on each. The figures are medians
over the rounds: requests/s, and processor time of the server (all its processes) for one request.

With --engine there is a real engine behind them (`hotrow serve` with W-serve's model, whose engine they all ask), and
the load is that of `hotrow bench serve`: closed loops, then ten times the capacity with a deadline of 100 ms.

    pip install aiohttp uvicorn granian
    python benchmarks/frontend.py                      # all servers and forms
    python benchmarks/frontend.py --engine             # the same servers over a real engine, and under overload
    python benchmarks/frontend.py --rows 10000 --forms packed --servers hotrow granian
    python benchmarks/frontend.py --profile            # where hotrow's time goes instead
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

FEATURES, DENSE = 26, 13
SERVERS = ("hotrow", "aiohttp", "uvicorn", "granian")
ENGINE = "HOTROW_BENCH_ENGINE"  # the variable that names the engine's socket


def body(form: str, rows: int) -> tuple[bytes, int | None]:
    """A request of so many candidates and 26 features, and the length of its JSON part."""
    draw = np.random.default_rng(0)
    keys, dense = draw.integers(-(2**62), 2**62, (rows, FEATURES)), draw.normal(size=(rows, DENSE)).astype(np.float32)
    tensors = {"dense": dense}
    if form == "packed":
        tensors = {"keys": keys, **tensors}
    else:
        tensors = {**{f"C{i + 1}": np.ascontiguousarray(keys[:, i]) for i in range(FEATURES)}, **tensors}
    inputs: list[dict[str, Any]] = []
    for name, array in tensors.items():
        datatype = "INT64" if array.dtype == np.int64 else "FP32"
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if form == "json":
            entry["data"] = array.tolist()
        else:
            entry["parameters"] = {"binary_data_size": array.nbytes}
        inputs.append(entry)
    document = {"inputs": inputs, "parameters": {"binary_data_output": form != "json"}}
    text = json.dumps(document).encode()
    if form == "json":
        return text, None
    return text + b"".join(array.tobytes() for array in tensors.values()), len(text)


def request(form: str, rows: int) -> bytes:
    """The bytes of a whole HTTP request."""
    data, header = body(form, rows)
    head = f"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    if header is not None:
        head += f"Inference-Header-Content-Length: {header}\r\n"
    return head.encode() + b"\r\n" + data


class Quick:
    """A backend that answers at once."""

    def __init__(self) -> None:
        from hotrow.serve.protocol.backend import ModelInfo
        from hotrow.serve.protocol.request import Signature

        signature = Signature(tuple(f"C{i + 1}" for i in range(FEATURES)), frozenset(), DENSE)
        self._models = {"ctr": ModelInfo("ctr", "1", signature)}

    def models(self) -> Any:
        return self._models

    def figures(self) -> Any:
        return {}

    async def infer(self, request: Any) -> Any:
        from hotrow.serve.protocol.request import Answer

        return Answer(np.linspace(-3, 3, request.rows, dtype=np.float32), "ctr", "1")


async def protocol() -> Any:
    """The handler that all servers share: a Call in, a Reply out, or RefusedError."""
    from hotrow.serve.frontend.engine_client import EngineClient
    from hotrow.serve.frontend.http_protocol import HttpProtocol
    from hotrow.serve.frontend.service import Service
    from hotrow.serve.protocol.limits import Limits

    backend: Any = Quick()
    if path := os.environ.get(ENGINE):
        backend = EngineClient([path])
        await backend.open()
        while not await backend.ready():
            await asyncio.sleep(0.01)
    return HttpProtocol(Service(backend, Limits()))


async def answer(handler: Any, call: Any) -> Any:
    """The Reply to a call, refusals included."""
    from hotrow.serve.frontend.http_message import error_reply
    from hotrow.serve.protocol.request import RefusedError

    try:
        return await handler(call)
    except RefusedError as error:
        return error_reply(error)


def headers_of(reply: Any) -> list[tuple[str, str]]:
    """A Reply's headers, as pairs."""
    lines = [line.split(": ", 1) for line in reply.headers.decode().split("\r\n") if line]
    return [("content-type", reply.kind.decode()), *[(name.lower(), value) for name, value in lines]]


async def serve_hotrow(port: int) -> None:
    from hotrow.serve.frontend.ports import Frontend, FrontendOptions

    await Frontend(Quick(), FrontendOptions(http_port=port, grpc_port=None, metrics_port=None)).start()  # type: ignore
    await asyncio.sleep(3600)


async def serve_aiohttp(port: int) -> None:
    from aiohttp import web

    from hotrow.serve.frontend.http_message import Call

    handler = await protocol()

    async def handle(call: web.BaseRequest) -> web.Response:
        headers = {name.lower(): value for name, value in call.headers.items()}
        reply = await answer(handler, Call(call.method, call.path, headers, await call.read()))
        return web.Response(body=reply.body, status=reply.status, headers=dict(headers_of(reply)))

    server: Any = web.Server(handle, access_log=None, auto_decompress=False)  # type: ignore[arg-type]
    await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
    await asyncio.sleep(3600)


async def serve_uvicorn(port: int) -> None:
    import uvicorn

    from hotrow.serve.frontend.http_message import Call

    handler = await protocol()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parts, more = [], True
        while more:
            event = await receive()
            parts.append(event.get("body", b""))
            more = event.get("more_body", False)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        reply = await answer(handler, Call(scope["method"], scope["path"], headers, b"".join(parts)))
        lines = [(name.encode(), value.encode()) for name, value in headers_of(reply)]
        lines.append((b"content-length", str(len(reply.body)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": lines})
        await send({"type": "http.response.body", "body": reply.body})

    options: dict[str, Any] = {"http": "httptools", "lifespan": "off", "log_level": "warning", "access_log": False}
    await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, **options)).serve()


class RsgiApp:
    """The application that granian imports."""

    def __init__(self) -> None:
        self.handler: Any = None

    async def __call__(self, scope: Any, connection: Any) -> None:
        from hotrow.serve.frontend.http_message import Call

        if self.handler is None:
            self.handler = asyncio.ensure_future(protocol())
        handler = await self.handler
        call = Call(scope.method, scope.path, dict(scope.headers.items()), await connection())
        reply = await answer(handler, call)
        connection.response_bytes(reply.status, headers_of(reply), reply.body)


application = RsgiApp()


def server_process(kind: str, port: int, profiled: float) -> None:
    import uvloop

    serve = {"hotrow": serve_hotrow, "aiohttp": serve_aiohttp, "uvicorn": serve_uvicorn}[kind]
    if not profiled:
        return uvloop.run(serve(port))
    import cProfile
    import pstats

    importlib.import_module("hotrow.serve.frontend.ports")
    profile = cProfile.Profile()
    profile.enable()
    try:
        uvloop.run(asyncio.wait_for(serve(port), profiled))
    except TimeoutError:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


class Server:
    """One server under test, as processes."""

    def __init__(self, kind: str, profiled: float = 0.0) -> None:
        self.kind = self.name = kind
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        if kind == "granian":
            command = [
                sys.executable,
                "-m",
                "granian",
                "--interface",
                "rsgi",
                "--host",
                "127.0.0.1",
                "--loop",
                "uvloop",
            ]
            command += ["--port", str(self.port), "--workers", "1", "--loop", "uvloop", "--http", "1", "--no-ws"]
            command += ["--log-level", "warning"]
            folder = Path(__file__).parent
            self._process: Any = subprocess.Popen([*command, "frontend:application"], cwd=folder)
        else:
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=server_process, args=(kind, self.port, profiled), daemon=True)
            self._process.start()
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"{self.kind} does not listen on port {self.port} after 60 s")

    def cpu(self) -> dict[str, float]:
        """Seconds of processor time, children included."""
        import psutil

        main = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
        return {"front end": float(sum(each.user + each.system for each in times))}

    def text(self) -> str:
        """What it printed: it prints to our terminal."""
        return ""

    def join(self) -> None:
        """Wait for it, after a profile."""
        self._process.join()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGTERM)


def load(port: int, data: bytes, connections: int, seconds: float) -> float:
    """Requests/s over kept-alive connections with one request in flight on each."""
    selector = selectors.DefaultSelector()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    missing = dict.fromkeys(sockets, 0)  # bytes of the answer that have not come; 0: its head has not
    for connection in sockets:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(data)
        selector.register(connection, selectors.EVENT_READ)
    answered, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for key, _ in selector.select():
            found: Any = key.fileobj
            part = found.recv(1 << 20)
            if not missing[found]:
                assert part.startswith(b"HTTP/1.1 200"), part[:200]
                head, _, rest = part.partition(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                missing[found] = int(next(line[15:] for line in lines if line.startswith(b"content-length:")))
                part = rest
            missing[found] -= len(part)
            if not missing[found]:
                answered += 1
                found.sendall(data)
    elapsed = time.perf_counter() - began
    for connection in sockets:
        connection.close()
    return answered / elapsed


def over_engine(kinds: list[str], rounds: int) -> None:
    """All servers in front of one real engine: closed loops, then overload."""
    import tempfile

    from hotrow.bench.serving import serve as bench
    from hotrow.bench.serving.serve_process import load as client

    with tempfile.TemporaryDirectory() as folder:
        made = bench.Bench(Path(folder))
        path, _ = made.requests(bench.ROWS)
        hurried, _ = made.requests(bench.ROWS, deadline_ms=bench.DEADLINE_MS)
        started = time.time()
        with made.serve(bench.ROWS) as ours:
            sockets = list(Path(tempfile.gettempdir()).glob("hotrow-serve-*/engine-0.sock"))
            os.environ[ENGINE] = str(next(each for each in sockets if each.stat().st_mtime >= started))
            servers: dict[str, Any] = {kind: ours if kind == "hotrow" else Server(kind) for kind in kinds}
            for connections in bench.CONNECTIONS:
                phase = {"connections": connections, "seconds": 3.0, "warm": 0.5}
                rates: dict[str, list[Any]] = {kind: [] for kind in servers}
                for _ in range(rounds):
                    for kind, server in servers.items():
                        rates[kind] += client(server, path, phase)
                for kind, found in rates.items():
                    rate, p99 = (median(each[name] for each in found) for name in ("rate", "p99"))
                    cpu = median(each["cpu"]["front end"] / (each["rate"] * 3.5) for each in found)
                    says = f"{rate:7,.0f} requests/s  p99 {p99 * 1e3:6.1f} ms  {cpu * 1e6:5,.0f} us of the front end"
                    print(f"engine{connections:4} connections  {kind:8} {says}", flush=True)
            for kind, server in servers.items():
                steady = client(server, path, {"connections": 16, "seconds": 2.0})[0]["rate"]
                flood = {"connections": bench.BURST_CONNECTIONS, "seconds": 3.0, "rate": bench.BURST * steady}
                try:
                    during = client(server, hurried, flood)[0]
                except Exception as error:  # requests that were lost or failed: said, not hidden
                    print(f"overload  {kind:8} {error}"[:300], flush=True)
                    continue
                accepted = f"{during['rate'] / steady:.2f} of the capacity, p99 {during['p99'] * 1e3:,.0f} ms"
                refused = f"refused p99 {during.get('refused_p99', 0) * 1e3:,.0f} ms"
                offered = during["sent"] / during["seconds"] / steady
                print(f"overload  {kind:8} {offered:.1f} times offered: accepted {accepted}; {refused}", flush=True)
            for kind, server in servers.items():
                if kind != "hotrow":
                    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--connections", type=int, nargs="*", default=[4, 32])
    parser.add_argument("--forms", nargs="*", default=["packed", "tensors", "json"])
    parser.add_argument("--servers", nargs="*", default=SERVERS, choices=SERVERS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--engine", action="store_true", help="over a real engine, and under overload")
    options = parser.parse_args()
    if options.engine:
        return over_engine(options.servers, options.rounds)
    if options.profile:
        server = Server("hotrow", options.seconds + 2)
        load(server.port, request(options.forms[0], options.rows), options.connections[0], options.seconds)
        return server.join()
    servers = [Server(kind) for kind in options.servers]
    try:
        for form in options.forms:
            data = request(form, options.rows)
            for connections in options.connections:
                rates: dict[str, list[tuple[float, float]]] = {server.kind: [] for server in servers}
                for turn in range(options.rounds + 1):  # the first warms up
                    for server in servers:
                        before = server.cpu()
                        rate = load(server.port, data, connections, options.seconds if turn else 0.3)
                        if turn:
                            used = (server.cpu()["front end"] - before["front end"]) / (rate * options.seconds)
                            rates[server.kind].append((rate, used * 1e6))
                for kind, found in rates.items():
                    rate, used = (median(column) for column in zip(*found, strict=True))
                    print(f"{form:8}{connections:4} connections  {kind:8} {rate:9,.0f} requests/s {used:7,.0f} us each")
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
