"""A real server for tests of lookups: an exported model behind an engine's socket, and a front end with all its ports.

Its features are of every kind: `user` and `item` have one id per row, `tags` any number that are averaged, `history` is
a sequence that shares the items' rows. Its columns are those of SPEC.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz import entries
from in_process import Running
from small_models import DENSE, DIM, make_batch, trained

import hotrow as hr
from hotrow.features import Dense, FeatureSpec, Key, Sequence
from hotrow.publish.publication import DELTA, Publication, TableChange
from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.processes.engine_process import EngineOptions, EngineProcess

POOLED = ("user", "item", "tags")
SPEC = FeatureSpec(
    [
        Key("user", hash="none"),
        Key("item", hash="none"),
        Sequence("tags", hash="none"),
        Sequence("history", hash="none"),
        *(Dense(f"d{number}") for number in range(DENSE)),
    ],
    label="click",
)


class LookupServer(Running):
    """The server. `engine` is its engine, in this process; `direct` is an hr.Engine of the same version."""

    def __init__(
        self,
        folder: Path,
        tiers: dict[str, Any] | None = None,
        model: hr.Recommender | None = None,
        tasks: list[hr.Task] | None = None,
        export: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if model is None:
            hr.export(trained("din").model, folder / "repository" / "ctr", features=SPEC)
        else:
            hr.export(model, folder / "repository" / "ctr", tasks=tasks, **(export or {}))
        plain = {"compile": False, "artifacts": str(folder / "artifacts"), "max_rows": 64, **(tiers or {})}
        self.engine = EngineProcess(
            EngineOptions(str(folder / "e.sock"), str(folder / "repository"), max_rows=64, options=plain)
        )
        self.direct = hr.Engine(folder / "repository" / "ctr")
        self.client = EngineClient([str(folder / "e.sock")])
        super().__init__(self.client, **options)  # type: ignore[arg-type]

    def __enter__(self) -> LookupServer:
        self.engine.start()
        super().__enter__()
        self.call(self.client.open())
        waited = threading.Event()
        while not self.call(self.client.ready()):
            waited.wait(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self.call(self.client.close())
        super().__exit__(*error)
        self.engine.stop()
        self.direct.close()

    def apply(self, publication: Any) -> None:
        """Put a publication in service, as the follower of a bus does."""
        current = self.engine.models.by_name["ctr"].current
        assert current is not None
        current.servable.prepare_update(publication)()

    def url(self, path: str = "/v2/models/ctr/infer") -> str:
        return f"http://{self.address('http')}{path}"

    def post(self, document: dict[str, Any], tail: bytes | None = None) -> tuple[int, Any, dict[str, np.ndarray]]:
        """The status, JSON and binary outputs of a request; `tail` are the bytes of its binary tensors."""
        head = json.dumps(document).encode()
        headers = {} if tail is None else {"Inference-Header-Content-Length": str(len(head))}
        request = urllib.request.Request(self.url(), head + (tail or b""), headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                status, data, length = reply.status, reply.read(), reply.headers.get("Inference-Header-Content-Length")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), {}
        answer = json.loads(data if length is None else data[: int(length)])
        found, at = {}, 0 if length is None else int(length)
        for output in answer["outputs"]:
            size = output.get("parameters", {}).get("binary_data_size")
            if size is not None:
                kind = {"FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_}[output["datatype"]]
                found[output["name"]] = np.frombuffer(data, kind, size // kind().nbytes, at).reshape(output["shape"])
                at += size
        return status, answer, found


def batch_of(rows: int, seed: int = 0) -> hr.KeyedBatch:
    """Rows of which half have keys that were never seen."""
    return make_batch(rows, seed, keys=600)


def inputs_of(batch: hr.KeyedBatch, features: tuple[str, ...] = (*POOLED, "history"), dense: bool = True) -> Any:
    """The batch as a request's tensors."""
    tensors: dict[str, np.ndarray] = {}
    for name in features:
        tensors[name] = batch.ids[name].values.numpy()
        offsets = batch.ids[name].offsets
        if offsets is not None:
            tensors[f"{name}.offsets"] = offsets.numpy()
    if dense and batch.dense is not None:
        tensors["dense"] = batch.dense.numpy()
    return tensors


def users_set_to(value: float, keys: list[int], number: int, watermark: int | None = None) -> Publication:
    """The publication that follows `number - 1` and sets these users' rows."""
    changed = TableChange(torch.tensor(keys), torch.full((len(keys), DIM), value), torch.empty(0, dtype=torch.int64))
    return Publication(DELTA, number, number - 1, "run", number, watermark, 0.0, {"user": changed})


def as_json(tensors: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The tensors as inputs of a JSON body."""
    return [
        {**entry, "data": array.reshape(-1).tolist()}
        for entry, array in zip(entries(tensors), tensors.values(), strict=True)
    ]


def as_binary(tensors: dict[str, np.ndarray]) -> tuple[list[dict[str, Any]], bytes]:
    """The tensors as inputs of a JSON head, and the bytes that follow it."""
    inputs = [
        {**entry, "parameters": {"binary_data_size": array.nbytes}}
        for entry, array in zip(entries(tensors), tensors.values(), strict=True)
    ]
    return inputs, b"".join(array.tobytes() for array in tensors.values())


def same_bits(found: Any, expected: Any) -> bool:
    """Whether two arrays have the same type, shape and bits."""
    a, b = np.asarray(found), np.asarray(expected)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
