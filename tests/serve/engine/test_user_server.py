"""A two-part tower behind the whole server: requests of one user over HTTP, gRPC and hotrow.client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lookup_server import LookupServer, as_binary, as_json
from user_models import HISTORY, MOST, Ask, ask, batch_of, items_set_to, user_trainer

import hotrow as hr
from hotrow.client import Client, ClientError
from hotrow.serve.frontend.engine_statistics import add_figures
from hotrow.serve.processes.status_line import StatusLine
from hotrow.serve.protocol.metrics import TABLE, render

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = {"export": {"max_lengths": {"seen_item": MOST}}}


@pytest.fixture(scope="module")
def model() -> hr.Recommender:
    return user_trainer().model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: hr.Recommender) -> Iterator[LookupServer]:
    folder = tmp_path_factory.mktemp("users")
    with LookupServer(folder, {"user_cache": "1MiB"}, model=model, **LENGTHS) as running:
        yield running


def inputs_of(one: Ask) -> dict[str, np.ndarray]:
    """The request's tensors: the user's features once, as [1, events]."""
    history = zip(HISTORY, (one.items, one.actions, one.times), strict=True)
    return {
        **{name: np.array([values], np.int64) for name, values in history},
        "age": np.array([one.age]),
        "item": np.array(one.candidates),
        "tags": np.array([key for keys in one.tags for key in keys], np.int64),
        "tags.offsets": np.cumsum([0, *map(len, one.tags)], dtype=np.int64),
        "dense": one.dense.numpy(),
    }


def predict(server: LookupServer, one: Ask, **more: Any) -> np.ndarray:
    inputs, tail = as_binary(inputs_of(one))
    status, answer, _ = server.post({"inputs": inputs, "outputs": [{"name": "logits"}], **more}, tail)
    assert status == 200, answer
    return np.array(answer["outputs"][0]["data"], np.float32)


def figures(server: LookupServer) -> dict[str, Any]:
    version = server.engine.models.by_name["ctr"].current
    assert version is not None
    found: dict[str, Any] = version.servable.figures()["users"]
    return found


def close(found: Any, expected: Any) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(expected)).max() <= 1e-6)


@pytest.mark.parametrize("seed, rows, events", [(1, 50, 9), (2, 1, 4), (3, 7, 0), (4, 1, 0), (5, 3, MOST)])
def test_answers_are_those_of_the_engine(server: LookupServer, seed: int, rows: int, events: int) -> None:
    one = ask(seed, rows, events)
    expected = server.direct.logits(batch_of([one]))
    assert close(predict(server, one), expected)
    assert close(predict(server, one), expected)  # the user's encoding is cached now
    status, answer, _ = server.post({"inputs": as_json(inputs_of(one)), "outputs": [{"name": "logits"}]})
    assert status == 200 and close(answer["outputs"][0]["data"], expected)


def test_requests_of_several_users_are_joined_and_stay_apart(server: LookupServer) -> None:
    asks = [ask(100 + seed % 12, rows=1 + seed % 9) for seed in range(60)]
    expected = [server.direct.logits(batch_of([one])) for one in asks]
    before = server.engine.models.by_name["ctr"].current.counts.executions  # type: ignore[union-attr]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda one: predict(server, one), asks))
    assert all(close(one, wanted) for one, wanted in zip(found, expected, strict=True))
    assert server.engine.models.by_name["ctr"].current.counts.executions - before < 60  # type: ignore[union-attr]


def test_a_request_larger_than_a_batch_is_cut_into_pieces_of_one_user(server: LookupServer) -> None:
    one = ask(200, rows=300, events=8)
    before = figures(server)
    assert close(predict(server, one), server.direct.logits(batch_of([one])))
    after = figures(server)
    assert after["cache"]["hits"] + after["cache"]["misses"] - before["cache"]["hits"] - before["cache"]["misses"] == 5
    assert after["users"] - before["users"] <= 2  # two lanes may begin at once


def test_the_client_sends_a_users_history_once(server: LookupServer) -> None:
    one = ask(300, rows=40, events=10)
    expected = server.direct.logits(batch_of([one]))
    for protocol in ("http", "grpc"):
        with Client(f"{protocol}://{server.address(protocol)}") as client:
            assert close(client.predict("ctr", inputs_of(one))["logits"], expected)
            lists = {**inputs_of(one), "seen_item": [one.items], "seen_action": [one.actions], "tags": one.tags}
            del lists["tags.offsets"]
            assert close(client.predict("ctr", lists)["logits"], expected)


def test_wrong_histories_are_refused_with_the_cure(server: LookupServer) -> None:
    one = ask(1, rows=3, events=5)
    long = inputs_of(ask(2, rows=3, events=MOST + 1))
    short = {**inputs_of(one), "seen_time": np.array([one.times[:4]])}
    per_row = {**inputs_of(one), "seen_time": np.array(one.times[:2]), "seen_time.offsets": np.array([0, 1, 1, 2])}
    for protocol in ("http", "grpc"):
        with Client(f"{protocol}://{server.address(protocol)}") as client:
            for inputs, said in (
                (long, f"'seen_item' has {MOST + 1} entries in row 0, .* give the newest {MOST}"),
                (short, "'seen_item' and 'seen_time' are columns of one history, but row 0 has 5 and 4 entries"),
                (per_row, "'seen_item' and 'seen_time' are columns of one history, but row 0 has 5 and 1 entries"),
                ({**inputs_of(one), "seen_time": np.array(one.times)}, "is a sequence: one row with 5 ids, or 5 rows"),
            ):
                with pytest.raises(ClientError, match=said) as error:
                    client.predict("ctr", inputs)
                assert error.value.status == 400


def test_vectors_of_user_features_are_per_row(server: LookupServer) -> None:
    one = ask(400, rows=6, events=7)
    expected = server.direct.lookup(batch_of([one]))
    with Client(f"http://{server.address('http')}") as client:
        found = client.embeddings("ctr", inputs_of(one), ["seen_item", "age", "item"])
        for name in ("seen_item", "seen_item_mask", "age", "item"):
            assert np.array_equal(found[name], expected[name].numpy())
        alone = client.embeddings("ctr", {"seen_item": np.array([one.items])})
        assert np.array_equal(alone["seen_item"], expected["seen_item"][:1].numpy())
    inputs, tail = as_binary(inputs_of(one))
    wanted = [{"name": "logits"}, {"name": "embeddings.age"}]
    status, answer, _ = server.post({"inputs": inputs, "outputs": wanted}, tail)
    assert status == 200 and close(answer["outputs"][0]["data"], server.direct.logits(batch_of([one])))
    assert close(answer["outputs"][1]["data"], expected["age"].numpy().reshape(-1))


def test_metadata_says_how_to_send_a_history(server: LookupServer) -> None:
    with urllib.request.urlopen(server.url("/v2/models/ctr"), timeout=30) as reply:
        inputs = {entry["name"]: entry for entry in json.loads(reply.read())["inputs"]}
    assert inputs["seen_time"] == {
        "name": "seen_time",
        "datatype": "INT64",
        "shape": [-1, -1],
        "parameters": {"max_length": MOST, "aligned": ["seen_item", "seen_action"], "user": True},
    }
    assert inputs["age"]["parameters"] == {"user": True} and "parameters" not in inputs["item"]


def test_a_publication_between_two_requests_is_never_hidden_by_the_cache(tmp_path: Path, model: hr.Recommender) -> None:
    one = ask(1, rows=4, events=6)
    with LookupServer(tmp_path, {"user_cache": "1MiB"}, model=model, **LENGTHS) as server:
        for number in range(1, 4):
            update = items_set_to(number / 4, one.items, number)
            predict(server, one)
            server.apply(update)
            server.direct.apply(update)
            assert close(predict(server, one), server.direct.logits(batch_of([one])))
        assert figures(server)["cache"]["outdated"] >= 3


def test_a_request_whose_history_is_cached_does_not_wait_for_its_rows(tmp_path: Path, model: hr.Recommender) -> None:
    one = ask(1, rows=1, events=MOST)
    tiers = {"user_cache": "1MiB", "dram": "3MiB", "ssd": str(tmp_path / "rows")}
    with LookupServer(tmp_path, tiers, model=model, **LENGTHS) as server:
        expected = server.direct.logits(batch_of([one]))
        assert close(predict(server, one, parameters={"policy": "wait"}), expected)
        current = server.engine.models.by_name["ctr"].current
        assert current is not None
        engine = current.servable.engine
        for rows in engine.embeddings.tables:
            rows.store.core.evict(1000)
        predict(server, one._replace(items=[], actions=[], times=[]), parameters={"policy": "wait"})  # its other rows
        batch = batch_of([one])
        assert current.servable.cold(batch) is None and engine.cold(batch) > 0
        held = server.engine.misses.counts.cold
        assert close(predict(server, one, parameters={"policy": "initial"}), expected)
        assert server.engine.misses.counts.cold == held


def test_metrics_count_users_and_the_cache(server: LookupServer) -> None:
    for _ in range(2):
        predict(server, ask(500, rows=2, events=4))
    found = add_figures([server.engine.status.figures()])
    labels = ("ctr", "1")
    names = ("users_encoded_total", "user_events_total", "user_batches_total", "user_cache_hits_total")
    assert all(found[(f"hotrow_{name}", *labels)] > 0 for name in names)
    assert found[("hotrow_user_cache_bytes", *labels)] > 0
    reasons = {figure[3] for figure in found if figure[0] == "hotrow_user_cache_evictions_total"}
    assert reasons == {"size", "outdated"}
    assert all(name in TABLE for name, *_ in found)
    assert 'hotrow_user_cache_evictions_total{model="ctr",version="1",reason="size"}' in render(found)


def test_the_status_line_shows_how_many_users_were_cached(server: LookupServer) -> None:
    status = StatusLine()
    status.line([server.engine.status.figures()], {"ctr": "1"})
    for seed in (600, 600, 600, 601):
        predict(server, ask(seed, rows=2, events=4))
    line = status.line([server.engine.status.figures()], {"ctr": "1"})
    assert "50% of users cached" in line, line
    assert "cached" not in status.line([server.engine.status.figures()], {"ctr": "1"})
