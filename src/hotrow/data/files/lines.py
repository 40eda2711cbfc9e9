"""Lines: a text file as blocks of whole lines, with the offset and number of every line.

A block is a few megabytes cut at a newline, so a parser never sees half a line, and line numbers are known without
parsing. A line ends with a newline byte; a carriage return before it belongs to the ending. A newline inside quotes is
not supported, because numbering a line would then require reading everything before it. The last line may lack its
newline. Files that start with gzip's magic bytes are decompressed while they are read; their offsets are those of the
decompressed text, and resuming in one reads it from the start.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hotrow.errors import DataError
from hotrow.features.hashing import IntArray

BLOCK_BYTES = 4 << 20
SPAN_BYTES = 8 << 20
LONGEST_LINE = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Block:
    """Whole lines: `data` is at byte `offset` of the file, and `number` lines come before it."""

    data: bytes
    offset: int
    number: int

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each line ends in `data`, its newline included."""
        ends = np.flatnonzero(np.frombuffer(self.data, np.uint8) == ord("\n")) + 1
        return ends if self.data.endswith(b"\n") or not self.data else np.append(ends, len(self.data))

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each line begins in `data`."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])[: len(self.ends)]

    @cached_property
    def blank(self) -> npt.NDArray[np.bool_]:
        """Which lines hold nothing but their ending."""
        return _blank(np.frombuffer(self.data, np.uint8), self.starts, self.ends)

    def take(self, lines: npt.NDArray[np.int64]) -> bytes:
        """The bytes of some lines. Requires: line indices in ascending order."""
        if len(lines) == len(self.ends):
            return self.data
        keep = np.zeros(len(self.ends), np.bool_)
        keep[lines] = True
        return np.frombuffer(self.data, np.uint8)[np.repeat(keep, self.ends - self.starts)].tobytes()

    def after(self, lines: int) -> Block:
        """The block without its first `lines` lines. Requires: it has as many."""
        end = int(self.ends[lines - 1])
        return Block(self.data[end:], self.offset + end, self.number + lines)


def read_blocks(path: str, offset: int = 0, number: int = 0) -> Iterator[Block]:
    """The lines of a file from byte `offset` on; `number` lines come before it."""
    try:
        with _open(path) as file:
            file.seek(offset)
            rest = b""
            while True:
                fresh = file.read(BLOCK_BYTES)
                cut = fresh.rfind(b"\n") + 1
                data = rest + (fresh[:cut] if fresh else b"")
                if data and (cut or not fresh):
                    block = Block(data, offset, number)
                    yield block
                    offset, number = offset + len(data), number + len(block.ends)
                    rest = b""
                if not fresh:
                    return
                rest += fresh[cut:]
                if len(rest) > LONGEST_LINE:
                    raise DataError(
                        f"{path}, line {number + 1} is longer than {LONGEST_LINE:,} bytes; is this a text file?"
                    )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the compressed data is damaged or cut off ({error}); fetch the file again") from error


def read_span(path: str, begin: int, end: int, number: int) -> Block:
    """The lines of an uncompressed file that begin at bytes begin to end; the last one may end after `end`.

    `number` lines come before them. A line begins at 0 and after every newline, so the search starts at the byte before
    `begin`.
    """
    with open(path, "rb") as file:
        before = max(begin - 1, 0)
        file.seek(before)
        data = file.read(end - before)
        first = data.find(b"\n") + 1 if begin else 0
        if (begin and not first) or first == len(data):
            return Block(b"", end, number)
        parts = [data[first:]]
        while not parts[-1].endswith(b"\n") and (more := file.readline(LONGEST_LINE)):
            parts.append(more)
            if len(more) == LONGEST_LINE:
                raise DataError(f"{path} has a line longer than {LONGEST_LINE:,} bytes; is this a text file?")
    return Block(b"".join(parts), before + first, number)


def find_lines(path: str, offset: int, number: int) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Where the non-blank lines of an uncompressed file begin and end, and their numbers, from byte `offset` on.

    `number` lines come before. Only newlines are scanned, in one reused buffer; allocating a block each time took three
    times as long.
    """
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    with open(path, "rb") as file:
        count = len(buffer)
        while count == len(buffer):  # a shorter one was the last
            file.seek(offset)
            count = file.readinto(buffer.data)
            data = buffer[:count]
            ends = np.flatnonzero(data == ord("\n")) + 1
            if 0 < count < len(buffer) and data[-1] != ord("\n"):
                ends = np.append(ends, count)
            if len(ends):
                starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
                lines = np.flatnonzero(~_blank(data, starts, ends))
                yield starts[lines] + offset, ends[lines] + offset, lines + (number + 1)
                offset, number = offset + int(ends[-1]), number + len(ends)
            elif count > LONGEST_LINE:
                raise DataError(
                    f"{path}, line {number + 1} is longer than {LONGEST_LINE:,} bytes; is this a text file?"
                )
            elif count:
                buffer = np.empty(2 * len(buffer), np.uint8)
                count = len(buffer)


def _blank(data: npt.NDArray[np.uint8], starts: IntArray, ends: IntArray) -> npt.NDArray[np.bool_]:
    first = data[starts]
    blank: npt.NDArray[np.bool_] = (first == ord("\n")) | ((ends - starts <= 2) & (first == ord("\r")))
    return blank


def is_zipped(path: str) -> bool:
    """Whether the file starts with gzip's magic bytes."""
    with open(path, "rb") as file:
        return file.read(2) == _GZIP_MAGIC


def _open(path: str) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if is_zipped(path) else open(path, "rb")
