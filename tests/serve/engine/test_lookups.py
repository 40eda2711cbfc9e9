"""Requests for embedding outputs, through the whole server: their vectors are Engine.lookup's, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from lookup_server import POOLED, LookupServer, as_binary, as_json, batch_of, inputs_of, same_bits, users_set_to
from tritonclient.utils import InferenceServerException

import hotrow as hr
from hotrow.serve.protocol.limits import Limits

NAMES = ("embeddings", *(f"embeddings.{name}" for name in ("user", "item", "history", "history_mask", "tags")))
BINARY = [{"name": name, "parameters": {"binary_data": True}} for name in NAMES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookupServer]:
    with LookupServer(tmp_path_factory.mktemp("lookups")) as running:
        yield running


def expected(server: LookupServer, batch: hr.KeyedBatch) -> dict[str, np.ndarray]:
    """The outputs of a batch by the engine alone."""
    vectors = server.direct.lookup(batch)
    found = {f"embeddings.{name}": vector.numpy() for name, vector in vectors.items()}
    return {"embeddings": torch.cat([vectors[name] for name in POOLED], dim=1).numpy(), **found}


def binary(server: LookupServer, batch: hr.KeyedBatch, outputs: Any = BINARY, **more: Any) -> Any:
    inputs, tail = as_binary(inputs_of(batch))
    return server.post({"inputs": inputs, "outputs": outputs, **more}, tail)


def until(what: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_vectors_over_http_are_those_of_the_engine(server: LookupServer, rows: int) -> None:
    batch = batch_of(rows, seed=rows)
    status, answer, found = binary(server, batch)
    assert status == 200 and list(found) == list(NAMES), answer
    wanted = expected(server, batch)
    assert all(same_bits(found[name], wanted[name]) for name in NAMES)
    assert answer["parameters"]["publication"] == 0 and answer["model_version"] == "1"


def test_vectors_as_json_are_those_of_the_engine(server: LookupServer) -> None:
    batch = batch_of(5, seed=3)
    outputs = [{"name": name} for name in NAMES]
    status, answer, _ = server.post({"inputs": as_json(inputs_of(batch)), "outputs": outputs})
    assert status == 200, answer
    wanted = expected(server, batch)
    for output in answer["outputs"]:
        array = np.array(output["data"], wanted[output["name"]].dtype).reshape(output["shape"])
        assert same_bits(array, wanted[output["name"]])
        assert output["datatype"] == ("BOOL" if output["name"].endswith("_mask") else "FP32")


def test_vectors_over_tritons_clients_are_those_of_the_engine(server: LookupServer) -> None:
    batch = batch_of(9, seed=4)
    wanted = expected(server, batch)
    for triton, protocol in ((triton_grpc, "grpc"), (triton_http, "http")):
        client = triton.InferenceServerClient(server.address(protocol))
        inputs = []
        for name, array in inputs_of(batch).items():
            kind = "FP32" if array.dtype == np.float32 else "INT64"
            inputs.append(triton.InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array)
        outputs = [triton.InferRequestedOutput(name) for name in NAMES]
        answer = client.infer("ctr", inputs, outputs=outputs)
        assert all(same_bits(answer.as_numpy(name), wanted[name]) for name in NAMES)
        half = client.infer("ctr", inputs, outputs=outputs[:1], parameters={"embeddings_datatype": "FP16"})
        assert same_bits(half.as_numpy("embeddings"), wanted["embeddings"].astype(np.float16))


def test_both_kinds_of_outputs_come_from_one_request(server: LookupServer) -> None:
    batch = batch_of(200, seed=5)  # the tower runs over 64 rows at once
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("logits", *NAMES, "probabilities")]
    status, answer, found = binary(server, batch, outputs)
    assert status == 200, answer
    assert [output["name"] for output in answer["outputs"]] == ["logits", *NAMES, "probabilities"]
    wanted = expected(server, batch)
    assert all(same_bits(found[name], wanted[name]) for name in NAMES)
    torch.testing.assert_close(torch.tensor(found["logits"]), server.direct.logits(batch), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.tensor(found["probabilities"]), server.direct.predict(batch), rtol=0, atol=1e-6)


def test_a_lookup_of_some_features_needs_no_others(server: LookupServer) -> None:
    batch = batch_of(6, seed=6)
    wanted = expected(server, batch)
    names = ("embeddings.item", "embeddings.history", "embeddings.history_mask")
    some = inputs_of(batch, ("item", "history"), dense=False)
    status, answer, _ = server.post({"inputs": as_json(some), "outputs": [{"name": name} for name in names]})
    assert status == 200, answer
    for output in answer["outputs"]:
        array = np.array(output["data"], wanted[output["name"]].dtype).reshape(output["shape"])
        assert same_bits(array, wanted[output["name"]])
    keys = np.stack([batch.ids[name].values.numpy() for name in ("user", "item")], axis=1)
    outputs = [{"name": f"embeddings.{name}"} for name in ("user", "item")]
    status, answer, _ = server.post({"inputs": as_json({"keys": keys}), "outputs": outputs})
    assert status == 200, answer
    data = {
        output["name"]: np.array(output["data"], np.float32).reshape(output["shape"]) for output in answer["outputs"]
    }
    assert all(same_bits(data[name], wanted[name]) for name in data)
    status, answer, _ = server.post({"inputs": as_json(some), "outputs": [{"name": "embeddings.user"}]})
    assert status == 400 and "a lookup of user has no tensor" in answer["error"]
    status, answer, _ = server.post({"inputs": as_json({**some, "itme": keys[:, 0]}), "outputs": [{"name": names[0]}]})
    assert status == 400 and "did you mean 'item'" in answer["error"]


def test_raw_columns_of_some_features_are_looked_up(server: LookupServer) -> None:
    batch = batch_of(4, seed=7)
    wanted = expected(server, batch)
    some = inputs_of(batch, ("user", "history"), dense=False)
    names = ("embeddings.user", "embeddings.history")
    outputs = [{"name": name} for name in names]
    status, answer, _ = server.post({"inputs": as_json(some), "outputs": outputs, "parameters": {"raw": True}})
    assert status == 200, answer
    for output in answer["outputs"]:
        array = np.array(output["data"], np.float32).reshape(output["shape"])
        assert same_bits(array, wanted[output["name"]])


def test_joined_lookups_do_not_see_each_other(tmp_path: Path) -> None:
    """Requests that wait for a busy lane share a batch. Each gets the sequences' length of its own rows."""
    with LookupServer(tmp_path) as server, ThreadPoolExecutor(9) as pool:
        lookup = server.direct.__class__.answer_lookup
        busy, sizes = threading.Event(), []

        def slow(engine: hr.Engine, batch: hr.KeyedBatch, *options: Any) -> Any:
            sizes.append(batch.size)
            busy.wait(20)
            return lookup(engine, batch, *options)

        servable: Any = server.engine.models.by_name["ctr"].current.servable  # type: ignore[union-attr]
        servable.engine.answer_lookup = slow.__get__(servable.engine)
        batches = [batch_of(3 + seed, seed=seed) for seed in range(9)]
        first = pool.submit(binary, server, batches[0], parameters={"deadline_ms": 30_000})
        until(lambda: sizes)
        others = [pool.submit(binary, server, batch, parameters={"deadline_ms": 30_000}) for batch in batches[1:]]
        until(lambda: server.engine.tensorbatch.figures()["waiting_rows"] == sum(b.size for b in batches[1:]))
        busy.set()
        for batch, answered in zip(batches, [first, *others], strict=True):
            status, answer, found = answered.result(30)
            assert status == 200, answer
            wanted = expected(server, batch)
            assert all(same_bits(found[name], wanted[name]) for name in NAMES)
        assert len(sizes) < len(batches) and max(sizes) > max(batch.size for batch in batches)


def test_a_lookup_of_more_rows_than_a_batch_is_one_batch(server: LookupServer) -> None:
    before = server.engine.tensorbatch.counts.batches
    batch = batch_of(1000, seed=8)
    status, _, found = binary(server, batch)
    assert status == 200 and server.engine.tensorbatch.counts.batches == before + 1
    wanted = expected(server, batch)
    assert all(same_bits(found[name], wanted[name]) for name in NAMES)


def test_vectors_are_fp16_if_the_request_asks(server: LookupServer) -> None:
    batch = batch_of(6, seed=9)
    wanted = expected(server, batch)
    half = {"binary_data": True, "datatype": "FP16"}
    outputs = [{"name": name, "parameters": half} for name in ("embeddings", "embeddings.history")]
    outputs.append({"name": "embeddings.history_mask", "parameters": {"binary_data": True}})
    status, answer, found = binary(server, batch, outputs)
    assert status == 200 and [output["datatype"] for output in answer["outputs"]] == ["FP16", "FP16", "BOOL"]
    for name, array in found.items():
        assert same_bits(array, wanted[name] if name.endswith("_mask") else wanted[name].astype(np.float16))
    outputs[1]["parameters"] = {"datatype": "FP32"}
    status, answer, _ = binary(server, batch, outputs)
    assert status == 400 and "FP32 and FP16" in answer["error"]


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([{"name": "embedding"}], "did you mean 'embeddings'"),
        ([{"name": "embeddings.usr"}], "did you mean 'embeddings.user'"),
        ([{"name": "embeddings.user_mask"}], "there is no output 'embeddings.user_mask'"),
        ([{"name": "embeddings", "parameters": {"datatype": "BF16"}}], "datatype 'BF16'"),
        ([{"name": "logits", "parameters": {"datatype": "FP16"}}], "only binary_data"),
        ([{"name": "embeddings.history_mask", "parameters": {"datatype": "FP16"}}], "BOOL"),
    ],
)
def test_wrong_outputs_are_refused(server: LookupServer, outputs: Any, says: str) -> None:
    status, answer, _ = server.post({"inputs": as_json(inputs_of(batch_of(2))), "outputs": outputs})
    assert status == 400 and says in answer["error"]


def test_answers_over_a_limit_are_refused_before_any_work(tmp_path: Path) -> None:
    limits = Limits(answer="4KiB", answers="4KiB", json="64KiB")
    with LookupServer(tmp_path, limits=limits) as server:
        batches = server.engine.tensorbatch.counts.batches
        outputs = [{"name": "embeddings", "parameters": {"binary_data": True}}]  # 48 bytes a row
        status, answer, _ = binary(server, batch_of(86), outputs)
        assert status == 413 and "answer=4KiB" in answer["error"] and "4128 bytes" in answer["error"]
        long = {"history": np.arange(300).reshape(1, 300)}
        status, answer, _ = server.post({"inputs": as_json(long), "outputs": [{"name": "embeddings.history"}]})
        assert status == 413 and "4800 bytes" in answer["error"]
        assert server.engine.tensorbatch.counts.batches == batches
        assert binary(server, batch_of(85), outputs)[0] == 200
        client = triton_grpc.InferenceServerClient(server.address("grpc"))
        keys = triton_grpc.InferInput("user", [300], "INT64")
        keys.set_data_from_numpy(np.arange(300))
        with pytest.raises(InferenceServerException, match="answer=4KiB"):
            client.infer("ctr", [keys], outputs=[triton_grpc.InferRequestedOutput("embeddings.user")])


def test_an_answer_of_many_numbers_as_json_is_refused(tmp_path: Path) -> None:
    with LookupServer(tmp_path, limits=Limits(json="16KiB")) as server:
        inputs, tail = as_binary({"user": np.arange(200)})
        document = {"inputs": inputs, "outputs": [{"name": "embeddings.user"}]}
        status, answer, _ = server.post(document, tail)
        assert status == 413 and "800 numbers" in answer["error"] and "binary_data" in answer["error"]
        document["outputs"] = [{"name": "embeddings.user", "parameters": {"binary_data": True}}]
        assert server.post(document, tail)[0] == 200


def test_lookups_in_flight_are_bounded_and_end(tmp_path: Path) -> None:
    with LookupServer(tmp_path, limits=Limits(answer="8KiB", answers="8KiB")) as server, ThreadPoolExecutor(1) as pool:
        servable: Any = server.engine.models.by_name["ctr"].current.servable  # type: ignore[union-attr]
        lookup, go = servable.lookup, threading.Event()
        servable.lookup = lambda *arguments: go.wait(20) and lookup(*arguments)
        outputs = [{"name": "embeddings", "parameters": {"binary_data": True}}]
        first = pool.submit(binary, server, batch_of(100), outputs, parameters={"deadline_ms": 30_000})
        answer_bytes = server.frontend.service.answer_bytes
        until(lambda: answer_bytes.held == 4800)
        status, answer, _ = binary(server, batch_of(100), outputs)
        assert status == 429 and "answers=8KiB" in answer["error"]
        go.set()
        assert first.result(30)[0] == 200
        until(lambda: answer_bytes.held == 0)
        client = triton_grpc.InferenceServerClient(server.address("grpc"))
        keys = triton_grpc.InferInput("user", [3], "INT64")
        keys.set_data_from_numpy(np.arange(3))
        client.infer("ctr", [keys], outputs=[triton_grpc.InferRequestedOutput("embeddings.user")])
        until(lambda: answer_bytes.held == 0)


def test_a_publication_changes_the_vectors_and_is_named(tmp_path: Path) -> None:
    with LookupServer(tmp_path) as server:
        inputs = as_json({"user": np.array([1, 2])})
        document = {"inputs": inputs, "outputs": [{"name": "embeddings.user"}]}
        _, before, _ = server.post(document)
        server.apply(users_set_to(9.0, [1], number=1, watermark=1000))
        _, after, _ = server.post(document)
        assert before["parameters"]["publication"] == 0 and after["parameters"]["publication"] == 1
        assert after["parameters"]["freshness_ms"] > 0
        assert after["outputs"][0]["data"][:4] == [9.0] * 4
        assert after["outputs"][0]["data"][4:] == before["outputs"][0]["data"][4:]


def test_every_answer_is_of_one_publication(tmp_path: Path) -> None:
    """While publications set all rows to their number, an answer has its own number in every row."""
    with LookupServer(tmp_path) as server, ThreadPoolExecutor(2) as pool:
        keys = list(range(200))
        server.apply(users_set_to(1.0, keys, number=1))
        done = threading.Event()

        def publish() -> int:
            number = 1
            while not done.is_set():
                number += 1
                server.apply(users_set_to(float(number), keys, number))
            return number

        publishing = pool.submit(publish)
        batch = batch_of(200, seed=1)
        same = {**inputs_of(batch), "user": np.arange(200)}
        try:
            for number in range(30):
                inputs, tail = as_binary(same)
                wanted = [{"name": "embeddings.user", "parameters": {"binary_data": True}}]
                wanted += [{"name": "logits"}] if number % 2 else []
                status, answer, found = server.post({"inputs": inputs, "outputs": wanted}, tail)
                assert status == 200, answer
                assert np.unique(found["embeddings.user"]).tolist() == [answer["parameters"]["publication"]]
        finally:
            done.set()
        assert publishing.result(30) > 2


def test_late_rows_follow_the_policy_and_are_counted(tmp_path: Path) -> None:
    tiers = {"dram": "3MiB", "ssd": str(tmp_path / "rows")}
    with LookupServer(tmp_path, tiers) as server:
        batch = batch_of(40, seed=2)
        wanted = expected(server, batch)
        servable: Any = server.engine.models.by_name["ctr"].current.servable  # type: ignore[union-attr]
        for rows in servable.engine.embeddings.tables:
            rows.store.core.evict(1000)
        prefetch, servable.prefetch = servable.prefetch, lambda *_: None  # rows on SSD do not arrive in time
        status, answer, found = binary(server, batch, parameters={"policy": "initial"})
        assert status == 200 and answer["parameters"]["late_rows"] > 0
        assert not same_bits(found["embeddings.user"], wanted["embeddings.user"])
        servable.prefetch = prefetch
        status, answer, found = binary(server, batch, parameters={"policy": "wait"})
        assert status == 200 and answer["parameters"]["late_rows"] == 0
        assert all(same_bits(found[name], wanted[name]) for name in NAMES)


def test_metadata_lists_the_outputs_and_their_columns(server: LookupServer) -> None:
    client = triton_http.InferenceServerClient(server.address("http"))
    outputs = {output["name"]: output for output in client.get_model_metadata("ctr")["outputs"]}
    assert list(outputs) == ["probabilities", "logits", *NAMES]
    assert outputs["embeddings"]["shape"] == [-1, 12] and outputs["embeddings.history"]["shape"] == [-1, -1, 4]
    assert outputs["embeddings.history_mask"]["datatype"] == "BOOL"
    places = outputs["embeddings"]["parameters"]["features"]
    assert places == [{"name": name, "offset": 4 * n, "width": 4} for n, name in enumerate(POOLED)]
    over_grpc = triton_grpc.InferenceServerClient(server.address("grpc"))
    config = over_grpc.get_model_config("ctr", as_json=True)["config"]
    assert '"offset": 8' in config["parameters"]["embeddings"]["string_value"]
    assert len(over_grpc.get_model_metadata("ctr").outputs) == 2 + len(NAMES)


def test_lookups_are_counted_apart_from_the_tower(tmp_path: Path) -> None:
    with LookupServer(tmp_path) as server:
        outputs = [{"name": "embeddings", "parameters": {"binary_data": True}}]
        for _ in range(3):
            assert binary(server, batch_of(10), outputs)[0] == 200
        assert binary(server, batch_of(5), [{"name": "logits"}])[0] == 200
        until(lambda: server.client.figures().get(("hotrow_lookups_total", "ctr", "1")) == 3)
        figures = server.client.figures()
        assert figures["hotrow_lookup_rows_total", "ctr", "1"] == 30
        assert figures["hotrow_lookup_bytes_total", "ctr", "1"] > 3 * 10 * 48
        assert figures["hotrow_fallback_total", "ctr", "1"] == 1
        model = server.engine.models.by_name["ctr"]
        assert model.lookups.service_time.known and model.group is not model.lookups


def test_many_sets_of_outputs_leave_no_queues_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.serve.processes.request_admission.MOST_ROUTES", 8)
    with LookupServer(tmp_path) as server:
        names = [f"embeddings.{name}" for name in (*POOLED, "history")]
        batch = batch_of(2)
        for number in range(1, 16):
            wanted = [
                {"name": name, "parameters": {"binary_data": True}} for n, name in enumerate(names) if number >> n & 1
            ]
            assert binary(server, batch, wanted)[0] == 200
        assert len(server.engine.tensorbatch._queues) <= 9


@pytest.mark.parametrize("tier", ["dram", "hbm"])
@pytest.mark.parametrize("tower", [False, True])
def test_an_engine_looks_up_the_same_bits_in_every_tier(server: LookupServer, tier: str, tower: bool) -> None:
    if tier == "hbm":
        pytest.importorskip("triton")
    batch = batch_of(9, seed=11)
    folder = server.direct.source.path.parent
    with hr.Engine(folder, memory=hr.Memory(**{tier: "4MiB"}), device="cpu") as engine:
        vectors, answer = engine.answer_lookup(batch, "wait", tower, most_rows=4)
    wanted = server.direct.lookup(batch)
    assert all(same_bits(vectors[name], wanted[name]) for name in wanted)
    assert len(answer.logits) == (9 if tower else 0)
    if tower:
        torch.testing.assert_close(answer.logits, server.direct.logits(batch), rtol=0, atol=1e-6)
