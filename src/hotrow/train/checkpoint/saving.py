"""Saving: capture the state of one step boundary, write it into a draft folder, publish the folder by a rename.

`capture` runs between two steps and is the only pause of training. It copies the dense part and begins a copy-on-write
snapshot of each table's rows: a row is copied when training is about to change it. `write` does the rest on any thread,
while training continues (background_save.py).

A crash at any instant is safe because of the order of `write`: sync all files, rename the folder, sync its parent, and
only then rename away and remove older checkpoints. So a folder with a final name is complete, and after the first save
there is always one. An error after the rename is a warning.

With ranks, each writes the rows it owns into the same draft. When all rows are durable, rank 0 writes the other files
and renames the draft. If one rank fails, all fail, and nothing is published. All ranks synchronise after every step of
`write` (`_collective`), over a channel separate from training's exchanges.
"""

from __future__ import annotations

import base64
import copy
import json
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hotrow.checksummed_json import fingerprint
from hotrow.data.source import StatefulCursor
from hotrow.errors import CheckpointError, OptionError, StorageError
from hotrow.parallel.ranks import Ranks
from hotrow.task import tasks_from_json
from hotrow.train.checkpoint import durable_files, state_encoding
from hotrow.train.checkpoint.manifest import (
    CURSOR,
    DENSE,
    FEATURES,
    OPTIMIZER,
    STATE,
    draft_name,
    is_readable,
    list_checkpoints,
    list_drafts,
    next_number,
    part_name,
    write_manifest,
)
from hotrow.train.checkpoint.row_logs import open_logs
from hotrow.train.checkpoint.shared_folder import not_shared
from hotrow.train.report import SaveReport
from hotrow.train.task_metrics import StreamingMetrics, metrics_of

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer

Result = TypeVar("Result")


@dataclass
class CapturedState:
    """Everything a checkpoint holds, as it was at one step boundary. Training does not change it."""

    step: int
    fields: dict[str, Any]  # of the manifest, plain JSON
    tensors: dict[str, dict[str, Tensor]]  # by file
    features: str | None
    metrics: StreamingMetrics
    tables: list[dict[str, Any]]
    snapshots: dict[str, Any]  # by table; taken out as they are finished
    ranks: Ranks | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes the common files and publishes the folder."""
        return self.ranks is None or self.ranks.first

    def is_partitioned(self, table: dict[str, Any]) -> bool:
        """Whether every rank writes a part of the table."""
        return self.ranks is not None and not self.ranks.replicates(bool(table.get("replicate")))

    def writes(self, table: dict[str, Any]) -> bool:
        """Whether this process writes rows of the table."""
        return self.ranks.owns_rows if self.ranks is not None and self.is_partitioned(table) else self.first

    def folder(self, table: dict[str, Any]) -> Path:
        """Where this process writes a table's rows, inside a checkpoint."""
        inside = Path("rows") / str(table["name"])
        if self.ranks is None or not self.is_partitioned(table):
            return inside
        number = self.ranks.roles.owner_number(self.ranks.rank)
        assert number is not None
        return inside / part_name(number)

    def abandon(self) -> None:
        """Release the snapshots that have not been written."""
        while self.snapshots:
            self.snapshots.popitem()[1].abandon()


def capture(trainer: Trainer, folder: Path, notes: dict[str, Any] | None = None) -> CapturedState:
    """Capture the trainer, to be written into `folder`. Requires: no step is in progress."""
    embeddings, optimizer = trainer.model.embeddings, trainer.dense_optimizer
    open_logs(embeddings, folder)
    embeddings.flush()
    tensors: dict[str, dict[str, Tensor]] = {DENSE: {}, OPTIMIZER: {}, STATE: {}}
    for name, value in trainer.model.tower.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the tower's state {name!r} is {type(value).__name__}; a tower's state must be tensors"
            )
        tensors[DENSE][name] = state_encoding.copy(value)
    tensors[STATE]["rng.cpu"] = torch.get_rng_state()
    if embeddings.device.type == "cuda":
        tensors[STATE]["rng.cuda"] = torch.cuda.get_rng_state(embeddings.device)
    if isinstance(trainer.cursor, StatefulCursor):
        tensors[CURSOR] = dict(trainer.cursor.state())
    fields: dict[str, Any] = {
        "step": embeddings.steps,
        "seed": embeddings.seed,
        "tower": type(trainer.model.tower).__name__,
        "dense_optimizer": None if optimizer is None else _optimizer_state(optimizer, tensors[OPTIMIZER]),
        "scaler": state_encoding.pack(trainer.scaler.state_dict(), tensors[STATE], "scaler"),
        "cursor": _json_copy("the cursor of the source", trainer.cursor),
        "watermark": embeddings.watermark,
        **({} if trainer.job is None else {"job": _json_copy("the job", trainer.job)}),
        **({"tasks": [task.to_dict() for task in trainer.tasks]} if trainer.tasks else {}),
        "fit": asdict(trainer.position),
        "notes": _json_copy("notes=", notes or {}),
    }
    if trainer.windows is not None:
        fields["windows"] = state_encoding.pack(_metric_tensors(trainer.windows.state()), tensors[STATE], "windows")
    if trainer.publisher is not None and (published := trainer.publisher.state()) is not None:
        fields["publish"] = published
    features = None if trainer.features is None else trainer.features.to_json()
    captured = CapturedState(embeddings.steps, fields, tensors, features, copy.deepcopy(trainer.metrics), [], {})
    captured.ranks = embeddings.ranks
    try:
        for rows in embeddings.tables:
            definition = {**rows.table.to_dict(), "optimizer": rows.optimizer.to_dict(), "width": rows.store.width}
            if captured.ranks is not None and captured.is_partitioned(definition):
                definition["parts"] = captured.ranks.roles.parts
            captured.tables.append(definition)
            if captured.writes(definition):
                captured.snapshots[rows.table.name] = rows.store.begin_snapshot()
    except BaseException:
        captured.abandon()
        raise
    return captured


def write(captured: CapturedState, report: SaveReport, keep: int | None) -> None:
    """Write and publish a captured state, and remove checkpoints beyond `keep`."""
    folder = report.path.parent
    draft = folder / draft_name(report.path.name)
    with ExitStack() as held:
        _collective(captured, "beginning a checkpoint", lambda: _begin(captured, draft, held))
        try:
            written = _collective(captured, "writing rows", lambda: _write_rows(captured, draft))
            ranks = captured.ranks
            all_written = [written] if ranks is None else ranks.saves.gather_json(written)
            _sum_figures(all_written, captured, report)
            published = _collective(
                captured, "publishing a checkpoint", lambda: _publish(captured, draft, all_written, report)
            )
        except BaseException:
            if captured.first:
                _try_to_remove(draft)
            raise
        if captured.first:
            _remove_replaced(published, report, keep)
    if captured.ranks is not None:
        report.path = Path(captured.ranks.saves.gather_json(str(report.path))[0])


def _collective(captured: CapturedState, what: str, work: Callable[[], Result]) -> Result:
    """Run `work` on all ranks; if it fails on one, it raises on all."""
    return work() if captured.ranks is None else captured.ranks.collective(what, work, "saves")


def _begin(captured: CapturedState, draft: Path, held: ExitStack) -> None:
    if not captured.first:
        return
    durable_files.make(draft.parent)
    held.enter_context(durable_files.exclusive(draft.parent))
    for stale in list_drafts(draft.parent):
        durable_files.remove(stale)
    durable_files.make(draft / "rows")
    for table in captured.tables:
        if captured.is_partitioned(table):
            durable_files.make(draft / "rows" / table["name"])


def _publish(captured: CapturedState, draft: Path, all_written: list[dict[str, Any]], report: SaveReport) -> Path:
    """Requires: all ranks' rows are durable."""
    if not captured.first:
        return report.path
    _write_files(captured, draft, next_number(draft.parent), all_written, report)
    for table in captured.tables:
        if captured.is_partitioned(table):
            durable_files.sync(draft / "rows" / table["name"])
    durable_files.sync(draft / "rows")
    durable_files.sync(draft)
    published = _free_name(report.path)
    durable_files.rename(draft, published)
    durable_files.sync(draft.parent)
    return published


def _remove_replaced(published: Path, report: SaveReport, keep: int | None) -> None:
    """Remove the checkpoints that the new one replaces; an error is a warning."""
    wanted = report.path
    try:
        _retire(published, wanted, keep)
    except StorageError as error:
        warnings.warn(f"{published} is saved, but what it replaces is still there: {error}", stacklevel=2)
    report.path = published if published.exists() else wanted


def _write_rows(captured: CapturedState, draft: Path) -> dict[str, Any]:
    """Write this process's rows. Returns rows by table, figures, and the fingerprints of files beside the segments
    (segments have checksums of their own); with ranks also this rank's metrics and random state."""
    if captured.ranks is not None and not (draft / "rows").is_dir():
        raise not_shared(draft.parent, captured.ranks)
    files: dict[str, Any] = {}
    rows: dict[str, int] = {}
    figures = dict.fromkeys(("rows", "rows_written", "bytes_written", "bytes_copied"), 0)
    older = list_checkpoints(draft.parent)
    for table in captured.tables:
        name = table["name"]
        if name not in captured.snapshots:
            continue
        inside = captured.folder(table)
        # If the rows' log is on another disk, segments of the previous checkpoint are linked instead.
        previous = str(older[0] / inside) if older else ""
        stats = captured.snapshots[name].finish(str(draft / inside), previous)
        del captured.snapshots[name]
        rows[name] = stats["rows"]
        for figure in figures:
            figures[figure] += stats[figure]
        for path in sorted((draft / inside).iterdir()):
            if not path.name.startswith("segment-"):
                with durable_files.disk("read", path):
                    files[f"{inside.as_posix()}/{path.name}"] = fingerprint(path.read_bytes())
    written: dict[str, Any] = {"files": files, "rows": rows, "figures": figures}
    if captured.ranks is not None and captured.ranks.has_tower:
        random = {name: tensor for name, tensor in captured.tensors[STATE].items() if name.startswith("rng.")}
        written["metrics"] = captured.metrics.state()
        written["random"] = {name: base64.b64encode(bytes(t.numpy())).decode() for name, t in random.items()}
    return written


def _sum_figures(all_written: list[dict[str, Any]], captured: CapturedState, report: SaveReport) -> None:
    for table in captured.tables:
        table["rows"] = sum(written["rows"].get(table["name"], 0) for written in all_written)
    for written in all_written:
        for figure, value in written["figures"].items():
            setattr(report, figure, getattr(report, figure) + value)


def _write_files(
    captured: CapturedState, draft: Path, number: int, all_written: list[dict[str, Any]], report: SaveReport
) -> None:
    state = state_encoding.pack(_metric_tensors(captured.metrics.state()), captured.tensors[STATE], "metrics")
    towers = [written for written in all_written if "metrics" in written]
    rank_fields = {} if captured.ranks is None else {"ranks": _rank_fields(towers[1:], captured)}
    files = {name: state_encoding.to_bytes(tensors) for name, tensors in captured.tensors.items()}
    if captured.features is not None:
        files[FEATURES] = captured.features.encode()
    for name, data in files.items():
        durable_files.write(draft / name, data)
    row_files = {name: mark for written in all_written for name, mark in written["files"].items()}
    manifest = write_manifest(
        draft,
        {
            "number": number,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **captured.fields,
            "metrics": {"figures": _json_copy("metrics", captured.metrics.compute()), "state": state},
            "tables": captured.tables,
            **rank_fields,
            "files": {name: fingerprint(data) for name, data in files.items()} | row_files,
        },
    )
    report.bytes_written += sum(len(data) for data in (*files.values(), manifest))


def _rank_fields(written: list[dict[str, Any]], captured: CapturedState) -> list[dict[str, Any]]:
    """The manifest's fields of ranks 1 and up that have towers; merges their metrics into the captured ones."""
    kept, tasks = [], tasks_from_json(captured.fields.get("tasks", ()))
    for number, one in enumerate(written, start=1):
        tensors, metrics = captured.tensors[STATE], metrics_of(tasks)
        for name, data in one["random"].items():
            tensors[f"ranks.{number}.{name}"] = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
        metrics.load_state(one["metrics"])
        kept.append(
            {"metrics": state_encoding.pack(_metric_tensors(one["metrics"]), tensors, f"ranks.{number}.metrics")}
        )
        captured.metrics.merge(metrics)
    return kept


def _optimizer_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "kind": type(optimizer).__name__,
        "state": state_encoding.pack(optimizer.state_dict(), tensors, "optimizer"),
    }


def _metric_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Turn long lists of numbers into tensors."""
    return {
        metric: {
            name: torch.tensor(value, dtype=torch.float64 if name == "predicted" else torch.int64)
            if isinstance(value, list)
            else value
            for name, value in parts.items()
        }
        for metric, parts in state.items()
    }


def _json_copy(what: str, value: Any) -> Any:
    """A copy of JSON values; NaN, which JSON lacks, becomes null."""
    try:
        return json.loads(json.dumps(value), parse_constant=lambda _: None)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{what} cannot be saved as JSON: {error}; use numbers, text, lists and dicts") from None


def _try_to_remove(folder: Path) -> None:
    with suppress(StorageError):  # the next save removes it
        durable_files.remove(folder)


def _free_name(wanted: Path) -> Path:
    """A name that is free: `wanted`, or with a number behind it while a checkpoint of the same step exists."""
    name, number = wanted, 1
    while name.exists():
        number += 1
        name = wanted.with_name(f"{wanted.name}-{number}")
    return name


def _retire(published: Path, wanted: Path, keep: int | None) -> None:
    """Remove the checkpoints that the new one replaces or that are beyond `keep`; then give it its proper name."""
    older = [path for path in list_checkpoints(wanted.parent) if path != published]
    older.sort(key=lambda path: not is_readable(path))  # remove an unreadable one first
    same_step = [path for path in older if path == wanted or path.name.startswith(f"{wanted.name}-")]
    others = [path for path in older if path not in same_step]
    for path in same_step + ([] if keep is None else others[keep - 1 :]):
        aside = path.with_name(draft_name(path.name))
        durable_files.rename(path, aside)
        durable_files.remove(aside)
    if published != wanted:
        durable_files.rename(published, wanted)
        durable_files.sync(wanted.parent)
