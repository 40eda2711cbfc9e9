"""Releases in a server: aliases, the canary's share and its fallback, the shadow's differences, restarts."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
from engines import EngineUnderTest, make_request, socket_of, with_backend
from in_process import Running
from plain_servable import PlainServable, load, write_version
from test_engine_process import expected
from test_engine_restart import INPUTS, front_end, until
from tritonclient.utils import InferenceServerException

from hotrow.serve.batching.shadow import SLICE_SECONDS
from hotrow.serve.frontend.canary import is_chosen
from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.processes.engine_process import EngineProcess
from hotrow.serve.protocol.metrics import render, sum_figures
from hotrow.serve.repository.releases import Release, Share, change_release

Start = Callable[..., EngineProcess]
StartProcess = Callable[..., EngineUnderTest]


def release(repository: Path, aliases: dict[str, int], **roles: tuple[int, float]) -> None:
    shares = {role: Share(*given) for role, given in roles.items()}
    change_release(repository / "ctr", lambda old: Release(aliases, **shares))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model with versions 1, 2 and 3."""
    for version in (1, 2, 3):
        write_version(tmp_path / "repository", "ctr", version)
    return tmp_path / "repository"


class Client:
    """Requests over HTTP to a front end."""

    def __init__(self, running: Running) -> None:
        self.running = running
        until(lambda: running.call(running.backend.ready()))

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.running.address("http"), timeout=30)
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text else None

    def version(self, key: str | None = None, name: str = "ctr", **body: Any) -> str:
        """The version that answers a request with this id."""
        given = {"inputs": INPUTS, **({} if key is None else {"id": key}), **body}
        status, answer = self.call("POST", f"/v2/models/{name}/infer", given)
        assert status == 200, answer
        return str(answer["model_version"])

    def load(self, name: str = "ctr") -> int:
        return self.call("POST", f"/v2/repository/models/{name}/load", {})[0]

    def figures(self) -> dict[tuple[str, ...], float]:
        return sum_figures([self.running.backend.figures(), self.running.frontend.figures()])

    def fallbacks(self) -> dict[str, float]:
        return {k[3]: v for k, v in self.figures().items() if k[0] == "hotrow_canary_fallback_total"}


def test_canary_takes_its_share_by_id_and_retries_land_on_the_same_version(
    repository: Path, start_engine: Start
) -> None:
    release(repository, {"stable": 1}, canary=(2, 0.3))
    engines = [start_engine(repository) for _ in range(2)]
    ids = [f"request-{number}" for number in range(60)]
    with front_end(*map(socket_of, engines)) as one, front_end(*map(socket_of, engines)) as other:
        client = Client(one)
        chosen = {id for id in ids if is_chosen("ctr", "2", 0.3, id)}
        assert 5 < len(chosen) < 40
        seen = {id: client.version(id) for id in ids}
        assert {id for id, version in seen.items() if version == "2"} == chosen and set(seen.values()) == {"1", "2"}
        assert {id: Client(other).version(id) for id in ids} == seen  # another front end agrees
        success = {k[2]: v for k, v in one.frontend.figures().items() if k[0] == "nv_inference_request_success"}
        assert success == {"1": 60 - len(chosen), "2": len(chosen)}
        release(repository, {"stable": 1}, canary=(2, 0.6))
        assert client.load() == 200
        again = {id: client.version(id) for id in ids}
        assert all(again[id] == "2" for id in chosen)  # a higher share keeps those that it has
        assert {id for id in ids if again[id] == "2"} == {id for id in ids if is_chosen("ctr", "2", 0.6, id)}
        release(repository, {"stable": 1})
        assert client.load() == 200
        assert {client.version(id) for id in ids} == {"1"}


def test_header_then_parameter_then_id_then_bytes_decide(repository: Path, start_engine: Start) -> None:
    release(repository, {"stable": 1}, canary=(2, 0.5))
    engine = start_engine(repository)
    users = [f"user-{number}" for number in range(100)]
    there = next(user for user in users if is_chosen("ctr", "2", 0.5, user))
    not_there = next(user for user in users if not is_chosen("ctr", "2", 0.5, user))
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        path, body = "/v2/models/ctr/infer", {"inputs": INPUTS, "id": not_there}
        assert client.call("POST", path, body)[1]["model_version"] == "1"
        body["parameters"] = {"routing_key": there}
        assert client.call("POST", path, body)[1]["model_version"] == "2"
        assert client.call("POST", path, body, {"Routing-Key": not_there})[1]["model_version"] == "1"
        by_bytes = Counter()
        for number in range(40):
            same = {"inputs": INPUTS, "parameters": {"deadline_ms": 10_000 + number}}
            versions = {client.call("POST", path, same)[1]["model_version"] for _ in range(3)}
            assert len(versions) == 1
            by_bytes.update(versions)
        assert set(by_bytes) == {"1", "2"}
        status, answer = client.call("POST", path, {"inputs": INPUTS, "parameters": {"routing_key": 7}})
        assert status == 400 and "routing_key" in answer["error"]

        grpc = over_grpc.InferenceServerClient(running.address("grpc"))
        tensors = [over_grpc.InferInput(i["name"], i["shape"], i["datatype"]) for i in INPUTS]
        for tensor, given in zip(tensors, INPUTS, strict=True):
            kind = np.int64 if given["datatype"] == "INT64" else np.float32
            tensor.set_data_from_numpy(np.array(given["data"], kind).reshape(given["shape"]))
        for key, version in ((there, "2"), (not_there, "1")):
            assert grpc.infer("ctr", tensors, headers={"routing-key": key}).get_response().model_version == version
        assert grpc.infer("ctr@canary", tensors).get_response().model_version == "2"
        with pytest.raises(InferenceServerException, match="no alias"):
            grpc.infer("ctr@nothing", tensors)


def test_stable_version_serves_though_newer_ones_exist(repository: Path, start_engine: Start) -> None:
    release(repository, {"stable": 1})
    engine = start_engine(repository, poll=0.05)

    async def work(backend: EngineClient) -> None:
        assert (await backend.infer(make_request(2))).version == "1"

    with_backend([socket_of(engine)], work)
    write_version(repository, "ctr", 4)
    assert engine.models.poll() == [] and engine.models.by_name["ctr"].current.name == "1"  # type: ignore[union-attr]
    release(repository, {"stable": 2})
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        until(lambda: client.version() == "2")  # by polling, without a restart
        (repository / "ctr" / "releases.json").unlink()
        until(lambda: client.version() == "4")  # the newest


def test_alias_names_a_version_wherever_a_name_is_accepted(repository: Path, start_engine: Start) -> None:
    release(repository, {"stable": 1, "candidate": 3}, shadow=(2, 0.0))
    engine = start_engine(repository)
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        assert [client.version(name=f"ctr@{alias}") for alias in ("stable", "candidate", "shadow")] == ["1", "3", "2"]
        assert client.call("GET", "/v2/models/ctr@candidate")[1]["name"] == "ctr"
        assert client.call("GET", "/v2/models/ctr@candidate/ready")[0] == 200
        stats = client.call("GET", "/v2/models/ctr@candidate/stats")[1]["model_stats"]
        assert [entry["version"] for entry in stats] == ["3"]
        status, answer = client.call("POST", "/v2/models/ctr@candidat/infer", {"inputs": INPUTS})
        assert status == 404 and "'candidate'" in answer["error"]
        status, answer = client.call("POST", "/v2/models/ctr@stable/versions/2/infer", {"inputs": INPUTS})
        assert status == 400 and "is version 1" in answer["error"]
        index = {(e["name"], e["version"]): e["state"] for e in client.call("POST", "/v2/repository/index")[1]}
        assert index["ctr@candidate", "3"] == "READY" and index["ctr", "3"] == "READY"

        assert client.call("POST", "/v2/repository/models/ctr@stable/unload", {})[0] == 400  # it is what serves
        assert client.call("POST", "/v2/repository/models/ctr@candidate/unload", {})[0] == 200
        assert client.call("POST", "/v2/models/ctr@candidate/infer", {"inputs": INPUTS})[0] == 404
        assert client.call("GET", "/v2/models/ctr@candidate/ready")[0] == 503
        assert engine.models.poll() == []
        assert client.call("GET", "/v2/models/ctr@candidate/ready")[0] == 503  # a poll does not load it again
        assert client.load("ctr@nothing") == 404
        assert client.load("ctr@candidate") == 200
        assert client.version(name="ctr@candidate") == "3"
        release(repository, {"stable": 1, "candidate": 2})
        assert client.load() == 200
        assert client.version(name="ctr@candidate") == "2"  # another version has the name now


def test_stable_version_answers_when_the_canary_does_not_load(repository: Path, start_engine: Start) -> None:
    (repository / "ctr" / "2" / "model.json").write_text("{")
    release(repository, {"stable": 1}, canary=(2, 1.0))
    engine = start_engine(repository)
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        assert [client.version(str(number)) for number in range(5)] == ["1"] * 5
        assert client.fallbacks() == {"not loaded": 5}
        index = {e["name"]: e for e in client.call("POST", "/v2/repository/index")[1] if "@" in e["name"]}
        assert index["ctr@canary"]["state"] == "UNAVAILABLE" and "corrupt" in index["ctr@canary"]["reason"]
        assert client.load() == 400  # and the answer says that it does not load
        write_version(repository, "ctr", 4)
        release(repository, {"stable": 1}, canary=(4, 1.0))
        assert client.load() == 200
        assert client.version("6") == "4" and client.fallbacks() == {"not loaded": 5}


def test_stable_version_answers_when_the_canary_fails(repository: Path, start_engine: Start) -> None:
    release(repository, {"stable": 1}, canary=(2, 1.0))
    engine = start_engine(repository)

    def fail(*_: object) -> Any:
        raise RuntimeError("out of memory")

    engine.models.by_name["ctr"].versions["2"].servable.run = fail
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        assert [client.version(str(number)) for number in range(5)] == ["1"] * 5
        assert client.fallbacks() == {"failed": 5}
        for path in ("/v2/models/ctr/versions/2/infer", "/v2/models/ctr@canary/infer"):  # asked for by name: its error
            status, answer = client.call("POST", path, {"inputs": INPUTS})
            assert status == 500 and "out of memory" in answer["error"]


def test_canary_with_other_inputs_answers_what_fits_it(repository: Path, start_engine: Start) -> None:
    write_version(repository, "ctr", 5, features=2)
    release(repository, {"stable": 1}, canary=(5, 1.0))
    engine = start_engine(repository)
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        assert client.version("a") == "1" and client.fallbacks() == {"inputs": 1}
        assert client.version(name="ctr@canary", inputs=INPUTS[:2] + INPUTS[3:]) == "5"


def test_shadow_counts_the_differences_and_answers_nothing(repository: Path, start_engine: Start) -> None:
    release(repository, {"stable": 1}, shadow=(2, 1.0))
    engine = start_engine(repository, max_rows=16)
    requests = [make_request(rows, seed) for seed, rows in enumerate([1, 7, 40, 16])]  # one of them in three parts
    names = ("requests", "rows", "values")
    counts = engine.models.by_name["ctr"].versions["2"].shadow

    async def ask(backend: EngineClient) -> list[Any]:
        found = []
        for request in requests:
            found.append(await backend.infer(request))
            until(lambda: counts.rows == sum(r.rows for r in requests[: len(found)]))
        return found

    answers = with_backend([socket_of(engine)], ask)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.version == "1"
        np.testing.assert_allclose(answer.logits, expected(request, 1), rtol=1e-5, atol=1e-6)
    differences = np.concatenate(
        [np.abs(1 / (1 + np.exp(-expected(r, 1))) - 1 / (1 + np.exp(-expected(r, 2)))) for r in requests]
    )
    shadow = engine.models.by_name["ctr"].versions["2"].shadow.figures(time.monotonic())
    assert [shadow[name] for name in names] == [4, 64, 64]
    np.testing.assert_allclose(shadow["total"], differences.sum(), rtol=1e-4)
    np.testing.assert_allclose(shadow["max"], differences.max(), rtol=1e-4)
    assert sum(shadow["buckets"]) == 64 and not any(shadow["dropped"].values())
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        until(lambda: ("hotrow_shadow_difference_count", "ctr", "2") in client.figures())
        page = render(client.figures())
    assert 'hotrow_shadow_difference_count{model="ctr",version="2"} 64' in page
    assert 'hotrow_shadow_difference_bucket{model="ctr",version="2",le="+Inf"} 64' in page
    assert "# TYPE hotrow_shadow_difference histogram" in page and "unknown metric" not in page
    assert 'hotrow_release_share{model="ctr",version="2",role="shadow"} 1' in page
    assert 'nv_inference_count{model="ctr",version="2"} 0' in page  # it answered nothing


def test_shadow_that_fails_changes_no_answer(repository: Path, start_engine: Start) -> None:
    release(repository, {"stable": 1}, shadow=(2, 1.0))
    engine = start_engine(repository)
    version = engine.models.by_name["ctr"].versions["2"]
    version.servable.tower = None
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        assert [client.version() for _ in range(5)] == ["1"] * 5
        until(lambda: version.shadow.dropped["failed"] == 5)
        assert version.shadow.rows == 0


def test_shadow_waits_for_rows_on_other_machines_by_a_deadline(
    repository: Path, start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, waits = PlainServable.run, dict[int, list[float]]()

    def run_until(servable: PlainServable, batch: Any, policy: str, until: float | None = None) -> Any:
        if until is not None:  # a warm-up has none
            waits.setdefault(id(servable), []).append(until - time.monotonic())
        return run(servable, batch, policy)

    monkeypatch.setattr(PlainServable, "waits_for_rows", True, raising=False)
    monkeypatch.setattr(PlainServable, "run", run_until)
    release(repository, {"stable": 1}, shadow=(2, 1.0))
    engine = start_engine(repository)
    model = engine.models.by_name["ctr"]
    with_backend([socket_of(engine)], lambda backend: backend.infer(make_request(5, deadline=time.monotonic() + 20.0)))
    until(lambda: model.versions["2"].shadow.requests == 1)
    (answered,), (shadowed,) = (waits[id(model.versions[name].servable)] for name in ("1", "2"))
    assert answered > 5.0  # most of the request's own time
    usual = model.group.service_time.of(5)
    assert shadowed <= max(2 * usual, SLICE_SECONDS) + 0.05  # a fraction of it, for requests may come meanwhile


def test_shadow_with_other_inputs_is_refused_by_name(repository: Path, start_engine: Start) -> None:
    write_version(repository, "ctr", 5, features=2)
    release(repository, {"stable": 1}, shadow=(5, 1.0))
    engine = start_engine(repository)
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        status, answer = client.call("POST", "/v2/repository/models/ctr/load", {})
        assert status == 400 and "version 5 takes other inputs than version 1" in answer["error"]
        assert client.version() == "1"


def test_shadow_finds_rows_on_ssd_before_it_is_compared(
    tmp_path: Path, start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    for version in (1, 2):
        write_version(repository, "ctr", version, features=3, rows=60_000)
    release(repository, {"stable": 1}, shadow=(2, 1.0))
    monkeypatch.setattr(
        "engines.load", lambda folder, options: load(folder, {**options, "ssd": str(tmp_path / folder.name)})
    )
    options = {"dram": "6MiB", "ssd": "yes"}
    engine = start_engine(repository, options=options, policy="wait", deadline=30.0)
    shadow = engine.models.by_name["ctr"].versions.get("2")
    assert shadow is not None and shadow.can_be_cold
    loaded: list[int] = []
    prefetch = shadow.servable.prefetch
    shadow.servable.prefetch = lambda batch, patient=False: (loaded.append(batch.size), prefetch(batch, patient))
    rng = np.random.default_rng(0)

    async def ask(backend: EngineClient) -> None:
        for seed in range(20):
            request = make_request(8, seed)
            for ids in request.ids:
                ids.values[:] = rng.integers(0, 60_000, len(ids.values))
            await backend.infer(request)

    with_backend([socket_of(engine)], ask)
    until(lambda: shadow.shadow.requests + sum(shadow.shadow.dropped.values()) >= 20)
    assert loaded and shadow.shadow.requests >= 15  # rows that were evicted again since then count as late


def test_restarted_engine_has_the_release_that_it_had(repository: Path, start_process: StartProcess) -> None:
    """Not that of the file, which the other engines may not have read yet."""
    release(repository, {"stable": 1}, canary=(2, 1.0), shadow=(3, 1.0))
    engine = start_process(repository, socket=repository.parent / "e.sock", ready=False)
    event = engine.wait_for("models")
    while len(event["versions"].get("ctr", ())) < 3:
        event = engine.wait_for("models")
    engine.kill()
    release(repository, {"stable": 3})
    again = {"restore": event["versions"], "restore_releases": event["releases"]}
    engine = start_process(repository, socket=repository.parent / "e.sock", **again)
    with front_end(engine.socket) as running:
        client = Client(running)
        assert client.version("a") == "2" and client.version(name="ctr@stable") == "1"
        assert client.version(name="ctr@shadow") == "3"
        assert client.load() == 200
        assert client.version("a") == "3"


def test_canary_that_a_restarted_engine_cannot_load_is_retried_and_never_becomes_the_default(
    repository: Path, start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.serve.processes.engine_process.FIGURES_SECONDS", 0.02)
    monkeypatch.setattr("hotrow.serve.processes.restore.FIRST_PAUSE", 0.1)
    released = {"ctr": Release({"stable": 1}, canary=Share(2, 1.0)).to_json()}
    files = {version: repository / "ctr" / version / "model.json" for version in ("1", "2")}
    good = {version: file.read_text() for version, file in files.items()}
    for file in files.values():
        file.write_text("{")
    engine = start_engine(repository, restore={"ctr": ["2", "1"]}, restore_releases=released)
    with front_end(socket_of(engine)) as running:
        client = Client(running)
        files["2"].write_text(good["2"])
        until(lambda: "2" in engine.models.by_name["ctr"].versions)
        assert client.call("POST", "/v2/models/ctr/infer", {"inputs": INPUTS})[0] == 503  # no stable version yet
        files["1"].write_text(good["1"])
        until(lambda: client.call("GET", "/v2/models/ctr/ready")[0] == 200)
        assert client.version("a") == "2" and client.version(name="ctr@stable") == "1"
        assert engine.restore.in_service() == {"ctr": ["2", "1"]}


def test_retired_canary_is_closed(repository: Path, start_engine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(PlainServable, "close", lambda self: closed.append(id(self)), raising=False)
    release(repository, {"stable": 1}, canary=(2, 0.5), shadow=(3, 1.0))
    engine = start_engine(repository)
    model = engine.models.by_name["ctr"]
    assert sorted(model.versions) == ["1", "2", "3"] and model.current is model.versions["1"]
    third = id(model.versions["3"].servable)
    release(repository, {"stable": 2})
    engine.models.load("ctr")
    assert list(model.versions) == ["1", "2"]  # promoted, and the one before is kept
    until(lambda: closed == [third])
