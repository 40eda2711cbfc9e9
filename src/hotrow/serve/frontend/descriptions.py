"""Descriptions: the server and its models as documents of the protocol, the same over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import hotrow
from hotrow.serve.protocol.backend import ModelInfo
from hotrow.serve.protocol.embedding_outputs import EMBEDDINGS, EmbeddingOutputs
from hotrow.serve.protocol.input_layout import DENSE, KEYS
from hotrow.serve.protocol.predictions import tower_outputs

EXTENSIONS = ("binary_tensor_data", "model_repository", "model_configuration", "statistics")


def server_metadata() -> dict[str, Any]:
    """The server's name, version and protocol extensions."""
    return {"name": "hotrow", "version": hotrow.__version__, "extensions": list(EXTENSIONS)}


def model_metadata(info: ModelInfo) -> dict[str, Any]:
    """The model's inputs and outputs. A size of -1 is any number of rows, or any length of a sequence.

    The output `embeddings` also says which of its columns each feature has.
    """
    embeddings = EmbeddingOutputs(info.signature, info.widths)
    outputs: list[dict[str, Any]] = [
        {"name": name, "datatype": kind, "shape": shape} for name, kind, shape in _outputs(info, embeddings)
    ]
    for output in outputs:
        if output["name"] == EMBEDDINGS:
            output["parameters"] = {"features": [asdict(place) for place in embeddings.places]}
        elif info.signature.named_tasks and not output["name"].startswith(EMBEDDINGS):
            output["parameters"] = {"tasks": _tasks(info)}
    return {
        "name": info.name,
        "versions": list(info.versions or (info.version,)),
        "platform": "hotrow",
        "inputs": [
            {"name": name, "datatype": kind, "shape": shape, **_history(info, name)}
            for name, kind, shape in _tensors(info)
        ],
        "outputs": outputs,
    }


def model_config(info: ModelInfo) -> dict[str, Any]:
    """The model's configuration as Triton's clients read it; the export's own fields are among the parameters, and
    `embeddings` (the columns of each feature in the output of that name) and `max_lengths` (the most events of each
    history) are JSON."""
    embeddings = EmbeddingOutputs(info.signature, info.widths)
    parameters = dict(info.config)
    if info.signature.max_lengths:
        parameters["max_lengths"] = json.dumps(dict(info.signature.max_lengths))
    if embeddings.places:
        parameters[EMBEDDINGS] = json.dumps([asdict(place) for place in embeddings.places])
    if info.signature.named_tasks:
        parameters["tasks"] = json.dumps(_tasks(info))
    return {
        "name": info.name,
        "platform": "hotrow",
        "backend": "hotrow",
        "max_batch_size": 0,
        "input": [
            {"name": name, "data_type": f"TYPE_{kind}", "dims": shape, "optional": name != DENSE}
            for name, kind, shape in _tensors(info)
        ],
        "output": [
            {"name": name, "data_type": f"TYPE_{kind}", "dims": shape}
            for name, kind, shape in _outputs(info, embeddings)
        ],
        "parameters": {key: {"string_value": str(value)} for key, value in parameters.items()},
    }


def _tensors(info: ModelInfo) -> list[tuple[str, str, list[int]]]:
    signature = info.signature
    several = signature.sequences.union(signature.numbers)
    tensors = [(name, "INT64", [-1, -1] if name in several else [-1]) for name in signature.columns]
    if signature.columns and KEYS not in signature.columns:
        tensors.append((KEYS, "INT64", [-1, len(signature.columns)]))
    if signature.dense:
        tensors.append((DENSE, "FP32", [-1, signature.dense]))
    return tensors


def _history(info: ModelInfo, name: str) -> dict[str, Any]:
    """What the metadata says about an input of a model over histories: its largest length, the inputs that must have
    the same lengths, and whether it is the user's, to be sent once."""
    signature = info.signature
    found: dict[str, Any] = {}
    if name in signature.max_lengths:
        found["max_length"] = signature.max_lengths[name]
    aligned = [other for group in signature.aligned if name in group for other in group if other != name]
    if aligned:
        found["aligned"] = aligned
    if name in signature.user:
        found["user"] = True
    return {"parameters": found} if found else {}


def _outputs(info: ModelInfo, embeddings: EmbeddingOutputs) -> list[tuple[str, str, list[int]]]:
    tower = [(name, "FP32", _logits_shape(info)) for name in tower_outputs(info.signature)]
    return tower + [
        (output.name, embeddings.datatype(output), list(output.shape)) for output in embeddings.by_name.values()
    ]


def _tasks(info: ModelInfo) -> list[dict[str, str]]:
    """The names and kinds of the tower's tasks, in the order of its columns."""
    return [{"name": name, "kind": kind} for name, kind in info.signature.named_tasks]


def _logits_shape(info: ModelInfo) -> list[int]:
    return [-1] if info.signature.tasks == 1 else [-1, info.signature.tasks]


_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


def model_statistics(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A version's statistics with every field of Triton's; fields that the entry lacks are 0."""
    stats = entry.get("inference_stats", {})
    return {
        "name": entry.get("name", ""),
        "version": entry.get("version", ""),
        "last_inference": entry.get("last_inference", 0),
        "inference_count": entry.get("inference_count", 0),
        "execution_count": entry.get("execution_count", 0),
        "inference_stats": {name: {"count": 0, "ns": 0, **stats.get(name, {})} for name in _DURATIONS},
        "batch_stats": list(entry.get("batch_stats", [])),
    }
