"""A bus in a folder: one file per message, named by its offset.

    00000000000000000041.msg     a message; complete, because its bytes were synced before it got this name
    .8231-2.tmp                  a message that is being written, or that a crash left
    marks/<name>                 the marks

A message is written under a hidden name, synced, and then *linked* to the next offset. A link never replaces a file, so
concurrent writers get different offsets without a lock, and a reader sees a message complete or not at all. If the disk
is full, the write fails before the link and leaves nothing. A reader opens the file of its offset and does not list the
folder for each message. Writers remove the oldest files every _RETENTION_INTERVAL appends.

A reader waits on inotify, which reports within a millisecond on a local disk, and polls every 50 ms for file systems
without notifications (NFS). Rejected: one growing file, which makes retention, several writers and truncated ends hard.
The price of this design is a file per message: with many small publications, set a lower keep=.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import select
import time
from contextlib import suppress
from pathlib import Path

from hotrow.errors import BusError, OptionError
from hotrow.publish.bus import Entry, Retention

_NAME = re.compile(r"(\d{20})\.msg")
_POLL_INTERVAL = 0.05
_RETENTION_INTERVAL = 64  # appends
_IN_CREATE, _IN_MOVED_TO, _IN_NONBLOCK, _IN_CLOEXEC = 0x100, 0x80, 0o4000, 0o2000000


class DirectoryBus:
    """Messages as files of a folder."""

    def __init__(self, folder: str, limit: int, retention: Retention) -> None:
        if not folder:
            raise OptionError("bus='dir:': give the folder too, such as dir:/data/publications")
        self.folder = Path(folder).absolute()  # heartbeats go on if the program changes its working directory
        self.limit, self.retention = limit, retention
        self._numbers = itertools.count()
        self._next: int | None = None
        self._appended = 0
        self._watch: _FolderWatch | None = None
        try:
            (self.folder / "marks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BusError(f"cannot open the bus in {self.folder}: {error.strerror}; check the disk") from error

    def append(self, data: bytes) -> int:
        """Append a message."""
        if len(data) > self.limit:
            raise BusError(f"a message of {len(data)} bytes is above max_message={self.limit} of the bus {self.folder}")
        draft = self.folder / f".{os.getpid()}-{id(self)}-{next(self._numbers)}.tmp"
        try:
            try:
                _write(draft, data)
                offset = self._link(draft)
            finally:
                with suppress(FileNotFoundError):
                    draft.unlink()
            _sync(self.folder)
        except OSError as error:
            raise BusError(f"cannot append to the bus in {self.folder}: {error.strerror or error}") from error
        self._appended += 1
        if self._appended % _RETENTION_INTERVAL == 0:
            self.retain()
        return offset

    def _link(self, draft: Path) -> int:
        offset = self.head() if self._next is None else self._next
        while True:
            try:
                os.link(draft, self._path(offset))
            except FileExistsError:
                offset = max(offset + 1, self.head())  # another writer took this offset
                continue
            self._next = offset + 1
            return offset

    def read(self, offset: int, most_bytes: int = 64 << 20, wait: float = 0.0) -> list[Entry]:
        """Messages from an offset on."""
        end = time.monotonic() + wait
        while True:
            found = self._read_now(offset, most_bytes)
            left = end - time.monotonic()
            if found or left <= 0:
                return found
            if self._watch is None:
                self._watch = _FolderWatch(self.folder)
                continue  # read messages that were appended before the watch was set up
            self._watch.wait(min(left, _POLL_INTERVAL))

    def _read_now(self, offset: int, most_bytes: int) -> list[Entry]:
        found: list[Entry] = []
        size = 0
        while size < most_bytes:
            try:
                data = self._path(offset).read_bytes()
            except FileNotFoundError:
                if found or self._path(offset - 1).exists():  # the end of the log, found without listing the folder
                    return found
                tail = self.tail()  # retention may have removed this offset
                if tail <= offset:
                    return found
                offset = tail
                continue
            except OSError as error:
                raise BusError(f"cannot read {self._path(offset)}: {error.strerror}; check the disk") from error
            if found and size + len(data) > most_bytes:
                return found
            found.append(Entry(offset, data))
            size += len(data)
            offset += 1
        return found

    def newest(self, count: int) -> list[Entry]:
        """The last messages."""
        found = []
        for offset in sorted(self._offsets())[-count:]:
            with suppress(FileNotFoundError):  # retention
                found.append(Entry(offset, self._path(offset).read_bytes()))
        return found

    def head(self) -> int:
        """The offset after the newest message."""
        return max(self._offsets(), default=-1) + 1

    def tail(self) -> int:
        """The offset of the oldest message."""
        return min(self._offsets(), default=0)

    def retain(self) -> None:
        """Remove messages older than keep= or beyond size=, but never the newest."""
        files = []
        for offset in sorted(self._offsets()):
            with suppress(FileNotFoundError):
                files.append((offset, self._path(offset).stat()))
        total, oldest = sum(stat.st_size for _, stat in files), time.time() - self.retention.seconds
        for offset, stat in files[:-1]:
            if total <= self.retention.size and stat.st_mtime >= oldest:
                break
            total -= stat.st_size
            with suppress(FileNotFoundError):
                self._path(offset).unlink()
        for draft in self.folder.glob(".*.tmp"):
            with suppress(OSError):
                if draft.stat().st_mtime < time.time() - 3600:  # a crash left it
                    draft.unlink()

    def set_mark(self, name: str, data: bytes | None) -> None:
        """Set or remove a mark."""
        path = self.folder / "marks" / name
        try:
            if data is None:
                path.unlink(missing_ok=True)
            else:
                draft = self.folder / f".{os.getpid()}-{id(self)}-{next(self._numbers)}.tmp"
                _write(draft, data)
                os.replace(draft, path)
            _sync(path.parent)
        except OSError as error:
            raise BusError(f"cannot set the mark {name} of the bus in {self.folder}: {error.strerror}") from error

    def mark(self, name: str) -> bytes | None:
        """A mark's current value."""
        try:
            return (self.folder / "marks" / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BusError(f"cannot read the mark {name} of the bus in {self.folder}: {error.strerror}") from error

    def close(self) -> None:
        """Stop watching the folder."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _path(self, offset: int) -> Path:
        return self.folder / f"{offset:020d}.msg"

    def _offsets(self) -> list[int]:
        try:
            return [int(match[1]) for name in os.listdir(self.folder) if (match := _NAME.fullmatch(name))]
        except OSError as error:
            raise BusError(f"cannot list the bus in {self.folder}: {error.strerror}; check the disk") from error


class _FolderWatch:
    """inotify on a folder, through ctypes. Where it is missing, `wait` sleeps."""

    def __init__(self, folder: Path) -> None:
        self.handle = -1
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            self.handle = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
            if (
                self.handle >= 0
                and libc.inotify_add_watch(self.handle, os.fsencode(folder), _IN_CREATE | _IN_MOVED_TO) < 0
            ):
                self.close()

    def wait(self, seconds: float) -> None:
        """Wait until something changes in the folder."""
        if self.handle < 0:
            time.sleep(min(seconds, 0.005))
            return
        poll = select.poll()  # select() takes no file descriptor above 1,023
        poll.register(self.handle, select.POLLIN)
        if poll.poll(seconds * 1000):
            with suppress(BlockingIOError):
                os.read(self.handle, 65536)

    def close(self) -> None:
        """Stop watching."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
