"""A table's folder on SSD, read without the process that writes it (docs/formats/segments.md).

A key may have many records there; which of them is the row is known to the process alone, in memory. On the disk it is
the last one: a row that leaves DRAM, or that compaction moves, is appended, so of a key's records the one with the
highest place is the newest. ADOPTED says which records counted when the process began from a checkpoint; the others in
those segments are of steps that a resume has undone. So `scan` finds each key's newest record, and it differs from what
the process knows in two ways: rows that changed in DRAM have not been written yet, and rows that were erased or have
expired have no mark.

Every block is compared with its checksum. In the last segment, bad blocks with nothing good behind them are a write
that was cut short, by a crash or because it is under way: the torn tail. All other bad blocks are damage, and named.

Memory is bounded: a large table is read in several passes, each for its part of the keys.
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
PASS_RECORDS = 32 << 20  # of which 32 bytes each are kept for a pass
SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class TableFolder:
    """One table's folder, as its names, sizes and first good header have it."""

    path: Path
    table: str
    row_bytes: int
    segments: list[Path]
    bytes: int
    written: float  # when a segment last changed; 0 where there is none
    dim: int | None = None
    optimizer: str | None = None
    problem: str | None = None  # with table.json

    @staticmethod
    def open(path: Path) -> TableFolder:
        """Look at the folder; no record is read."""
        segments, total, written = [], 0, 0.0
        for segment in sorted(path.glob("segment-*.hrs")):
            try:
                stat = segment.stat()
            except FileNotFoundError:
                continue  # compaction was faster
            segments.append(segment)
            total, written = total + stat.st_size, max(written, stat.st_mtime)
        words, problem = None, None
        try:
            words = read_description(path)
        except CheckpointError as error:
            problem = str(error)
        if words is not None:
            known = (words["name"], words["row_bytes"])
            dim, optimizer = words["dim"], words["optimizer"]["kind"]
        else:
            known, dim, optimizer = _first_header(segments) or (path.name, 0), None, None
        return TableFolder(path, *known, segments, total, written, dim, optimizer, problem)

    @property
    def passes(self) -> int:
        """How often a scan reads the segments."""
        return 1 + self.bytes // (RECORD_HEAD + self.row_bytes) // PASS_RECORDS


@dataclass
class Findings:
    """What a scan has found. `records` are those that verify; `newest` has each key's last one."""

    newest: Ranking
    records: int = 0
    torn: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    gone: int = 0  # segments that went while we were reading


def list_tables(folder: Path) -> list[TableFolder]:
    """The tables of an SSD folder, or the one whose folder it is."""
    marks = [mark for pattern in ("segment-*.hrs", DESCRIPTION) for mark in (pattern, f"*/{pattern}")]
    return [TableFolder.open(path) for path in sorted({found.parent for mark in marks for found in folder.glob(mark)})]


def in_use(folder: Path) -> bool:
    """Whether a process holds the SSD folder, or the one that a table's folder is in."""
    for lock in (folder / "LOCK", folder.parent / "LOCK"):
        if not lock.is_file():
            continue
        try:
            handle = os.open(lock, os.O_RDONLY)
        except OSError:
            continue  # we may not look
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment: nobody is kept out for long
        except BlockingIOError:
            return True
        except OSError:
            pass  # a file system without locks
        finally:
            os.close(handle)
    return False


def scan(table: TableFolder, top: int, advance: Callable[[int], None]) -> Findings:
    """Read and verify all segments; `advance` is told of the bytes, `passes` times those of the folder in all."""
    findings = Findings(Ranking(top, table.dim))
    adopted = _adopted(table.path, findings)
    for number in range(table.passes):
        # Later passes find the same damage again, and keep it to themselves.
        found = findings if number == 0 else Findings(findings.newest)
        kept: list[list[Array]] = []
        for path in table.segments:
            last = path == table.segments[-1]
            for rows, counts_for in _read_segment(table, path, adopted, last, found, advance):
                keys, counts, steps, values = (part[counts_for] for part in rows)
                mine = _part_of(keys, table.passes) == number
                kept.append([part[mine] for part in (keys, counts, steps, findings.newest.norms(values))])
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
    """Rows that verify, chunk by chunk, and which of them counted or were written since."""
    try:
        size = path.stat().st_size
        with core_errors():
            segment = _core.SegmentScan(str(path))
    except CheckpointError as error:
        if last and _is_blank(path):
            findings.torn.append(f"{path}: its {size:,} bytes were never written whole, and do not count")
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
        findings.damaged.append(f"{path} is segment {segment.segment} by its header; give it its name back")
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
        (*words, values), numbers = chunk
        findings.records += len(numbers)
        rows = (*words, floats_of(values, segment.row_type, table.dim) if table.dim else values)
        yield rows, _counted(numbers, records, bits) if began_with else np.ones(len(numbers), bool)
    _judge(path, segment, last and not began_with, records if began_with else 0, findings)


def _judge(path: Path, segment: Any, open_ended: bool, records: int, findings: Findings) -> None:
    """Tell what did not verify: as a torn tail where a write may have been cut short, else as damage."""
    bad, good = list(segment.bad), int(segment.blocks)
    if open_ended:
        while bad and bad[-1] == good - 1:
            good = bad.pop()
    end = HEADER + good * segment.block_bytes
    if end < segment.bytes:
        tail = f"{path}: its last {segment.bytes - end:,} bytes"
        if open_ended:
            findings.torn.append(f"{tail} are of a write that was cut short, and do not count")
        else:
            findings.damaged.append(f"{tail} are no block")
    if bad:
        named = ", ".join(map(str, bad[:8])) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        findings.damaged.append(f"{path}: damaged in block{'s' if len(bad) > 1 else ''} {named}")
    missing = records - segment.blocks * segment.records_per_block
    if missing > 0:
        findings.damaged.append(f"{path} was cut short: its last {missing:,} records are missing")


def _is_blank(path: Path) -> bool:
    """Whether there is no header at all: the first write never came to the disk."""
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
            continue  # the scan will name it
        return str(segment.table), int(segment.row_bytes)
    return None


def _counted(numbers: Array, records: int, bits: Array) -> Array:
    """Which records a manifest counts."""
    inside = np.minimum(numbers, records - 1).astype(np.uint64)
    counted: Array = (bits[inside >> np.uint64(6)] >> (inside & np.uint64(63))) & np.uint64(1) != 0
    return counted & (numbers < records)


def _part_of(keys: Array, parts: int) -> Array:
    mixed: Array = (keys.view(np.uint64) * SPREAD) >> np.uint64(32)
    return mixed % np.uint64(parts)


def _last_of_each(keys: Array) -> Array:
    """Where each key stands for the last time."""
    order = np.argsort(keys, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(keys[order])), len(keys) - 1) if len(keys) else order
    last: Array = order[ends]
    return last
