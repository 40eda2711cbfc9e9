"""A trainer whose rows and weights say which publication they are of, its publications, and the check of answers.

Every value of a row is the row's key or the number of the publication that changed the row last. The tower's logit is
its only weight, the number of the publication that changed the weights last. A publication changes CHANGED random rows,
a few of them by removal, and every fourth one brings weights. So an answer with the vectors and the logit of its keys
shows for each row, and for the weights, which publication it is of. `History.check` replays what was published and
compares every answer with the state at the publication that the answer names.

The publications are sent as a trainer's (hotrow.publish.delivery). One thread publishes.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hotrow as hr
from hotrow.publish.bus import open_bus
from hotrow.publish.cut import Cut
from hotrow.publish.delivery import Delivery, SenderIdentity
from hotrow.publish.publication import DELTA, TableChange
from hotrow.publish.spool import Spool

TABLES = {"user": 8, "item": 16}  # dims
ROWS = 100_000  # of each table
CHANGED, INTERVAL = 5_000, 0.25  # rows of a publication, and seconds between two: 20,000 rows/s
REMOVED = 100  # of CHANGED
DENSE_EVERY = 4
SEED = 5
REQUEST_ROWS, REQUESTS = 8, 512
UNKNOWN = 0.01  # of a request's keys that never have a row
EXACT = 1 << 24  # whole numbers below it are exact in float32
WIDTH = sum(TABLES.values())


class NumberTower(nn.Module):
    """A tower whose logit is the publication of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """The number for every row."""
        return torch.cat(list(vectors.values()), dim=1).sum(dim=1) * 0.0 + self.number


def collection() -> hr.EmbeddingCollection:
    """The tables without rows."""
    return hr.EmbeddingCollection([hr.Table(name, dim=dim) for name, dim in TABLES.items()], hr.optim.SGD(), seed=SEED)


def export(repository: Path) -> None:
    """The model `ctr` at publication 0."""
    embeddings = collection()
    for rows in embeddings.tables:
        keys = torch.arange(ROWS)
        rows.store.assign(keys, row_values(keys, torch.zeros_like(keys), rows.table.dim))
    hr.export(hr.Recommender(embeddings, NumberTower()), repository / "ctr", publication=0)


def row_values(keys: Tensor, publications: Tensor, dim: int) -> Tensor:
    """Rows of these keys, last changed at these publications."""
    values = torch.empty(keys.numel(), dim)
    values[:, 0::2] = keys[:, None].float()
    values[:, 1::2] = publications[:, None].float()
    return values


def request_keys() -> NDArray[np.int64]:
    """The keys of all requests: [REQUESTS, REQUEST_ROWS, tables]."""
    generator = np.random.default_rng(1)
    keys = generator.integers(0, ROWS, (REQUESTS, REQUEST_ROWS, len(TABLES)))
    return np.where(generator.random(keys.shape) < UNKNOWN, keys + ROWS, keys).astype(np.int64)


def request_bodies(keys: NDArray[np.int64]) -> list[tuple[int, bytes]]:
    """Requests for vectors and logits, with binary tensors: the length of each one's JSON, and its body."""
    found = []
    for part in keys:
        tensor = {"name": "keys", "datatype": "INT64", "shape": list(part.shape)}
        head = {
            "inputs": [{**tensor, "parameters": {"binary_data_size": part.nbytes}}],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in ("embeddings", "logits")],
        }
        text = json.dumps(head).encode()
        found.append((len(text), text + part.tobytes()))
    return found


@dataclass(frozen=True)
class Answer:
    """An answer with status 200: the number of its request, when it had arrived (time.time()), and its content."""

    request: int
    arrived: float
    publication: int
    highest: int
    freshness: float  # seconds, as the answer says
    late_rows: int
    vectors: NDArray[np.float32]  # [rows, width]
    logits: NDArray[np.float32]

    @staticmethod
    def parse(request: int, arrived: float, json_bytes: int, body: bytes) -> Answer:
        """From the body, whose first `json_bytes` bytes are JSON."""
        head = json.loads(body[:json_bytes])
        arrays, at = {}, json_bytes
        for output in head["outputs"]:
            count = int(np.prod(output["shape"]))
            arrays[output["name"]] = np.frombuffer(body, "<f4", count, at).reshape(output["shape"])
            at += output["parameters"]["binary_data_size"]
        of = head["parameters"]
        newest = of.get("publication_highest", of["publication"])
        age = float(of.get("freshness_ms", "inf")) / 1000
        return Answer(
            request, arrived, of["publication"], newest, age, of["late_rows"], arrays["embeddings"], arrays["logits"]
        )


@dataclass
class Checked:
    """What `check` found."""

    answers: int = 0
    mixed: list[str] = field(default_factory=list)  # why, answer by answer
    oldest: float = 0.0  # seconds
    publications: int = 0  # different ones that answered


@dataclass(frozen=True)
class _Published:
    changes: dict[str, tuple[Tensor, Tensor]]  # keys that were set and that were removed, by table
    dense: bool
    at: float


class History:
    """Publishes on `bus`, every INTERVAL seconds while the context is open, and remembers it."""

    def __init__(self, bus: str, spool: Path) -> None:
        self._published: list[_Published] = []
        self._delivery = Delivery(
            lambda: open_bus(bus),
            Spool(spool, 1 << 30),
            SenderIdentity(secrets.token_hex(8), secrets.randbits(63)),
            memory=256 << 20,
            heartbeat=1.0,
        )
        self._generator = torch.Generator().manual_seed(SEED)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._began = self._ended = 0.0

    def __enter__(self) -> History:
        self._delivery.start(0, {}, 0, None, 0)
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self._ended = time.monotonic()
        self._delivery.flush(10.0)
        self._delivery.close()

    @property
    def newest(self) -> int:
        """The number of the newest publication."""
        return len(self._published)

    @property
    def rate(self) -> float:
        """Changed rows a second."""
        return self.newest * CHANGED / ((self._ended or time.monotonic()) - self._began)

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, self._began + self.newest * INTERVAL - time.monotonic())):
            self._publish(self.newest + 1)

    def _publish(self, number: int) -> None:
        changes, tables = {}, {}
        for name, dim in TABLES.items():
            drawn = torch.randperm(ROWS, generator=self._generator)[: CHANGED // len(TABLES)]
            removed, keys = [part.sort().values for part in drawn.tensor_split([REMOVED // len(TABLES)])]
            changes[name] = (keys, removed)
            tables[name] = TableChange(keys, row_values(keys, torch.full_like(keys, number), dim), removed)
        dense = {"number": torch.tensor(float(number))} if number % DENSE_EVERY == 0 else None
        at = time.time()
        self._published.append(_Published(changes, dense is not None, at))
        fields = {
            "kind": DELTA,
            "previous": number - 1,
            "step": number,
            "watermark": int(at * 1000),
            "cut": at,
            "rows": CHANGED,
            "values": "fp32",
        }
        self._delivery.claim_number(number)
        self._delivery.put(Cut(number, fields, tables, dense, "fp32"))

    # --- the check ---

    def check(self, answers: Iterable[Answer], keys: NDArray[np.int64]) -> Checked:
        """Compare answers with the state at their publications. `keys` are those of the requests."""
        found = Checked()
        by_number: dict[int, list[Answer]] = {}
        for answer in answers:
            by_number.setdefault(answer.publication, []).append(answer)
        state = _State()
        for number in range(self.newest + 1):
            if number:
                state.apply(number, self._published[number - 1])
            here = by_number.pop(number, [])
            found.publications += bool(here)
            for answer in here:
                found.answers += 1
                why = state.compare(answer, keys[answer.request])
                if why:
                    found.mixed.append(f"at publication {number}: {why}")
                age = answer.freshness if not number else answer.arrived - self._published[number - 1].at
                found.oldest = max(found.oldest, age, answer.freshness)
        for number, rest in by_number.items():
            found.answers += len(rest)
            found.mixed += [f"publication {number} was never published"] * len(rest)
        return found


class _State:
    """What every key's row is at one publication: the publication that changed it last, -1 without a row."""

    def __init__(self) -> None:
        self.last = {name: np.full(2 * ROWS, -1, np.int64) for name in TABLES}
        for last in self.last.values():
            last[:ROWS] = 0
        self.number = 0  # of the weights
        every = torch.arange(2 * ROWS)
        stores = {rows.table.name: rows.store for rows in collection().tables}
        self.initial = {name: stores[name].read(every)[0].numpy() for name in TABLES}

    def apply(self, number: int, published: _Published) -> None:
        """The state after the next publication."""
        for name, (keys, removed) in published.changes.items():
            self.last[name][keys.numpy()] = number
            self.last[name][removed.numpy()] = -1
        if published.dense:
            self.number = number

    def compare(self, answer: Answer, keys: NDArray[np.int64]) -> str:
        """What is wrong with an answer; an empty text if nothing is."""
        if answer.highest != answer.publication:
            return f"it has rows up to publication {answer.highest}"
        if answer.late_rows:
            return f"{answer.late_rows} rows were answered by policy"
        if not (answer.logits == self.number).all():
            return f"its weights are of {answer.logits.tolist()} and not {self.number}"
        at = 0
        for column, (name, dim) in enumerate(TABLES.items()):
            of = torch.from_numpy(np.ascontiguousarray(keys[:, column]))
            last = self.last[name][of.numpy()]
            expected = row_values(of, torch.from_numpy(last), dim).numpy()
            expected[last < 0] = self.initial[name][of.numpy()[last < 0]]
            rows = answer.vectors[:, at : at + dim]
            wrong = np.flatnonzero((rows != expected).any(axis=1))
            if wrong.size:
                row = int(wrong[0])
                one = f"that of key {int(of[row])} is {rows[row].tolist()} and not {expected[row].tolist()}"
                return f"{wrong.size} rows of {name} are of another publication: {one}"
            at += dim
        return ""


def probe(bodies: list[tuple[int, bytes]]) -> bytes:
    """The first request as whole HTTP."""
    length, body = bodies[0]
    head = f"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: fleet\r\nContent-Length: {len(body)}\r\n"
    return (head + f"Inference-Header-Content-Length: {length}\r\n\r\n").encode() + body
