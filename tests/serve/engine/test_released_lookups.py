"""Lookups of embedding outputs during a canary: vectors, and the bytes held for them, are the answering version's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lookup_server import POOLED, SPEC, LookupServer, as_json, batch_of, inputs_of, same_bits
from small_models import trained
from test_engine_restart import until

import hotrow as hr
from hotrow.serve.repository.releases import Release, Share, change_release

ITEM, HISTORY = "embeddings.item", "embeddings.history"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LookupServer]:
    with LookupServer(tmp_path) as running:
        yield running


def add_canary(server: LookupServer, model: hr.Recommender, **options: Any) -> hr.Engine:
    """Make the model version 2, the canary of all requests; returns an engine of it."""
    folder = server.engine.models.repository / "ctr"
    hr.export(model, folder, **options)
    change_release(folder, lambda _: Release({"stable": 1}, canary=Share(2, 1.0)))
    server.call(server.client.load("ctr"))
    return hr.Engine(folder, 2)


def lookup(server: LookupServer, inputs: Any, names: tuple[str, ...], url: str = "ctr") -> tuple[Any, dict[str, Any]]:
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in names]
    server.url = lambda path="": LookupServer.url(server, f"/v2/models/{url}/infer")  # type: ignore[method-assign]
    status, answer, found = server.post({"inputs": as_json(inputs), "outputs": outputs})
    assert status == 200, answer
    return answer["model_version"], found


def fallbacks(server: LookupServer) -> dict[str, float]:
    return {k[3]: v for k, v in server.frontend.figures().items() if k[0] == "hotrow_canary_fallback_total"}


def test_canary_with_the_same_inputs_answers_lookups(server: LookupServer) -> None:
    with add_canary(server, trained("din", steps=9).model, features=SPEC) as direct:
        batch = batch_of(7, seed=1)
        names = (ITEM, HISTORY)
        for engine, url, version in (
            (direct, "ctr", "2"),
            (direct, "ctr@canary", "2"),
            (server.direct, "ctr@stable", "1"),
        ):
            answered, found = lookup(server, inputs_of(batch), names, url)
            expected = engine.lookup(batch)
            assert answered == version
            assert all(same_bits(found[name], expected[name.partition(".")[2]].numpy()) for name in names)
        assert not same_bits(direct.lookup(batch)["item"].numpy(), server.direct.lookup(batch)["item"].numpy())
        assert fallbacks(server) == {}
        until(lambda: server.frontend.service.answer_bytes.held == 0)  # a moment after the client has its answer


def test_canary_with_other_features_answers_with_its_own_vectors(server: LookupServer) -> None:
    """Its outputs have other numbers and widths than those of the stable version."""
    torch.manual_seed(2)
    embeddings = hr.EmbeddingCollection([hr.Table(name, dim=24) for name in ("item", "other", "user")], seed=5)
    model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, top=(4,)))
    with add_canary(server, model) as direct:
        assert direct.signature.features.index("item") != server.direct.signature.features.index("item")
        inputs = {"item": np.arange(6), "user": np.arange(6)}
        held: list[int] = []
        take = server.frontend.service.answer_bytes.take
        server.frontend.service.answer_bytes.take = lambda size: (held.append(size), take(size))[1]  # type: ignore[method-assign, func-returns-value]
        answered, found = lookup(server, inputs, (ITEM, "embeddings.user"))
        ids = {name: hr.Jagged(torch.arange(6)) for name in direct.signature.features}
        expected = direct.lookup(hr.KeyedBatch(ids))
        assert answered == "2" and found[ITEM].shape == (6, 24)
        assert same_bits(found[ITEM], expected["item"].numpy())
        assert same_bits(found["embeddings.user"], expected["user"].numpy())
        assert held == [6 * 4 * 2 * 24]  # not the stable version's
        until(lambda: server.frontend.service.answer_bytes.held == 0)
        assert fallbacks(server) == {}


def test_stable_version_answers_lookups_that_the_canary_does_not_have(server: LookupServer) -> None:
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)])
    model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, top=(4,)))
    with add_canary(server, model):
        batch = batch_of(5, seed=3)
        answered, found = lookup(server, inputs_of(batch), (HISTORY,))
        assert answered == "1" and fallbacks(server) == {"inputs": 1}
        assert same_bits(found[HISTORY], server.direct.lookup(batch)["history"].numpy())
        until(lambda: server.frontend.service.answer_bytes.held == 0)
        assert set(POOLED) - set(embeddings.features)  # one that only the stable version has
