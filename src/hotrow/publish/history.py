"""What is on a bus already: for a trainer that starts again, for rollback, and for tools.

A bus is read from its end backwards, as far as is needed, because what matters most is the newest. Commits are found
here; putting whole publications together in order is the subscriber's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotrow.publish.bus import Bus
from hotrow.publish.message import NOTE, BadMessage, Message, note_fields
from hotrow.publish.publication import DELTA, ROLLBACK, SnapshotPlace


@dataclass(frozen=True)
class Commit:
    """A publication that is whole: its number, and what its commit says."""

    number: int
    words: dict[str, Any]
    offset: int

    @property
    def step(self) -> int:
        """The update that it contains."""
        return int(self.words["step"])

    @property
    def parts(self) -> list[int]:
        """Checksums of what each rank sent."""
        return [int(part) for part in self.words["parts"]]


def commits_after(bus: Bus, number: int, at_least: int = 1) -> dict[int, Commit]:
    """Commits above `number` that are still on the bus, by number; at least the newest `at_least`, if it has them."""
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
        whole = len(entries) < count
        if whole or (lowest is not None and lowest <= number + 1 and len(found) >= at_least):
            newest = sorted(found)[-at_least:]
            return {n: found[n] for n in sorted(found) if n > number or n in newest}
        count *= 4


def newest_commit(bus: Bus) -> Commit | None:
    """The newest publication."""
    found = commits_after(bus, 1 << 62)
    return found[max(found)] if found else None


def as_commit(offset: int, data: bytes) -> Commit | None:
    """A message as a commit, if it is one."""
    try:
        message = Message.decode(data)
        if message.kind != NOTE:
            return None
        words = note_fields(message)
        if words["kind"] not in (DELTA, ROLLBACK):
            return None
        commit = Commit(message.number, words, offset)
        commit.step, commit.parts  # noqa: B018  (they must be there)
        return commit
    except (BadMessage, KeyError, TypeError, ValueError):
        return None


def snapshot_of(words: dict[str, Any]) -> SnapshotPlace | None:
    """The newest snapshot that a note tells of."""
    try:
        return SnapshotPlace.of(words.get("snapshot"))
    except (KeyError, TypeError, ValueError):
        return None
