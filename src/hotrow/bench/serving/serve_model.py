"""The model of `hotrow bench serve` (W-serve, and W-dlrm at dim 16) and its requests.

26 tables of 20,000 keys, 13 dense features, a DLRM tower. A few steps of training give every key a row. The model is
exported for HotRow, and written once more for the peers as one safetensors file: the rows of all tables in one matrix,
the layers by number. Requests are whole HTTP requests in each server's natural encoding, all with the same ids and
features.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import hotrow as hr
from hotrow.bench.serving.serve_peers import DENSE, DIM, FEATURES
from hotrow.bench.training.pipeline import Drawn

KEYS = 20_000  # of each table
NAMES = tuple(f"C{number + 1}" for number in range(FEATURES))


@dataclass(frozen=True)
class Tower:
    """Hidden layers of a DLRM."""

    bottom: tuple[int, ...]
    top: tuple[int, ...]


W_SERVE = Tower((64,), (128, 64))
W_DLRM = Tower((512, 256), (1024, 1024, 512, 256))


@dataclass(frozen=True)
class Question:
    """One request's columns: int64 [rows, 26] and float32 [rows, 13]."""

    keys: NDArray[np.int64]
    dense: NDArray[np.float32]

    def batch(self) -> hr.KeyedBatch:
        """For trainer.predict."""
        columns = torch.from_numpy(np.ascontiguousarray(self.keys.T))
        ids = {name: hr.Jagged(values) for name, values in zip(NAMES, columns, strict=True)}
        return hr.KeyedBatch(ids, dense=torch.from_numpy(self.dense))


def trained(tower: Tower, steps: int = 12) -> hr.Trainer:
    """A model trained for a few steps, in which every key has a row."""
    torch.manual_seed(0)
    embeddings = hr.EmbeddingCollection([hr.Table(name, dim=DIM) for name in NAMES], optimizer=hr.optim.Adam(lr=1e-2))
    dlrm = hr.models.DLRM(embeddings.features, dense_features=DENSE, bottom=tower.bottom, top=tower.top)
    trainer = hr.Trainer(hr.Recommender(embeddings, dlrm))
    generator = np.random.default_rng(0)
    every = [generator.permutation(np.arange(KEYS)) for _ in NAMES]
    batches = []
    for part in range(steps):
        at = np.arange(part, KEYS, steps)
        keys = np.stack([column[at] for column in every], axis=1)
        batch = Question(keys, generator.standard_normal((len(at), DENSE)).astype(np.float32)).batch()
        labels = torch.from_numpy(generator.integers(0, 2, len(at)).astype(np.float32))
        batches.append(hr.KeyedBatch(batch.ids, dense=batch.dense, labels=labels))
    trainer.fit(Drawn(batches), progress=False)
    return trainer


def write_plain(trainer: hr.Trainer, path: Path) -> None:
    """Rows and weights for a peer in plain PyTorch."""
    embeddings, tower = trainer.model.embeddings, trainer.model.tower
    keys = torch.arange(KEYS)
    with torch.inference_mode():
        vectors = embeddings.eval()(hr.KeyedBatch({name: hr.Jagged(keys) for name in NAMES}))
    weights = {
        "rows": torch.cat([vectors[name] for name in NAMES]),
        "first": torch.arange(FEATURES) * KEYS,
        **_layers("bottom", tower.bottom),
        **_layers("top", tower.top),
    }
    save_file({name: weight.detach().clone().contiguous() for name, weight in weights.items()}, path)


def _layers(name: str, mlp: Any) -> dict[str, torch.Tensor]:
    found = [layer for layer in mlp.modules() if isinstance(layer, torch.nn.Linear)]
    parts: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(found):
        parts |= {f"{name}.{number}.weight": layer.weight, f"{name}.{number}.bias": layer.bias}
    return parts


def questions(rows: int, count: int = 512, seed: int = 1) -> list[Question]:
    """Requests of `rows` candidates: one user's ids (13 features) and each candidate's own (13), Zipf."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        keys = (generator.zipf(1.1, (rows, FEATURES)) - 1) % KEYS
        keys[:, : FEATURES // 2] = keys[:1, : FEATURES // 2]
        found.append(Question(keys.astype(np.int64), generator.standard_normal((rows, DENSE)).astype(np.float32)))
    return found


def for_hotrow(asked: Sequence[Question], model: str = "ctr", **parameters: Any) -> list[bytes]:
    """Open Inference Protocol v2 with binary tensors, the ids as one `keys`."""
    found = []
    for question in asked:
        inputs = [
            {
                "name": name,
                "datatype": datatype,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": array.nbytes},
            }
            for name, datatype, array in (("keys", "INT64", question.keys), ("dense", "FP32", question.dense))
        ]
        document: dict[str, Any] = {
            "inputs": inputs,
            "outputs": [{"name": "probabilities", "parameters": {"binary_data": True}}],
        }
        if parameters:
            document["parameters"] = parameters
        text = json.dumps(document).encode()
        text += b" " * (-len(text) % 8)  # aligns the tensors
        head = f"Inference-Header-Content-Length: {len(text)}\r\n"
        found.append(_post(f"/v2/models/{model}/infer", text + _body(question), head))
    return found


def for_peers(asked: Sequence[Question]) -> list[bytes]:
    """The bytes of both matrices."""
    return [_post("/predict", _body(question)) for question in asked]


def _body(question: Question) -> bytes:
    return question.keys.tobytes() + question.dense.tobytes()


def _post(path: str, body: bytes, head: str = "") -> bytes:
    start = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
    return f"{start}{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
