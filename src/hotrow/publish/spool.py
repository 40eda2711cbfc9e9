"""The spool: publications that wait on the local disk for a bus that is away.

One file a publication, `<number>.pub`: its body and its commit's words as two messages (message.py), so that what a
crash tore is told from what is whole; written beside its name, synced, renamed. They leave in order, after they are on
the bus. `budget` bytes of them at most: one that does not fit is refused, and its keys are published with a later one.

One thread at a time (delivery.py's lock).
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
    """What one rank publishes under a number: the body's bytes and what the commit will say."""

    number: int
    words: dict[str, Any]
    body: bytes = field(repr=False)


class SpoolFull(PublishError):  # noqa: N818
    """There is no room left for what waits."""


class Spool:
    """Parcels on disk, in order of their numbers."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # rows that nobody else reads
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
        """On disk now."""
        return sum(self._sizes.values())

    @property
    def numbers(self) -> list[int]:
        """Of the publications that wait, rising."""
        return sorted(self._sizes)

    def put(self, parcel: EncodedPublication, session: int) -> None:
        """Keep one. SpoolFull where the budget or the disk has no room."""
        data = b"".join(_framed(parcel, session))
        if self.bytes + len(data) > self.budget:
            raise SpoolFull(
                f"the spool {self.folder} has {self.bytes} of {self.budget} bytes; publications wait longer"
            )
        path = self._path(parcel.number)
        draft = path.with_name(f".{path.name}.tmp")
        try:
            with open(draft, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise SpoolFull(f"cannot write {path}: {error.strerror}; publications wait longer") from error
        self._sizes[parcel.number] = len(data)

    def get(self, number: int) -> EncodedPublication | None:
        """One of them; None if it was torn, and then it is gone."""
        try:
            data = self._path(number).read_bytes()
            (first,) = _LENGTH.unpack_from(data)
            part = Message.decode(data[_LENGTH.size : _LENGTH.size + first])
            words = Message.decode(data[2 * _LENGTH.size + first :])
            if part.kind != PART or words.kind != NOTE or part.number != number:
                raise BadMessage(f"{self._path(number)} is not what its name says")
            return EncodedPublication(number, note_fields(words), part.payload)
        except (OSError, struct.error, BadMessage):
            self.drop(number)
            return None

    def drop(self, number: int) -> None:
        """One is on the bus, or is not wanted any more."""
        self._path(number).unlink(missing_ok=True)
        self._sizes.pop(number, None)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:020d}.pub"


def _framed(parcel: EncodedPublication, session: int) -> Iterator[bytes]:
    for message in (Message(PART, parcel.number, session, parcel.body), note(parcel.number, session, parcel.words)):
        data = message.encode()
        yield _LENGTH.pack(len(data)) + data
