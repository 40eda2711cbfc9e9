"""`hotrow inspect`: what is on disk, without a trainer and without bringing rows into memory.

The folder says what it is: manifest.json is a checkpoint, step-... inside are a run's checkpoints, MANIFEST is one
table's rows, and segments without it are an SSD folder, of a process that runs or of one that has ended. Nothing is
written, and nobody is kept waiting.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from hotrow.inspect.checkpoints import TableOnDisk, inspect_checkpoint, inspect_rows
from hotrow.inspect.ranking import check_name
from hotrow.inspect.ssd import inspect_ssd
from hotrow.train.checkpoint.manifest import MANIFEST, list_checkpoints

ROWS_MANIFEST = "MANIFEST"


def inspect(path: str | os.PathLike[str], table: str | None, top: int, console: Console) -> None:
    """Print what a folder holds: its tables, or one table's rows and hottest keys."""
    folder = Path(path)
    if (folder / MANIFEST).is_file() or list_checkpoints(folder):
        inspect_checkpoint(folder, table, top, console)
    elif (folder / ROWS_MANIFEST).is_file():
        rows = TableOnDisk.open(folder)
        check_name(folder, table, [rows.table])
        inspect_rows(rows, top, console, whole=table is not None)
    else:
        inspect_ssd(folder, table, top, console)
