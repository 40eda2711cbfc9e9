"""What must survive a power cut goes through here: make, write, sync, rename, remove.

A file is safe when its bytes are synced and then the folder that holds its name. So `write` and `make` sync what they
made, and whoever fills a folder calls `sync` on it before `rename` gives it its final name, and on its parent after.
`remove` needs no sync: what was not removed in time is found and removed again.

Every refusal of the disk becomes a StorageError with the path and a cure. Callers use the functions by module
(`durable.sync(...)`), so that a test can make each of them fail.
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
    """The operating system's errors as HotRow's.

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
    """Make a folder, and those above it that are missing."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with disk("make the folder", path):
            path.mkdir(exist_ok=True)
        sync(path.parent)
    with disk("make the folder", folder):
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")


def write(path: Path, data: bytes) -> None:
    """Write a new file; its bytes are on the disk afterwards."""
    with disk("write", path), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Bring the names inside a folder to the disk."""
    with disk("sync", folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rename(old: Path, new: Path) -> None:
    """Give a folder another name on the same disk, all at once. Requires: nothing has the new name."""
    with disk(f"rename {old.name} to", new):
        os.rename(old, new)


def remove(folder: Path) -> None:
    """Remove a folder and all that is in it; a missing one is fine."""
    with disk("remove", folder):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


@contextmanager
def alone(folder: Path, cure: str = "give each run a checkpoints folder of its own") -> Iterator[None]:
    """Hold the folder against other processes that save into it; the second one is refused."""
    with disk("open", folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"another process is saving into {folder}; {cure}") from None
        except OSError:
            pass  # a file system without locks: nobody can be kept out
        yield
    finally:
        os.close(handle)
