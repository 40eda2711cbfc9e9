"""hotrow.client: predictions and lookups over HTTP and gRPC, retries within the timeout, and errors with their cure."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lookup_server import LookupServer, batch_of, inputs_of, same_bits, users_set_to

import hotrow as hr
from hotrow.client import Client, ClientError
from hotrow.client.tensors import tensors
from hotrow.errors import OptionError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookupServer]:
    with LookupServer(tmp_path_factory.mktemp("client")) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(server: LookupServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(f"{request.param}://{server.address(request.param)}") as opened:
        yield opened


def test_vectors_and_predictions_are_those_of_the_engine(server: LookupServer, client: Client) -> None:
    batch = batch_of(12, seed=1)
    answer = client.embeddings("ctr", inputs_of(batch))
    wanted = server.direct.lookup(batch)
    assert list(answer.arrays) == list(wanted)
    assert all(same_bits(answer[name], wanted[name]) for name in wanted)
    assert (answer.model, answer.version, answer.publication, answer.late_rows) == ("ctr", "1", 0, 0)
    predicted = client.predict("ctr", inputs_of(batch), version=1, deadline=20.0)
    torch.testing.assert_close(
        torch.tensor(predicted["probabilities"]), server.direct.predict(batch), rtol=0, atol=1e-6
    )
    assert predicted["logits"].shape == (12,)


def test_features_are_those_of_the_inputs_or_the_named_ones(server: LookupServer, client: Client) -> None:
    lists = {"user": [1, 2], "history": [[3, 4, 5], []]}
    answer = client.embeddings("ctr", lists)
    assert list(answer.arrays) == ["user", "history", "history_mask"]
    assert answer["history_mask"].tolist() == [[True, True, True], [False, False, False]]
    assert list(client.embeddings("ctr", lists, ["user"]).arrays) == ["user"]
    assert client.embeddings("ctr", {"user": 7}, half=True)["user"].dtype == np.float16
    raw = client.embeddings("ctr", lists, raw=True)
    assert all(same_bits(raw[name], answer[name]) for name in answer.arrays)
    with pytest.raises(OptionError, match="no feature 'usr'; did you mean 'user'"):
        client.embeddings("ctr", lists, ["usr"])


def test_an_answer_names_the_publication_that_it_is_of(tmp_path: Path) -> None:
    with LookupServer(tmp_path) as server, Client(f"http://{server.address('http')}") as client:
        server.apply(users_set_to(9.0, [1], number=1))
        answer = client.embeddings("ctr", {"user": [1]})
        assert answer.publication == 1 and answer["user"].tolist() == [[9.0] * 4]


def test_wrong_requests_are_refused_with_the_servers_reason(client: Client) -> None:
    with pytest.raises(ClientError, match="there is no model 'ctx'") as error:
        client.predict("ctx", {"user": [1]})
    assert error.value.status == 404 and not error.value.temporary
    with pytest.raises(ClientError, match="were not sent: 'item'") as error:
        client.predict("ctr", {"user": [1], "dense": [[0.0] * 3]})
    assert error.value.status == 400


def test_wrong_options_are_refused_before_anything_is_sent(client: Client) -> None:
    with pytest.raises(OptionError, match="policy='waits'; did you mean 'wait'"):
        client.predict("ctr", {"user": [1]}, policy="waits")
    with pytest.raises(OptionError, match="deadline=0; give seconds above 0"):
        client.embeddings("ctr", {"user": [1]}, deadline=0)
    with pytest.raises(OptionError, match=r"inputs=\{\}"):
        client.embeddings("ctr", {})
    with pytest.raises(OptionError, match="among strings"):
        client.predict("ctr", {"user": ["ann", None]})
    with pytest.raises(OptionError, match="timeout=0"):
        Client("http://127.0.0.1:1", timeout=0)


def test_any_number_of_threads_share_a_client(server: LookupServer, client: Client) -> None:
    batches = [batch_of(1 + seed, seed) for seed in range(16)]
    wanted = [server.direct.lookup(batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda batch: client.embeddings("ctr", inputs_of(batch)), batches)
    for answer, vectors in zip(answers, wanted, strict=True):
        assert all(same_bits(answer[name], vectors[name]) for name in vectors)


def take_all_answer_bytes(server: LookupServer) -> Callable[[], object]:
    """Leave no room for another answer; returns the function that gives it back."""
    answer_bytes, size = server.frontend.service.answer_bytes, server.frontend.service.limits.answers_bytes
    until = time.monotonic() + 10
    while answer_bytes.held and time.monotonic() < until:  # gRPC tells a moment late that an answer was sent
        time.sleep(0.005)
    answer_bytes.take(size)
    return lambda: server.loop.call_soon_threadsafe(answer_bytes.give, size)


def test_a_refused_request_is_sent_again_within_the_timeout(server: LookupServer, client: Client) -> None:
    """While the front end has no room for the answer, it refuses with 429; then there is room."""
    client.embeddings("ctr", {"user": [1]})
    give = take_all_answer_bytes(server)
    threading.Timer(0.3, give).start()
    began = time.monotonic()
    assert client.embeddings("ctr", {"user": [1]})["user"].shape == (1, 4)
    assert time.monotonic() - began >= 0.3


def test_refusals_beyond_the_timeout_are_an_error_that_counts_the_tries(server: LookupServer) -> None:
    with Client(f"grpc://{server.address('grpc')}", timeout=1.5) as client:
        client.embeddings("ctr", {"user": [1]})
        give = take_all_answer_bytes(server)
        try:
            with pytest.raises(ClientError, match=r"answers=128MiB.* \(2 tries in timeout=1.5 s") as error:
                client.embeddings("ctr", {"user": [1]})
        finally:
            give()
    assert error.value.status == 429 and error.value.retry_after == 1


class Starting(http.server.BaseHTTPRequestHandler):
    """A server that is starting: it answers its first requests with 503, and closes every connection."""

    refusals = 0
    seen: ClassVar[list[float]] = []

    def do_GET(self) -> None:
        self.seen.append(time.monotonic())
        status, body = 200, {"name": "ctr", "outputs": [{"name": "embeddings.user"}]}
        if len(self.seen) <= type(self).refusals:
            status, body = 503, {"error": "no engine is ready"}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def test_retry_after_is_waited_for() -> None:
    Starting.refusals, Starting.seen = 1, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Starting) as starting:
        threading.Thread(target=starting.serve_forever, daemon=True).start()
        with Client(f"http://127.0.0.1:{starting.server_port}") as client:
            with pytest.raises(ClientError, match="501"):  # it has no POST
                client.embeddings("ctr", {"user": [1]})
        starting.shutdown()
    assert len(Starting.seen) == 2 and Starting.seen[1] - Starting.seen[0] >= 1.0


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_is_not_there_is_an_error_in_time(scheme: str) -> None:
    began = time.monotonic()
    with Client(f"{scheme}://127.0.0.1:1", timeout=0.6) as client:
        with pytest.raises(ClientError, match=r"127\.0\.0\.1:1.*tries in timeout=0\.6 s") as error:
            client.predict("ctr", {"user": [1]})
    assert error.value.temporary and time.monotonic() - began < 10


def test_a_connection_that_the_server_closed_is_opened_again(tmp_path: Path) -> None:
    with LookupServer(tmp_path) as server, Client(f"http://{server.address('http')}") as client:
        before = client.embeddings("ctr", {"user": [1]})
        server.loop.call_soon_threadsafe(lambda: [one.abort() for one in list(server.frontend._http.connections)])
        time.sleep(0.1)
        assert same_bits(client.embeddings("ctr", {"user": [1]})["user"], before["user"])


def test_values_become_tensors() -> None:
    made = {tensor.name: tensor for tensor in tensors({
        "one": 7, "many": [[1, 2], [3, 4]], "ragged": [[1], [], [2, 3]], "empty": [[], []],
        "dense": [[0.5]], "price": [1.5], "name": "ann", "flag": [True],
    })}  # fmt: skip
    shapes = {name: (tensor.datatype, tensor.shape) for name, tensor in made.items()}
    assert shapes == {
        "one": ("INT64", (1,)), "many": ("INT64", (2, 2)), "ragged": ("INT64", (3,)), "ragged.offsets": ("INT64", (4,)),
        "empty": ("INT64", (0,)), "empty.offsets": ("INT64", (3,)), "dense": ("FP32", (1, 1)),
        "price": ("FP64", (1,)), "name": ("BYTES", (1,)), "flag": ("BOOL", (1,)),
    }  # fmt: skip
    assert np.frombuffer(made["ragged.offsets"].data, np.int64).tolist() == [0, 1, 1, 3]
    assert made["name"].data == b"\3\0\0\0ann"


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text().partition("## Use the rows")[2]
    example = page.partition("```python\n")[2].partition("```")[0]
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)])
    model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, dense_features=2, bottom=(4,), top=(4,)))
    with LookupServer(tmp_path, model=model) as server:
        here: dict[str, Any] = {}
        exec(example.replace("127.0.0.1:8000", server.address("http")), here)
    assert here["answer"]["user"].shape == (2, 4)
