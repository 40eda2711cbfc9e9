"""`hotrow inspect`: what is on disk, without a trainer and without bringing rows into memory.

The folder says what it is: manifest.json is a checkpoint, step-... inside are a run's checkpoints, MANIFEST is one
table's rows, and segments alone are a table on SSD. The SSD tier writes no MANIFEST while it runs: which records count
is known in memory alone, so all that can be said of such a table is how many segments and records are on the disk.
"""

from __future__ import annotations

import heapq
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table as View

from hotrow import _core
from hotrow.config import format_size
from hotrow.errors import CheckpointError, OptionError, choices
from hotrow.tiers.host import core_errors
from hotrow.train.checkpoint import MANIFEST, Checkpoint, list_checkpoints, open_checkpoint

ROWS_MANIFEST, SEGMENT_HEADER = "MANIFEST", 4096
CHUNK = 65536
CHEAP_ROWS = 10_000_000  # about ten seconds of reading; more only when the table is asked for by name


def inspect(path: str | os.PathLike[str], table: str | None, top: int, console: Console) -> None:
    """Print what a folder holds: its tables, or one table's rows and hottest keys."""
    folder = Path(path)
    if (folder / MANIFEST).is_file() or list_checkpoints(folder):
        _inspect_checkpoint(folder, table, top, console)
    elif (folder / ROWS_MANIFEST).is_file():
        rows = TableOnDisk.open(folder)
        _check_name(folder, table, [rows.table])
        _one_table(rows, top, console, whole=table is not None)
    else:
        _inspect_ssd(folder, table, console)


@dataclass(frozen=True)
class TableOnDisk:
    """A table's rows in a folder; `dim` and `optimizer` are known where a checkpoint says so."""

    folder: Path
    table: str
    row_bytes: int
    rows: int
    dim: int | None = None
    optimizer: str | None = None

    @staticmethod
    def open(folder: Path, dim: int | None = None, optimizer: str | None = None) -> TableOnDisk:
        """Read the snapshot's own manifest."""
        with core_errors():
            reader = _core.SnapshotReader(str(folder))
        return TableOnDisk(folder, str(reader.table), int(reader.row_bytes), int(reader.rows), dim, optimizer)

    def read(self) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Keys, counts, last steps and values, chunk by chunk; every block's checksum is compared."""
        with core_errors():
            reader = _core.SnapshotReader(str(self.folder))
            while (chunk := reader.next(CHUNK)) is not None:
                yield chunk

    @property
    def bytes(self) -> int:
        """What its files take."""
        return folder_bytes(self.folder)


@dataclass(frozen=True)
class SegmentsOnDisk:
    """A table's segments, as their headers describe them (docs/formats/segments.md)."""

    table: str
    row_bytes: int
    segments: int
    records: int
    bytes: int
    written: str

    @staticmethod
    def open(folder: Path) -> SegmentsOnDisk:
        """Read the headers and sizes of all segments."""
        table, row_bytes, records, total, written = "", 0, 0, 0, 0.0
        paths = sorted(folder.glob("segment-*"))
        for path in paths:
            with path.open("rb") as file:
                header = file.read(SEGMENT_HEADER)
            if len(header) < SEGMENT_HEADER or header[:8] != b"HOTROWSG":
                raise CheckpointError(f"{path} is not a segment: its header is missing or damaged")
            row_bytes, _, block, per_block, name_bytes = struct.unpack_from("<5I", header, 20)
            table = header[64 : 64 + name_bytes].decode(errors="replace")
            stat = path.stat()
            records += max(0, -(-(stat.st_size - SEGMENT_HEADER) // block)) * per_block
            total, written = total + stat.st_size, max(written, stat.st_mtime)
        when = datetime.fromtimestamp(written, timezone.utc).isoformat(timespec="seconds")
        return SegmentsOnDisk(table, row_bytes, len(paths), records, total, when)


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _inspect_checkpoint(folder: Path, table: str | None, top: int, console: Console) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    if table is not None:
        _check_name(folder, table, list(checkpoint.tables))
        saved = checkpoint.tables[table]
        rows = TableOnDisk.open(checkpoint.rows(table), saved["dim"], saved["optimizer"]["kind"])
        _one_table(rows, top, console, whole=True)
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
        width = saved["width"] * 4
        features = ", ".join(f"{f} ({p})" if p != "sum" else f for f, p in saved["features"].items())
        view.add_row(
            name,
            features,
            saved["optimizer"]["kind"],
            str(saved["dim"]),
            f"{saved['rows']:,}",
            str(width),
            format_size(saved["rows"] * width),
        )
    console.print(view)
    for split, figures in {"train": manifest["metrics"]["figures"], **(manifest["notes"].get("metrics") or {})}.items():
        known = {name: value for name, value in (figures or {}).items() if name != "examples" and value is not None}
        if known:
            console.print(f"{split}: " + "  ".join(f"{name} {v:.4f}" for name, v in known.items()), highlight=False)


def _inspect_ssd(folder: Path, table: str | None, console: Console) -> None:
    inside = {path.parent for path in (*folder.glob("segment-*"), *folder.glob("*/segment-*"))}
    found = [SegmentsOnDisk.open(path) for path in sorted(inside)]
    if not found:
        raise CheckpointError(
            f"{folder} is not a checkpoint, a folder of checkpoints, a table's rows or an SSD folder: it has no "
            f"{MANIFEST}, step-..., {ROWS_MANIFEST} or segments"
        )
    _check_name(folder, table, [rows.table for rows in found])
    console.print(f"[bold]{folder}[/]: the SSD tier of a process that runs, or ran; checkpoints have what is committed")
    view = View("table")
    for column in ("segments", "records, living and dead", "bytes a row", "on disk", "last written"):
        view.add_column(column, justify="right")
    for rows in found:
        if table in (None, rows.table):
            sizes = (f"{rows.segments:,}", f"{rows.records:,}", str(rows.row_bytes), format_size(rows.bytes))
            view.add_row(rows.table, *sizes, rows.written)
    console.print(view)


def _one_table(rows: TableOnDisk, top: int, console: Console, whole: bool) -> None:
    state = f" with {rows.optimizer} state" if rows.optimizer else ""
    shape = f" of dim {rows.dim}" if rows.dim else ""
    line = f"[bold]{rows.table}[/]: {rows.rows:,} rows{shape} ({rows.row_bytes} bytes{state}), "
    line += f"{format_size(rows.bytes)} on disk"
    if rows.rows > CHEAP_ROWS and not whole:
        console.print(f"{line}; --table {rows.table} reads them all and ranks them", highlight=False)
        return
    hottest: list[tuple[int, int, int, float]] = []
    norms, seen, last, count = 0.0, 0, 0, 0
    for keys, counts, steps, values in rows.read():
        norm = np.linalg.norm(values[:, : rows.dim].astype(np.float64), axis=1)
        norms, seen, count = norms + float(norm.sum()), seen + int(counts.sum()), count + len(keys)
        last = max(last, int(steps.max(initial=0)))
        best = np.argsort(counts, kind="stable")[::-1][:top]
        parts = zip(*(part[best].tolist() for part in (counts, keys, steps, norm)), strict=True)
        hottest = heapq.nlargest(top, [*hottest, *parts])
    mean = f", mean norm {norms / max(1, count):.4f}" if rows.dim else ""
    console.print(f"{line}, seen {seen:,} times{mean}, last step {last:,}", highlight=False)
    view = View(title=f"hottest {len(hottest)} keys")
    for column in ("key", "seen", "share", "last step", *(["norm"] if rows.dim else [])):
        view.add_column(column, justify="right")
    for times, key, step, norm_value in hottest:
        cells = [str(key), f"{times:,}", f"{times / max(1, seen):.2%}", f"{step:,}"]
        view.add_row(*cells, *([f"{norm_value:.4f}"] if rows.dim else []))
    console.print(view)


def _check_name(folder: Path, table: str | None, names: list[str]) -> None:
    if table is not None and table not in names:
        raise OptionError(f"{folder} has no table {table!r}; {choices(table, names)}")
