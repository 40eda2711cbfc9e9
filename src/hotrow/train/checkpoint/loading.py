"""Loading: reads a checkpoint into a trainer, all of it or, with `tables=`, only the rows of some tables.

Everything is read and compared with the model first, so a checkpoint that is damaged or does not match leaves the model
unchanged. Then rows change, then the dense part, then counters. A checkpoint does not record which tier a row was in,
so any memory budget that holds the rows works.

`resume` loads the newest readable checkpoint. It skips a damaged one with a warning. One that does not match this model
is an error, because the others would not match either.

A checkpoint can be loaded by any number of ranks. A rank takes the rows of the shards that it owns. If one part of the
checkpoint holds exactly these shards, its segments become the rank's own; otherwise rows are copied out of all parts
that overlap. If one rank cannot read the checkpoint, no rank loads it. Called by the training thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hotrow import _core
from hotrow.data.source import Cursor, StatefulCursor
from hotrow.errors import CheckpointError, OptionError, choices
from hotrow.features import FeatureSpec
from hotrow.parallel.ownership import in_shards
from hotrow.parallel.ranks import Ranks
from hotrow.table import TableRows
from hotrow.task import Task, tasks_from_json
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import SHARDS, floats_of
from hotrow.train.checkpoint import state_encoding
from hotrow.train.checkpoint.manifest import (
    CURSOR,
    DENSE,
    OPTIMIZER,
    STATE,
    Checkpoint,
    Part,
    list_checkpoints,
    newest_in,
    open_checkpoint,
)
from hotrow.train.run_position import RunPosition
from hotrow.train.task_metrics import StreamingMetrics, metrics_of
from hotrow.units import parse_size

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer

CHUNK = 65536  # rows at a time
Result = TypeVar("Result")


@dataclass(frozen=True)
class Contents:
    """Everything in a checkpoint except the rows, read and checked."""

    dense: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    scaler: dict[str, Any]
    metrics: StreamingMetrics
    rng: Tensor
    gpu_rng: Tensor | None
    features: FeatureSpec | None
    windows: dict[str, Any] | None
    cursor: Cursor | None


def load(
    trainer: Trainer, path: Path, rename: Mapping[str, str] | None = None, tables: Sequence[str] | None = None
) -> Checkpoint:
    """Read one checkpoint (or a folder's newest) into the trainer.

    Rows are read twice: first to compare their checksums, so that a damaged block changes nothing.
    """
    ranks = trainer.model.embeddings.ranks
    if ranks is not None:  # rank 0 chooses the newest: another rank may see it later
        path = path / ranks.broadcast_result(
            f"looking into {path}", lambda: newest_in(path).relative_to(path).as_posix()
        )

    def read_and_match() -> tuple[Checkpoint, list[tuple[str, TableRows]], Contents | None]:
        checkpoint, contents = open_checkpoint(path), None
        pairs = match_tables(trainer, checkpoint, rename or {}, tables)
        if tables is None:
            contents = read(checkpoint, ranks)
            check_dense(trainer, checkpoint, contents)
        else:
            checkpoint.verify_rows()
        for name, rows in pairs:
            for part in _parts_of(checkpoint, name, _shards(rows, ranks)):
                for _ in _read_rows(part.folder, rows.table.dim):
                    pass
        return checkpoint, pairs, contents

    checkpoint, pairs, contents = _collective(ranks, f"reading {path}", read_and_match)
    if ranks is not None:
        ranks.agree(f"what is in {path}", {"checksum": checkpoint.manifest["checksum"]})
    if contents is not None:
        _collective(ranks, f"loading {path}", lambda: apply(trainer, checkpoint, pairs, contents))
    else:
        _collective(ranks, f"loading {path}", lambda: apply_rows(checkpoint, pairs, ranks))
        # The model must not be at an earlier step than its rows.
        trainer.model.embeddings.steps = max(trainer.steps, checkpoint.step)
    return checkpoint


def _collective(ranks: Ranks | None, what: str, work: Callable[[], Result]) -> Result:
    """Run `work` on all ranks; if it fails on one, it raises on all."""
    return work() if ranks is None else ranks.collective(what, work)


def resume(trainer: Trainer, folder: Path, features: FeatureSpec | None) -> Checkpoint | None:
    """Read the newest valid checkpoint of a folder into the trainer; None if the folder has no checkpoint at all."""
    faults = []
    ranks = trainer.model.embeddings.ranks

    def names() -> list[str]:
        return [path.name for path in list_checkpoints(folder)]

    paths = [
        folder / name
        for name in (names() if ranks is None else ranks.broadcast_result(f"looking into {folder}", names))
    ]

    def open_and_read(path: Path) -> tuple[Checkpoint, Contents]:
        checkpoint = open_checkpoint(path)
        return checkpoint, read(checkpoint, ranks)

    for path in paths:
        try:
            checkpoint, contents = _collective(ranks, f"reading {path}", partial(open_and_read, path))
        except CheckpointError as error:
            faults.append(_skip(path, error))
            continue
        pairs = match_tables(trainer, checkpoint, {}, None)
        check_dense(trainer, checkpoint, contents)
        _check_features(checkpoint, contents.features, features)
        try:
            _apply_together(trainer, checkpoint, pairs, contents)
        except CheckpointError as error:  # rows are checked as they are read; the next one replaces them all
            faults.append(_skip(path, error))
            continue
        return checkpoint
    if faults:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {folder} can be read: {'; '.join(faults)}. Restore one, or "
            "move them away to start a new run"
        )
    return None


def _apply_together(
    trainer: Trainer, checkpoint: Checkpoint, pairs: list[tuple[str, TableRows]], contents: Contents
) -> None:
    ranks = trainer.model.embeddings.ranks
    _collective(ranks, f"loading {checkpoint.path}", lambda: apply(trainer, checkpoint, pairs, contents))


def read(checkpoint: Checkpoint, ranks: Ranks | None = None) -> Contents:
    """Read and check everything except rows; of the rows, only the manifests."""
    dense, parts, state = (checkpoint.tensors(name) for name in (DENSE, OPTIMIZER, STATE))
    features = checkpoint.features()
    checkpoint.verify_rows()
    manifest = checkpoint.manifest
    saved = manifest["dense_optimizer"]
    try:
        optimizer = None if saved is None else state_encoding.unpack(saved["state"], parts)
        scaler = state_encoding.unpack(manifest["scaler"], state)
        figures = [state_encoding.unpack(manifest["metrics"]["state"], state)]
        figures += [state_encoding.unpack(other["metrics"], state) for other in manifest.get("ranks", [])]
        windows = None if "windows" not in manifest else _listed(state_encoding.unpack(manifest["windows"], state))
        # A rank that has no counterpart among the writers keeps its random state.
        mine = "" if ranks is None or ranks.first else f"ranks.{ranks.roles.requester_number(ranks.rank)}."
        rng = state["rng.cpu"] if not mine else state.get(f"{mine}rng.cpu", torch.get_rng_state())
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.path} is corrupt: its tensors lack {error}") from None
    cursor = manifest["cursor"]
    if CURSOR in manifest["files"] and cursor is not None:
        remembered = checkpoint.tensors(CURSOR)
        cursor = StatefulCursor(cursor, lambda: remembered)
    tasks = tasks_from_json(manifest.get("tasks", ()))
    metrics = _own_metrics([_metrics(one, tasks) for one in figures], tasks, ranks)
    if rng.dtype != torch.uint8 or rng.shape != torch.get_rng_state().shape:
        raise CheckpointError(
            f"{checkpoint.path} has a random state of {rng.numel()} bytes and this torch uses "
            f"{torch.get_rng_state().numel()}; load it with the torch that made it"
        )
    return Contents(dense, optimizer, scaler, metrics, rng, state.get(f"{mine}rng.cuda"), features, windows, cursor)


def _metrics(figures: dict[str, Any], tasks: Sequence[Task]) -> StreamingMetrics:
    metrics = metrics_of(tasks)
    metrics.load_state(_listed(figures))
    return metrics


def _listed(figures: dict[str, Any]) -> dict[str, Any]:
    """Turn tensors back into lists."""
    return {
        metric: {name: v.tolist() if isinstance(v, Tensor) else v for name, v in parts.items()}
        for metric, parts in figures.items()
    }


def _own_metrics(saved: list[StreamingMetrics], tasks: Sequence[Task], ranks: Ranks | None) -> StreamingMetrics:
    """This rank's metrics if as many ranks saved; else rank 0 gets the sum of all."""
    if ranks is not None and not ranks.has_tower:
        return metrics_of(tasks)
    if ranks is not None and len(saved) == len(ranks.roles.requesters):
        return saved[ranks.roles.requester_number(ranks.rank) or 0]
    total = metrics_of(tasks)
    for one in saved if ranks is None or ranks.first else ():
        total.merge(one)
    return saved[0] if len(saved) == 1 and (ranks is None or ranks.first) else total


def match_tables(
    trainer: Trainer, checkpoint: Checkpoint, rename: Mapping[str, str], tables: Sequence[str] | None
) -> list[tuple[str, TableRows]]:
    """Pairs of saved table name and the model's table, each checked. `rename` has saved names, `tables` the model's."""
    mine = {rows.table.name: rows for rows in trainer.model.embeddings.tables}
    saved = checkpoint.tables
    for name in rename:
        if name not in saved:
            raise OptionError(f"rename={name!r}: {checkpoint.path} has no such table; {choices(name, saved)}")
    source = {rename.get(name, name): name for name in saved}
    if len(source) < len(saved):
        raise OptionError(f"rename={dict(rename)} gives two saved tables one name; give each its own")
    wanted = list(mine) if tables is None else list(tables)
    for name in wanted:
        if name not in mine:
            raise OptionError(f"tables={wanted}: this model has no table {name!r}; {choices(name, mine)}")
        if name not in source:
            raise CheckpointError(
                f"this model has a table {name!r} that {checkpoint.path} lacks (it has {', '.join(saved)}); map one to "
                f"it with rename={{'...': {name!r}}}, or load only some with tables="
            )
    extra = [] if tables is not None else [name for name in source if name not in mine]
    if extra:
        raise CheckpointError(
            f"{checkpoint.path} has a table {source[extra[0]]!r} that this model lacks (it has {', '.join(mine)}); map "
            f"it with rename={{{source[extra[0]]!r}: '...'}}, or load only some with tables="
        )
    if tables is None and checkpoint.manifest["seed"] != trainer.model.embeddings.seed:
        raise CheckpointError(
            f"{checkpoint.path} draws new rows with seed {checkpoint.manifest['seed']} and this model with "
            f"{trainer.model.embeddings.seed}; pass seed={checkpoint.manifest['seed']}"
        )
    for name in wanted:
        _check_table(checkpoint, saved[source[name]], mine[name])
    return [(source[name], mine[name]) for name in wanted]


def check_dense(trainer: Trainer, checkpoint: Checkpoint, contents: Contents) -> None:
    """Compare tasks, tower and dense optimizer with what was saved. A row rank has neither of the last two."""
    _check_tasks(trainer, checkpoint)
    if not trainer.has_tower:
        return
    kind, mine = checkpoint.manifest["tower"], trainer.model.tower.state_dict()
    cure = f"build the tower as it was saved (a {kind}), or load rows alone with tables="
    for name in [*mine, *contents.dense]:
        if name not in contents.dense or name not in mine:
            owner = "this tower" if name in mine else str(checkpoint.path)
            raise CheckpointError(f"only {owner} has the weight {name!r}; {cure}")
        shape, saved_shape = list(mine[name].shape), list(contents.dense[name].shape)
        if shape != saved_shape:
            raise CheckpointError(
                f"the tower's weight {name!r} has shape {shape} but {checkpoint.path} has {saved_shape}; {cure}"
            )
    saved, optimizer = checkpoint.manifest["dense_optimizer"], trainer.dense_optimizer
    if saved is None or optimizer is None:
        return
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the dense optimizer is {type(optimizer).__name__} but {checkpoint.path} has state of {saved['kind']}; "
            f"pass dense_optimizer=torch.optim.{saved['kind']}(...), or load rows alone with tables="
        )
    assert contents.optimizer is not None
    ours, theirs = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, contents.optimizer["param_groups"])
    )
    if ours != theirs:
        raise CheckpointError(
            f"the dense optimizer's groups have {ours} parameters but those of {checkpoint.path} have {theirs}; group "
            "the parameters as before"
        )


def _check_tasks(trainer: Trainer, checkpoint: Checkpoint) -> None:
    ours = [task.to_dict() for task in trainer.tasks]
    theirs = checkpoint.manifest.get("tasks", [])
    if ours == theirs:
        return
    mine, saved = (
        ", ".join(f"{t['name']} ({t['kind']})" for t in tasks) or "no named task" for tasks in (ours, theirs)
    )
    lacks = [task["name"] for task in ours if task not in theirs]
    fact = f"it lacks {', '.join(lacks)}" if lacks else "the order or the number differs"
    cure = f"tasks={[task['name'] for task in theirs]} in this order" if theirs else "no tasks="
    raise CheckpointError(
        f"{checkpoint.path} was trained on {saved}, but this trainer has {mine}: {fact}. Train with {cure}, or load "
        "rows alone with tables="
    )


def apply(trainer: Trainer, checkpoint: Checkpoint, pairs: list[tuple[str, TableRows]], contents: Contents) -> None:
    """Set the trainer to the saved state. Requires: the state has been checked against the model."""
    trainer.forget()
    if trainer.model.embeddings.hbm_cache is not None:
        trainer.model.embeddings.hbm_cache.drop()  # all rows are replaced
    apply_rows(checkpoint, pairs, trainer.model.embeddings.ranks)
    if trainer.has_tower:
        trainer.model.tower.load_state_dict(contents.dense)
    if trainer.dense_optimizer is not None and contents.optimizer is not None:
        trainer.dense_optimizer.load_state_dict(contents.optimizer)
    if trainer.scaler.is_enabled() and contents.scaler:
        trainer.scaler.load_state_dict(contents.scaler)
    trainer.model.embeddings.steps = checkpoint.step
    trainer.model.embeddings.watermark = checkpoint.manifest.get("watermark")
    trainer.metrics, trainer.cursor = contents.metrics, contents.cursor
    trainer.position = RunPosition(**checkpoint.manifest["fit"])
    if trainer.windows is not None:
        trainer.windows.begin()
        if contents.windows is not None:
            trainer.windows.load_state(contents.windows)
    trainer.features = contents.features or trainer.features
    torch.set_rng_state(contents.rng)
    if contents.gpu_rng is not None and trainer.model.embeddings.device.type == "cuda":
        torch.cuda.set_rng_state(contents.gpu_rng, trainer.model.embeddings.device)
    trainer.saver.after_load(checkpoint.path)


def apply_rows(checkpoint: Checkpoint, pairs: list[tuple[str, TableRows]], ranks: Ranks | None = None) -> None:
    """Replace the rows of this rank's shards by the saved ones."""
    for name, rows in pairs:
        rows.flush_and_drop()
        shards = _shards(rows, ranks)
        parts = _parts_of(checkpoint, name, shards)
        same = checkpoint.tables[name].get("dtype", "fp32") == rows.table.dtype
        if same and name == rows.table.name and [part.shards for part in parts] == [shards]:
            rows.store.load_snapshot(str(parts[0].folder))
        else:
            _copy_rows(parts, rows, shards)
        rows.after_load()


def _shards(rows: TableRows, ranks: Ranks | None) -> tuple[int, int]:
    return (0, SHARDS) if ranks is None or ranks.replicates(rows.table.replicate) else ranks.shards


def _parts_of(checkpoint: Checkpoint, name: str, shards: tuple[int, int]) -> list[Part]:
    """The parts of a table that overlap these shards."""
    begin, end = shards
    return [part for part in checkpoint.parts(name) if part.shards[0] < end and begin < part.shards[1]]


def _copy_rows(parts: list[Part], rows: TableRows, shards: tuple[int, int]) -> None:
    """Copy row by row: into a table of another name (segments carry their table's name) or dtype, or other shards.

    The cutoffs of earlier sweeps are loaded last: a row that is assigned while they exist counts as updated since.
    """
    rows.store.clear()
    for part in parts:
        for keys, counts, last_steps, values in _read_rows(part.folder, rows.table.dim):
            mine = in_shards(keys, *shards)
            if bool(mine.any()):
                rows.assign(keys[mine], values[mine], counts[mine], last_steps[mine])
    for part in parts:
        rows.store.load_state(str(part.folder), part.shards)


def _read_rows(folder: Path, dim: int) -> Iterator[list[Tensor]]:
    """A snapshot's keys, counts, last steps and values with state, with every block's checksum compared."""
    with core_errors():
        reader = _core.SnapshotReader(str(folder))
        while (chunk := reader.next(CHUNK)) is not None:
            *words, rows = chunk
            yield [torch.from_numpy(part) for part in (*words, floats_of(rows, reader.row_type, dim))]


def _check_table(checkpoint: Checkpoint, saved: dict[str, Any], mine: TableRows) -> None:
    name, dim = mine.table.name, mine.table.dim
    if saved["dim"] != dim:
        raise CheckpointError(
            f"table {name!r} has dim {dim} but {checkpoint.path} has {saved['dim']}; pass dim={saved['dim']}, or map "
            "another table to it with rename="
        )
    admission, before = mine.table.admission, saved.get("admission")
    if (
        admission is not None
        and before is not None
        and parse_size(before["sketch"], "sketch") != admission.sketch_bytes
    ):
        raise CheckpointError(
            f"table {name!r} counts sightings in a sketch of {admission.sketch!r} but {checkpoint.path} has one of "
            f"{before['sketch']!r}; pass admission=hr.Admission(..., sketch={before['sketch']!r})"
        )
    kind = type(mine.optimizer).__name__
    if (saved["optimizer"]["kind"], saved["width"]) != (kind, mine.store.width):
        raise CheckpointError(
            f"table {name!r} is trained by {kind} ({mine.store.width} numbers a row) but {checkpoint.path} has state "
            f"of {saved['optimizer']['kind']} ({saved['width']} numbers a row); pass "
            f"optimizer=hr.optim.{saved['optimizer']['kind']}(...)"
        )


def _check_features(checkpoint: Checkpoint, saved: FeatureSpec | None, mine: FeatureSpec | None) -> None:
    if saved is not None and mine is not None and saved != mine:
        raise CheckpointError(
            f"the source's feature spec differs from {checkpoint.path / 'features.json'}: the same events would give "
            "other keys. Resume with hr.FeatureSpec.load() of that file, or begin anew in another folder"
        )


def _skip(path: Path, error: CheckpointError) -> str:
    warnings.warn(f"passing over the checkpoint {path}: {error}", stacklevel=4)
    return str(error)
