"""Checkpoints and the rows inside them. Checksums are verified before anything is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from rich.console import Console
from rich.table import Table as View

from hotrow import _core
from hotrow.errors import CheckpointError
from hotrow.inspect.ranking import Ranking, check_name
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import floats_of
from hotrow.train.checkpoint.manifest import Checkpoint, list_checkpoints, open_checkpoint
from hotrow.train.task_metrics import describe_figures
from hotrow.units import format_size

CHUNK = 65536
CHEAP_ROWS = 10_000_000  # about ten seconds of reading; a larger table is read only if --table names it


@dataclass(frozen=True)
class TableOnDisk:
    """A table's rows in a folder. `dim` and `optimizer` come from a checkpoint's manifest; None without one."""

    folders: tuple[Path, ...]
    table: str
    row_bytes: int
    rows: int
    dim: int | None = None
    optimizer: str | None = None

    @staticmethod
    def open(*folders: Path, dim: int | None = None, optimizer: str | None = None) -> TableOnDisk:
        """Read the manifest of a snapshot, or of the snapshots of all ranks."""
        with core_errors():
            readers = [_core.SnapshotReader(str(folder)) for folder in folders]
        rows = sum(int(reader.rows) for reader in readers)
        return TableOnDisk(folders, str(readers[0].table), int(readers[0].row_bytes), rows, dim, optimizer)

    def read(self) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Keys, counts, last steps and values, chunk by chunk; every block's checksum is verified.

        Without a `dim` the values are the raw words of the files.
        """
        for folder in self.folders:
            with core_errors():
                reader = _core.SnapshotReader(str(folder))
                while (chunk := reader.next(CHUNK)) is not None:
                    *columns, rows = chunk
                    yield *columns, floats_of(rows, reader.row_type, self.dim) if self.dim else rows

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(folder_bytes(folder) for folder in self.folders)


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def inspect_checkpoint(folder: Path, table: str | None, top: int, console: Console) -> None:
    """Show a checkpoint's tables, after the list of checkpoints if there are several; or one table's rows."""
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    if table is not None:
        check_name(folder, table, list(checkpoint.tables))
        saved = checkpoint.tables[table]
        folders = [part.folder for part in checkpoint.parts(table)]
        rows = TableOnDisk.open(*folders, dim=saved["dim"], optimizer=saved["optimizer"]["kind"])
        inspect_rows(rows, top, console, whole=True)
        return
    if checkpoint.path != folder:
        _history(folder, console)
    _overview(checkpoint, console)


def _history(folder: Path, console: Console) -> None:
    view = View("checkpoint", "saved")
    for column in ("step", "rows", "bytes"):
        view.add_column(column, justify="right")
    for path in list_checkpoints(folder):
        try:
            manifest = open_checkpoint(path).manifest
            rows = sum(saved["rows"] for saved in manifest["tables"])
            figures = (manifest["created"], f"{manifest['step']:,}", f"{rows:,}", format_size(folder_bytes(path)))
        except CheckpointError as error:
            figures = (f"[red]{error}[/]", "", "", "")
        view.add_row(path.name, *figures)
    console.print(view)


def _overview(checkpoint: Checkpoint, console: Console) -> None:
    manifest, tables = checkpoint.manifest, checkpoint.tables
    rows = sum(saved["rows"] for saved in tables.values())
    console.print(
        f"[bold]{checkpoint.path}[/]: {manifest['tower']} after {checkpoint.step:,} steps, {manifest['created']}, "
        f"{rows:,} rows in {len(tables)} tables, {format_size(folder_bytes(checkpoint.path))}; checksums are right",
        highlight=False,
    )
    view = View("table", "features", "optimizer")
    for column in ("dim", "rows", "bytes a row", "values"):
        view.add_column(column, justify="right")
    for name, saved in tables.items():
        width = TableOnDisk.open(*(part.folder for part in checkpoint.parts(name))).row_bytes
        features = ", ".join(f"{f} ({p})" if p != "sum" else f for f, p in saved["features"].items())
        view.add_row(
            name,
            features,
            saved["optimizer"]["kind"],
            f"{saved['dim']}" + (f" {saved['dtype']}" if "dtype" in saved else ""),
            f"{saved['rows']:,}",
            str(width),
            format_size(saved["rows"] * width),
        )
    console.print(view)
    if tasks := manifest.get("tasks"):
        named = ", ".join(f"{task['name']} ({task['kind']})" for task in tasks)
        console.print(f"tasks: {named}", highlight=False)
    for split, figures in {"train": manifest["metrics"]["figures"], **(manifest["notes"].get("metrics") or {})}.items():
        known = {name: value for name, value in (figures or {}).items() if value is not None}
        if shown := describe_figures(known):
            console.print(f"{split}: {shown}", highlight=False)


def inspect_rows(rows: TableOnDisk, top: int, console: Console, whole: bool) -> None:
    """Show one table's rows. A large table is read only with `whole`."""
    state = f" with {rows.optimizer} state" if rows.optimizer else ""
    shape = f" of dim {rows.dim}" if rows.dim else ""
    line = f"[bold]{rows.table}[/]: {rows.rows:,} rows{shape} ({rows.row_bytes} bytes{state}), "
    line += f"{format_size(rows.bytes)} on disk"
    if rows.rows > CHEAP_ROWS and not whole:
        console.print(f"{line}; --table {rows.table} reads them all and ranks them", highlight=False)
        return
    ranking = Ranking(top, rows.dim)
    for keys, counts, steps, values in rows.read():
        ranking.add(keys, counts, steps, ranking.norms(values))
    console.print(f"{line}, {ranking.summary()}", highlight=False)
    console.print(ranking.view())
