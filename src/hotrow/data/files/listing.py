"""Listing: which files a source reads, in which order, and a stamp that identifies them.

A pattern's files are read in the order of their sorted paths; a list's patterns and paths in the order of the list.
The stamp covers every name (relative to their common directory, so a dataset may move as a whole) and every size. A
file that was replaced, added or removed between two runs changes the stamp, and the source refuses the cursor. Contents
are not read for the stamp: a file rewritten to the same size is not detected.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from hotrow.errors import DataError, OptionError

Paths: TypeAlias = str | os.PathLike[str] | Many[str | os.PathLike[str]]


@dataclass(frozen=True)
class Files:
    """Some files as they are now.

    names are relative to the directory that all have in common; sizes are bytes.
    """

    paths: tuple[str, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def stat(paths: tuple[str, ...]) -> Files:
        """The files' names and sizes at this moment."""
        root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
        names = tuple(os.path.relpath(path, root).replace(os.sep, "/") for path in paths)
        try:
            return Files(paths, names, tuple(os.stat(path).st_size for path in paths))
        except FileNotFoundError as error:
            raise DataError(f"the file {error.filename} is gone since the source was made; put it back") from error

    @cached_property
    def stamp(self) -> str:
        """A digest of all names and sizes."""
        return hashlib.sha256(json.dumps([self.names, self.sizes]).encode()).hexdigest()[:16]


def find_files(paths: Paths) -> tuple[str, ...]:
    """The files that a pattern, a path or a list of them names, in reading order; at least one, none twice."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise OptionError("no files: the list of paths is empty; give a pattern such as 'clicks/*.parquet'")
    found = [path for entry in given for path in _expand(os.fspath(entry))]
    for path, times in Counter(found).items():
        if times > 1:
            raise OptionError(f"the file {path} is named {times} times; name every file once")
    return tuple(found)


def _expand(entry: str) -> list[str]:
    if os.path.isfile(entry):
        return [entry]
    if os.path.isdir(entry):
        raise DataError(f"{entry} is a directory; name the files in it, for example {os.path.join(entry, '*')!r}")
    if not glob.has_magic(entry):
        raise DataError(f"there is no file {entry}; check the path (working directory: {os.getcwd()})")
    matches = sorted(path for path in glob.glob(entry, recursive=True) if os.path.isfile(path))
    if not matches:
        raise DataError(f"no file matches {entry!r}; check the pattern (working directory: {os.getcwd()})")
    return matches
