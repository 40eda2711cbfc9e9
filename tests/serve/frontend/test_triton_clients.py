"""NVIDIA's clients, unchanged, against the front end: every call they have that we serve, over HTTP and gRPC alike."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from in_process import SPEC, Running, small_backend
from tritonclient.utils import InferenceServerException

import hotrow as hr

ROWS = 5


@pytest.fixture(params=["http", "grpc"])
def client(request: Any, running: Running) -> Any:
    return _client(request.param, running)


def _client(protocol: str, running: Running) -> Any:
    module = over_http if protocol == "http" else over_grpc
    made = module.InferenceServerClient(running.address(protocol))
    made.module = module
    return made


def tensor(client: Any, name: str, array: np.ndarray, **options: Any) -> Any:
    kinds = {"i8": "INT64", "i4": "INT32", "f4": "FP32", "f8": "FP64"}
    datatype = kinds.get(array.dtype.str[1:], "BYTES")
    made = client.module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, **options)
    return made


def batch(rows: int = ROWS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(rows)
    return {
        "user": draw.integers(0, 200, rows),
        "item": draw.integers(0, 200, rows),
        "history": draw.integers(0, 200, 2 * rows),
        "history.offsets": np.arange(rows + 1) * 2,
        "dense": draw.normal(size=(rows, 2)).astype(np.float32),
    }


def expected(running: Running, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The trainer's own logits of the same examples."""
    rows = len(arrays["dense"])
    ids = {
        "user": hr.Jagged(torch.from_numpy(np.broadcast_to(arrays["user"], rows).copy())),
        "item": hr.Jagged(torch.from_numpy(arrays["item"])),
        "history": hr.Jagged(torch.from_numpy(arrays["history"]), torch.from_numpy(arrays["history.offsets"])),
    }
    with torch.no_grad():
        logits: np.ndarray = running.backend._all["ctr"][0](
            hr.KeyedBatch(ids, torch.from_numpy(arrays["dense"]))
        ).numpy()
    return logits


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return torch.sigmoid(torch.from_numpy(logits)).numpy()


def test_answers_equal_the_models_own(client: Any, running: Running) -> None:
    arrays = batch()
    result = client.infer("ctr", [tensor(client, name, array) for name, array in arrays.items()])
    want = expected(running, arrays)
    np.testing.assert_allclose(result.as_numpy("logits"), want, atol=1e-6)
    np.testing.assert_allclose(result.as_numpy("probabilities"), sigmoid(want), atol=1e-6)


def test_json_and_typed_contents_give_the_same_bits_as_bytes(running: Running) -> None:
    arrays = batch()
    client = _client("http", running)
    binary = client.infer("ctr", [tensor(client, name, array) for name, array in arrays.items()])
    inputs = [tensor(client, name, array, binary_data=False) for name, array in arrays.items()]
    outputs = [over_http.InferRequestedOutput("logits", binary_data=False)]
    text = client.infer("ctr", inputs, outputs=outputs)
    assert text.as_numpy("probabilities") is None
    np.testing.assert_array_equal(text.as_numpy("logits"), binary.as_numpy("logits"))


def test_one_packed_tensor_equals_one_tensor_a_feature(client: Any) -> None:
    arrays = batch()
    plain = {"user": arrays["user"], "item": arrays["item"], "history": arrays["history"][:ROWS].reshape(ROWS, 1)}
    dense = tensor(client, "dense", arrays["dense"])
    one_each = client.infer("ctr", [*(tensor(client, name, array) for name, array in plain.items()), dense])
    packed = np.stack([array.reshape(-1) for array in plain.values()], axis=1)
    together = client.infer("ctr", [tensor(client, "keys", packed), dense])
    rest = client.infer(
        "ctr", [dense, tensor(client, "user", plain["user"]), tensor(client, "keys", packed[:, 1:].copy())]
    )
    np.testing.assert_array_equal(together.as_numpy("logits"), one_each.as_numpy("logits"))
    np.testing.assert_array_equal(rest.as_numpy("logits"), one_each.as_numpy("logits"))


def test_a_users_features_sent_once_equal_those_sent_for_every_row(client: Any) -> None:
    arrays = batch()
    once = {
        "user": np.array([7]),
        "item": arrays["item"],
        "history": np.array([[3, 4, 5]]),
        "dense": np.ones((1, 2), np.float32),
    }
    every = {
        "user": np.full(ROWS, 7),
        "item": arrays["item"],
        "history": np.tile([3, 4, 5], ROWS),
        "history.offsets": np.arange(ROWS + 1, dtype=np.int32) * 3,
        "dense": np.ones((ROWS, 2), np.float32),
    }
    answers = [client.infer("ctr", [tensor(client, n, a) for n, a in arrays.items()]) for arrays in (once, every)]
    np.testing.assert_array_equal(answers[0].as_numpy("logits"), answers[1].as_numpy("logits"))


def test_raw_columns_go_through_the_saved_spec(client: Any, running: Running) -> None:
    users = np.array(["ann"], dtype=object)
    items = np.array([f"item {i}" for i in range(ROWS)], dtype=object)
    history = np.array(["item 1", "item 2", "item 3"], dtype=object)
    inputs = [
        tensor(client, "user", users),
        tensor(client, "item", items),
        tensor(client, "history", history.reshape(1, 3)),
        tensor(client, "price", np.linspace(0, 1, ROWS)),
        tensor(client, "age", np.array([40.0])),
    ]
    result = client.infer("ctr", inputs)
    columns = {
        "user": ["ann"] * ROWS,
        "item": items.tolist(),
        "history": [history.tolist()] * ROWS,
        "price": np.linspace(0, 1, ROWS).tolist(),
        "age": [40.0] * ROWS,
    }
    with torch.no_grad():
        want = running.backend._all["ctr"][0](SPEC.apply(columns, labels=False)).numpy()
    np.testing.assert_allclose(result.as_numpy("logits"), want, atol=1e-6)
    assert running.backend.requests[-1].ids[0].shared, "the user's column is one row, so the engine reads it once"


def test_numeric_raw_columns_need_the_parameter(client: Any) -> None:
    inputs = [tensor(client, "user", np.arange(2)), tensor(client, "item", np.arange(2))]
    inputs += [tensor(client, "history", np.arange(2).reshape(2, 1))]
    inputs += [tensor(client, name, np.ones(2)) for name in ("price", "age")]
    with pytest.raises(InferenceServerException, match="price"):
        client.infer("ctr", inputs)
    assert client.infer("ctr", inputs, parameters={"raw": True}).as_numpy("logits").shape == (2,)


def test_requested_outputs_id_and_answer_parameters(client: Any) -> None:
    inputs = [tensor(client, name, array) for name, array in batch().items()]
    wanted = [client.module.InferRequestedOutput("probabilities")]
    result = client.infer("ctr", inputs, outputs=wanted, request_id="abc", model_version="1")
    assert result.as_numpy("logits") is None and result.as_numpy("probabilities").shape == (ROWS,)
    response = result.get_response() if client.module is over_http else result.get_response(as_json=True)
    assert (response["id"], response["model_version"]) == ("abc", "1")
    publication = response["parameters"]["publication"]
    assert publication in (7, {"int64_param": "7"})


def test_deadline_timeout_and_policy_reach_the_backend(client: Any, running: Running) -> None:
    inputs = [tensor(client, name, array) for name, array in batch().items()]
    client.infer("ctr", inputs, parameters={"deadline_ms": 5000, "policy": "initial"})
    assert running.backend.requests[-1].policy == "initial" and running.backend.requests[-1].deadline is not None
    with pytest.raises(InferenceServerException, match="deadline"):
        client.infer("ctr", inputs, timeout=1)
    with pytest.raises(InferenceServerException, match="did you mean 'policy'"):
        client.infer("ctr", inputs, parameters={"polcy": "wait"})


def test_health_metadata_config_statistics_and_index(client: Any) -> None:
    as_json = {} if client.module is over_http else {"as_json": True}
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ctr")
    assert (
        client.is_model_ready("ctr", "1") and not client.is_model_ready("ctr", "9") and not client.is_model_ready("no")
    )
    assert client.get_server_metadata(**as_json)["name"] == "hotrow"
    metadata = client.get_model_metadata("ctr", **as_json)
    assert [entry["name"] for entry in metadata["inputs"]] == ["user", "item", "history", "keys", "dense"]
    assert metadata["versions"] == ["1", "2"]
    config = client.get_model_config("ctr", **as_json)
    config = config.get("config", config)
    assert config["input"][-1]["data_type"] == "TYPE_FP32" and config["parameters"]["dtype"]["string_value"] == "fp32"
    client.infer("ctr", [tensor(client, name, array) for name, array in batch().items()])
    statistics = client.get_inference_statistics("ctr", **as_json)["model_stats"][0]
    assert int(statistics["inference_count"]) >= ROWS
    index = client.get_model_repository_index(**as_json)
    index = index.get("models") if isinstance(index, dict) else index
    assert index == [{"name": "ctr", "version": "2", "state": "READY", **({"reason": ""} if not as_json else {})}]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_load_and_unload(protocol: str) -> None:
    with Running(small_backend()) as running:
        client = _client(protocol, running)
        client.unload_model("ctr")
        assert not client.is_model_ready("ctr")
        with pytest.raises(InferenceServerException, match="no model 'ctr' in service"):
            client.infer("ctr", [tensor(client, name, array) for name, array in batch().items()])
        client.load_model("ctr")
        assert client.is_model_ready("ctr")
        with pytest.raises(InferenceServerException, match="no model's name"):
            client.load_model("..")


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_bodies_and_answers(algorithm: str, running: Running) -> None:
    client = _client("http", running)
    inputs = [tensor(client, name, array) for name, array in batch(300).items()]
    plain = client.infer("ctr", inputs)
    packed = client.infer(
        "ctr", inputs, request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
    )
    np.testing.assert_array_equal(packed.as_numpy("logits"), plain.as_numpy("logits"))


def test_a_stream_answers_in_order_and_survives_an_error(running: Running) -> None:
    client = _client("grpc", running)
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    inputs = [tensor(client, name, array) for name, array in batch().items()]
    client.async_stream_infer("ctr", inputs, request_id="1")
    client.async_stream_infer("ctr", inputs[:2], request_id="2")
    client.async_stream_infer("ctr", inputs, request_id="3")
    found = [answers.get(timeout=30) for _ in range(3)]
    client.stop_stream()
    assert [error is None for _, error in found] == [True, False, True]
    assert found[2][0].get_response().id == "3"
