"""The rules that hold for both protocols: authorization, refusals, draining, metrics."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from fuzz import binary, http_request
from in_process import Running, small_backend
from prometheus_client.parser import text_string_to_metric_families
from raw_http import connect, exchange, good, infer_status, read_reply
from tritonclient.utils import InferenceServerException

from hotrow.errors import OptionError
from hotrow.serve.frontend.grpc_messages import SERVICE, build
from hotrow.serve.frontend.ports import FrontendOptions
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.request import RefusedError

TOKEN = "0123456789abcdef0123"


def post(path: str, extra: str = "") -> bytes:
    return http_request(b"", None, extra, path)


def test_a_token_guards_loading_over_both_protocols() -> None:
    with Running(small_backend(), token=TOKEN) as running:
        unload = "/v2/repository/models/ctr/unload"
        for extra in ("", "Authorization: Bearer wrong\r\n", f"Authorization: Basic {TOKEN}\r\n"):
            status, reply = exchange(running, post(unload, extra))
            assert status == 401 and b"WWW-Authenticate: Bearer" in reply["head"]
        client = over_grpc.InferenceServerClient(running.address("grpc"))
        with pytest.raises(InferenceServerException, match="Bearer"):
            client.unload_model("ctr")
        assert client.is_model_ready("ctr")
        client.unload_model("ctr", headers={"authorization": f"Bearer {TOKEN}"})
        assert not client.is_model_ready("ctr")
        web = over_http.InferenceServerClient(running.address("http"))
        web.load_model("ctr", headers={"Authorization": f"Bearer {TOKEN}"})
        assert client.is_model_ready("ctr")


def test_off_loopback_without_a_token_nothing_is_loaded_but_requests_are_answered() -> None:
    with Running(small_backend(), host="0.0.0.0") as running:
        status, reply = exchange(running, post("/v2/repository/models/ctr/unload"))
        assert status == 403 and "--token" in reply["error"]
        with pytest.raises(InferenceServerException, match="--token"):
            over_grpc.InferenceServerClient(running.address("grpc")).load_model("ctr")
        assert infer_status(running)[0] == 200


def test_a_web_page_cannot_unload_a_model_of_its_reader(running: Running) -> None:
    status, _ = exchange(running, post("/v2/repository/models/ctr/unload", "Origin: http://example.org\r\n"))
    assert status == 403


def test_refusals_carry_their_status_and_when_to_come_back() -> None:
    backend = small_backend()
    with Running(backend) as running:
        for status, code in ((429, "RESOURCE_EXHAUSTED"), (503, "UNAVAILABLE")):
            backend.refuse = RefusedError(status, "too much work", retry_after=2.3)
            found, reply = exchange(running, http_request(*binary(good())))
            assert found == status and b"Retry-After: 3" in reply["head"] and reply["error"] == "too much work"
            client = over_grpc.InferenceServerClient(running.address("grpc"))
            inputs = [over_grpc.InferInput("keys", [1, 3], "INT64"), over_grpc.InferInput("dense", [1, 2], "FP32")]
            inputs[0].set_data_from_numpy(np.zeros((1, 3), np.int64))
            inputs[1].set_data_from_numpy(np.zeros((1, 2), np.float32))
            with pytest.raises(InferenceServerException, match=code):
                client.infer("ctr", inputs)


def test_a_broken_backend_is_a_500_that_says_nothing_of_the_inside() -> None:
    backend = small_backend()
    with Running(backend) as running:
        backend.refuse = ValueError("secret")  # type: ignore[assignment]
        status, reply = exchange(running, http_request(*binary(good())))
        assert status == 500 and "secret" not in reply["error"]
        backend.refuse = None
        assert infer_status(running)[0] == 200


def test_more_requests_than_in_flight_are_refused_at_once() -> None:
    backend = small_backend()
    with Running(backend, limits=Limits(in_flight=2)) as running:
        backend.seconds = 0.7
        waiting = [connect(running) for _ in range(2)]
        for connection in waiting:
            connection.sendall(http_request(*binary(good())))
        time.sleep(0.2)
        began = time.monotonic()
        assert infer_status(running)[0] == 429
        assert time.monotonic() - began < 0.4
        assert [read_reply(connection)[0] for connection in waiting] == [200, 200]


def test_draining_finishes_what_is_in_flight_and_takes_nothing_new() -> None:
    backend = small_backend()
    running = Running(backend)
    with running:
        backend.seconds = 0.8
        busy, idle = connect(running), connect(running)
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_reply(idle)[0] == 200
        busy.sendall(http_request(*binary(good())))
        time.sleep(0.2)
        closing = threading.Thread(target=lambda: running.call(running.frontend.close()))
        closing.start()
        time.sleep(0.2)
        assert idle.recv(10) == b""
        with pytest.raises(OSError):
            connect(running)
        status, reply = read_reply(busy)
        assert status == 200 and b"Connection: close" in reply["head"]
        closing.join(10)
        assert not closing.is_alive()


def test_draining_cancels_no_grpc_call() -> None:
    """grpc answers CANCELLED, which clients do not retry, to calls that it has received and the event loop has not."""
    make = build()["ModelInferRequest"]
    inputs = [
        {"name": "keys", "datatype": "INT64", "shape": [1, 3]},
        {"name": "dense", "datatype": "FP32", "shape": [1, 2]},
    ]
    data = make(model_name="ctr", inputs=inputs, raw_input_contents=[bytes(24), bytes(8)]).SerializeToString()
    codes: Counter[str] = Counter()

    def call_until_refused() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        with grpc.insecure_channel(running.address("grpc"), options=options) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            found: Counter[str] = Counter()
            while set(found) <= {"OK"}:
                calls = [infer.future(data, timeout=30) for _ in range(8)]
                found.update(call.code().name for call in calls)
            codes.update(found)

    backend = small_backend()
    backend.seconds = 0.002
    with Running(backend) as running:
        clients = [threading.Thread(target=call_until_refused) for _ in range(6)]
        for client in clients:
            client.start()
        time.sleep(0.3)
        running.call(running.frontend.close())
        for client in clients:
            client.join(30)
    assert set(codes) == {"OK", "UNAVAILABLE"} and codes["UNAVAILABLE"] >= len(clients), codes


def test_metrics_have_tritons_names_and_add_up() -> None:
    with Running(small_backend()) as running:
        for _ in range(3):
            assert infer_status(running)[0] == 200
        assert infer_status(running, item=np.arange(3))[0] == 400
        text = _page(running)
        values = {
            (family.name, *sample.labels.values()): sample.value  # the parser adds _total to samples
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["nv_inference_request_success", "ctr", "2"] == 3
        assert values["nv_inference_request_failure", "ctr", "2", "BAD_REQUEST"] == 1
        assert values["nv_inference_count", "ctr", "1"] == 12
        assert values["nv_inference_request_duration_us", "ctr", "2"] > 0
        assert "# TYPE nv_inference_request_success counter" in text
        assert exchange(running, b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n", "metrics")[0] == 404


def _page(running: Running) -> str:
    from urllib.request import urlopen

    with urlopen(f"http://{running.address('metrics')}/metrics") as page:
        text: str = page.read().decode()
    return text


@pytest.mark.parametrize("options", [{"http_port": 99999}, {"token": "short"}, {"grpc_port": "8001"}])
def test_wrong_options_name_themselves(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        FrontendOptions(**options)


def test_a_port_that_is_taken_is_an_error_with_the_cure(running: Running) -> None:
    taken = Running(small_backend(), http_port=running.frontend.ports["http"])
    taken._thread.start()
    with pytest.raises(OptionError, match="http_port"):
        taken.call(taken.frontend.start())
    taken.loop.call_soon_threadsafe(taken.loop.stop)
