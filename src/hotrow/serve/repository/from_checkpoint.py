"""Export a checkpoint into a repository, without the program that trained it.

The checkpoint has the tables, their rows, the tower's weights and the feature spec. The caller builds the tower. Rows
are not loaded into memory: a collection opens them over an SSD folder of its own (hard links to the checkpoint's
segments if both are on one disk) and streams them from there. So expired rows are left out, parts that several ranks
wrote are joined, and the code of `export` is reused.

The folder is hidden in the repository and removed at the end. If a crash left one, the next export removes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hotrow.config import Memory
from hotrow.errors import CheckpointError
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.progress import ProgressBar
from hotrow.serve.repository.export import export
from hotrow.serve.repository.manifest import Version, check_name
from hotrow.table import Table
from hotrow.task import tasks_from_json
from hotrow.train.checkpoint import durable_files
from hotrow.train.checkpoint.loading import apply_rows
from hotrow.train.checkpoint.manifest import DENSE, Checkpoint, open_checkpoint
from hotrow.train.checkpoint.row_logs import remove_if_free
from hotrow.units import format_size

PREFIX = ".export-"
_FIXED, _ROW, _TABLE_ROWS = 64 << 20, 32, 16384  # DRAM: bytes of buffers, bytes of index per row, rows of each table
_FIELDS = frozenset(Table.__dataclass_fields__)

TowerOf = Callable[[Checkpoint, EmbeddingCollection], nn.Module]


def export_checkpoint(
    path: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    model: str | None,
    tower_of: TowerOf,
    *,
    bar: ProgressBar,
    **options: Any,
) -> Version:
    """Export a checkpoint (or a folder's newest) as the next version of `model`, by default the run's folder's name.

    `options` are those of `hr.export`.
    """
    checkpoint = open_checkpoint(path)
    name = check_name(checkpoint.path.resolve().parent.name if model is None else model)
    checkpoint.verify()
    folder = Path(repository)
    durable_files.make(folder)
    for abandoned in folder.glob(f"{PREFIX}*"):
        remove_if_free(abandoned)
    scratch = folder / f"{PREFIX}{os.getpid()}"
    try:
        embeddings = _embeddings(checkpoint, scratch, bar)
        tower = tower_of(checkpoint, embeddings)
        _load_weights(checkpoint, tower)
        bar.begin("writing rows", sum(len(rows) for rows in embeddings.tables))
        return export(
            Recommender(embeddings, tower),
            folder / name,
            features=checkpoint.features(),
            progress=bar.advance,
            **{
                "publication": _publication(checkpoint),
                "tasks": tasks_from_json(checkpoint.manifest.get("tasks", ())),
                **options,
            },
        )
    finally:
        durable_files.remove(scratch)


def _publication(checkpoint: Checkpoint) -> int:
    """The publication whose rows the checkpoint has; 0 if it was not taken at one."""
    published = checkpoint.manifest.get("publish")
    return int(published["number"]) if published is not None and published["whole"] else 0


def _embeddings(checkpoint: Checkpoint, scratch: Path, bar: ProgressBar) -> EmbeddingCollection:
    """The checkpoint's rows as a collection over an SSD folder."""
    tables = [Table.from_dict(_definition(saved)) for saved in checkpoint.manifest["tables"]]
    widest = sum(_TABLE_ROWS * (4 * saved["width"] + 64) for saved in checkpoint.manifest["tables"])
    rows = sum(saved["rows"] for saved in checkpoint.manifest["tables"])
    sketches = sum(table.admission.sketch_bytes for table in tables if table.admission is not None)
    dram = _FIXED + widest + _ROW * rows + sketches
    bar.begin(f"reading {rows:,} rows in {format_size(dram)}", None)
    embeddings = EmbeddingCollection(
        tables, memory=Memory(dram=dram, ssd=scratch), seed=int(checkpoint.manifest["seed"])
    )
    apply_rows(checkpoint, [(one.table.name, one) for one in embeddings.tables])
    embeddings.steps = checkpoint.step
    embeddings.watermark = checkpoint.manifest.get("watermark")
    return embeddings


def _definition(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A table's definition from the manifest, without the fields about its rows."""
    return {name: value for name, value in saved.items() if name in _FIELDS}


def _load_weights(checkpoint: Checkpoint, tower: nn.Module) -> None:
    weights, mine = checkpoint.tensors(DENSE), tower.state_dict()
    for name in sorted({*weights, *mine}):  # the order of a safetensors file means nothing
        shapes = [_shape(tensors.get(name)) for tensors in (weights, mine)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{checkpoint.path / DENSE} has {shapes[0]} as weight {name!r} but the described tower has "
                f"{shapes[1]}; pass the job file that trained it: --job job.toml"
            )
    tower.load_state_dict(weights)


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{list(tensor.shape)}"
