"""Segments: read a table's SSD folder without the process that writes it (docs/formats/segments.md).

A key may have many records. The process knows in memory which of them is the current row. On disk it is the last one,
because a row that leaves DRAM or that compaction moves is appended. When a process starts from a checkpoint, ADOPTED
lists the records of older segments that are valid; the other records in those segments belong to steps that the resume
has undone. So `scan` finds each key's newest record. It differs from the process's view in two ways: rows that changed
in DRAM are not on disk yet, and erased or expired rows leave no mark on disk.

Every block's checksum is verified. Bad blocks at the end of the last segment, with no good block after them, are a torn
tail: a write cut short by a crash, or still in progress. All other bad blocks are reported as damage.

Memory is bounded: a large table is read in several passes, each for a part of the keys.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotrow import _core
from hotrow.errors import CheckpointError, StorageError
from hotrow.inspect.ranking import Array, Ranking
from hotrow.table.ssd_folder import DESCRIPTION, read_description
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import floats_of

HEADER, RECORD_HEAD = 4096, 16
PASS_RECORDS = 32 << 20  # records per pass; each takes 32 bytes of memory
SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class TableFolder:
    """One table's folder, described by its file names, sizes and first good header."""

    path: Path
    table: str
    row_bytes: int
    segments: list[Path]
    bytes: int
    written: float  # when a segment last changed; 0 where there is none
    dim: int | None = None
    optimizer: str | None = None
    problem: str | None = None  # why table.json cannot be read

    @staticmethod
    def open(path: Path) -> TableFolder:
        """List the folder's segments. No record is read."""
        segments, total, written = [], 0, 0.0
        for segment in sorted(path.glob("segment-*.hrs")):
            try:
                stat = segment.stat()
            except FileNotFoundError:
                continue  # compaction has removed it
            segments.append(segment)
            total, written = total + stat.st_size, max(written, stat.st_mtime)
        description, problem = None, None
        try:
            description = read_description(path)
        except CheckpointError as error:
            problem = str(error)
        if description is not None:
            known = (description["name"], description["row_bytes"])
            dim, optimizer = description["dim"], description["optimizer"]["kind"]
        else:
            known, dim, optimizer = _first_header(segments) or (path.name, 0), None, None
        return TableFolder(path, *known, segments, total, written, dim, optimizer, problem)

    @property
    def passes(self) -> int:
        """How many times a scan reads the segments."""
        return 1 + self.bytes // (RECORD_HEAD + self.row_bytes) // PASS_RECORDS


@dataclass
class Findings:
    """The result of a scan. `records` counts the records that verified; `newest` ranks each key's last one."""

    newest: Ranking
    records: int = 0
    torn: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    gone: int = 0  # segments that were removed during the scan


def list_tables(folder: Path) -> list[TableFolder]:
    """The tables of an SSD folder, or of a single table's folder."""
    marks = [mark for pattern in ("segment-*.hrs", DESCRIPTION) for mark in (pattern, f"*/{pattern}")]
    return [TableFolder.open(path) for path in sorted({found.parent for mark in marks for found in folder.glob(mark)})]


def in_use(folder: Path) -> bool:
    """Whether a process holds the lock of the SSD folder, or of its parent if this is a table's folder."""
    for lock in (folder / "LOCK", folder.parent / "LOCK"):
        if not lock.is_file():
            continue
        try:
            handle = os.open(lock, os.O_RDONLY)
        except OSError:
            continue  # no permission
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once
        except BlockingIOError:
            return True
        except OSError:
            pass  # a file system without locks
        finally:
            os.close(handle)
    return False


def scan(table: TableFolder, top: int, advance: Callable[[int], None]) -> Findings:
    """Read and verify all segments. `advance` gets the bytes read, in total `passes` times the folder's size."""
    findings = Findings(Ranking(top, table.dim))
    adopted = _adopted(table.path, findings)
    for number in range(table.passes):
        # Later passes find the same damage again; report it once.
        found = findings if number == 0 else Findings(findings.newest)
        kept: list[list[Array]] = []
        for path in table.segments:
            last = path == table.segments[-1]
            for rows, counts_for in _read_segment(table, path, adopted, last, found, advance):
                keys, counts, steps, values = (part[counts_for] for part in rows)
                in_pass = _part_of(keys, table.passes) == number
                kept.append([part[in_pass] for part in (keys, counts, steps, findings.newest.norms(values))])
        if kept:
            parts = [np.concatenate(part) for part in zip(*kept, strict=True)]
            newest = _last_of_each(parts[0])
            findings.newest.add(*(part[newest] for part in parts))
    return findings


def _read_segment(
    table: TableFolder,
    path: Path,
    adopted: dict[int, Any],
    last: bool,
    findings: Findings,
    advance: Callable[[int], None],
) -> Iterator[tuple[tuple[Array, ...], Array]]:
    """Rows that verified, chunk by chunk, and the mask of those that are valid: adopted, or written later."""
    try:
        size = path.stat().st_size
        with core_errors():
            segment = _core.SegmentScan(str(path))
    except CheckpointError as error:
        if last and _is_blank(path):
            findings.torn.append(f"{path}: its {size:,} bytes were never written completely and are ignored")
        else:
            findings.damaged.append(str(error))
        advance(size)
        return
    except (FileNotFoundError, StorageError):
        if path.exists():
            raise
        findings.gone += 1
        return
    if (segment.table, segment.row_bytes) != (table.table, table.row_bytes):
        findings.damaged.append(
            f"{path} has rows of {segment.row_bytes} bytes of table {segment.table!r}; it does not belong here"
        )
        advance(size)
        return
    if path.name != f"segment-{segment.segment:010d}.hrs":
        findings.damaged.append(f"{path} is segment {segment.segment} by its header; restore that name")
        advance(size)
        return
    origin, records, bits = adopted.get(segment.segment, (None, 0, None))
    began_with = origin == segment.origin
    done = 0
    while True:
        with core_errors():
            chunk = segment.next()
        advance(segment.position * segment.block_bytes - done)
        done = segment.position * segment.block_bytes
        if chunk is None:
            break
        (*columns, values), numbers = chunk
        findings.records += len(numbers)
        rows = (*columns, floats_of(values, segment.row_type, table.dim) if table.dim else values)
        yield rows, _counted(numbers, records, bits) if began_with else np.ones(len(numbers), bool)
    _report_bad_blocks(path, segment, last and not began_with, records if began_with else 0, findings)


def _report_bad_blocks(path: Path, segment: Any, open_ended: bool, records: int, findings: Findings) -> None:
    """Report blocks that did not verify: as a torn tail where a write may have been cut short, else as damage."""
    bad, good = list(segment.bad), int(segment.blocks)
    if open_ended:
        while bad and bad[-1] == good - 1:
            good = bad.pop()
    end = HEADER + good * segment.block_bytes
    if end < segment.bytes:
        tail = f"{path}: its last {segment.bytes - end:,} bytes"
        if open_ended:
            findings.torn.append(f"{tail} are of a write that was cut short and are ignored")
        else:
            findings.damaged.append(f"{tail} are no block")
    if bad:
        named = ", ".join(map(str, bad[:8])) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        findings.damaged.append(f"{path}: damaged in block{'s' if len(bad) > 1 else ''} {named}")
    missing = records - segment.blocks * segment.records_per_block
    if missing > 0:
        findings.damaged.append(f"{path} was cut short: its last {missing:,} records are missing")


def _is_blank(path: Path) -> bool:
    """Whether there is no header at all: the first write did not reach the disk."""
    with path.open("rb") as file:
        header = file.read(HEADER)
    return len(header) < HEADER or not any(header)


def _adopted(folder: Path, findings: Findings) -> dict[int, Any]:
    try:
        with core_errors():
            return dict(_core.read_adopted(str(folder)) or {})
    except CheckpointError as error:
        findings.damaged.append(f"{error} (records of steps that a resume has undone may be shown)")
        return {}


def _first_header(segments: list[Path]) -> tuple[str, int] | None:
    for path in segments:
        try:
            with core_errors():
                segment = _core.SegmentScan(str(path))
        except (CheckpointError, StorageError):
            continue  # the scan will report it
        return str(segment.table), int(segment.row_bytes)
    return None


def _counted(numbers: Array, records: int, bits: Array) -> Array:
    """The mask of the records that the bitmap `bits` marks as valid."""
    inside = np.minimum(numbers, records - 1).astype(np.uint64)
    counted: Array = (bits[inside >> np.uint64(6)] >> (inside & np.uint64(63))) & np.uint64(1) != 0
    return counted & (numbers < records)


def _part_of(keys: Array, parts: int) -> Array:
    mixed: Array = (keys.view(np.uint64) * SPREAD) >> np.uint64(32)
    return mixed % np.uint64(parts)


def _last_of_each(keys: Array) -> Array:
    """The index of each key's last occurrence."""
    order = np.argsort(keys, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(keys[order])), len(keys) - 1) if len(keys) else order
    last: Array = order[ends]
    return last
