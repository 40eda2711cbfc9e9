"""An engine process that follows a bus: answers have its publication and age, and kill -9 loses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import EngineUnderTest, make_request, socket_of, with_backend

import hotrow as hr
from hotrow.publish.bus import Bus, open_bus
from hotrow.publish.message import checksum, note, parts
from hotrow.publish.publication import DELTA, TableChange, content_checksum, encode_body
from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.processes.engine_process import EngineOptions, EngineProcess
from hotrow.serve.protocol.request import Answer

KEYS = torch.arange(1000)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hr.Recommender:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(3)
    embeddings = hr.EmbeddingCollection([hr.Table(f"f{i}", dim=4) for i in range(3)], seed=3)
    model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, dense_features=4, bottom=(8,), top=(8,)))
    hr.export(model, tmp_path / "repository" / "ctr")
    return model.eval()


def publish(bus: Bus, number: int, model: hr.Recommender) -> None:
    """Publication `number` sets every row to values drawn from it, here and there."""
    draw = torch.Generator().manual_seed(number)
    tables = {}
    for rows in model.embeddings.tables:
        values = torch.randn(KEYS.numel(), 4, generator=draw)
        rows.assign(KEYS, values)
        tables[rows.table.name] = TableChange(KEYS, values, KEYS[:0])
    body = encode_body(tables, dict(model.tower.state_dict()), "fp32")
    header: dict[str, Any] = {"kind": DELTA, "previous": number - 1, "run": "r", "step": number, "cut": time.time()}
    header |= {"watermark": int(time.time() * 1000), "values": "fp32", "rows": 3000, "parts": [checksum(body)]}
    header["checksum"] = content_checksum(number, header)
    for message in parts(number, 5, 0, 1, body, bus.limit):
        bus.append(message.encode())
    bus.append(note(number, 5, header).encode())


def ask(engine: EngineUnderTest | EngineProcess, publication: int) -> tuple[Answer, Any]:
    """An answer of that publication, and the metrics."""

    async def work(backend: EngineClient) -> tuple[Answer, Any]:
        until = time.monotonic() + 50
        while (answer := await backend.infer(make_request(20))).publication < publication:
            assert time.monotonic() < until, f"still at publication {answer.publication}"
        while not (figures := backend.figures()) or figures.get(("hotrow_publication", "ctr", "1")) != publication:
            await backend.infer(make_request(20))
        return answer, figures

    return with_backend([socket_of(engine)], work)


def expected(model: hr.Recommender) -> np.ndarray:
    request = make_request(20)
    ids = {"f0": hr.Jagged(torch.from_numpy(request.ids[0].values).repeat(20))}
    for number in (1, 2):
        given = request.ids[number]
        offsets = None if given.offsets is None else torch.from_numpy(given.offsets)
        ids[f"f{number}"] = hr.Jagged(torch.from_numpy(given.values), offsets)
    assert request.dense is not None
    with torch.no_grad():
        return model(hr.KeyedBatch(ids, dense=torch.from_numpy(request.dense))).numpy()


def test_answers_and_metrics_have_publication_and_age(tmp_path: Path, model: hr.Recommender) -> None:
    address = f"dir:{tmp_path / 'bus'}"
    bus = open_bus(address)
    publish(bus, 1, model)
    events: list[tuple[str, dict[str, Any]]] = []
    options = {"bus": {"ctr": address}, "compile": False, "artifacts": str(tmp_path / "artifacts")}
    engine_options = EngineOptions(
        str(tmp_path / "e.sock"), str(tmp_path / "repository"), max_rows=64, stale_after=2.0, options=options
    )
    engine = EngineProcess(engine_options, report_event=lambda event, **content: events.append((event, content)))
    engine.start()
    try:
        publish(bus, 2, model)
        answer, figures = ask(engine, 2)
        np.testing.assert_allclose(answer.logits, expected(model), rtol=0, atol=1e-6)
        assert answer.publication == 2 and 0 <= int(answer.parameters["freshness_ms"]) < 60_000
        assert "publication_highest" not in answer.parameters
        assert figures["hotrow_bus_publications_total", "ctr", "1"] == 2
        assert figures["hotrow_bus_rows_total", "ctr", "1"] == 6000
        assert 0 < figures["hotrow_freshness_seconds", "ctr", "1"] < 60
        assert ("hotrow_freshness_quantile_seconds", "ctr", "1", "0.99") in figures
        until = time.monotonic() + 30  # nothing is published any more, so the alarm is raised
        while not any(event == "stale" for event, _ in events):
            assert time.monotonic() < until
            time.sleep(0.05)
        publish(bus, 3, model)
        while not any(event == "fresh" for event, _ in events):
            assert time.monotonic() < until + 30
            time.sleep(0.05)
    finally:
        engine.stop()
        for version in engine.models.by_name["ctr"].versions.values():
            version.servable.close()


def test_an_engine_killed_while_it_applies_comes_back_with_everything(
    tmp_path: Path, model: hr.Recommender, start_process: Callable[..., EngineUnderTest]
) -> None:
    address = f"dir:{tmp_path / 'bus'}"
    bus = open_bus(address)
    options: dict[str, Any] = {
        "loader": "hotrow.serve.execution.servable:open_version",
        "max_rows": 64,
        "options": {"bus": {"ctr": address}, "compile": False, "artifacts": str(tmp_path / "artifacts")},
    }
    engine = start_process(tmp_path / "repository", **options)
    for number in range(1, 41):
        publish(bus, number, model)
    engine.kill()  # while it applies one of them
    answer, _ = ask(start_process(tmp_path / "repository", **options), 40)
    assert answer.publication == 40
    np.testing.assert_allclose(answer.logits, expected(model), rtol=0, atol=1e-6)
