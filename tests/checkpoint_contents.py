"""What a run has learned, to compare runs bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotrow import _core
from hotrow.train.checkpoint.manifest import open_checkpoint

KEPT = ("step", "metrics", "ranks", "cursor", "fit", "dense_optimizer")


def contents(folder: Path) -> dict[str, Any]:
    """A run's result: its newest checkpoint, without times and numbers of publication."""
    checkpoint = open_checkpoint(folder)
    rows = {}
    for table in checkpoint.tables:
        for part in checkpoint.parts(table):
            reader = _core.SnapshotReader(str(part.folder))
            while (chunk := reader.next(65536)) is not None:
                for key, count, last, values in zip(*chunk, strict=True):
                    rows[table, int(key)] = (int(count), int(last), values.tobytes())
    files = {name: checkpoint.read(f"{name}.safetensors") for name in ("dense", "optimizer", "state")}
    return {"rows": rows, "manifest": {name: checkpoint.manifest.get(name) for name in KEPT}, "files": files}
