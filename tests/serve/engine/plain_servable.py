"""A real model without an export: an EmbeddingCollection and a DLRM made from a seed, so that a test knows every logit.

A version's folder has `model.json`: {"seed": 1, "features": 3, "dense": 4, "delay": 0.0, "ssd": false}. `load` is an
engine's loader; `logits_of` is the same model in the test's process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import hotrow as hr
from hotrow.batch import KeyedBatch
from hotrow.errors import CheckpointError
from hotrow.serve.execution.servable import cold_rows
from hotrow.serve.protocol.request import Signature
from hotrow.tiers.host.store import prefetch_all

KEYS = 1000


class PlainServable:
    """`delay` seconds are slept by each run, as a tower would take them."""

    def __init__(self, config: dict[str, Any], options: Mapping[str, Any]) -> None:
        names = [f"f{i}" for i in range(config["features"])]
        memory = None
        if options.get("ssd"):
            memory = hr.Memory(dram=options["dram"], ssd=options["ssd"])
        self.embeddings = hr.EmbeddingCollection(
            [hr.Table(name, dim=4) for name in names], seed=config["seed"], memory=memory
        ).eval()
        torch.manual_seed(config["seed"])
        self.tower = hr.models.DLRM(
            self.embeddings.features, dense_features=config["dense"], bottom=(8,), top=(8,)
        ).eval()
        self.signature = Signature(tuple(names), frozenset(), config["dense"])
        self.delay = float(config.get("delay", 0.0))
        self.delay_rows = float(config.get("delay_rows", 0.0))
        self.can_be_cold = bool(options.get("ssd"))
        self.slow = float(config.get("slow", 0.0))  # seconds that SSD takes longer
        if self.can_be_cold:
            for rows in self.embeddings.tables:
                rows.assign(torch.arange(config["rows"]), torch.ones(config["rows"], 4))

    def run(self, batch: KeyedBatch, policy: str) -> tuple[torch.Tensor, Any]:
        if self.delay or self.delay_rows:
            time.sleep(self.delay + self.delay_rows * batch.size)
        with torch.inference_mode():
            lookup = self.embeddings.route(batch, ahead=False).read(policy)
            logits = self.tower(self.embeddings(lookup), batch.dense)
            return logits, lookup.late_by_example if lookup.late_ids else 0  # known once the rows are gathered

    def cold(self, batch: KeyedBatch) -> Any:
        return cold_rows(self.embeddings, batch)

    def prefetch(self, batch: KeyedBatch, patient: bool = False) -> None:
        time.sleep(self.slow)
        prefetch_all([(rows.store, batch.ids[rows.table.name].values) for rows in self.embeddings.tables])


def load(folder: Path, options: Mapping[str, Any]) -> PlainServable:
    try:
        config = json.loads((folder / "model.json").read_text())
    except ValueError as error:
        raise CheckpointError(f"{folder}/model.json is corrupt: {error}") from error
    return PlainServable(config, options)


def write_version(repository: Path, name: str, version: int, **config: Any) -> Path:
    folder = repository / name / str(version)
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps({"seed": version, "features": 3, "dense": 4, **config}))
    return folder
