"""`hotrow serve --devices` with an exported model: answers, requests of each engine, and an engine that dies."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines import EngineUnderTest
from served import Served

import hotrow as hr

KEYS, DENSE, ROWS = 500, 3, 5
NAMES = ("user", "item")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    embeddings = hr.EmbeddingCollection([hr.Table(name, dim=4) for name in NAMES], seed=3)
    draw = torch.Generator().manual_seed(0)
    for rows in embeddings.tables:
        rows.assign(torch.arange(KEYS), torch.randn(KEYS, 4, generator=draw))
    torch.manual_seed(0)
    tower = hr.models.DLRM(embeddings.features, dense_features=DENSE, bottom=(8,), top=(8,))
    path = tmp_path_factory.mktemp("models") / "repository"
    hr.export(hr.Recommender(embeddings, tower), path / "ctr")
    return path


def make_batch(seed: int) -> hr.KeyedBatch:
    draw = torch.Generator().manual_seed(seed)
    ids = {name: hr.Jagged(torch.randint(0, KEYS + 50, (ROWS,), generator=draw)) for name in NAMES}
    return hr.KeyedBatch(ids, torch.randn(ROWS, DENSE, generator=draw))


def infer(server: Served, batch: hr.KeyedBatch) -> torch.Tensor:
    inputs = [
        {"name": name, "shape": [ROWS], "datatype": "INT64", "data": batch.ids[name].values.tolist()} for name in NAMES
    ]
    assert batch.dense is not None
    dense = batch.dense.flatten().tolist()
    inputs.append({"name": "dense", "shape": [ROWS, DENSE], "datatype": "FP32", "data": dense})
    answer = json.loads(server.get("/v2/models/ctr/infer", data=json.dumps({"inputs": inputs}).encode()))
    return torch.tensor(answer["outputs"][0]["data"])


def metric(server: Served, name: str) -> dict[str, float]:
    """A metric's value by engine number."""
    lines = [line for line in server.get("/metrics", "metrics").splitlines() if line.startswith(name + "{")]
    return {line.split('engine="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def wait_until(condition: Callable[[], Any], what: str, server: Served) -> Any:
    until = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < until, f"{what}: {server.text()}"
        time.sleep(0.1)
    return found


@pytest.mark.parametrize(
    ("devices", "memory"),
    [
        ("cpu,cpu", ()),
        pytest.param("0,0", (), marks=on_gpu),
        pytest.param("0,0", ("--hbm", "1MiB"), marks=on_gpu),
        pytest.param("cpu,0", (), marks=on_gpu),
    ],
)
def test_all_devices_answer_and_the_others_go_on_when_one_dies(
    devices: str, memory: tuple[str, ...], repository: Path
) -> None:
    server = Served(repository, "--devices", devices, "--no-compile", *memory, loader=None)
    try:
        check_answers_of_all_devices(server, devices, repository)
    finally:
        server.end()


@pytest.mark.skipif(torch.cuda.is_available(), reason="its GPU works")
def test_gpu_that_torch_cannot_use_is_one_error_that_names_the_device(
    repository: Path, start_process: Callable[..., EngineUnderTest]
) -> None:
    engine = start_process(repository, ready=False, device="cuda:3")
    why = engine.wait_for("failed")["why"]
    assert why.startswith("cuda:3: torch cannot compute on it: ") and "give other --devices (cpu: no GPU)" in why
    assert engine.process.wait(60) == 2


def check_answers_of_all_devices(server: Served, devices: str, repository: Path) -> None:
    shown = ["cpu" if device == "cpu" else f"cuda:{device}" for device in devices.split(",")]
    with hr.Engine(repository / "ctr") as engine:
        batches = [make_batch(seed) for seed in range(10)]
        expected = [engine.predict(batch) for batch in batches]

    def check(numbers: range) -> None:
        for number in numbers:
            assert torch.allclose(infer(server, batches[number]), expected[number], rtol=1e-4, atol=1e-5)

    check(range(10))
    for name, each in (("requests_total", 5), ("rows_total", 5 * ROWS), ("up", 1)):  # one after another: in turn
        expect = {"0": each, "1": each}
        wait_until(lambda: metric(server, f"hotrow_engine_{name}") == expect, f"{name} {expect}", server)  # noqa: B023
    assert f'hotrow_engine_up{{engine="1",device="{shown[1]}"}} 1' in server.get("/metrics", "metrics")

    def engines() -> dict[int, psutil.Process]:
        return {int(process.cmdline()[3].split()[1]): process for process in server.children("engine_process")}

    before = engines()
    environment = before[1].environ()["CUDA_VISIBLE_DEVICES"]
    assert (environment == "") == (shown[1] == "cpu")
    before[1].kill()
    refused = 0
    for number in range(10):  # the one in flight at most is lost
        try:
            check(range(number, number + 1))
        except urllib.error.HTTPError as error:
            assert error.code == 503
            refused += 1
    assert refused <= 1
    wait_until(lambda: "it starts again" in server.text() and len(engines()) == 2, "a restart", server)
    assert engines()[1].pid != before[1].pid and engines()[1].environ()["CUDA_VISIBLE_DEVICES"] == environment
    assert engines()[0].pid == before[0].pid

    def answers_again() -> bool:
        """Until the new process has answered: its count begins at 0, and the old one's was 5."""
        check(range(10))
        count = metric(server, "hotrow_engine_requests_total")["1"]
        return count not in (0, 5) and metric(server, "hotrow_engine_up") == {"0": 1, "1": 1}

    wait_until(answers_again, "answers of the restarted engine", server)
