"""A real model as a Backend in the same process: answers come from rows and a tower."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import hotrow as hr
from hotrow.serve.frontend.ports import Frontend, FrontendOptions
from hotrow.serve.protocol.backend import READY, UNAVAILABLE, IndexEntry, ModelInfo
from hotrow.serve.protocol.request import Answer, Ids, RefusedError, Request, Signature

SPEC = hr.features.FeatureSpec(
    [
        hr.features.Key("user"),
        hr.features.Key("item"),
        hr.features.Sequence("history"),
        hr.features.Dense("price"),
        hr.features.Dense("age"),
    ],
    label="click",
)


class TwoLogits(torch.nn.Module):
    """A small tower with a sequence, so that every kind of input counts in the answer."""

    def __init__(self, dim: int, dense: int) -> None:
        super().__init__()
        self.top = torch.nn.Linear(3 * dim + dense, 1)

    def forward(self, vectors: dict[str, torch.Tensor], dense: torch.Tensor | None) -> torch.Tensor:
        assert dense is not None
        parts = [vectors["user"], vectors["item"], vectors["history"], dense]
        logits: torch.Tensor = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return logits


def small_model(seed: int = 1) -> hr.Recommender:
    """Users, items and pooled histories, untrained but with different rows."""
    torch.manual_seed(seed)
    tables = [hr.Table("user", dim=4), hr.Table("item", dim=4, features=["item", "history"])]
    embeddings = hr.EmbeddingCollection(tables, seed=seed)
    keys = torch.arange(-50, 200)
    ids = {"user": hr.Jagged(keys), "item": hr.Jagged(keys), "history": hr.Jagged(keys)}
    embeddings(hr.KeyedBatch(ids))
    return hr.Recommender(embeddings, TwoLogits(4, 2)).eval()


def keyed_batch(request: Request, features: tuple[str, ...]) -> hr.KeyedBatch:
    """A request spread over its rows, by the simplest code."""
    ids = {name: _spread(column, request.rows) for name, column in zip(features, columns(request), strict=True)}
    dense = request.dense
    if dense is not None and request.dense_shared:
        dense = np.repeat(dense, request.rows, axis=0)
    return hr.KeyedBatch(ids, None if dense is None else torch.from_numpy(np.array(dense)))


def _spread(ids: Ids, rows: int) -> hr.Jagged:
    values, weights, offsets = ids.values, ids.weights, ids.offsets
    if ids.shared:
        offsets = np.arange(rows + 1) * len(values)
        values = np.tile(values, rows)
        weights = None if weights is None else np.tile(weights, rows)
    return hr.Jagged(
        torch.from_numpy(np.array(values)),
        None if offsets is None else torch.from_numpy(np.array(offsets, dtype=np.int64)),
        None if weights is None else torch.from_numpy(np.array(weights)),
    )


class InProcessBackend:
    """A Backend over models in this process."""

    def __init__(self, models: Mapping[str, tuple[hr.Recommender, ModelInfo]]) -> None:
        self._all = dict(models)
        self._models = {name: info for name, (_, info) in models.items()}
        self.requests: list[Request] = []
        self.seconds = 0.0  # how long every answer takes
        self.refuse: RefusedError | None = None
        self._counts: dict[str, int] = {}

    def models(self) -> Mapping[str, ModelInfo]:
        return self._models

    def figures(self) -> dict[tuple[str, ...], float]:
        return {("nv_inference_count", name, "1"): count for name, count in self._counts.items()}

    async def infer(self, request: Request) -> Answer:
        self.requests.append(request)
        del self.requests[:-10]
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if self.refuse is not None:
            raise self.refuse
        if request.deadline is not None and request.deadline < time.monotonic():
            raise RefusedError(504, "the deadline has passed; allow more with deadline_ms")
        model, info = self._all[request.model]
        with torch.no_grad():
            logits = model(keyed_batch(request, info.signature.features)).numpy()
        self._counts[request.model] = self._counts.get(request.model, 0) + request.rows
        return Answer(logits, request.model, request.version or info.version, publication=7)

    async def index(self) -> list[IndexEntry]:
        return [
            IndexEntry(name, info.version, READY if name in self._models else UNAVAILABLE, "")
            for name, (_, info) in self._all.items()
        ]

    async def load(self, name: str) -> None:
        if name not in self._all:
            raise RefusedError(404, f"the repository has no model {name!r}")
        self._models[name] = self._all[name][1]

    async def unload(self, name: str) -> None:
        if self._models.pop(name, None) is None:
            raise RefusedError(404, f"model {name!r} is not in service")

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        return [
            {"name": known, "version": "1", "inference_count": count, "inference_stats": {"success": {"count": count}}}
            for known, count in self._counts.items()
            if name in ("", known)
        ]

    async def ready(self) -> bool:
        return True

    async def live(self) -> bool:
        return True


def small_backend() -> InProcessBackend:
    """A model `ctr` with versions 1 and 2, a spec, and every kind of input."""
    model = small_model()
    signature = Signature(("user", "item", "history"), frozenset(), 2)
    info = ModelInfo("ctr", "2", signature, ("1", "2"), SPEC.to_json(), {"dtype": "fp32"})
    return InProcessBackend({"ctr": (model, info)})


class Running:
    """A front end on its own thread and loop, as a process would have it."""

    def __init__(self, backend: InProcessBackend, **options: Any) -> None:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        self.backend = backend
        self.frontend = Frontend(backend, FrontendOptions(**{**ports, "drain_seconds": 5.0, **options}))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Any) -> Any:
        """Run something on the front end's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def __enter__(self) -> Running:
        self._thread.start()
        self.call(self.frontend.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.frontend.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def address(self, protocol: str) -> str:
        """Host and port of a protocol."""
        host = {"0.0.0.0": "127.0.0.1", "::1": "[::1]"}.get(self.frontend.options.host, self.frontend.options.host)
        return f"{host}:{self.frontend.ports[protocol]}"


def columns(request: Request) -> tuple[Ids, ...]:
    """The ids by feature, also of a request that gives them as one matrix."""
    if request.matrix is None:
        return request.ids
    return tuple(Ids(np.ascontiguousarray(column)) for column in request.matrix.T)
