"""Versions of a release that read their rows from a row server: canary, shadow and lookups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lookup_server import SPEC, LookupServer, as_json, batch_of, inputs_of, same_bits
from small_models import trained
from test_engine_restart import until

import hotrow as hr
from hotrow.serve.repository.releases import Release, Share, change_release
from hotrow.serve.rows.row_server_options import RowServerOptions
from hotrow.serve.rows.row_server_process import RowServerProcess

ITEM = "embeddings.item"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookupServer]:
    """Version 1 is stable, 2 the canary of half the requests, 3 the shadow."""
    folder = tmp_path_factory.mktemp("rows")
    socket, model = folder / "rows.sock", folder / "repository" / "ctr"
    serving = LookupServer(folder, {"rows": {"ctr": f"unix:{socket}"}})
    for steps in (6, 8):
        hr.export(trained("din", steps=steps).model, model, features=SPEC)
    change_release(model, lambda _: Release({"stable": 1}, canary=Share(2, 0.5), shadow=Share(3, 1.0)))
    rows = RowServerProcess(RowServerOptions(str(folder / "repository"), listen=(f"unix:{socket}",), metrics=None))
    rows.start()
    try:
        with serving:
            yield serving
    finally:
        rows.stop()


def infer(server: LookupServer, batch: hr.KeyedBatch, key: str, **request: Any) -> tuple[str, dict[str, Any]]:
    parameters = {"routing_key": key, "deadline_ms": 20_000, **request.pop("parameters", {})}
    status, answer, found = server.post({"inputs": as_json(inputs_of(batch)), "parameters": parameters, **request})
    assert status == 200, answer
    return answer["model_version"], found or {o["name"]: torch.tensor(o["data"]) for o in answer["outputs"]}


def test_every_version_of_a_release_reads_its_own_rows(server: LookupServer, tmp_path: Path) -> None:
    model = server.engine.models.by_name["ctr"]
    assert sorted(model.versions) == ["1", "2", "3"] and all(v.waits_for_rows for v in model.versions.values())
    shadow = model.versions["3"].shadow
    outputs = [{"name": ITEM, "parameters": {"binary_data": True}}]
    with hr.Engine(server.direct.source.path.parent, 2) as canary:
        engines = {"1": server.direct, "2": canary}
        seen = set()
        for number in range(12):
            batch = batch_of(8, seed=number)
            version, found = infer(server, batch, f"user-{number}")
            expected = engines[version].predict(batch)
            torch.testing.assert_close(found["probabilities"], expected, rtol=1e-5, atol=1e-6)
            assert infer(server, batch, f"user-{number}", outputs=outputs)[0] == version
            _, vectors = infer(server, batch, f"user-{number}", outputs=outputs)
            assert same_bits(vectors[ITEM], engines[version].lookup(batch)["item"].numpy())
            seen.add(version)
        assert seen == {"1", "2"}

    def compared() -> bool:
        """Ask on, because a copy is dropped while this machine is busy."""
        for number in range(12):
            infer(server, batch_of(8, seed=number), f"user-{number}")
        return shadow.rows > 0

    until(compared)
    assert shadow.total > 0 and shadow.dropped["failed"] == 0
