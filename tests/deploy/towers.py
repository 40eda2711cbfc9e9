"""Tower servers on fixed ports over a small exported model, and clients that send them requests through a proxy."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import forked
import numpy as np
import psutil
import torch
from small_models import make_batch, make_model

import hotrow as hr
from hotrow.bench.serving.fleet_servers import steady_ports

HOST = "127.0.0.1"
PATIENCE = 120.0  # seconds, on a busy machine
INFER = "/v2/models/ctr/infer"
BODY = json.dumps(
    {
        "inputs": [
            {"name": "user", "datatype": "INT64", "shape": [1], "data": [7]},
            {"name": "item", "datatype": "INT64", "shape": [2], "data": [101, 102]},
            {"name": "tags", "datatype": "INT64", "shape": [1, 2], "data": [3, 4]},
            {"name": "dense", "datatype": "FP32", "shape": [1, 3], "data": [0.5, 1.0, 0.0]},
        ],
        "outputs": [{"name": "probabilities"}],
    }
).encode()


def export_small_model(folder: Path) -> Path:
    """A repository with a model `ctr` that has rows; its folder."""
    model = make_model("dlrm")
    with torch.no_grad():
        model(make_batch(64))  # creates rows
    hr.export(model.eval(), folder / "repository" / "ctr")
    return folder / "repository"


class TowerServer:
    """`hotrow serve`, on the same three ports at every start."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.repository, self.folder = repository, folder
        self.http, self.grpc, self.metrics = steady_ports(3)
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start the process; `wait_ready` waits for it."""
        self._starts += 1
        ports = {"--http": self.http, "--grpc": self.grpc, "--metrics": self.metrics}
        self.process = forked.hotrow(
            *("serve", str(self.repository), "--no-compile", "--deadline", "60s", "--drain", "60s"),
            *(str(word) for pair in ports.items() for word in pair),
            log=self.folder / f"tower-{self.http}-{self._starts}.log",
            env={"OMP_NUM_THREADS": "1", "COLUMNS": "200", "XDG_CACHE_HOME": str(self.folder)},
        )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.process.text()
            with urllib.request.urlopen(f"http://{HOST}:{self.http}/v2/health/ready", timeout=30) as answer:
                return bool(answer.status == 200)

        until(ready, f"the tower server on port {self.http}")

    def answered(self) -> float:
        """Requests that this process has answered."""
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("nv_inference_request_success{"))

    def kill(self) -> None:
        """SIGKILL to all of its processes at once, as when its machine is lost."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        psutil.wait_procs(family, timeout=30)

    def drain(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


class Client:
    """One HTTP connection; with a certificate authority over TLS."""

    def __init__(self, port: int, authority: Path | None = None) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=60)
        if authority is not None:
            context = ssl.create_default_context(cafile=str(authority))
            self._connection = http.client.HTTPSConnection(HOST, port, timeout=60, context=context)

    def ask(self, path: str = INFER, body: bytes | None = BODY) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers (lower case)."""
        self._connection.request("GET" if body is None else "POST", path, body)
        answer = self._connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}

    def close(self) -> None:
        self._connection.close()


def grpc_request(port: int, authority: Path) -> Callable[[], list[float]]:
    """A function that sends the request of BODY over gRPC, on one connection, and returns the probabilities."""
    from tritonclient import grpc

    client = grpc.InferenceServerClient(f"{HOST}:{port}", ssl=True, root_certificates=str(authority))
    inputs = []
    for tensor in json.loads(BODY)["inputs"]:
        inputs.append(grpc.InferInput(tensor["name"], tensor["shape"], tensor["datatype"]))
        kind = np.float32 if tensor["datatype"] == "FP32" else np.int64
        inputs[-1].set_data_from_numpy(np.array(tensor["data"], kind).reshape(tensor["shape"]))

    def ask() -> list[float]:
        values: list[float] = client.infer("ctr", inputs).as_numpy("probabilities").tolist()
        return values

    return ask


class Load:
    """Threads that each send one request after another. `failures` has every answer that is not the expected one."""

    def __init__(self, ask: Callable[[], Callable[[], Any]], expected: Any, threads: int = 4) -> None:
        self.answers, self.failures = 0, list[str]()
        self._ask, self._expected, self._ended = ask, expected, threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def _run(self) -> None:
        ask = self._ask()
        while not self._ended.is_set():
            try:
                answer = ask()
                wrong = None if answer == self._expected else f"{answer!r}"
            except Exception as error:  # every error is a failed request
                wrong = f"{type(error).__name__}: {error}"
            with self._lock:
                self.answers += 1
                if wrong is not None:
                    self.failures.append(wrong)
            time.sleep(0.01)

    def wait_for(self, more: int) -> None:
        """Until that many more requests are answered."""
        enough = self.answers + more
        until(lambda: self.answers >= enough, f"{more} more answers")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait until the condition holds; a connection that fails counts as false."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if condition():
                return
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)
