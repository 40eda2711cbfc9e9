"""The SSD folder of a collection: one lock, and for each table a folder with its log and its table.json.

The running process owns the content. If it dies, the next process starts the folder anew from a checkpoint. Checkpoints
have hard links to (or copies of) the segments that they need, so no committed row is lost. Only `hotrow inspect` reads
table.json (docs/formats/segments.md).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotrow import _core
from hotrow.checksummed_json import FileFormat, OtherFormatError
from hotrow.config import Memory
from hotrow.errors import CheckpointError, MemoryBudgetError, OptionError
from hotrow.table.rows import TableRows
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import SEGMENT
from hotrow.tiers.host.stored_table import SMALLEST_BUFFER, smallest_dram_bytes
from hotrow.units import format_size, round_up_size

DESCRIPTION, FORMAT, VERSION = "table.json", "hotrow-ssd-table", 1
LARGEST_BUFFER = 1 << 20  # bytes of a table's write buffer
SEGMENTS_OF_TABLE, SMALLEST_SEGMENT = 16, 128 << 10  # with a limit: files of a table, and bytes of one


class SsdFolder:
    """Locks the folder and attaches each table's log."""

    def __init__(self, memory: Memory, tables: Sequence[TableRows]) -> None:
        self.path = os.path.abspath(os.fspath(memory.ssd or "."))
        least = smallest_dram_bytes(tables)
        if memory.dram_bytes < least:
            raise MemoryBudgetError(
                f"dram={format_size(memory.dram_bytes)} is too small for {len(tables)} tables over ssd=; "
                f"give at least {round_up_size(least)} (beside the rows of a batch, and 10 bytes for each row on SSD)"
            )
        with core_errors():
            lock = _core.lock_folder(self.path)
        # Write buffers are part of the budget: a hundredth of it for all of them.
        buffer = min(LARGEST_BUFFER, max(SMALLEST_BUFFER, memory.dram_bytes // 100 // len(tables) // 4096 * 4096))
        segment = SEGMENT
        if limit := memory.ssd_limit_bytes:
            if limit < (smallest := SEGMENTS_OF_TABLE * SMALLEST_SEGMENT * len(tables)):
                raise OptionError(
                    f"ssd_limit={format_size(limit)} is too small for {len(tables)} tables; give at least "
                    f"{round_up_size(smallest)}"
                )
            segment = min(segment, limit // SEGMENTS_OF_TABLE // len(tables) // 4096 * 4096)
        allow_many_files()
        for rows in tables:
            folder = os.path.join(self.path, rows.table.name)
            rows.store.attach(folder, evicts=True, buffer=buffer, lock=lock, segment=segment)
            with core_errors():
                _core.replace_file(os.path.join(folder, DESCRIPTION), describe(rows))


def describe(rows: TableRows) -> bytes:
    """The content of a table's table.json."""
    words: dict[str, Any] = {"name": rows.table.name, "dim": rows.table.dim}
    words |= {"optimizer": rows.optimizer.to_dict(), "row_bytes": rows.store.row_bytes}
    if rows.table.dtype != "fp32":
        words["dtype"] = rows.table.dtype
    if rows.table.values is not None:
        words["values"] = rows.table.values
    return TABLE_JSON.dump(words)


def read_description(folder: Path) -> dict[str, Any] | None:
    """The content of table.json after a check, or None if there is no such file."""
    path = folder / DESCRIPTION
    try:
        words = TABLE_JSON.load(path.read_bytes())
    except FileNotFoundError:
        return None
    except OtherFormatError:
        raise CheckpointError(
            f"{path} is not of format {FORMAT!r} version {VERSION}, which this release reads"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from None
    del words["checksum"]
    return words


def _digest(data: bytes) -> str:
    return f"{_core.hash_bytes(data) & 0xFFFFFFFFFFFFFFFF:016x}"


TABLE_JSON = FileFormat(FORMAT, (VERSION,), _digest)


def allow_many_files() -> None:
    """Raise the limit of open files to the hard limit: a log keeps one descriptor open per segment of 64 MiB, and a row
    server one per connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
