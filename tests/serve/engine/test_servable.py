"""An exported model behind an engine's socket gives the model's own predictions; lanes keep their thread budget."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import make_request, with_backend

import hotrow as hr
from hotrow.serve.batching.versions import Version
from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.frontend.engine_statistics import add_figures
from hotrow.serve.processes.engine_process import EngineOptions, EngineProcess
from hotrow.serve.protocol.metrics import render
from hotrow.serve.protocol.request import Answer, Request


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[tuple[hr.Recommender, EngineProcess]]:
    torch.manual_seed(3)
    embeddings = hr.EmbeddingCollection([hr.Table(f"f{i}", dim=4) for i in range(3)], seed=3)
    model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, dense_features=4, bottom=(8,), top=(8,)))
    for rows in embeddings.tables:
        rows.assign(torch.arange(500), torch.randn(500, 4))
    hr.export(model, tmp_path / "repository" / "ctr")
    options = {"compile": False, "artifacts": str(tmp_path / "artifacts")}  # buckets have their own tests
    engine = EngineProcess(
        EngineOptions(str(tmp_path / "e.sock"), str(tmp_path / "repository"), lanes=2, threads=1, options=options)
    )
    engine.start()
    yield model.eval(), engine
    engine.stop()


def plain(model: hr.Recommender, request: Request) -> np.ndarray:
    ids = {}
    for number, feature in enumerate(request.ids):
        values = torch.from_numpy(feature.values)
        values = values.repeat(request.rows) if feature.shared else values
        ids[f"f{number}"] = hr.Jagged(values, None if feature.offsets is None else torch.from_numpy(feature.offsets))
    assert request.dense is not None
    with torch.no_grad():
        return model(hr.KeyedBatch(ids, dense=torch.from_numpy(request.dense))).numpy()


def test_served_logits_equal_the_models_own(exported: tuple[hr.Recommender, EngineProcess]) -> None:
    model, engine = exported
    requests = [make_request(rows, seed) for seed, rows in enumerate([1, 50, 7, 300])]

    async def ask(backend: EngineClient) -> list[Answer]:
        return await asyncio.gather(*[backend.infer(request) for request in requests])

    for request, answer in zip(requests, with_backend([engine.options.socket], ask), strict=True):
        np.testing.assert_allclose(answer.logits, plain(model, request), rtol=0, atol=1e-6)


def test_each_lane_runs_the_tower_with_its_own_budget_of_threads(
    exported: tuple[hr.Recommender, EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = exported
    seen: list[int] = []
    run = Version.run

    def spy(self: Version, *arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return run(self, *arguments)

    monkeypatch.setattr(Version, "run", spy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # other code changes the number after the lanes have set theirs

    async def ask(backend: EngineClient) -> None:
        await asyncio.gather(*[backend.infer(make_request(900, seed)) for seed in range(6)])

    with_backend([engine.options.socket], ask)
    torch.set_num_threads(before)
    assert set(seen) == {1}


def test_compiled_pieces_and_eager_ops_are_shown_over_all_engines(
    exported: tuple[hr.Recommender, EngineProcess],
) -> None:
    _, engine = exported
    figures = engine.status.figures()
    (version,) = figures["versions"]
    assert version["tower"]["compiled_pieces"] == 0 and version["tower"]["eager_ops"] == {}
    version["tower"].update(compiled_pieces=4, eager_ops={"aten.mode.default": 2})
    shown = add_figures([figures, figures])
    assert shown["hotrow_compiled_pieces", "ctr", "1"] == 8
    assert shown["hotrow_eager_ops", "ctr", "1", "aten.mode.default"] == 4
    assert 'hotrow_eager_ops{model="ctr",version="1",op="aten.mode.default"} 4' in render(shown)
