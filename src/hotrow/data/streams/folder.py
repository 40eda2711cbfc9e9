"""A feed from a growing folder of Parquet files, read in the order of their names.

The writer creates a file elsewhere (or under a name that the pattern does not match, such as `.part`) and renames it,
so that it appears whole. A file never changes afterwards. Names must be ascending: a file that sorts before one already
begun would never be read, so it is an error. Files that have been read may be removed.

A late file is detected within one pass only: the pass lists the earlier files when it begins, and a new name among them
is late. Detecting late files across restarts would mean storing every name.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Generator, Iterator

from hotrow.data.files.parquet import ParquetReader
from hotrow.data.rejects import Rejects
from hotrow.data.streams.follow import ALL, TICK, Message, StreamPosition
from hotrow.errors import DataError

PART = "folder"


class FolderFeed:
    """Follows `folder/pattern`."""

    kind = "folder"

    def __init__(self, address: str, columns: tuple[str, ...]) -> None:
        folder, pattern = os.path.split(address)
        if os.path.isdir(address):
            folder, pattern = address, "*.parquet"
        if not os.path.isdir(folder or "."):
            raise DataError(f"there is no folder {folder}; make it, or check path={address!r}")
        self.folder, self.pattern, self.columns = folder or ".", pattern, columns

    @property
    def address(self) -> str:
        """The folder and the pattern."""
        return os.path.join(self.folder, self.pattern)

    def read(self, position: StreamPosition, rejects: Rejects) -> Generator[list[Message], None, None]:
        """Files after a position, some thousand rows at a time."""
        name, row = position.get(PART, ("", ALL))
        behind = {file for file in self._names() if file < name}
        reader: ParquetReader | None = None
        if row != ALL and name not in self._names():
            raise DataError(f"{os.path.join(self.folder, name)} is gone, and {row} of its rows are read; put it back")
        while True:
            files = self._names()
            late = [file for file in files if file < name and file not in behind]
            if late:
                raise DataError(
                    f"{os.path.join(self.folder, late[0])} appeared after {name} was begun, and sorts before it; write "
                    "files under ascending names, and rename this one so that it comes next"
                )
            following = [file for file in files if file > name or (file == name and row != ALL)]
            if not following:
                yield []
                time.sleep(TICK)
                continue
            begin = row if following[0] == name else 0
            behind.add(name)
            name, row = following[0], ALL
            path = os.path.join(self.folder, name)
            reader = reader or ParquetReader(path, self.columns)
            yield from self._file(reader, path, name, begin, rejects)

    def _file(
        self, reader: ParquetReader, path: str, name: str, begin: int, rejects: Rejects
    ) -> Iterator[list[Message]]:
        held: Message | None = None  # until it is known whether another one follows
        for chunk in reader.chunks(path, begin, begin, rejects):
            if held is not None:
                yield [held]
            held = Message(PART, name, chunk.table, begin, last=False)
            begin += chunk.table.num_rows
        if held is not None:
            yield [Message(PART, name, held.table, held.first, last=True)]

    def _names(self) -> list[str]:
        try:
            found = os.listdir(self.folder)
        except FileNotFoundError:
            raise DataError(f"the folder {self.folder} is gone; put it back") from None
        return sorted(name for name in found if fnmatch.fnmatchcase(name, self.pattern) and name[0] not in "._")
