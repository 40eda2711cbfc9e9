"""Show an SSD folder: its tables, how many keys each has on disk, torn tails and damage."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table as View

from hotrow.errors import CheckpointError
from hotrow.inspect.ranking import Ranking, check_name
from hotrow.inspect.segments import Findings, TableFolder, in_use, list_tables, scan
from hotrow.progress import ProgressBar
from hotrow.units import format_size

CHEAP_BYTES = 4 << 30  # about ten seconds of reading; a larger folder is read only if --table names a table


def inspect_ssd(folder: Path, table: str | None, top: int, console: Console) -> None:
    """Show all tables of an SSD folder, or one with its hottest keys. Raises after the output if there is damage."""
    found = list_tables(folder)
    if not found:
        raise CheckpointError(
            f"{folder} is not a checkpoint, a folder of checkpoints, a table's rows or an SSD folder: it has no "
            "manifest.json, step-..., MANIFEST or segments"
        )
    check_name(folder, table, [each.table for each in found])
    used = in_use(folder)
    shown = [each for each in found if table in (None, each.table)]
    whole = table is not None or sum(each.bytes for each in shown) <= CHEAP_BYTES
    results = _scan(shown, top, console) if whole else {}
    state = "in use by a running process, as of now" if used else "of a process that has ended"
    written = max(each.written for each in shown)
    last = f", last written {datetime.fromtimestamp(written, timezone.utc).isoformat(timespec='seconds')}"
    console.print(
        f"[bold]{folder}[/]: the SSD tier {state}{last if written else ''}; checkpoints have the committed rows",
        highlight=False,
    )
    console.print(_overview(shown, results))
    if len(shown) == 1 and whole:
        _one_table(shown[0], results[shown[0].path].newest, console)
    _notes(shown, results, used or in_use(folder), console)
    damaged = [message for findings in results.values() for message in findings.damaged]
    damaged += [each.problem for each in shown if each.problem is not None]
    if damaged:
        raise CheckpointError(f"{'; '.join(damaged)}. Checkpoints have the committed rows: resume from the last one")


def _scan(tables: list[TableFolder], top: int, console: Console) -> dict[Path, Findings]:
    total = sum(each.bytes * each.passes for each in tables)
    with ProgressBar("reading", total, console, bytes=True) as bar:
        return {each.path: scan(each, top, bar.advance) for each in tables}


def _overview(tables: list[TableFolder], results: dict[Path, Findings]) -> View:
    view = View("table")
    for column in ("dim", "bytes a row", "segments", "on disk", "records", "keys"):
        view.add_column(column, justify="right", overflow="fold")
    for each in tables:
        findings = results.get(each.path)
        view.add_row(
            each.table,
            str(each.dim or "?"),
            f"{each.row_bytes:,}",
            f"{len(each.segments):,}",
            format_size(each.bytes),
            f"{findings.records:,}" if findings else "not read",
            f"{findings.newest.rows:,}" if findings else "not read",
        )
    return view


def _one_table(table: TableFolder, newest: Ranking, console: Console) -> None:
    state = f" with {table.optimizer} state" if table.optimizer else ""
    shape = f" of dim {table.dim}" if table.dim else ""
    line = f"[bold]{table.table}[/]: {newest.rows:,} keys with rows{shape} ({table.row_bytes} bytes{state})"
    console.print(f"{line}, {newest.summary()}", highlight=False)
    console.print(newest.view())


def _notes(tables: list[TableFolder], results: dict[Path, Findings], used: bool, console: Console) -> None:
    if results:
        console.print(
            "A key is shown as its last record has it. Rows that are new or changed in DRAM are not on the disk yet; "
            "rows that were erased or have expired stay until compaction drops them.",
            highlight=False,
        )
    else:
        console.print(f"--table {tables[0].table} reads a table's records, verifies and ranks them", highlight=False)
    for findings in results.values():
        for message in findings.torn:
            console.print(f"[yellow]torn[/] {message}{' (yet)' if used else ''}", highlight=False)
        if findings.gone:
            console.print(f"{findings.gone} segments were removed during the scan, by the process that uses the folder")
