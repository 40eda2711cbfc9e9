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
from hotrow.tiers.host import count_cold


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

    where = {tier: options[tier] for tier in ("hbm", "dram", "ssd") if options.get(tier) is not None}
    if "ssd" in where:  # each version of each model has its own folder there
        where["ssd"] = str(Path(where["ssd"]) / folder.parent.name / folder.name)
    return ServedVersion(Engine(folder.parent, folder.name, memory=Memory(**where)))
