"""Saving: capture one instant, write it beside its final name, publish it by a rename.

`capture` runs at a step boundary and is the only pause: it copies the dense part and begins a snapshot of each table's
rows, which costs no time of its own because rows are copied later, when training is about to change them. `write` does
the rest, from any thread, while training goes on (train/checkpoint/background_save.py).

The order of `write` is what a crash at any instant relies on: all files synced, then the folder renamed, then its
parent synced, and only then are older checkpoints renamed away and removed. So a folder with a final name is complete,
and there is always one if there ever was. What goes wrong after the publication is a warning, not an error.

With ranks, each writes the rows that it owns into the same draft; when all are durable, rank 0 writes the rest and
publishes. If any of them fails, all do, and nothing was published. Every step of `write` is taken by all ranks together
(`_all`), over a channel of its own, because training goes on meanwhile.
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
from hotrow.errors import CheckpointError, OptionError, StorageError
from hotrow.parallel.ownership import shard_range
from hotrow.parallel.ranks import Ranks
from hotrow.train.checkpoint import durable_files, state_encoding
from hotrow.train.checkpoint.manifest import (
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
from hotrow.train.metrics import Metrics
from hotrow.train.report import SaveReport

if TYPE_CHECKING:
    from hotrow.train.trainer import Trainer

Result = TypeVar("Result")


@dataclass
class Instant:
    """Everything a checkpoint holds, as it was at one step boundary; nothing in it changes when training goes on."""

    step: int
    fields: dict[str, Any]  # of the manifest, plain JSON
    tensors: dict[str, dict[str, Tensor]]  # by file
    features: str | None
    metrics: Metrics
    tables: list[dict[str, Any]]
    snapshots: dict[str, Any]  # by table; taken out as they are finished
    ranks: Ranks | None = None

    @property
    def first(self) -> bool:
        """Whether this process publishes."""
        return self.ranks is None or self.ranks.first

    def is_parted(self, table: dict[str, Any]) -> bool:
        """Whether every rank writes a part of the table."""
        return self.ranks is not None and not table.get("replicate")

    def folder(self, table: dict[str, Any]) -> Path:
        """Where this process writes a table's rows, inside a checkpoint."""
        inside = Path("rows") / str(table["name"])
        return inside / part_name(self.ranks.rank) if self.ranks is not None and self.is_parted(table) else inside

    def abandon(self) -> None:
        """Give up what has not been written."""
        while self.snapshots:
            self.snapshots.popitem()[1].abandon()


def capture(trainer: Trainer, folder: Path, notes: dict[str, Any] | None = None) -> Instant:
    """The trainer as it is now, to be written into `folder`. Requires: a step boundary."""
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
    fields: dict[str, Any] = {
        "step": embeddings.steps,
        "seed": embeddings.seed,
        "tower": type(trainer.model.tower).__name__,
        "dense_optimizer": None if optimizer is None else _optimizer_state(optimizer, tensors[OPTIMIZER]),
        "scaler": state_encoding.pack(trainer.scaler.state_dict(), tensors[STATE], "scaler"),
        "cursor": _plain("the cursor of the source", trainer.cursor),
        "watermark": embeddings.watermark,
        **({} if trainer.job is None else {"job": _plain("the job", trainer.job)}),
        "fit": asdict(trainer.position),
        "notes": _plain("notes=", notes or {}),
    }
    if trainer.windows is not None:
        fields["windows"] = state_encoding.pack(_metric_tensors(trainer.windows.state()), tensors[STATE], "windows")
    if trainer.publisher is not None and (published := trainer.publisher.state()) is not None:
        fields["publish"] = published
    features = None if trainer.features is None else trainer.features.to_json()
    instant = Instant(embeddings.steps, fields, tensors, features, copy.deepcopy(trainer.metrics), [], {})
    instant.ranks = embeddings.ranks
    try:
        for rows in embeddings.tables:
            definition = {**rows.table.to_dict(), "optimizer": rows.optimizer.to_dict(), "width": rows.store.width}
            if instant.ranks is not None and instant.is_parted(definition):
                definition["parts"] = [shard_range(rank, instant.ranks.world) for rank in range(instant.ranks.world)]
            instant.tables.append(definition)
            if instant.first or instant.is_parted(definition):
                instant.snapshots[rows.table.name] = rows.store.begin_snapshot()
    except BaseException:
        instant.abandon()
        raise
    return instant


def write(instant: Instant, report: SaveReport, keep: int | None) -> None:
    """Write and publish an instant, and remove what is beyond `keep`."""
    folder = report.path.parent
    draft = folder / draft_name(report.path.name)
    with ExitStack() as held:
        _all(instant, "beginning a checkpoint", lambda: _begin(instant, draft, held))
        try:
            wrote = _all(instant, "writing rows", lambda: _write_rows(instant, draft))
            everyones = [wrote] if instant.ranks is None else instant.ranks.saves.gather_json(wrote)
            _add_up(everyones, instant, report)
            published = _all(instant, "publishing a checkpoint", lambda: _publish(instant, draft, everyones, report))
        except BaseException:
            if instant.first:
                _try_to_remove(draft)
            raise
        if instant.first:
            _make_way(published, report, keep)
    if instant.ranks is not None:
        report.path = Path(instant.ranks.saves.gather_json(str(report.path))[0])


def _all(instant: Instant, what: str, work: Callable[[], Result]) -> Result:
    """Work that has failed on any rank has failed on all."""
    return work() if instant.ranks is None else instant.ranks.collective(what, work, "saves")


def _begin(instant: Instant, draft: Path, held: ExitStack) -> None:
    if not instant.first:
        return
    durable_files.make(draft.parent)
    held.enter_context(durable_files.alone(draft.parent))
    for stale in list_drafts(draft.parent):
        durable_files.remove(stale)
    durable_files.make(draft / "rows")
    for table in instant.tables:
        if instant.is_parted(table):
            durable_files.make(draft / "rows" / table["name"])


def _publish(instant: Instant, draft: Path, everyones: list[dict[str, Any]], report: SaveReport) -> Path:
    """Requires: all ranks' rows are durable."""
    if not instant.first:
        return report.path
    _write_files(instant, draft, next_number(draft.parent), everyones, report)
    for table in instant.tables:
        if instant.is_parted(table):
            durable_files.sync(draft / "rows" / table["name"])
    durable_files.sync(draft / "rows")
    durable_files.sync(draft)
    published = _free_name(report.path)
    durable_files.rename(draft, published)
    durable_files.sync(draft.parent)
    return published


def _make_way(published: Path, report: SaveReport, keep: int | None) -> None:
    """What the new checkpoint replaces goes."""
    wanted = report.path
    try:
        _retire(published, wanted, keep)
    except StorageError as error:
        warnings.warn(f"{published} is saved, but what it replaces is still there: {error}", stacklevel=2)
    report.path = published if published.exists() else wanted


def _write_rows(instant: Instant, draft: Path) -> dict[str, Any]:
    """Returns what the others need to know: rows by table, figures, and what the manifest says of the files beside the
    segments, which have checksums of their own; with ranks also this rank's metrics and random state."""
    files: dict[str, Any] = {}
    rows: dict[str, int] = {}
    figures = dict.fromkeys(("rows", "rows_written", "bytes_written", "bytes_copied"), 0)
    older = list_checkpoints(draft.parent)
    for table in instant.tables:
        name, inside = table["name"], instant.folder(table)
        if name not in instant.snapshots:
            continue
        # Where the rows' log is on another disk, segments that the checkpoint before has are linked from there.
        previous = str(older[0] / inside) if older else ""
        stats = instant.snapshots[name].finish(str(draft / inside), previous)
        del instant.snapshots[name]
        rows[name] = stats["rows"]
        for figure in figures:
            figures[figure] += stats[figure]
        for path in sorted((draft / inside).iterdir()):
            if not path.name.startswith("segment-"):
                with durable_files.disk("read", path):
                    files[f"{inside.as_posix()}/{path.name}"] = fingerprint(path.read_bytes())
    wrote: dict[str, Any] = {"files": files, "rows": rows, "figures": figures}
    if instant.ranks is not None:
        random = {name: tensor for name, tensor in instant.tensors[STATE].items() if name.startswith("rng.")}
        wrote["metrics"] = instant.metrics.state()
        wrote["random"] = {name: base64.b64encode(bytes(t.numpy())).decode() for name, t in random.items()}
    return wrote


def _add_up(everyones: list[dict[str, Any]], instant: Instant, report: SaveReport) -> None:
    for table in instant.tables:
        table["rows"] = sum(wrote["rows"].get(table["name"], 0) for wrote in everyones)
    for wrote in everyones:
        for figure, value in wrote["figures"].items():
            setattr(report, figure, getattr(report, figure) + value)


def _write_files(
    instant: Instant, draft: Path, number: int, everyones: list[dict[str, Any]], report: SaveReport
) -> None:
    state = state_encoding.pack(_metric_tensors(instant.metrics.state()), instant.tensors[STATE], "metrics")
    of_ranks = {} if instant.ranks is None else {"ranks": _others(everyones[1:], instant)}
    files = {name: state_encoding.to_bytes(tensors) for name, tensors in instant.tensors.items()}
    if instant.features is not None:
        files[FEATURES] = instant.features.encode()
    for name, data in files.items():
        durable_files.write(draft / name, data)
    of_rows = {name: mark for wrote in everyones for name, mark in wrote["files"].items()}
    manifest = write_manifest(
        draft,
        {
            "number": number,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **instant.fields,
            "metrics": {"figures": _plain("metrics", instant.metrics.compute()), "state": state},
            "tables": instant.tables,
            **of_ranks,
            "files": {name: fingerprint(data) for name, data in files.items()} | of_rows,
        },
    )
    report.bytes_written += sum(len(data) for data in (*files.values(), manifest))


def _others(wrote: list[dict[str, Any]], instant: Instant) -> list[dict[str, Any]]:
    """What the manifest keeps of the ranks from 1 on; the figures for people become those of all ranks."""
    kept = []
    for number, one in enumerate(wrote, start=1):
        tensors, metrics = instant.tensors[STATE], Metrics()
        for name, data in one["random"].items():
            tensors[f"ranks.{number}.{name}"] = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
        metrics.load_state(one["metrics"])
        kept.append(
            {"metrics": state_encoding.pack(_metric_tensors(one["metrics"]), tensors, f"ranks.{number}.metrics")}
        )
        instant.metrics.merge(metrics)
    return kept


def _optimizer_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "kind": type(optimizer).__name__,
        "state": state_encoding.pack(optimizer.state_dict(), tensors, "optimizer"),
    }


def _metric_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """Long lists of numbers as tensors."""
    return {
        metric: {
            name: torch.tensor(value, dtype=torch.float64 if name == "predicted" else torch.int64)
            if isinstance(value, list)
            else value
            for name, value in parts.items()
        }
        for metric, parts in state.items()
    }


def _plain(what: str, value: Any) -> Any:
    """A copy of plain JSON values; NaN, which JSON lacks, becomes null."""
    try:
        return json.loads(json.dumps(value), parse_constant=lambda _: None)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{what} cannot be saved as JSON: {error}; use numbers, text, lists and dicts") from None


def _try_to_remove(folder: Path) -> None:
    with suppress(StorageError):  # the next save removes it
        durable_files.remove(folder)


def _free_name(wanted: Path) -> Path:
    """The name of a checkpoint; if one of the same step is there, another until that one is out of the way."""
    name, number = wanted, 1
    while name.exists():
        number += 1
        name = wanted.with_name(f"{wanted.name}-{number}")
    return name


def _retire(published: Path, wanted: Path, keep: int | None) -> None:
    """Remove what a new checkpoint replaces and what is beyond `keep`, and let it have its proper name."""
    older = [path for path in list_checkpoints(wanted.parent) if path != published]
    older.sort(key=lambda path: not is_readable(path))  # one that cannot be read is the first to go
    same_step = [path for path in older if path == wanted or path.name.startswith(f"{wanted.name}-")]
    others = [path for path in older if path not in same_step]
    for path in same_step + ([] if keep is None else others[keep - 1 :]):
        aside = path.with_name(draft_name(path.name))
        durable_files.rename(path, aside)
        durable_files.remove(aside)
    if published != wanted:
        durable_files.rename(published, wanted)
        durable_files.sync(wanted.parent)
