"""Requests/s of the front end alone: both binary forms and JSON, with a backend that answers at once.

Run `python benchmarks/frontend.py`. The server and one load process share the machine; connections are kept alive, one
request in flight on each. `bare` is aiohttp's own web.Server reading the same bytes and answering the same number,
without looking at either: what connection.py replaces. `--profile` prints where the server's time goes instead.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import selectors
import socket
import time
from typing import Any

import numpy as np

ROWS, FEATURES, DENSE = 50, 26, 13


def body(form: str) -> tuple[bytes, int | None]:
    """A request of 50 candidates and 26 features, and the length of its JSON part."""
    draw = np.random.default_rng(0)
    keys, dense = draw.integers(-(2**62), 2**62, (ROWS, FEATURES)), draw.normal(size=(ROWS, DENSE)).astype(np.float32)
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


def request(form: str) -> bytes:
    """The bytes of a whole HTTP request."""
    data, header = body(form)
    head = f"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    if header is not None:
        head += f"Inference-Header-Content-Length: {header}\r\n"
    return head.encode() + b"\r\n" + data


class Quick:
    """A backend that answers at once."""

    def __init__(self) -> None:
        from hotrow.serve.backend import ModelInfo
        from hotrow.serve.request import Answer, Signature

        signature = Signature(tuple(f"C{i + 1}" for i in range(FEATURES)), frozenset(), DENSE)
        self._models = {"ctr": ModelInfo("ctr", "1", signature)}
        self._answer = Answer(np.linspace(-3, 3, ROWS, dtype=np.float32), "ctr", "1")

    def models(self) -> Any:
        return self._models

    def figures(self) -> Any:
        return {}

    async def infer(self, request: Any) -> Any:
        return self._answer


async def serve(kind: str, ports: Any) -> None:
    if kind == "bare":
        from aiohttp import web

        async def handle(call: web.BaseRequest) -> web.Response:
            await call.read()
            return web.Response(body=b"x" * 650, headers={"Inference-Header-Content-Length": "250"})

        server = await asyncio.get_running_loop().create_server(
            web.Server(handle, access_log=None, auto_decompress=False),  # type: ignore[arg-type]
            "127.0.0.1",
            0,
        )
        ports.put(server.sockets[0].getsockname()[1])
    else:
        from hotrow.serve.frontend import Frontend, FrontendOptions

        frontend = Frontend(Quick(), FrontendOptions(http_port=0, grpc_port=None, metrics_port=None))  # type: ignore
        await frontend.start()
        ports.put(frontend.ports["http"])
    await asyncio.sleep(600)


def server_process(kind: str, ports: Any, profiled: float) -> None:
    import uvloop

    if not profiled:
        uvloop.run(serve(kind, ports))
        return
    import cProfile
    import pstats

    importlib.import_module("hotrow.serve.frontend")
    profile = cProfile.Profile()
    profile.enable()
    try:
        uvloop.run(asyncio.wait_for(serve(kind, ports), profiled))
    except TimeoutError:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


def load(port: int, data: bytes, connections: int, seconds: float) -> float:
    """Requests/s over kept-alive connections with one request in flight on each."""
    selector = selectors.DefaultSelector()
    for _ in range(connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(data)
        selector.register(connection, selectors.EVENT_READ)
    answered, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for key, _ in selector.select():
            found: Any = key.fileobj
            reply = found.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200"), reply
            answered += 1
            found.sendall(data)
    return answered / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, nargs="*", default=[4, 32])
    parser.add_argument("--forms", nargs="*", default=["bare", "packed", "tensors", "json"])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    fork = multiprocessing.get_context("spawn")
    for form in options.forms:
        ports = fork.Queue()
        kind = "bare" if form == "bare" else "hotrow"
        seconds = options.seconds * len(options.connections) + 1 if options.profile else 0
        process = fork.Process(target=server_process, args=(kind, ports, seconds))
        process.start()
        port = ports.get(timeout=60)
        data = request("packed" if form == "bare" else form)
        for connections in options.connections:
            load(port, data, connections, 0.3)
            before = _cpu(process.pid)
            rate = load(port, data, connections, options.seconds)
            used = (_cpu(process.pid) - before) / (rate * options.seconds)
            print(f"{form:8} {connections:4} connections {rate:9,.0f} requests/s  server {used * 1e6:5.0f} µs/request")
        if options.profile:
            process.join()
        process.terminate()


def _cpu(pid: int | None) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
