"""`hotrow serve` answers tritonclient and curl like hr.Engine, for up to 100,000 rows."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from fuzz import binary, text
from server_process import Server

import hotrow as hr

FEATURES = ("a", "b", "c", "d")
CURL = shutil.which("curl")
needs_curl = pytest.mark.skipif(CURL is None, reason="there is no curl; apt-get install curl")


class Serving(Server):
    """A server of one exported model with four features, and that model in this process."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(5)
        embeddings = hr.EmbeddingCollection([hr.Table(name, dim=8) for name in FEATURES], seed=5)
        for rows in embeddings.tables:
            rows.assign(torch.arange(20_000), torch.randn(20_000, 8))
        model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, top=(16,))).eval()
        hr.export(model, folder / "repository" / "ctr")
        self.engine_here = hr.Engine(folder / "repository" / "ctr")
        super().__init__(folder, "--grpc", "0", "--deadline", "60s")
        (line,) = (line for line in self.text().splitlines() if "grpc://" in line)
        self.ports["grpc"] = int(line.rpartition(":")[2])
        self.url = f"http://127.0.0.1:{self.ports['http']}/v2/models/ctr/infer"

    def expected(self, tensors: dict[str, np.ndarray]) -> np.ndarray:
        """The logits that the engine gives in this process."""
        batch = hr.KeyedBatch({name: hr.Jagged(torch.from_numpy(array)) for name, array in tensors.items()})
        found: np.ndarray = self.engine_here.logits(batch).numpy()
        return found


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("real")) as server:
        yield server
        server.engine_here.close()


def drawn(rows: int) -> dict[str, np.ndarray]:
    """Keys that the model has rows for, and some that it does not."""
    draw = np.random.default_rng(rows)
    return {name: draw.integers(-1_000, 21_000, rows) for name in FEATURES}


@pytest.mark.parametrize("rows", [1, 10_000, 100_000])
@pytest.mark.parametrize("form", ["json", "binary", "gzip", "grpc"])
def test_tritons_clients_get_the_engines_answers(serving: Serving, form: str, rows: int) -> None:
    module: Any = over_grpc if form == "grpc" else over_http
    port = serving.ports["grpc" if form == "grpc" else "http"]
    wait = {} if form == "grpc" else {"network_timeout": 120.0, "connection_timeout": 120.0}
    client = module.InferenceServerClient(f"127.0.0.1:{port}", **wait)
    tensors, packed, inputs = drawn(rows), form != "json", []
    for name, array in tensors.items():
        made = module.InferInput(name, [rows], "INT64")
        made.set_data_from_numpy(array, **({} if form == "grpc" else {"binary_data": packed}))
        inputs.append(made)
    options: dict[str, Any] = {}
    if form != "grpc":
        options["outputs"] = [module.InferRequestedOutput("logits", binary_data=packed)]
    if form == "gzip":
        options |= {"request_compression_algorithm": "gzip", "response_compression_algorithm": "gzip"}
    result = client.infer("ctr", inputs, **options)
    client.close()
    np.testing.assert_allclose(result.as_numpy("logits"), serving.expected(tensors), atol=1e-6)


def curl(folder: Path, *arguments: str, body: bytes | None = None) -> tuple[int, bytes]:
    """The status that curl sees, and the body."""
    assert CURL is not None
    command = [CURL, "--silent", "--show-error", "--max-time", "120", "--output", str(folder / "answer")]
    if body is not None:
        (folder / "body").write_bytes(body)
        command += ["--data-binary", f"@{folder / 'body'}", "--header", "Content-Type: application/json"]
    ended = subprocess.run([*command, "--write-out", "%{http_code}", *arguments], capture_output=True, check=False)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    return int(ended.stdout), (folder / "answer").read_bytes()


CURL_OPTIONS = {
    "plain": (),
    "chunked": ("--header", "Transfer-Encoding: chunked"),
    "HTTP/1.0": ("--http1.0",),
    "100-continue": ("--header", "Expect: 100-continue"),
    "no Expect": ("--header", "Expect:"),
    "compressed answer": ("--compressed",),
    "offer of HTTP/2": ("--http2",),
    "slow reader": ("--limit-rate", "20M"),
}


@needs_curl
@pytest.mark.parametrize("options", CURL_OPTIONS)
def test_curl_gets_the_engines_answers(serving: Serving, tmp_path: Path, options: str) -> None:
    for rows in (2, 100_000):
        tensors = drawn(rows)
        status, answer = curl(tmp_path, *CURL_OPTIONS[options], serving.url, body=text(tensors))
        assert status == 200, answer[:300]
        (found,) = (output for output in json.loads(answer)["outputs"] if output["name"] == "logits")
        np.testing.assert_allclose(np.array(found["data"]), serving.expected(tensors), atol=1e-6)


@needs_curl
def test_curl_sends_bytes_packed_and_not(serving: Serving, tmp_path: Path) -> None:
    tensors = drawn(100_000)
    body, header = binary(tensors)
    headers = ("--header", f"Inference-Header-Content-Length: {header}")
    for packed, extra in ((body, ()), (gzip.compress(body, 1), ("--header", "Content-Encoding: gzip"))):
        status, answer = curl(tmp_path, *headers, *extra, serving.url, body=packed)
        assert status == 200, answer[:300]
        found = np.frombuffer(answer[-400_000:], "<f4")  # probabilities, then logits
        np.testing.assert_allclose(found, serving.expected(tensors), atol=1e-6)


@needs_curl
def test_curl_is_told_of_a_limit_before_it_has_sent_the_body(serving: Serving, tmp_path: Path) -> None:
    status, answer = curl(tmp_path, serving.url, body=bytes((64 << 20) + 1))
    assert status == 413 and b"body=64MiB" in answer


@needs_curl
def test_curl_asks_for_a_head_and_several_at_once(serving: Serving, tmp_path: Path) -> None:
    live = serving.url.partition("/v2")[0] + "/v2/health/live"
    assert curl(tmp_path, "--head", live)[0] == 200
    ended = subprocess.run(
        [CURL, "--silent", "--verbose", "--http2", live, live, live], capture_output=True, check=False
    )
    assert ended.returncode == 0 and ended.stderr.count(b"HTTP/1.1 200 OK") == 3
    assert ended.stderr.count(b"Connected to") == 1, "a connection was not kept"
