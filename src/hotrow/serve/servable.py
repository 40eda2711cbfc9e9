"""A version of an exported model as an engine process serves it: hr.Engine behind the Servable protocol.

This is the one place where lanes and hr.Engine meet. `cold` and `prefetch` are there when rows may be on SSD alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.config import Memory
from hotrow.serve.request import Array, Signature
from hotrow.serve.tower import OriginalTower
from hotrow.serve.tower_graph import TowerGraph
from hotrow.serve.towers import TowerOptions, Towers
from hotrow.tiers.host import count_cold

LADDER = (32, 128, 512, 1024, 4096, 16384)  # batch sizes that a GPU's lanes capture, up to the largest batch


class ServedVersion:
    """hr.Engine, as lanes call it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.signature: Signature = engine.signature
        spec = engine.features
        self.features: str | None = None if spec is None else spec.to_json()
        self.policy: str = engine.source.policy
        self.deadline: float | None = engine.source.deadline
        self.can_be_cold = any(rows.store.evicts for rows in engine.embeddings.tables)

    @property
    def publication(self) -> int:
        """The newest that was applied; 0 without any."""
        return int(getattr(self.engine, "publication", 0))

    def run(self, batch: KeyedBatch, policy: str) -> tuple[Tensor, Any, bool]:
        """Logits, late ids by row and whether a bucket answered."""
        logits, late, compiled = self.engine.answer(batch, policy)
        return logits, late.by_row if late.ids else 0, compiled

    def figures(self) -> dict[str, Any]:
        """What its tower and its cache have done: counters, and gauges of now."""
        towers = self.engine.towers
        if not isinstance(towers, Towers):
            return {}
        counts = towers.counts
        return {
            "buckets": {str(shape): hits for shape, hits in counts.hits.items()},
            "padded_rows": counts.padded_rows,
            **{name: towers.metrics()[name] for name in ("compile_queue", "compile_seconds")},
            "compiler": towers.describe()["compiler"],
        }

    def close(self) -> None:
        """Let go of rows, weights, threads and the compile process."""
        self.engine.close()

    def cold(self, batch: KeyedBatch) -> Array | None:
        """Which rows have keys that are on SSD alone."""
        return cold_rows(self.engine.embeddings, batch)

    def prefetch(self, batch: KeyedBatch) -> None:
        """Bring them up."""
        self.engine.warm(batch)


def cold_rows(embeddings: Any, batch: KeyedBatch) -> Array | None:
    """Which rows of a batch have keys with a row on SSD alone; None: none of them, which is told by one quick call."""
    parts = [(rows.store, batch.ids[name].values) for rows in embeddings.tables for name in rows.table.poolings]
    if not count_cold(parts):
        return None
    cold = np.zeros(batch.size, bool)
    for rows in embeddings.tables:
        for name in rows.table.poolings:
            ids = batch.ids[name]
            cold[_rows_of(ids, rows.store.cold(ids.values).numpy())] = True
    return cold


def _rows_of(ids: Any, mask: Array) -> Array:
    """The rows whose ids are marked."""
    places = np.flatnonzero(mask)
    if ids.offsets is None:
        return places
    return np.searchsorted(ids.offsets.numpy(), places, side="right") - 1


def open_version(folder: Path, options: Mapping[str, Any]) -> ServedVersion:
    """The version in `folder`, with rows where `dram`, `ssd` and `hbm` say."""
    from hotrow.serve.engine import Engine  # type: ignore[import-untyped, unused-ignore]

    def towers(original: OriginalTower) -> Towers:
        chosen = TowerOptions(
            compile=bool(options.get("compile", True)),
            most_rows=int(options.get("max_rows", 1024)),
            lanes=int(options.get("lanes", 1)),
            threads=int(options.get("threads", 1)),
            cache=options.get("artifacts"),
        )
        made = Towers(TowerGraph(original.program), original.weights, original.device, chosen)
        made.start()
        return made

    where = {tier: options[tier] for tier in ("hbm", "dram", "ssd") if options.get(tier) is not None}
    if "ssd" in where:  # each version of each model has its own folder there
        where["ssd"] = str(Path(where["ssd"]) / folder.parent.name / folder.name)
    precision, most = options.get("precision", "fp32"), int(options.get("max_rows", 1024))
    ladder = [size for size in LADDER if size < most] + [most]
    engine = Engine(
        folder.parent,
        folder.name,
        memory=Memory(**where),
        towers=towers,
        precision=precision,
        ladder=ladder,
        lanes=int(options.get("lanes", 1)),
    )
    return ServedVersion(engine)
