"""Engines as processes or in the test's process, and requests to them through an EngineClient."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from plain_servable import load

from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.processes.engine_process import EngineOptions, EngineProcess
from hotrow.serve.protocol.request import Ids, Request


class EngineUnderTest:
    """An engine process. `wait_for` reads its events."""

    def __init__(self, repository: Path, socket: Path, **options: Any) -> None:
        self.socket = str(socket)
        given = {"socket": self.socket, "repository": str(repository), "loader": "plain_servable:load", **options}
        code = "import sys; from hotrow.serve.processes.engine_process import main; sys.exit(main())"
        self.process = forked.python(code, log=socket.with_suffix(".log"), pipes=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            content: dict[str, Any] = json.loads(line)
            if content["event"] == event:
                return content
        raise AssertionError(f"the engine ended with {self.process.wait(60)} before the event {event!r}")

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., EngineUnderTest]]:
    engines: list[EngineUnderTest] = []

    def start(repository: Path, ready: bool = True, **options: Any) -> EngineUnderTest:
        socket = options.pop("socket", tmp_path / f"engine-{len(engines)}.sock")
        engine = EngineUnderTest(repository, socket, **options)
        engines.append(engine)
        if ready:
            engine.wait_for("ready")
        return engine

    yield start
    for engine in engines:
        engine.kill()


def with_backend(sockets: list[str], work: Callable[[EngineClient], Awaitable[Any]], ready: bool = True) -> Any:
    """Run `work` with a backend over the engines, on a loop of its own."""

    async def run() -> Any:
        backend = EngineClient(sockets)
        await backend.open()
        until = time.monotonic() + 10
        while ready and not (await backend.ready() and backend.models()):
            assert time.monotonic() < until, "no engine became ready"
            await asyncio.sleep(0.005)
        try:
            return await work(backend)
        finally:
            await backend.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


def socket_of(engine: EngineUnderTest | EngineProcess) -> str:
    return engine.options.socket if isinstance(engine, EngineProcess) else engine.socket


def make_request(rows: int, seed: int = 0, model: str = "ctr", **options: Any) -> Request:
    """For models of plain_servable: 3 features, the first shared, and 4 dense columns."""
    rng = np.random.default_rng(seed)
    ids = (
        Ids(rng.integers(0, 1000, 1), shared=True),
        Ids(rng.integers(0, 1000, rows)),
        Ids(rng.integers(0, 1000, 2 * rows), offsets=np.arange(rows + 1) * 2),
    )
    return Request(model, rows, ids, dense=rng.random((rows, 4), np.float32), **options)


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Engines in the test's own process, behind real sockets: they start faster than processes."""
    engines: list[EngineProcess] = []

    def start(repository: Path, **options: Any) -> EngineProcess:
        socket = options.pop("socket", tmp_path / f"inside-{len(engines)}.sock")
        engine = EngineProcess(EngineOptions(str(socket), str(repository), drain=2.0, **options), load)
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.stop()
