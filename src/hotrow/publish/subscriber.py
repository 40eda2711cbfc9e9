"""Subscriber: reads complete publications from a bus, in order, each once.

Messages on a bus may be missing, duplicated, out of order, truncated or changed. A publication is returned when its
commit and all parts that the commit names have been read, the parts match their checksums, and every earlier
publication was returned. Until then its messages are kept, up to `memory` bytes.

    duplicated       recognised by number or checksum; dropped and counted
    out of order     kept until the messages before it have been read
    corrupt          written to the quarantine folder (the newest QUARANTINED are kept) and counted
    missing          a later commit was read, and the missing messages do not arrive within `patience` seconds, or
                     retention has removed them: raises Behind, which names the newest snapshot. Load that, and
                     subscribe again from its number.

For exactly-once, the reader stores `publication.resume` in the same transaction in which it applies the publication,
and starts there the next time. A reader that stores only a number passes that, and the bus is read from its tail.

One thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrow.errors import BusError, PublishError
from hotrow.publish.bus import Bus, Entry, open_bus
from hotrow.publish.history import Commit
from hotrow.publish.message import NOTE, BadMessage, Message, checksum, note_fields
from hotrow.publish.publication import (
    DELTA,
    KINDS,
    ROLLBACK,
    SNAPSHOT,
    Publication,
    SnapshotPlace,
    content_checksum,
    decode_body,
    join_tables,
)

QUARANTINED = 64  # files


class Behind(PublishError):  # noqa: N818
    """The next publication is not on the bus any more. `snapshot` is where to start again, if there is one."""

    def __init__(self, after: int, oldest: int | None, snapshot: SnapshotPlace | None, why: str) -> None:
        self.after, self.oldest, self.snapshot = after, oldest, snapshot
        cure = (
            f"load the snapshot of publication {snapshot.number} at {snapshot.path} and subscribe from there"
            if snapshot is not None
            else "the bus names no snapshot: export the model again, and keep publications longer (keep=, size=)"
        )
        super().__init__(f"publication {after + 1} cannot be read: {why}; {cure}")


@dataclass
class Counters:
    """Totals since the start."""

    publications: int = 0
    rows: int = 0
    bytes: int = 0
    duplicates: int = 0
    reordered: int = 0
    corrupt: int = 0
    dropped: int = 0  # messages above the memory limit


@dataclass
class _Body:
    """A rank's part: the chunks received so far."""

    chunks: list[bytes | None]
    size: int
    first: int  # offset

    @property
    def whole(self) -> bool:
        return all(chunk is not None for chunk in self.chunks)

    def join(self) -> bytes:
        return b"".join(chunk for chunk in self.chunks if chunk is not None)


class Subscriber:
    """Reads a bus after a publication's number.

    `after` is the number of the last publication applied (0: an empty model). `position` is a `publication.resume`.

    >>> import tempfile
    >>> Subscriber(f"dir:{tempfile.mkdtemp()}").poll()
    []
    """

    def __init__(
        self,
        bus: str | Bus,
        after: int = 0,
        *,
        position: tuple[int, int] | None = None,
        quarantine: str | Path | None = None,
        patience: float = 2.0,
        memory: int = 1 << 30,
    ) -> None:
        self.bus = open_bus(bus) if isinstance(bus, str) else bus
        self.number, self._offset = position if position is not None else (after, 0)
        self.counters = Counters()
        self.snapshot: SnapshotPlace | None = None
        self.patience, self.memory = patience, memory
        self._quarantine = None if quarantine is None else Path(quarantine)
        self._bodies: dict[tuple[int, int, int], _Body] = {}  # number, rank, checksum
        self._commits: dict[int, tuple[Commit, dict[str, Any]]] = {}
        self._kept = 0  # bytes
        self._stuck_since: float | None = None

    def poll(self, wait: float = 0.0) -> list[Publication]:
        """Publications that are complete now, in order; waits up to `wait` seconds for the first. Raises Behind."""
        end = time.monotonic() + wait
        while True:
            ready: list[Publication] = []
            for entry in self._read(max(0.0, end - time.monotonic())):
                self._offset = entry.offset + 1
                note = self._receive(entry)
                ready += self._ready()
                if note is not None and (note.kind == SNAPSHOT or note.number == self.number):
                    ready.append(note)
            if ready:
                self._stuck_since = None
                return ready
            self._check_gap()
            if time.monotonic() >= end:
                return []

    def __iter__(self) -> Iterator[Publication]:
        """All publications, without end."""
        while True:
            yield from self.poll(wait=1.0)

    def close(self) -> None:
        """Close the bus."""
        self.bus.close()

    def _read(self, wait: float) -> list[Entry]:
        if self._commits:  # a part is missing: return soon, to check whether it can still come
            wait = min(wait, 0.1)
        return self.bus.read(self._offset, wait=wait)

    # --- one message ---

    def _receive(self, entry: Entry) -> Publication | None:
        """Store the contents of a message. A heartbeat or a snapshot's path is returned at once."""
        self.counters.bytes += len(entry.data)
        try:
            message = Message.decode(entry.data)
            if message.kind == NOTE:
                return self._receive_note(message, entry)
            self._receive_part(message, entry)
        except BadMessage as error:
            self._quarantine_message(entry, error)
        return None

    def _receive_part(self, message: Message, entry: Entry) -> None:
        if message.number <= self.number:
            self.counters.duplicates += 1
            return
        name = (message.number, message.rank, message.body_checksum)
        body = self._bodies.get(name)
        if body is None:
            body = self._bodies[name] = _Body([None] * message.chunks, message.body_bytes, entry.offset)
        if len(body.chunks) != message.chunks or body.size != message.body_bytes:
            raise BadMessage(f"a chunk of publication {message.number} does not match the others")
        if body.chunks[message.chunk] is not None:
            self.counters.duplicates += 1
            return
        if self._kept + len(message.payload) > self.memory:
            self.counters.dropped += 1
            return
        if message.number > self.number + 1:
            self.counters.reordered += 1
        body.chunks[message.chunk] = message.payload
        self._kept += len(message.payload)

    def _receive_note(self, message: Message, entry: Entry) -> Publication | None:
        fields, number = note_fields(message), message.number
        try:
            if fields["kind"] not in KINDS:
                raise BadMessage(f"a note about publication {number} is of kind {fields['kind']!r}")
            self.snapshot = SnapshotPlace.of(fields.get("snapshot")) or self.snapshot
            if fields["kind"] not in (DELTA, ROLLBACK):
                return self._publication(number, fields, {}, None)
            if fields["checksum"] != content_checksum(number, fields):
                raise BadMessage(f"the commit of publication {number} does not match its checksum")
            commit = Commit(number, fields, entry.offset)
            if number <= self.number or number in self._commits:
                self.counters.duplicates += 1
            elif commit.parts:
                self._commits[number] = commit, fields
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"a note about publication {number} lacks {error}") from None
        return None

    def _quarantine_message(self, entry: Entry, error: BadMessage) -> None:
        self.counters.corrupt += 1
        if self._quarantine is None:
            return
        self._quarantine.mkdir(parents=True, exist_ok=True)
        (self._quarantine / f"{entry.offset:020d}.bad").write_bytes(entry.data)
        (self._quarantine / f"{entry.offset:020d}.txt").write_text(f"{error}\n")
        for old in sorted(self._quarantine.glob("*.bad"))[:-QUARANTINED]:
            old.unlink(missing_ok=True)
            old.with_suffix(".txt").unlink(missing_ok=True)

    # --- complete publications ---

    def _ready(self) -> list[Publication]:
        ready: list[Publication] = []
        while (found := self._commits.get(self.number + 1)) is not None:
            commit, fields = found
            bodies = [self._bodies.get((commit.number, rank, part)) for rank, part in enumerate(commit.parts)]
            if any(body is None or not body.whole for body in bodies):
                break
            joined = [body.join() for body in bodies if body is not None]
            if any(checksum(body) != part for body, part in zip(joined, commit.parts, strict=True)):
                self._discard(commit.number, "a body does not match its checksum")
                break
            try:
                decoded = [decode_body(body) for body in joined]
                tables = join_tables(part for part, _ in decoded)
            except PublishError as error:
                self._discard(commit.number, str(error))
                break
            dense = next((weights for _, weights in decoded if weights is not None), None)
            self.number += 1
            self._drop_older()
            ready.append(self._publication(commit.number, fields, tables, dense))
            self.counters.publications += 1
            self.counters.rows += ready[-1].rows
        return ready

    def _publication(self, number: int, fields: dict[str, Any], tables: Any, dense: Any) -> Publication:
        return Publication(
            kind=str(fields["kind"]),
            number=number,
            previous=int(fields.get("previous", number)),
            run=str(fields["run"]),
            step=int(fields["step"]),
            watermark=None if fields["watermark"] is None else int(fields["watermark"]),
            cut=float(fields["cut"]),
            tables=tables,
            dense=dense,
            snapshot=SnapshotPlace.of(fields.get("snapshot")),
            restores=fields.get("restores"),
            checksum=int(fields.get("checksum", 0)),
            resume=(self.number, self._unfinished()),
        )

    def _unfinished(self) -> int:
        """The lowest offset of a message that is still needed."""
        bodies, commits = self._bodies.values(), self._commits.values()
        return min([self._offset, *(body.first for body in bodies), *(commit.offset for commit, _ in commits)])

    def _drop_older(self) -> None:
        """Drop messages of publications up to the current number."""
        self._commits = {n: commit for n, commit in self._commits.items() if n > self.number}
        self._bodies = {name: body for name, body in self._bodies.items() if name[0] > self.number}
        self._kept = sum(len(chunk) for body in self._bodies.values() for chunk in body.chunks if chunk is not None)

    def _discard(self, number: int, why: str) -> None:
        """Drop the parts of a publication that cannot be decoded."""
        self.counters.corrupt += 1
        for name in [name for name in self._bodies if name[0] == number]:
            del self._bodies[name]

    def _check_gap(self) -> None:
        """Raise Behind if the next publication was missing for `patience` seconds."""
        if not self._commits:
            self._stuck_since = None
            return
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since < self.patience:
            return
        here = self.number + 1 in self._commits
        why = "parts of it are missing or corrupt" if here else f"the next on the bus is {min(self._commits)}"
        raise Behind(self.number, min(self._commits), self.snapshot, why)


def bodies_of(bus: Bus, commit: Commit) -> list[bytes]:
    """Read the ranks' parts of a commit back from the bus."""
    wanted = dict(enumerate(commit.parts))
    found: dict[int, _Body] = {}
    count = 64
    while True:
        entries = bus.newest(count)
        for entry in entries:
            try:
                message = Message.decode(entry.data)
            except BadMessage:
                continue
            if message.kind == NOTE or message.number != commit.number:
                continue
            if wanted.get(message.rank) == message.body_checksum:
                body = found.setdefault(message.rank, _Body([None] * message.chunks, message.body_bytes, entry.offset))
                body.chunks[message.chunk] = message.payload
        if len(found) == len(wanted) and all(body.whole for body in found.values()):
            return [found[rank].join() for rank in sorted(found)]
        if len(entries) < count:
            raise BusError(f"parts of publication {commit.number} are not on the bus any more")
        count *= 4
