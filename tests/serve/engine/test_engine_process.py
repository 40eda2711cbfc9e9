"""An engine behind its socket: right answers, big requests, versions, death, drain."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import EngineUnderTest, make_request, socket_of, with_backend
from plain_servable import PlainServable, write_version

from hotrow.batch import Jagged, KeyedBatch
from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.processes.engine_process import EngineProcess
from hotrow.serve.protocol.request import Answer, RefusedError, Request

Start = Callable[..., EngineProcess]
StartProcess = Callable[..., EngineUnderTest]


def expected(request: Request, seed: int) -> np.ndarray:
    """The model's own logits for one request, by plain tensors."""
    model = PlainServable({"seed": seed, "features": 3, "dense": 4}, {})
    ids = {}
    for number, feature in enumerate(request.ids):
        values = torch.from_numpy(feature.values)
        values = values.repeat(request.rows) if feature.shared else values
        offsets = None if feature.offsets is None else torch.from_numpy(feature.offsets)
        ids[f"f{number}"] = Jagged(values, offsets)
    assert request.dense is not None
    return model.run(KeyedBatch(ids, dense=torch.from_numpy(request.dense)), "initial")[0].numpy()


def test_concurrent_requests_get_their_own_answers(tmp_path: Path, start_engine: Start) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    engine = start_engine(tmp_path / "repository")
    requests = [make_request(rows, seed) for seed, rows in enumerate([1, 50, 7, 1, 20] * 8)]

    async def ask(backend: EngineClient) -> list[Answer]:
        return await asyncio.gather(*[backend.infer(request) for request in requests])

    for request, answer in zip(requests, with_backend([socket_of(engine)], ask), strict=True):
        assert (answer.model, answer.version, answer.late_rows) == ("ctr", "1", 0)
        np.testing.assert_allclose(answer.logits, expected(request, 1), rtol=1e-5, atol=1e-6)


def test_request_larger_than_a_batch_is_split_and_put_together(tmp_path: Path, start_engine: Start) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    engine = start_engine(tmp_path / "repository", max_rows=16, lanes=2)
    requests = [make_request(100, 1), make_request(16, 2), make_request(17, 3)]

    async def ask(backend: EngineClient) -> list[Answer]:
        return await asyncio.gather(*[backend.infer(request) for request in requests])

    for request, answer in zip(requests, with_backend([socket_of(engine)], ask), strict=True):
        np.testing.assert_allclose(answer.logits, expected(request, 1), rtol=1e-5, atol=1e-6)


def test_version_switch_under_load_fails_no_request(tmp_path: Path, start_engine: Start) -> None:
    repository = tmp_path / "repository"
    write_version(repository, "ctr", 1)
    engine = start_engine(repository, lanes=2)
    request = make_request(5, 1)
    wanted = {str(version): expected(request, version) for version in (1, 2)}

    async def work(backend: EngineClient) -> list[str]:
        seen: list[str] = []
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                answer = await backend.infer(request)
                seen.append(answer.version)
                np.testing.assert_allclose(answer.logits, wanted[answer.version], rtol=1e-5, atol=1e-6)

        clients = [asyncio.create_task(client()) for _ in range(8)]
        await asyncio.sleep(0.2)
        write_version(repository, "ctr", 2)
        await backend.load("ctr")
        assert backend.models()["ctr"].version == "2"
        assert (await backend.infer(request)).version == "2"
        assert (await backend.infer(make_request(5, 1, version="1"))).version == "1"  # kept for going back
        await asyncio.sleep(0.2)
        await backend.load("ctr", "1")
        assert (await backend.infer(request)).version == "1"
        stop.set()
        await asyncio.gather(*clients)
        return seen

    seen = with_backend([socket_of(engine)], work)
    assert set(seen) == {"1", "2"}


def test_corrupt_version_is_refused_by_name_while_the_old_one_serves(tmp_path: Path, start_engine: Start) -> None:
    repository = tmp_path / "repository"
    write_version(repository, "ctr", 1)
    engine = start_engine(repository)

    async def work(backend: EngineClient) -> None:
        (write_version(repository, "ctr", 2) / "model.json").write_text("{")
        with pytest.raises(RefusedError, match=r"version 2 of model 'ctr' does not load.*corrupt"):
            await backend.load("ctr")
        assert (await backend.infer(make_request(2))).version == "1"
        states = {entry.version: (entry.state, entry.reason) for entry in await backend.index()}
        assert states["1"][0] == "READY"
        assert states["2"][0] == "UNAVAILABLE" and "corrupt" in states["2"][1]

    with_backend([socket_of(engine)], work)


def test_repository_is_polled_for_new_versions(tmp_path: Path, start_engine: Start) -> None:
    repository = tmp_path / "repository"
    write_version(repository, "ctr", 1)
    engine = start_engine(repository, poll=0.1)

    async def work(backend: EngineClient) -> None:
        write_version(repository, "ctr", 2)
        for _ in range(1000):
            if (await backend.infer(make_request(2))).version == "2":
                return
            await asyncio.sleep(0.01)
        raise AssertionError("version 2 was not found")

    with_backend([socket_of(engine)], work)


def test_new_signature_keeps_answering_requests_made_for_the_old_one(tmp_path: Path, start_engine: Start) -> None:
    repository = tmp_path / "repository"
    write_version(repository, "ctr", 1)
    engine = start_engine(repository)

    async def work(backend: EngineClient) -> None:
        connection = backend.connections[0]
        number, fingerprint = connection.numbers["ctr", None]
        write_version(repository, "ctr", 2, features=2)
        await backend.load("ctr")
        assert backend.models()["ctr"].signature.features == ("f0", "f1")
        connection.numbers["ctr", None] = (number, fingerprint)  # a front end that has old numbers
        assert (await backend.infer(make_request(3))).version == "1"

    with_backend([socket_of(engine)], work)


def test_retired_version_is_let_go(tmp_path: Path, start_engine: Start) -> None:
    repository = tmp_path / "repository"
    write_version(repository, "ctr", 1)
    engine = start_engine(repository)
    first = engine.models.by_name["ctr"].current
    assert first is not None
    held = weakref.ref(first.servable)
    del first

    async def work(backend: EngineClient) -> None:
        await backend.infer(make_request(2, version="1"))
        for version in (2, 3):
            write_version(repository, "ctr", version)
            await backend.load("ctr")
            await backend.infer(make_request(2))
        with pytest.raises(RefusedError):
            await backend.infer(make_request(2, version="1"))

    with_backend([socket_of(engine)], work)
    gc.collect()
    assert held() is None


def test_unknown_model_and_unloaded_model_are_refused(tmp_path: Path, start_engine: Start) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    engine = start_engine(tmp_path / "repository")

    async def work(backend: EngineClient) -> None:
        with pytest.raises(RefusedError, match="did you mean 'ctr'") as refused:
            await backend.infer(make_request(1, model="ctrr"))
        assert refused.value.status == 404
        await backend.unload("ctr")
        assert not backend.models()
        with pytest.raises(RefusedError):
            await backend.infer(make_request(1))
        await backend.load("ctr")
        await backend.infer(make_request(1))

    with_backend([socket_of(engine)], work)


def test_requests_of_an_engine_that_dies_are_refused_and_the_next_one_serves(
    tmp_path: Path, start_process: StartProcess
) -> None:
    repository = tmp_path / "repository"
    write_version(repository, "ctr", 1, delay=0.3)
    engine = start_process(repository, socket=tmp_path / "e.sock")

    async def work(backend: EngineClient) -> None:
        tasks = [asyncio.create_task(backend.infer(make_request(3, deadline=None))) for _ in range(4)]
        await asyncio.sleep(0.1)
        engine.kill()
        for task in tasks:
            with pytest.raises(RefusedError) as refused:
                await task
            assert (refused.value.status, refused.value.retry_after) == (503, 1.0)
        assert not await backend.ready()
        await asyncio.to_thread(start_process, repository, socket=tmp_path / "e.sock")
        for _ in range(500):
            if await backend.ready():
                break
            await asyncio.sleep(0.01)
        assert (await backend.infer(make_request(3))).version == "1"

    with_backend([socket_of(engine)], work)


def test_requests_are_spread_over_engines(tmp_path: Path, start_engine: Start) -> None:
    write_version(tmp_path / "repository", "ctr", 1, delay=0.01)
    engines = [start_engine(tmp_path / "repository") for _ in range(2)]

    async def work(backend: EngineClient) -> None:
        while not all(connection.ready for connection in backend.connections):
            await asyncio.sleep(0.01)
        await asyncio.gather(*[backend.infer(make_request(4, seed)) for seed in range(64)])
        counts = [(await connection.command(op="figures"))["queue"]["admitted"] for connection in backend.connections]
        assert sum(counts) == 64 and min(counts) >= 16
        (stats,) = await backend.statistics("ctr")
        assert stats["inference_count"] == 256 and stats["inference_stats"]["success"]["count"] == 64

    with_backend([socket_of(engine) for engine in engines], work)


def test_sigterm_answers_what_was_admitted_then_ends_with_0(tmp_path: Path, start_process: StartProcess) -> None:
    write_version(tmp_path / "repository", "ctr", 1, delay=0.2)
    engine = start_process(tmp_path / "repository", max_rows=4)

    async def work(backend: EngineClient) -> None:
        tasks = [asyncio.create_task(backend.infer(make_request(4, seed))) for seed in range(3)]
        await asyncio.sleep(0.1)
        engine.terminate()
        answers = await asyncio.gather(*tasks)
        assert [len(answer.logits) for answer in answers] == [4, 4, 4]

    with_backend([socket_of(engine)], work)
    assert engine.process.wait(10) == 0


def test_engine_ends_when_its_supervisor_is_gone(tmp_path: Path, start_process: StartProcess) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    engine = start_process(tmp_path / "repository")
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(10) == 0
