"""Opens a version: its rows as a read-only collection in the form that its tower reads, and what runs its graphs.

Called when an engine is opened, on the caller's thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hotrow.config import Memory
from hotrow.errors import CheckpointError
from hotrow.nn import EmbeddingCollection
from hotrow.nn.tower_form import TowerForm
from hotrow.serve.execution.two_part_tower import TwoPartTower
from hotrow.serve.execution.version_rows import load_rows
from hotrow.serve.graph.tower import OriginalTower
from hotrow.serve.protocol.request import Signature
from hotrow.serve.repository.manifest import (
    MANIFEST,
    Version,
    candidates,
    check_name,
    check_version,
    open_version,
    warn_damaged,
)


def open_rows(
    path: Path, version: int | str | None, memory: Memory | None, device: str | torch.device | None
) -> tuple[Version, EmbeddingCollection]:
    """The given version, or the newest whose rows can be read, and its rows."""
    if version is None and (path / MANIFEST).is_file():
        path, version = path.parent, path.name
    check_name(path.resolve().name)
    if version is not None:
        chosen = open_version(path / str(check_version(version)))
        return chosen, load_rows(chosen, memory, device)
    for chosen in candidates(path):
        try:
            return chosen, load_rows(chosen, memory, device)
        except CheckpointError as error:  # a damaged block of rows: an older version may be intact
            warn_damaged(chosen.path, error)
    raise AssertionError("candidates raises when there is none")


def run_with(original: OriginalTower | TwoPartTower, make: Any) -> Any:
    """The object that runs the tower: what `make` returns for its graph, or for both of its graphs."""
    if make is None:
        return original
    return original.with_parts(lambda part, _: make(part)) if isinstance(original, TwoPartTower) else make(original)


def set_form(embeddings: EmbeddingCollection, signature: Signature) -> None:
    """Let a collection produce vectors in the form that the signature's tower reads.

    Without aligned groups: the engine checks them where a tower runs. A lookup may leave out columns of a history.
    """
    users = tuple(name for name in signature.columns if name in signature.user)
    embeddings.form = TowerForm(signature.jagged, users)
