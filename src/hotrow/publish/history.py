"""The history on a bus: the commits that it still has. For a trainer that restarts, for rollback, and for tools.

A bus is read backwards from its end, as far as needed, because the newest commits matter most. The subscriber assembles
complete publications; this module does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotrow.publish.bus import Bus
from hotrow.publish.message import NOTE, BadMessage, Message, note_fields
from hotrow.publish.publication import DELTA, ROLLBACK, SnapshotPlace


@dataclass(frozen=True)
class Commit:
    """A committed publication: its number and the fields of its commit."""

    number: int
    fields: dict[str, Any]
    offset: int

    @property
    def step(self) -> int:
        """The last training step that it contains."""
        return int(self.fields["step"])

    @property
    def parts(self) -> list[int]:
        """The checksum of each rank's part."""
        return [int(part) for part in self.fields["parts"]]


def commits_after(bus: Bus, number: int, at_least: int = 1) -> dict[int, Commit]:
    """Commits above `number` that are on the bus, by number. At least the newest `at_least` commits are returned."""
    count = 16
    while True:
        entries = bus.newest(count)
        found: dict[int, Commit] = {}
        lowest = None
        for entry in entries:
            commit = as_commit(entry.offset, entry.data)
            if commit is None:
                continue
            lowest = commit.number if lowest is None else min(lowest, commit.number)
            found.setdefault(commit.number, commit)
        complete = len(entries) < count
        if complete or (lowest is not None and lowest <= number + 1 and len(found) >= at_least):
            newest = sorted(found)[-at_least:]
            return {n: found[n] for n in sorted(found) if n > number or n in newest}
        count *= 4


def newest_commit(bus: Bus) -> Commit | None:
    """The commit of the newest publication."""
    found = commits_after(bus, 1 << 62)
    return found[max(found)] if found else None


def as_commit(offset: int, data: bytes) -> Commit | None:
    """Decode a message that is a commit; None for other messages."""
    try:
        message = Message.decode(data)
        if message.kind != NOTE:
            return None
        fields = note_fields(message)
        if fields["kind"] not in (DELTA, ROLLBACK):
            return None
        commit = Commit(message.number, fields, offset)
        commit.step, commit.parts  # noqa: B018  (raises if they are missing)
        return commit
    except (BadMessage, KeyError, TypeError, ValueError):
        return None


def snapshot_of(fields: dict[str, Any]) -> SnapshotPlace | None:
    """The newest snapshot named in a note's fields."""
    try:
        return SnapshotPlace.of(fields.get("snapshot"))
    except (KeyError, TypeError, ValueError):
        return None
