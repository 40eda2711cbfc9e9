"""`hotrow inspect`: show what is on disk, without a trainer and without loading all rows into memory.

    checkpoints.py   a checkpoint, a folder of checkpoints, or one table's rows
    ssd.py           an SSD folder, for people: tables, keys, torn tails, damage
    segments.py      reads and verifies the segments of an SSD folder
    ranking.py       sums over all rows and the hottest keys

The kind of folder is detected by its files: manifest.json is a checkpoint, step-... folders are a run's checkpoints,
MANIFEST is one table's rows, and segments without MANIFEST are an SSD folder, of a running process or of one that has
ended. Nothing is written and no lock is held, so a running process is not disturbed. Used by the command line; one
thread.
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
