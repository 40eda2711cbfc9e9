"""Small JSON files with a checksum over their own fields: manifests of checkpoints, exports and SSD folders.

A file is one JSON object with `format`, `version`, the caller's fields and `checksum`. The checksum covers all other
fields, written as JSON with sorted keys and no spaces, so that layout and order of the file do not matter. A reader
compares format and version first: another release may compute the checksum in another way.

A FileFormat is immutable; each package defines one constant per kind of file. Errors are ValueErrors without a path,
and the caller adds the path and the cure. Any thread may call any of this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def digest(data: bytes) -> str:
    """BLAKE2b, 16 bytes, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def fingerprint(data: bytes) -> dict[str, Any]:
    """What a manifest records about another file: its size and digest."""
    return {"bytes": len(data), "blake2b": digest(data)}


class OtherFormatError(ValueError):
    """The file is of another format or version. Its checksum was not compared."""

    def __init__(self, format: object, version: object) -> None:
        super().__init__(f"it has format {format!r} version {version!r}")
        self.format, self.version = format, version


@dataclass(frozen=True)
class FileFormat:
    """One kind of file: its name, the versions that this release reads, and its checksum function.

    >>> note = FileFormat("example", (1,))
    >>> note.load(note.dump({"rows": 3}))["rows"]
    3
    >>> note.load(note.dump({"rows": 3}).replace(b"3", b"4", 1))
    Traceback (most recent call last):
    ValueError: its checksum differs from its contents
    """

    name: str
    versions: tuple[int, ...]
    digest: Callable[[bytes], str] = digest
    indent: int | None = 1

    def dump(self, fields: dict[str, Any], version: int | None = None) -> bytes:
        """The file's bytes. Raises ValueError for NaN, which JSON lacks."""
        document = {"format": self.name, "version": version or self.versions[0], **fields}
        document["checksum"] = self._checksum(document)
        return json.dumps(document, indent=self.indent, allow_nan=False).encode()

    def load(self, data: bytes) -> dict[str, Any]:
        """The checked document, `checksum` included. Raises OtherFormatError, or ValueError for a corrupt file."""
        try:
            document = json.loads(data)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        if document.get("format") != self.name or document.get("version") not in self.versions:
            raise OtherFormatError(document.get("format"), document.get("version"))
        try:
            intact = document.get("checksum") == self._checksum(document)
        except ValueError:  # NaN, which `dump` never writes
            intact = False
        if not intact:
            raise ValueError("its checksum differs from its contents")
        return document

    def _checksum(self, document: dict[str, Any]) -> str:
        fields = {name: value for name, value in document.items() if name != "checksum"}
        return self.digest(json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
