"""Messages: what goes over a bus. docs/formats/publication.md has the bytes.

A message is a fixed header and a payload, with a checksum over both, so that one which was cut short or changed on its
way is known for what it is before anything in it is believed. There are two kinds. A *part* is a piece of the rows that
one rank publishes under a number: a body larger than the bus's limit travels as several, each of which names its place
and the checksum of the whole body. A *note* is a few words in JSON: a commit ("publication 7 is these parts"), a
heartbeat, where a snapshot is.

Plain functions over bytes: any thread. Nothing is unpickled, and no length is believed before it was compared with what
came.
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
    """Bytes that are not a whole message of ours."""


@dataclass(frozen=True)
class Message:
    """One message. `session` is whoever sent it, drawn anew by each process; parts of two of them never mix."""

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
        """As bytes.

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
        """Of bytes that may be anything; BadMessage says what is wrong with them."""
        if len(data) < HEADER_BYTES:
            raise BadMessage(f"a message of {len(data)} bytes is truncated: a header alone has {HEADER_BYTES}")
        magic, version, kind, _, number, session, *rest = _HEADER.unpack_from(data)
        rank, world, chunk, chunks, body_bytes, body_checksum, payload_bytes = rest
        if magic != MAGIC:
            raise BadMessage(f"a message begins with {magic!r}, not {MAGIC!r}: it is not one of HotRow's")
        if len(data) != HEADER_BYTES + payload_bytes:
            raise BadMessage(f"a message is truncated: {len(data)} bytes of {HEADER_BYTES + payload_bytes}")
        (expected,) = _CHECK.unpack_from(data, len(data) - _CHECK.size)
        if checksum(data[: -_CHECK.size]) != expected:
            raise BadMessage(f"a message about publication {number} is corrupt: its checksum does not fit")
        if version != VERSION:
            raise BadMessage(f"a message has version {version}, and this HotRow reads {VERSION}; use the same version")
        if kind not in (PART, NOTE) or not (chunk < chunks and rank < world):
            raise BadMessage(f"a message about publication {number} is of no known kind, or has no place in it")
        payload = data[_HEADER.size : -_CHECK.size]
        return Message(kind, number, session, payload, rank, world, chunk, chunks, body_bytes, body_checksum)


def checksum(data: bytes) -> int:
    """XXH64, unsigned."""
    return int(_core.hash_bytes(data)) & 0xFFFFFFFFFFFFFFFF


def parts(number: int, session: int, rank: int, world: int, body: bytes, limit: int) -> Iterator[Message]:
    """A body as messages of at most `limit` bytes, made one by one."""
    room = limit - HEADER_BYTES
    if room < 1:
        raise PublishError(f"the bus takes messages of {limit} bytes, and a header alone has {HEADER_BYTES}")
    whole, chunks = checksum(body), max(1, -(-len(body) // room))
    for chunk in range(chunks):
        piece = body[chunk * room : (chunk + 1) * room]
        yield Message(PART, number, session, piece, rank, world, chunk, chunks, len(body), whole)


def note(number: int, session: int, words: dict[str, Any]) -> Message:
    """A few words about a publication."""
    return Message(NOTE, number, session, json.dumps(words, separators=(",", ":"), sort_keys=True).encode())


def note_fields(message: Message) -> dict[str, Any]:
    """What a note says."""
    try:
        words = json.loads(message.payload)
    except ValueError as error:
        raise BadMessage(f"a note about publication {message.number} is not JSON: {error}") from None
    if not isinstance(words, dict) or not isinstance(words.get("kind"), str):
        raise BadMessage(f"a note about publication {message.number} does not say its kind")
    return words
