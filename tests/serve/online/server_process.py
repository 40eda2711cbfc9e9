"""`hotrow serve` and `hotrow publish-remote` as people run them, and a model whose answers are its rows.

The tower's logits are the user's row, so that a test can compare the server's rows with the trainer's bit for bit,
through the protocol.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import forked
import numpy as np
import psutil
import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.publish.publication import to_wire

KEYS = 200
PATIENCE = 120.0  # seconds, on a busy machine


class ShowsRows(nn.Module):
    """Logits that are the user's row, which is one number; the weight is there to be published."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return vectors["user"][:, 0] + 0.0 * self.nothing


class Events:
    """Steps number `first` to `last`, each with its time: now."""

    def __init__(self, first: int, last: int, pause: float = 0.0) -> None:
        self.first, self.last, self.pause, self.examples = first, last, pause, 32 * (last - first)

    def batches(self, cursor: Any = None) -> Iterator[tuple[hr.KeyedBatch, Any]]:
        for number in range(self.first, self.last):
            draw = torch.Generator().manual_seed(number)
            users = torch.randint(0, KEYS, (32,), generator=draw)
            labels = torch.randint(0, 2, (32,), generator=draw).float()
            now = torch.full((32,), int(time.time() * 1000))
            time.sleep(self.pause)
            yield hr.KeyedBatch({"user": hr.Jagged(users)}, labels=labels, time=now), number

    def describe(self) -> str:
        return "drawn events"


def make_trainer(folder: Path, bus: str, **publish: Any) -> hr.Trainer:
    """A trainer that publishes every step, and an export of it before the first one."""
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=1)], optimizer=hr.optim.Adam(lr=0.05), seed=3)
    model = hr.Recommender(embeddings, ShowsRows())
    repository = folder / "repository" / "ctr"
    hr.export(model, repository, dense_features=0, policy="wait")
    options: dict[str, Any] = {"every_steps": 1, "heartbeat": 0.2, "spool": str(folder / "spool"), **publish}
    return hr.Trainer(model, torch.optim.SGD(model.tower.parameters(), lr=0.0), publish=hr.Publish(bus, **options))


def rows_of(trainer: hr.Trainer) -> np.ndarray:  # type: ignore[type-arg]
    """All rows as the wire has them; keys without one as the server reads them."""
    values = trainer.model.embeddings.table("user").read(torch.arange(KEYS))
    assert trainer.publisher is not None
    seen = trainer.model.embeddings.table("user").contains(torch.arange(KEYS))
    values[seen] = to_wire(values[seen], trainer.publisher.options.values).float()
    return values[:, 0].numpy()


class Command:
    """A hotrow command as a process, with its output in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        env = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "XDG_CACHE_HOME": str(log.parent)}
        self.process = forked.hotrow(*arguments, log=log, env=env)

    def text(self) -> str:
        return self.process.text()

    def end(self) -> None:
        """SIGTERM; SIGKILL if it does not mind."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            self.process.wait(20)
        self.process.kill()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.text())
        self.end()


class Server(Command):
    """`hotrow serve` of a folder's repository, on ports that the system chose."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        ports = ["--http", "0", "--grpc", "-1", "--metrics", "0"]
        super().__init__(folder / "serve.log", "serve", str(folder / "repository"), "--no-compile", *ports, *arguments)
        until(lambda: "metrics " in self.text() or self.process.poll() is not None, "the server")
        assert self.process.poll() is None, self.text()
        lines = [line.split() for line in self.text().splitlines() if "http://" in line]
        self.ports = {name: int(where.split(":")[2].split("/")[0]) for name, where in lines}

    def ask(self, policy: str = "wait", seconds: float = 10.0) -> tuple[np.ndarray, dict[str, Any]]:  # type: ignore[type-arg]
        """Every row, and the answer's parameters."""
        inputs = [{"name": "user", "shape": [KEYS], "datatype": "INT64", "data": list(range(KEYS))}]
        body = {
            "inputs": inputs,
            "outputs": [{"name": "logits"}],
            "parameters": {"policy": policy, "deadline_ms": int(1000 * seconds)},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['http']}/v2/models/ctr/infer", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = json.loads(answer.read())
        rows = np.array(content["outputs"][0]["data"], np.float32)
        return rows, content["parameters"]

    def metric(self, name: str) -> float:
        """A model's metric now; 0 without one."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['metrics']}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")), 0.0)

    def engine(self) -> psutil.Process:
        """The process that has the rows; one that was killed is started again after a moment."""
        found: list[psutil.Process] = []

        def there() -> bool:
            children = psutil.Process(self.process.pid).children()
            found[:] = [p for p in children if any("engine_process" in part for part in p.cmdline())]
            return bool(found)

        until(there, "an engine")
        return found[0]

    def reaches(self, publication: int) -> dict[str, Any]:
        """Ask until an answer is of that publication, whole; its parameters."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found.append(self.ask()[1])
            return int(found[-1]["publication"]) >= publication

        until(there, f"publication {publication}")
        return found[-1]


def publications(trainer: hr.Trainer) -> int:
    """How many a trainer has cut."""
    assert trainer.publisher is not None
    return trainer.publisher._last


def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait until the condition holds; an error of a server that is not there yet counts as false."""
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except (OSError, urllib.error.URLError, psutil.Error):
            pass
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)
