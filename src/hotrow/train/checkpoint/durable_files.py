"""Durable file operations: make, write, sync, rename, remove. After each, a power cut leaves the old or the new state.

A file is durable when its bytes and the folder entry with its name are both synced. `write` and `make` sync what they
create. A caller that fills a folder calls `sync` on it before `rename` gives it its final name, and on its parent after
that. `remove` needs no sync: what a crash leaves behind is found and removed again.

Every error of the operating system becomes a StorageError with the path and a cure. Callers use the functions through
the module (`durable_files.sync(...)`), so that tests can make each of them fail. Any thread may call them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotrow.errors import StorageError

_CURES = {
    errno.ENOSPC: "free some space there, or save to another disk",
    errno.EDQUOT: "free some of your quota there, or save to another disk",
    errno.EACCES: "give this user the right to write there, or save to another folder",
    errno.EPERM: "give this user the right to write there, or save to another folder",
    errno.EROFS: "mount it writable, or save to another folder",
    errno.ENOTDIR: "a file is where a folder should be; move it away, or save to another folder",
}


@contextmanager
def disk(action: str, path: Path) -> Iterator[None]:
    """Raise the operating system's errors as StorageErrors with a cure.

    >>> with disk("read", Path("x")):
    ...     open("/does/not/exist")
    Traceback (most recent call last):
    hotrow.errors.StorageError: cannot read x: No such file or directory; look at the disk and try again
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "look at the disk and try again")
        raise StorageError(f"cannot {action} {path}: {error.strerror or error}; {cure}") from error


def make(folder: Path) -> None:
    """Make a folder and its missing parents, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with disk("make the folder", path):
            path.mkdir(exist_ok=True)
        sync(path.parent)
    with disk("make the folder", folder):
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")


def write(path: Path, data: bytes) -> None:
    """Write a new file and sync its bytes."""
    with disk("write", path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Sync the names inside a folder."""
    with disk("sync", folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Rename a folder atomically. Requires: the new name is free and on the same disk."""
    with disk(f"rename {old.name} to", new):
        os.rename(old, new)


def remove(folder: Path) -> None:
    """Remove a folder and its contents; does nothing if it is missing."""
    with disk("remove", folder):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


@contextmanager
def exclusive(folder: Path, cure: str = "give each run a checkpoints folder of its own") -> Iterator[None]:
    """Lock the folder against other processes that save into it. Raises StorageError if another holds the lock."""
    with disk("open", folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"another process is saving into {folder}; {cure}") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
