"""Export: writes a model as a version into a repository, completely or not at all.

The parts are, in this order: the tower's graph and weights (serve/graph/tower.py), the rows of each table as values
only (row_files.py), the feature spec, and last the manifest with all checksums. They are written into a hidden draft,
synced, and the draft is renamed to the version's number. So a folder whose name is a number is always complete. One
process at a time exports into a model's folder.

The model is not changed: rows are read, the tower is copied, no random number is drawn. Call `export` between two
steps, on the thread that trains.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hotrow.errors import OptionError, StorageError, choices
from hotrow.features import FeatureSpec
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.serve.graph import graph_archive
from hotrow.serve.graph.tower import Traced
from hotrow.serve.graph.tower_inputs import TowerInputs
from hotrow.serve.protocol.request import POLICIES, Signature
from hotrow.serve.repository.history_layout import describe_inputs, trace_with_lengths
from hotrow.serve.repository.manifest import (
    FEATURES,
    TOWER,
    USER,
    WEIGHTS,
    Version,
    check_name,
    check_version,
    file_digest,
    list_versions,
    open_version,
    write_manifest,
)
from hotrow.serve.repository.row_files import check_values, write_rows
from hotrow.table import TableRows
from hotrow.task import Task, check_tasks
from hotrow.train.checkpoint import durable_files, state_encoding

DefaultRows = Mapping[str, Tensor | Sequence[float]]


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export, checked."""

    values: str
    policy: str
    deadline: float | None
    default_rows: dict[str, list[float]]
    features: FeatureSpec | None
    on_rows: Callable[[int], object] = field(default=lambda rows: None)
    publication: int = 0
    tasks: tuple[Task, ...] = ()


def export(
    model: Recommender,
    path: str | os.PathLike[str],
    *,
    features: FeatureSpec | None = None,
    dense_features: int | None = None,
    values: str = "fp32",
    version: int | None = None,
    policy: str = "wait",
    deadline: float | None = None,
    default_rows: DefaultRows | None = None,
    progress: Callable[[int], object] | None = None,
    publication: int = 0,
    tasks: Sequence[Task] | None = None,
    max_lengths: Mapping[str, int] | None = None,
    aligned: Sequence[Sequence[str]] | None = None,
    numbers: Sequence[str] = (),
) -> Version:
    """Write `model` as the next version of `path`, such as "repository/ctr", for `hr.Engine` and `hotrow serve`.

    `features` is the spec that converts raw columns to batches; with it, clients may send raw columns. The number of
    dense features comes from the spec or the tower (`tower.dense_features`); otherwise give `dense_features`. `values`
    is the type that rows are stored in. `policy` applies to rows that cannot be read before the request's deadline
    (`deadline` seconds, or the server's): "wait" for them, or use the "initial" values, or the "default" row of the
    table in `default_rows` (zeros by default). `progress` is called with the number of rows of each chunk.
    `publication` is the number of the publication that these rows are from: a server that follows the bus starts there
    (`hr.Publish(snapshot=lambda n: hr.export(model, path, publication=n).path)`). `tasks` are those of the trainer
    (`trainer.tasks`): their kinds decide whether a logit is answered as a probability, a value or a rate.

    `max_lengths` are the most events of histories by feature, where tables do not say it (`hr.Table(max_length=)`), and
    `aligned` are groups of features that are columns of one history, besides those that the tower names. `numbers` are
    int64 features without rows that neither the spec nor the tower names.

    >>> import tempfile, torch, hotrow as hr
    >>> embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)])
    >>> model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, top=(8,)))
    >>> with tempfile.TemporaryDirectory() as repository:
    ...     hr.export(model, f"{repository}/ctr").number, hr.export(model, f"{repository}/ctr").number
    (1, 2)
    """
    if not isinstance(model, Recommender):
        raise OptionError(
            f"export takes an hr.Recommender, not {type(model).__name__}; for a Trainer, pass trainer.model"
        )
    embeddings, folder = model.embeddings, Path(path)
    check_name(folder.name)
    if embeddings.ranks is not None and embeddings.ranks.world > 1:
        raise OptionError("a rank has only a part of the rows; save a checkpoint and export that: `hotrow export`")
    options = ExportOptions(
        _checked(check_values, values),
        _policy(policy),
        _deadline(deadline),
        _default_rows(embeddings, default_rows or {}),
        features,
        progress or (lambda rows: None),
        _publication(publication),
        check_tasks(tasks) if tasks else (),
    )
    _check_spec(embeddings, features)
    dense = _dense(model, features, dense_features)
    inputs = describe_inputs(model.tower, embeddings, dense, features, max_lengths, aligned, numbers)
    traced, inputs = trace_with_lengths(model.tower, inputs, features)
    if options.tasks and len(options.tasks) != traced.tasks:
        raise OptionError(
            f"tasks= has {len(options.tasks)} tasks but the tower gives {traced.tasks} logits for a row; pass those "
            "that it was trained on (trainer.tasks)"
        )
    durable_files.make(folder)
    with durable_files.exclusive(folder, "wait for it, or export under another name"):
        for left in folder.glob(".*.tmp"):
            durable_files.remove(left)
        number = _number(folder, version)
        draft = folder / f".{number}.tmp"
        try:
            _write(draft, folder.name, number, embeddings, traced, inputs, options)
            durable_files.rename(draft, folder / str(number))
        except BaseException:
            with suppress(StorageError):  # the next export removes it
                durable_files.remove(draft)
            raise
        durable_files.sync(folder)
    return open_version(folder / str(number))


def _write(
    draft: Path,
    model: str,
    number: int,
    embeddings: EmbeddingCollection,
    traced: Traced,
    inputs: TowerInputs,
    options: ExportOptions,
) -> None:
    """Write and sync a version's files."""
    durable_files.make(draft / "rows")
    _write_graph(draft / TOWER, traced.program)
    if traced.user is not None:
        _write_graph(draft / USER, traced.user)
    durable_files.write(draft / WEIGHTS, state_encoding.to_bytes(traced.weights))
    if options.features is not None:
        durable_files.write(draft / FEATURES, options.features.to_json().encode())
    tables = [_write_table(draft / "rows", rows, options) for rows in embeddings.tables]
    durable_files.sync(draft / "rows")
    write_manifest(
        draft,
        {
            "model": model,
            "number": number,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": str(torch.__version__),
            "signature": _signature(inputs, traced.tasks, options.tasks).as_json(),
            "tower": {"weights": list(traced.weights), "tied": traced.tied},
            "seed": embeddings.seed,
            "tables": tables,
            "policy": options.policy,
            "deadline": options.deadline,
            "trained": {"step": embeddings.steps, "watermark": embeddings.watermark},
            "publication": options.publication,
            "files": _fingerprints(draft),
        },
    )
    durable_files.sync(draft)


def _write_graph(path: Path, program: ExportedProgram) -> None:
    durable_files.write(path, graph_archive.pack(program))
    graph_archive.check(path.read_bytes(), path)


def _signature(inputs: TowerInputs, tasks: int, named: Sequence[Task]) -> Signature:
    return Signature(
        tuple(inputs.widths),
        inputs.sequences,
        inputs.dense,
        tasks,
        tuple((task.name, task.kind) for task in named),
        frozenset(inputs.user),
        inputs.numbers,
        inputs.jagged,
        inputs.aligned,
        dict(inputs.max_lengths),
    )


def _write_table(folder: Path, rows: TableRows, options: ExportOptions) -> dict[str, Any]:
    """Write one table's rows; returns its entry in the manifest."""
    table = rows.table
    count = write_rows(table, len(rows), rows.scan(), folder / table.name, options.values, options.on_rows)
    return {
        "name": table.name,
        "dim": table.dim,
        "features": table.poolings,
        "initial": table.initial.to_dict(),
        "rows": count,
        "values": options.values,
        "default": options.default_rows.get(table.name),
        **({} if table.dtype == "fp32" else {"dtype": table.dtype}),
    }


def _fingerprints(draft: Path) -> dict[str, Any]:
    """Size and checksum of every file. Requires: all files are written."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    return {
        path.relative_to(draft).as_posix(): {"bytes": path.stat().st_size, "blake2b": file_digest(path)}
        for path in files
    }


def _number(folder: Path, version: int | None) -> int:
    taken = list_versions(folder)
    if version is None:
        return 1 + max(taken, default=0)
    number = check_version(version)
    if (folder / str(number)).exists():
        raise OptionError(f"version={number} of {folder} exists; versions are never changed: leave version= out")
    return number


def _dense(model: Recommender, features: FeatureSpec | None, given: int | None) -> int:
    """The number of dense features that the tower reads, from the option, the tower or the spec."""
    of_tower = getattr(model.tower, "dense_features", None)
    of_spec = None if features is None else len(features.dense_names)
    counts = {
        "dense_features=": given,
        "the tower": of_tower if isinstance(of_tower, int) else None,
        "features=": of_spec,
    }
    known = {source: count for source, count in counts.items() if count is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{source} says {count}" for source, count in known.items())
        raise OptionError(f"how many dense features a row has is not clear: {listed}; make them agree")
    return next(iter(known.values()), 0)


def _check_spec(embeddings: EmbeddingCollection, features: FeatureSpec | None) -> None:
    if features is None:
        return
    for rows in embeddings.tables:
        for feature in rows.table.poolings:
            if feature not in features.id_names:
                raise OptionError(
                    f"features= has no feature {feature!r}, which table {rows.table.name!r} reads; "
                    f"{choices(feature, features.id_names)}"
                )


def _checked(check: Callable[[str], None], value: str) -> str:
    check(value)
    return value


def _policy(policy: str) -> str:
    if policy not in POLICIES:
        raise OptionError(f"policy={policy!r}: {choices(policy, POLICIES)}")
    return policy


def _deadline(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline < math.inf:
        raise OptionError(f"deadline={deadline!r}: give seconds above 0, such as 0.05, or None for the server's")
    return float(deadline)


def _publication(number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 53:
        raise OptionError(f"publication={number!r}: give the number of a publication, or 0 for none")
    return number


def _default_rows(embeddings: EmbeddingCollection, given: DefaultRows) -> dict[str, list[float]]:
    rows = {}
    for name, values in given.items():
        dim = embeddings.table(name).table.dim
        row = torch.as_tensor(values, dtype=torch.float32).flatten().cpu()
        if row.numel() != dim or not bool(torch.isfinite(row).all()):
            raise OptionError(f"default_rows[{name!r}] has {row.numel()} values; give {dim} finite numbers")
        rows[name] = row.tolist()
    return rows
