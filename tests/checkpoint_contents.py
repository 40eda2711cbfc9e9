"""What a run has learned, to compare runs bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotrow import _core
from hotrow.train.checkpoint.manifest import open_checkpoint

BY_ANYONE = ("step", "metrics", "cursor", "fit", "dense_optimizer")  # however many ranks wrote it
KEPT = (*BY_ANYONE, "ranks")


def contents(folder: Path, kept: tuple[str, ...] = KEPT) -> dict[str, Any]:
    """A run's result: a checkpoint, or the newest of a folder, without times and numbers of publication."""
    checkpoint = open_checkpoint(folder)
    rows = {}
    for table in checkpoint.tables:
        for part in checkpoint.parts(table):
            reader = _core.SnapshotReader(str(part.folder))
            while (chunk := reader.next(65536)) is not None:
                for key, count, last, values in zip(*chunk, strict=True):
                    rows[table, int(key)] = (int(count), int(last), values.tobytes())
    files = {name: checkpoint.read(f"{name}.safetensors") for name in ("dense", "optimizer", "state")}
    return {"rows": rows, "manifest": {name: checkpoint.manifest[name] for name in kept}, "files": files}
