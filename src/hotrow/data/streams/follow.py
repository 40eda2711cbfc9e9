"""Following: sources that never end, with batches that come out the same after a crash.

    feed (folder.py, kafka.py, redis.py)   events in order, or "nothing new for a moment"
    FollowSource                                                features, batches, cursors

A cursor holds, for each part of the feed (a Kafka partition, a stream, a folder), the message (or file) and how many of
its rows are behind it; and how many examples the stream has given so far. The trainer saves it with the rows of the
same step, so that after a crash every event is learned from once.

A batch that does not fill up within `flush` seconds of its first event is given as it is, so that a quiet stream is
learned from too. That is the one thing here which a clock decides, and a resumed run that cut its batches elsewhere
would compute other bits, and so other publications, than the bus already has. So a short batch's end (how many examples
the stream had given) is written to the `journal` before anybody sees the batch, and a resumed pass cuts at the same
places until it is past the last of them. With several Kafka partitions, whose messages have no order among each other,
a resumed run still learns from each event once, but may see them in another order.

`end` makes every pass that has begun stop within a tick; the trainer calls it, from any thread. Each pass runs on one
thread.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from hotrow.batch import KeyedBatch
from hotrow.credentials import public
from hotrow.data.files.chunks import Chunk
from hotrow.data.files.file_parts import apply_features
from hotrow.data.rebatch import join_batches, slice_batch
from hotrow.data.rejects import Rejects, check_policy
from hotrow.data.source import Cursor, check_batch_size, check_features, cursor_number, match_cursor
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec
from hotrow.features.hashing import IntArray

TICK = 0.1  # seconds: how long a feed waits before it says that there is nothing new
ALL = -1

Place: TypeAlias = dict[str, tuple[str, int]]
"""By part of the feed: a message's name, and how many of its rows are behind us, or ALL."""


@dataclass(frozen=True)
class Message:
    """Some rows of one message or file. `first` rows of it came before; `last` says that none come after."""

    part: str
    name: str
    table: pa.Table
    first: int = 0
    last: bool = True


class Feed(Protocol):
    """Where events come from."""

    @property
    def kind(self) -> str:
        """A word for the cursor."""

    @property
    def address(self) -> str:
        """What is followed, for the cursor and the log."""

    def read(self, place: Place, rejects: Rejects) -> Generator[list[Message], None, None]:
        """Messages after a place, for ever; an empty list after every TICK in which there was nothing new.

        A message that cannot be read goes to `rejects`.
        """


@dataclass
class _Piece:
    """Examples on their way into a batch, and where each row of theirs stood."""

    batch: KeyedBatch
    rows: IntArray  # the number of each example's row among all rows of the messages, from 1
    messages: list[Message]


class FollowSource:
    """A source without an end. Made by `hotrow.data.streams.follow`."""

    def __init__(
        self,
        feed: Feed,
        features: FeatureSpec,
        batch_size: int = 4096,
        on_error: str = "raise",
        flush: float = 1.0,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(flush, (int, float)) or not flush > 0:
            raise OptionError(f"flush={flush!r}: give a number of seconds above 0")
        self.feed, self.features = feed, check_features(features)
        self.batch_size, self.flush = check_batch_size(batch_size), float(flush)
        self.journal = None if journal is None else Journal(Path(journal), f"{feed.kind} {feed.address} {batch_size}")
        self._on_error = check_policy(on_error)
        self._rejects = Rejects(on_error, "event")
        self._ended = 0  # how often `end` was called
        self._quiet: tuple[int, float] | None = None  # examples given so far, and seconds without a new event

    examples = None

    @property
    def skipped(self) -> int:
        """How many events the latest pass has skipped so far, with on_error="skip"."""
        return self._rejects.count

    def describe(self) -> str:
        """One line for a log."""
        return f"following {self.feed.kind}: {self.feed.address}, batches of {self.batch_size}, or of {self.flush:g} s"

    def end(self) -> None:
        """Let the passes that have begun come to their end. Any thread."""
        self._ended += 1

    def quiet_for(self, cursor: Cursor | None) -> float | None:
        """Seconds for which there has been no event after the batch that came with `cursor`; None if there has. Any
        thread. What the stream has not been asked yet does not count as nothing."""
        quiet = self._quiet
        if quiet is None or cursor is None or quiet[0] != cursor.get("examples"):
            return None
        return quiet[1]

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """Batches from the start, or after the batch that came with `cursor`; waits for more."""
        place, examples = self._find_start(cursor)
        self._rejects = Rejects(self._on_error, "event")
        return self._stream(place, examples, self._rejects)

    def _stream(self, place: Place, examples: int, rejects: Rejects) -> Iterator[tuple[KeyedBatch, Cursor]]:
        mine = self._ended
        cuts = [] if self.journal is None else self.journal.after(examples)
        waiting: list[_Piece] = []
        count, since, heard = 0, 0.0, time.monotonic()
        with closing(self.feed.read(dict(place), rejects)) as feed:
            for messages in feed:
                if messages:
                    heard, self._quiet = time.monotonic(), None
                    for piece in self._pieces(messages, rejects):
                        since = time.monotonic() if not count else since
                        waiting.append(piece)
                        count += piece.batch.size
                elif not count:
                    self._quiet = examples, time.monotonic() - heard
                while True:
                    size = self.batch_size if not cuts else min(self.batch_size, cuts[0] - examples)
                    if count < size:
                        if cuts or not count or time.monotonic() - since < self.flush:
                            break
                        size = count
                        if self.journal is not None:
                            self.journal.add(examples + size)
                    batch = _take(waiting, size, place)
                    count, examples, since = count - size, examples + size, time.monotonic()
                    if cuts and examples >= cuts[0]:
                        del cuts[0]
                    yield batch, self._cursor(place, examples)
                    if self._ended != mine:
                        return
                if self._ended != mine:
                    return

    def _pieces(self, messages: list[Message], rejects: Rejects) -> Iterator[_Piece]:
        """The features of some messages' rows, as many messages at once as have types that agree."""
        for group, table in _joined(messages):
            rows = np.arange(1, table.num_rows + 1)
            chunk = Chunk(f"{self.feed.address}, {group[0].name}", table, rows, rows)
            for batch, used in apply_features(self.features, chunk, rejects):
                if batch.size:
                    yield _Piece(batch, used.ends, group)

    def _cursor(self, place: Place, examples: int) -> Cursor:
        return {
            "source": f"follow {self.feed.kind}",
            "batch_size": self.batch_size,
            "address": self.feed.address,
            "examples": examples,
            "place": json.dumps(place, sort_keys=True),
        }

    def _find_start(self, cursor: Cursor | None) -> tuple[Place, int]:
        if cursor is None:
            return {}, 0
        mine = self._cursor({}, 0)
        if str(cursor.get("source")) in ("follow redis", "follow kafka"):  # older ones had the login in the address
            cursor = {**cursor, "address": public(str(cursor.get("address")))}
        cures = {
            "source": "resume with the kind of source that made the cursor",
            "batch_size": f"pass batch_size={cursor.get('batch_size')}",
            "address": f"follow {cursor.get('address')!r} again, or start without a cursor",
        }
        match_cursor(cursor, {name: mine[name] for name in cures}, cures)
        try:
            place = {str(part): (str(name), int(row)) for part, (name, row) in json.loads(str(cursor["place"])).items()}
        except (KeyError, ValueError, TypeError, AttributeError):
            raise DataError(
                f"the cursor is damaged: its place is {cursor.get('place')!r}; pass a cursor as `batches` gave it"
            ) from None
        return place, cursor_number(cursor, "examples")


def _take(waiting: list[_Piece], size: int, place: Place) -> KeyedBatch:
    """The first `size` examples; `place` moves behind them."""
    taken: list[KeyedBatch] = []
    while size:
        piece = waiting[0]
        use = min(size, piece.batch.size)
        taken.append(slice_batch(piece.batch, 0, use))
        whole = use == piece.batch.size
        _pass(piece.messages, int(piece.rows[use - 1]), whole, place)
        if whole:
            waiting.pop(0)
        else:
            waiting[0] = _Piece(slice_batch(piece.batch, use, piece.batch.size), piece.rows[use:], piece.messages)
        size -= use
    return join_batches(taken)


def _pass(messages: list[Message], rows: int, whole: bool, place: Place) -> None:
    """Go behind the first `rows` rows of these messages; where `whole`, what is left of them was refused."""
    for message in messages:
        count = message.table.num_rows
        if rows < count and not whole:
            if rows > 0:
                place[message.part] = (message.name, message.first + rows)
            return
        place[message.part] = (message.name, ALL if message.last else message.first + count)
        rows -= count


def _joined(messages: list[Message]) -> Iterator[tuple[list[Message], pa.Table]]:
    """Messages in order, as one table; or each by itself, where a column has other types in other messages."""
    try:
        yield messages, pa.concat_tables([message.table for message in messages], promote_options="default")
    except pa.ArrowException:
        for message in messages:
            yield [message], message.table


_LOGIN = re.compile(r"\b((redis|rediss|kafka)://)\S*@")  # older journals had it


@dataclass
class Journal:
    """Where short batches ended: a line with a number of examples each, behind a line that names the stream."""

    path: Path
    stream: str
    _ends: list[int] = field(default_factory=list)

    def after(self, examples: int) -> list[int]:
        """The ends beyond so many examples, in order."""
        lines = self.path.read_text().split("\n") if self.path.exists() else []
        if lines and (found := _LOGIN.sub(r"\1", json.loads(lines[0] or '""'))) != self.stream:
            raise DataError(
                f"{self.path} is the journal of another stream ({found!r}, not {self.stream!r}); give journal= a file "
                "of its own, or remove it together with the checkpoints beside it"
            )
        # The last piece is behind the last line's end, or a line that a crash cut short: its batch was never given.
        self._ends = sorted({int(line) for line in lines[1:-1]})
        return [end for end in self._ends if end > examples]

    def add(self, examples: int) -> None:
        """Remember an end, on disk, before its batch is used."""
        self._ends.append(examples)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        old = self.path.read_bytes() if self.path.exists() else b""
        keep = old[: old.rfind(b"\n") + 1] or json.dumps(self.stream).encode() + b"\n"
        with open(self.path, "r+b" if old else "wb") as file:
            if old[: len(keep)] != keep:
                file.write(keep)
            file.seek(len(keep))
            file.truncate()
            file.write(b"%d\n" % examples)
            file.flush()
            os.fsync(file.fileno())


def follow(
    address: str,
    features: FeatureSpec,
    batch_size: int = 4096,
    on_error: str = "raise",
    flush: float = 1.0,
    journal: str | os.PathLike[str] | None = None,
) -> FollowSource:
    """A source that waits for more: a folder of Parquet files, `redis://host/0?stream=name` or `kafka://host/topic`.

    A batch that is not full `flush` seconds after its first event is given as it is; `journal`, a file beside the
    checkpoints, remembers where, so that a resumed run cuts the same batches.

    >>> import tempfile, pyarrow.parquet as pq
    >>> from hotrow.features import Key
    >>> folder = tempfile.mkdtemp()
    >>> pq.write_table(pa.table({"user": [1, 2, 3], "click": [1, 0, 1]}), folder + "/0001.parquet")
    >>> source = follow(folder, FeatureSpec([Key("user")], label="click"), batch_size=2, flush=0.1)
    >>> stream = source.batches()
    >>> [next(stream)[0].size for _ in range(2)]
    [2, 1]
    """
    spec, place = check_features(features), os.fspath(address)
    feed: Feed
    if place.startswith(("redis://", "rediss://")):
        from hotrow.data.streams.redis import RedisFeed

        feed = RedisFeed(place)
    elif place.startswith("kafka://"):
        from hotrow.data.streams.kafka import KafkaFeed

        feed = KafkaFeed(place)
    else:
        from hotrow.data.streams.folder import FolderFeed

        feed = FolderFeed(place, spec.columns())
    return FollowSource(feed, spec, batch_size, on_error, flush, journal)
