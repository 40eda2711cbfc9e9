"""The spool: publications on the local disk while the bus is unreachable.

Each publication is a file `<number>.pub` with its body and its commit's fields as two messages (message.py), so a file
that a crash truncated is detected. It is written under another name, synced, and renamed. Files are removed in order,
when their publications are on the bus. They take at most `budget` bytes; `put` raises SpoolFull beyond that, and the
caller publishes these keys later.

One thread at a time (under delivery.py's lock).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrow.errors import PublishError, StorageError
from hotrow.publish.message import NOTE, PART, BadMessage, Message, note, note_fields

_NAME = re.compile(r"(\d{20})\.pub")
_LENGTH = struct.Struct("<Q")


@dataclass
class EncodedPublication:
    """One rank's part of a publication: the body's bytes and the fields of its commit."""

    number: int
    fields: dict[str, Any]
    body: bytes = field(repr=False)


class SpoolFull(PublishError):  # noqa: N818
    """The budget or the disk is full."""


class Spool:
    """Encoded publications on disk, in order of their numbers."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # only this user may read the rows
            for draft in folder.glob(".*.tmp"):
                draft.unlink(missing_ok=True)
            self._sizes = {
                int(match[1]): path.stat().st_size
                for path in sorted(folder.iterdir())
                if (match := _NAME.fullmatch(path.name))
            }
        except OSError as error:
            raise StorageError(
                f"cannot use the spool {folder}: {error.strerror}; give Publish another one with spool="
            ) from error

    @property
    def bytes(self) -> int:
        """The bytes on disk now."""
        return sum(self._sizes.values())

    @property
    def numbers(self) -> list[int]:
        """The numbers of the spooled publications, in order."""
        return sorted(self._sizes)

    def put(self, publication: EncodedPublication, session: int) -> None:
        """Write one; raises SpoolFull if the budget or the disk is full."""
        data = b"".join(_framed(publication, session))
        if self.bytes + len(data) > self.budget:
            raise SpoolFull(
                f"the spool {self.folder} has {self.bytes} of {self.budget} bytes; "
                "its rows are published with a later publication"
            )
        path = self._path(publication.number)
        draft = path.with_name(f".{path.name}.tmp")
        try:
            with open(draft, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise SpoolFull(
                f"cannot write {path}: {error.strerror}; its rows are published with a later publication"
            ) from error
        self._sizes[publication.number] = len(data)

    def get(self, number: int) -> EncodedPublication | None:
        """Read one. If its file is damaged, remove it and return None."""
        try:
            data = self._path(number).read_bytes()
            (first,) = _LENGTH.unpack_from(data)
            part = Message.decode(data[_LENGTH.size : _LENGTH.size + first])
            fields = Message.decode(data[2 * _LENGTH.size + first :])
            if part.kind != PART or fields.kind != NOTE or part.number != number:
                raise BadMessage(f"{self._path(number)} does not have the publication of its name")
            return EncodedPublication(number, note_fields(fields), part.payload)
        except (OSError, struct.error, BadMessage):
            self.drop(number)
            return None

    def drop(self, number: int) -> None:
        """Remove one that is on the bus or was withdrawn."""
        self._path(number).unlink(missing_ok=True)
        self._sizes.pop(number, None)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:020d}.pub"


def _framed(publication: EncodedPublication, session: int) -> Iterator[bytes]:
    for message in (
        Message(PART, publication.number, session, publication.body),
        note(publication.number, session, publication.fields),
    ):
        data = message.encode()
        yield _LENGTH.pack(len(data)) + data
