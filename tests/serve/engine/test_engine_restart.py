"""An engine that dies and restarts: meanwhile its models are unavailable (503), never unknown (404)."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as over_grpc
from engines import EngineUnderTest, make_request, socket_of, with_backend
from in_process import Running
from plain_servable import write_version
from tritonclient.utils import InferenceServerException

from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.processes.engine_process import EngineProcess
from hotrow.serve.protocol.request import RefusedError

Start = Callable[..., EngineProcess]
StartProcess = Callable[..., EngineUnderTest]

INPUTS = [{"name": f"f{i}", "shape": [2], "datatype": "INT64", "data": [1, 2]} for i in range(3)]
INPUTS.append({"name": "dense", "shape": [2, 4], "datatype": "FP32", "data": [0.5] * 8})
CALLS = (
    ("POST", "/v2/models/ctr/infer", json.dumps({"inputs": INPUTS})),
    ("POST", "/v2/models/ctr/versions/1/infer", json.dumps({"inputs": INPUTS})),
    ("GET", "/v2/models/ctr", None),
    ("GET", "/v2/models/ctr/config", None),
    ("GET", "/v2/models/ctr/ready", None),
    ("GET", "/v2/models/ctr/stats", None),
    ("POST", "/v2/repository/index", "{}"),
)


class Clients:
    """Threads that send requests without end and count the statuses."""

    def __init__(self, running: Running) -> None:
        self.running, self.answers, self.wrong = running, Counter[tuple[str, Any]](), list[str]()
        self._stop = threading.Event()
        works = [lambda call=call: self._http(*call) for call in CALLS] + [self._grpc]
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]

    def _repeat(self, work: Callable[[], Any]) -> None:
        try:
            while not self._stop.is_set():
                work()
                time.sleep(0.01)
        except Exception as error:
            self.wrong.append(repr(error))

    def _http(self, method: str, path: str, body: str | None) -> None:
        connection = http.client.HTTPConnection(self.running.address("http"), timeout=30)
        connection.request(method, path, body)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        self.answers[path, answer.status] += 1
        may_retry = answer.getheader("Retry-After") is not None or path.endswith("/ready")
        if answer.status not in (200, 503) or (answer.status == 503 and not may_retry):
            self.wrong.append(f"{path}: {answer.status} {text}")

    def _grpc(self) -> None:
        if not hasattr(self, "_client"):
            self._client = over_grpc.InferenceServerClient(self.running.address("grpc"))
            self._inputs = [over_grpc.InferInput(i["name"], i["shape"], i["datatype"]) for i in INPUTS]
            import numpy as np

            for tensor, given in zip(self._inputs, INPUTS, strict=True):
                kind = np.int64 if given["datatype"] == "INT64" else np.float32
                tensor.set_data_from_numpy(np.array(given["data"], kind).reshape(given["shape"]))
        for call in (
            lambda: self._client.infer("ctr", self._inputs),
            lambda: self._client.get_model_metadata("ctr"),
            lambda: self._client.get_inference_statistics("ctr"),
        ):
            try:
                call()
                self.answers["grpc", "OK"] += 1
            except InferenceServerException as error:
                self.answers["grpc", error.status()] += 1
                if error.status() != "StatusCode.UNAVAILABLE":
                    self.wrong.append(str(error))

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


@contextmanager
def front_end(*sockets: str) -> Iterator[Running]:
    with Running(EngineClient(sockets)) as running:  # type: ignore[arg-type]
        running.call(running.backend.open())  # type: ignore[attr-defined]
        yield running
        running.call(running.backend.close())  # type: ignore[attr-defined]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)


def test_killed_engine_is_503_under_load_and_nothing_is_404(tmp_path: Path, start_process: StartProcess) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    socket = tmp_path / "e.sock"
    engine = start_process(tmp_path / "repository", socket=socket)
    with front_end(str(socket)) as running:
        until(lambda: running.call(running.backend.ready()))
        with Clients(running) as clients:
            paths = {path for _, path, _ in CALLS}
            for _ in range(2):
                clients.answers.clear()
                until(lambda: {path for path, status in clients.answers if status in (200, "OK")} >= paths | {"grpc"})
                engine.kill()
                until(lambda: not running.call(running.backend.ready()))
                clients.answers.clear()
                until(lambda: clients.answers["/v2/models/ctr/infer", 503] >= 20)
                until(lambda: clients.answers["grpc", "StatusCode.UNAVAILABLE"] >= 3)
                until(lambda: clients.answers["/v2/models/ctr/ready", 503] >= 3)
                until(lambda: clients.answers["/v2/models/ctr", 200] >= 3)  # what it takes is known all the time
                engine = start_process(tmp_path / "repository", socket=socket)
        assert not clients.wrong, clients.wrong[:3]
        connection = http.client.HTTPConnection(running.address("http"), timeout=30)
        connection.request("GET", "/v2/models/other")
        assert connection.getresponse().status == 404  # the repository has no such model


def test_front_end_that_begins_without_an_engine_knows_no_model_yet(tmp_path: Path, start_engine: Start) -> None:
    with front_end(str(tmp_path / "inside-0.sock")) as running:
        for path, status in (("/v2/models/ctr", 503), ("/v2/health/ready", 503), ("/v2/health/live", 200)):
            connection = http.client.HTTPConnection(running.address("http"), timeout=30)
            connection.request("GET", path)
            assert connection.getresponse().status == status
        write_version(tmp_path / "repository", "ctr", 1)
        start_engine(tmp_path / "repository")
        until(lambda: running.call(running.backend.ready()))
        for path, status in (("/v2/models/ctr", 200), ("/v2/models/other", 404)):
            connection = http.client.HTTPConnection(running.address("http"), timeout=30)
            connection.request("GET", path)
            assert connection.getresponse().status == status


def test_when_one_of_two_engines_dies_the_other_serves(tmp_path: Path, start_engine: Start) -> None:
    """Meanwhile nothing is loaded or unloaded, because the engines would serve different models."""
    write_version(tmp_path / "repository", "ctr", 1)
    write_version(tmp_path / "repository", "feed", 1)
    one, two = start_engine(tmp_path / "repository"), start_engine(tmp_path / "repository")

    async def work(backend: EngineClient) -> None:
        while not all(connection.ready for connection in backend.connections):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(one.stop)
        while backend.connections[0].ready:
            await asyncio.sleep(0.01)
        assert await backend.ready() and backend.models()["ctr"].state == "READY"
        for version in (None, "1"):
            assert (await backend.infer(make_request(2, version=version))).version == "1"
        assert len(await backend.statistics("ctr")) == 1
        for change in (backend.unload("feed"), backend.load("feed")):
            with pytest.raises(RefusedError, match="an engine is starting") as refused:
                await change
            assert (refused.value.status, refused.value.retry_after) == (503, 1.0)
        assert (await backend.infer(make_request(2, model="feed"))).version == "1"

    with_backend([socket_of(one), socket_of(two)], work)


def test_model_that_one_of_two_engines_has_unloaded_already_can_be_unloaded(
    tmp_path: Path, start_engine: Start
) -> None:
    """One engine restarted during the unload, and has loaded the model again."""
    write_version(tmp_path / "repository", "ctr", 1)
    one, two = start_engine(tmp_path / "repository"), start_engine(tmp_path / "repository")

    async def work(backend: EngineClient) -> None:
        while not all(connection.ready for connection in backend.connections):
            await asyncio.sleep(0.01)
        await backend.connections[0].command(op="unload", name="ctr")
        assert (await backend.infer(make_request(2))).version == "1"  # by the other
        await backend.unload("ctr")
        assert not backend.models()
        with pytest.raises(RefusedError) as refused:
            await backend.unload("ctr")
        assert refused.value.status == 404

    with_backend([socket_of(one), socket_of(two)], work)


def test_restarted_engine_serves_the_same_versions(tmp_path: Path, start_process: StartProcess) -> None:
    """The version that was in service with the one before it, and nothing that was unloaded."""
    repository = tmp_path / "repository"
    for name, version in (("ctr", 1), ("feed", 1)):
        write_version(repository, name, version)
    engine = start_process(repository, socket=tmp_path / "e.sock")

    async def change(backend: EngineClient) -> None:
        write_version(repository, "ctr", 2)
        await backend.load("ctr")
        await backend.load("ctr", "1")  # back again
        await backend.unload("feed")

    with_backend([engine.socket], change)
    event = engine.wait_for("models")
    while "feed" in event["versions"] or event["versions"]["ctr"] != ["2", "1"]:
        event = engine.wait_for("models")
    engine.kill()
    write_version(repository, "ctr", 3)  # newer, and never loaded
    engine = start_process(repository, socket=tmp_path / "e.sock", restore=event["versions"])

    async def check(backend: EngineClient) -> None:
        assert (await backend.infer(make_request(2))).version == "1"
        assert (await backend.infer(make_request(2, version="2"))).version == "2"
        for request in (make_request(2, model="feed"), make_request(2, version="3")):
            with pytest.raises(RefusedError) as refused:
                await backend.infer(request)
            assert refused.value.status == 404

    with_backend([engine.socket], check)


def test_model_that_was_in_service_and_does_not_load_is_unavailable_until_it_does(
    tmp_path: Path, start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.serve.processes.engine_process.FIGURES_SECONDS", 0.02)
    monkeypatch.setattr("hotrow.serve.processes.restore.FIRST_PAUSE", 0.1)
    for name in ("ctr", "feed"):
        write_version(tmp_path / "repository", name, 1)
    written = tmp_path / "repository" / "ctr" / "1" / "model.json"
    good = written.read_text()
    written.write_text("{")
    engine = start_engine(tmp_path / "repository", restore={"ctr": ["1"], "feed": ["1"]})
    assert engine.restore.in_service() == {"ctr": ["1"], "feed": ["1"]}  # and the restarted engine tries again too
    with front_end(socket_of(engine)) as running:
        until(lambda: running.call(running.backend.ready()))
        connection = http.client.HTTPConnection(running.address("http"), timeout=30)
        connection.request("POST", "/v2/models/ctr/infer", json.dumps({"inputs": INPUTS}))
        answer = connection.getresponse()
        assert answer.status == 503 and "corrupt" in answer.read().decode() and answer.getheader("Retry-After")
        written.write_text(good)
        until(lambda: "ctr" in _ready(running))
        connection.request("POST", "/v2/models/ctr/infer", json.dumps({"inputs": INPUTS}))
        assert connection.getresponse().status == 200


def _ready(running: Running) -> list[str]:
    return [name for name, info in running.backend.models().items() if info.state == "READY"]
