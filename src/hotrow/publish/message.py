"""Messages on a bus. docs/formats/publication.md has the byte layout.

A message is a fixed header and a payload with a checksum over both, so a truncated or changed message is detected
before its contents are used. There are two kinds. A *part* carries rows that one rank publishes under a number: a body
larger than the bus's limit is sent as several parts, each with its chunk number and the checksum of the whole body. A
*note* carries JSON fields: a commit ("publication 7 consists of these parts"), a heartbeat, or the path of a snapshot.

Pure functions over bytes, for any thread. Nothing is unpickled, and every length is compared with the received bytes
before it is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotrow import _core
from hotrow.errors import PublishError

MAGIC, VERSION = b"HRPB", 1
PART, NOTE = 1, 2
# magic, version, kind, 0; number; session; rank, world, chunk, chunks; bytes and checksum of the body; payload's bytes
_HEADER = struct.Struct("<4sHBBQQHHIIQQQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECK.size
assert HEADER_BYTES == 68


class BadMessage(PublishError):  # noqa: N818
    """Bytes that are not a complete, valid message."""


@dataclass(frozen=True)
class Message:
    """One message. `session` is a random number of the sending process; parts of two sessions are never mixed."""

    kind: int
    number: int
    session: int
    payload: bytes
    rank: int = 0
    world: int = 1
    chunk: int = 0
    chunks: int = 1
    body_bytes: int = 0
    body_checksum: int = 0

    def encode(self) -> bytes:
        """The message as bytes.

        >>> Message.decode(Message(NOTE, 7, 1, b"{}").encode()).number
        7
        """
        header = _HEADER.pack(
            *(MAGIC, VERSION, self.kind, 0, self.number, self.session),
            *(self.rank, self.world, self.chunk, self.chunks, self.body_bytes, self.body_checksum, len(self.payload)),
        )
        data = header + self.payload
        return data + _CHECK.pack(checksum(data))

    @staticmethod
    def decode(data: bytes) -> Message:
        """Decode untrusted bytes; BadMessage says what is wrong with them."""
        if len(data) < HEADER_BYTES:
            raise BadMessage(f"a message of {len(data)} bytes is truncated: the header has {HEADER_BYTES}")
        magic, version, kind, _, number, session, *rest = _HEADER.unpack_from(data)
        rank, world, chunk, chunks, body_bytes, body_checksum, payload_bytes = rest
        if magic != MAGIC:
            raise BadMessage(f"a message begins with {magic!r}, not {MAGIC!r}: it is not from HotRow")
        if len(data) != HEADER_BYTES + payload_bytes:
            raise BadMessage(f"a message is truncated: {len(data)} bytes of {HEADER_BYTES + payload_bytes}")
        (expected,) = _CHECK.unpack_from(data, len(data) - _CHECK.size)
        if checksum(data[: -_CHECK.size]) != expected:
            raise BadMessage(f"a message about publication {number} is corrupt: its checksum does not match")
        if version != VERSION:
            raise BadMessage(f"a message has version {version}, and this HotRow reads {VERSION}; use the same version")
        if kind not in (PART, NOTE) or not (chunk < chunks and rank < world):
            raise BadMessage(
                f"a message about publication {number} has an unknown kind, or a wrong rank or chunk number"
            )
        payload = data[_HEADER.size : -_CHECK.size]
        return Message(kind, number, session, payload, rank, world, chunk, chunks, body_bytes, body_checksum)


def checksum(data: bytes) -> int:
    """XXH64, unsigned."""
    return int(_core.hash_bytes(data)) & 0xFFFFFFFFFFFFFFFF


def parts(number: int, session: int, rank: int, world: int, body: bytes, limit: int) -> Iterator[Message]:
    """Split a body into messages of at most `limit` bytes, one at a time."""
    payload_limit = limit - HEADER_BYTES
    if payload_limit < 1:
        raise PublishError(
            f"the bus takes messages of {limit} bytes, but the header has {HEADER_BYTES}; raise max_message="
        )
    whole, chunks = checksum(body), max(1, -(-len(body) // payload_limit))
    for chunk in range(chunks):
        piece = body[chunk * payload_limit : (chunk + 1) * payload_limit]
        yield Message(PART, number, session, piece, rank, world, chunk, chunks, len(body), whole)


def note(number: int, session: int, fields: dict[str, Any]) -> Message:
    """A message with JSON fields about a publication."""
    return Message(NOTE, number, session, json.dumps(fields, separators=(",", ":"), sort_keys=True).encode())


def note_fields(message: Message) -> dict[str, Any]:
    """The fields of a note."""
    try:
        fields = json.loads(message.payload)
    except ValueError as error:
        raise BadMessage(f"a note about publication {message.number} is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise BadMessage(f"a note about publication {message.number} has no kind")
    return fields
