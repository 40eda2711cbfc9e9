"""Follow: a source that never ends, with batches that are the same again after a crash.

    feed (folder.py, kafka.py, redis.py)   yields messages in order, or an empty list when there is nothing new
    FollowSource                           makes features, batches and cursors of them

The cursor holds, for each part of the feed (a Kafka partition, a Redis stream, a folder), the last message or file and
how many of its rows have been consumed, and the number of examples so far. The trainer saves it with the rows of the
same step, so after a crash every event is trained on once.

A batch that is not full `flush` seconds after its first event is emitted short, so that a slow stream is trained on
too. This is the only decision that depends on a clock. A resumed run that cut its batches elsewhere would compute other
bits than the publications already on the bus. So the end of a short batch (the number of examples so far) is written to
the `journal` before the batch is emitted, and a resumed pass cuts at the recorded ends. Messages of different Kafka
partitions have no order among each other: a resumed run trains on each event once, but maybe in another order.

`end` stops every running pass within a tick; any thread may call it. Each pass runs on one thread.
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
from hotrow.data.event_log.builder import HistoryBuilder, Piece
from hotrow.data.event_log.options import Histories
from hotrow.data.event_log.resume import LogHistories, needed_columns
from hotrow.data.files.chunks import Chunk
from hotrow.data.files.file_units import apply_features
from hotrow.data.rebatch import join_batches, slice_batch
from hotrow.data.rejects import Rejects, check_policy
from hotrow.data.source import Cursor, check_batch_size, check_features, cursor_number, match_cursor
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec
from hotrow.features.hashing import IntArray

TICK = 0.1  # seconds that a feed waits before it yields an empty list
ALL = -1

StreamPosition: TypeAlias = dict[str, tuple[str, int]]
"""By part of the feed: a message's name, and how many of its rows have been consumed, or ALL."""


@dataclass(frozen=True)
class Message:
    """Rows of one message or file. `first` rows of it came before these; `last` is true if none come after."""

    part: str
    name: str
    table: pa.Table
    first: int = 0
    last: bool = True


class Feed(Protocol):
    """A stream of messages that can be read from any position."""

    @property
    def kind(self) -> str:
        """The kind of feed, for the cursor: "folder", "redis" or "kafka"."""

    @property
    def address(self) -> str:
        """The address without login, for the cursor and the log."""

    def read(self, position: StreamPosition, rejects: Rejects) -> Generator[list[Message], None, None]:
        """Messages after a position, for ever; an empty list after every TICK without a new one.

        A message that cannot be read goes to `rejects`.
        """


@dataclass
class _Piece:
    """Examples that wait for a batch, and the row that each of them came from."""

    batch: KeyedBatch
    rows: IntArray  # the number of each example's row among all rows of the messages, from 1
    messages: list[Message]
    built: Piece | None = None  # with histories: the piece of the log
    first: int = 0  # the number of the first example here, in `built`


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
        histories: Histories | None = None,
    ) -> None:
        if not isinstance(flush, (int, float)) or not flush > 0:
            raise OptionError(f"flush={flush!r}: give a number of seconds above 0")
        self.feed, self.features = feed, check_features(features)
        self.batch_size, self.flush = check_batch_size(batch_size), float(flush)
        self.journal = None if journal is None else Journal(Path(journal), f"{feed.kind} {feed.address} {batch_size}")
        self.histories = None if histories is None else LogHistories(histories, self.features)
        if histories is not None and histories.before is not None:
            raise OptionError(f"histories: before={histories.before!r} with a stream; leave it out, or train on files")
        self._on_error = check_policy(on_error)
        self._rejects = Rejects(on_error, "event")
        self._ended = 0  # how often `end` was called
        self._idle: tuple[int, float] | None = None  # examples emitted so far, and seconds without a new event

    examples = None

    @property
    def skipped(self) -> int:
        """How many events the latest pass has skipped so far, with on_error="skip"."""
        return self._rejects.count

    def describe(self) -> str:
        """One line for a log."""
        return f"following {self.feed.kind}: {self.feed.address}, batches of {self.batch_size}, or of {self.flush:g} s"

    def end(self) -> None:
        """Stop all running passes. Any thread may call it."""
        self._ended += 1

    def idle_seconds(self, cursor: Cursor | None) -> float | None:
        """Seconds without an event after the batch that came with `cursor`, or None if there was one or the feed has
        not been read since. Any thread may call it."""
        quiet = self._idle
        if quiet is None or cursor is None or quiet[0] != cursor.get("examples"):
            return None
        return quiet[1]

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """Batches from the start, or after the batch that came with `cursor`. Blocks until there are more."""
        position, examples = self._find_start(cursor)
        self._rejects = Rejects(self._on_error, "event")
        builder = None if self.histories is None else self.histories.begin_stream(cursor)
        return self._stream(position, examples, self._rejects, builder)

    def _stream(
        self, position: StreamPosition, examples: int, rejects: Rejects, builder: HistoryBuilder | None
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        mine = self._ended
        cuts = [] if self.journal is None else self.journal.after(examples)
        waiting: list[_Piece] = []
        count, since, last_event = 0, 0.0, time.monotonic()
        with closing(self.feed.read(dict(position), rejects)) as feed:
            for messages in feed:
                if messages:
                    last_event, self._idle = time.monotonic(), None
                    for piece in self._pieces(messages, rejects, builder):
                        since = time.monotonic() if not count else since
                        waiting.append(piece)
                        count += piece.batch.size
                elif not count:
                    self._idle = examples, time.monotonic() - last_event
                while True:
                    size = self.batch_size if not cuts else min(self.batch_size, cuts[0] - examples)
                    if count < size:
                        if cuts or not count or time.monotonic() - since < self.flush:
                            break
                        size = count
                        if self.journal is not None:
                            self.journal.add(examples + size)
                    batch, last, row = _take(waiting, size, position)
                    count, examples, since = count - size, examples + size, time.monotonic()
                    if cuts and examples >= cuts[0]:
                        del cuts[0]
                    after = self._cursor(position, examples)
                    if self.histories is not None and last.built is not None:
                        after = self.histories.cursor(after, last.built, row)
                    yield batch, after
                    if self._ended != mine:
                        return
                if self._ended != mine:
                    return

    def _pieces(self, messages: list[Message], rejects: Rejects, builder: HistoryBuilder | None) -> Iterator[_Piece]:
        """The features of these messages' rows, for as many messages at once as their column types allow."""
        for group, table in _concat_tables(messages):
            rows = np.arange(1, table.num_rows + 1)
            chunk = Chunk(f"{self.feed.address}, {group[0].name}", table, rows, rows)
            if builder is not None:
                for built in builder.pieces(chunk, rejects):
                    yield _Piece(built.batch, built.chunk.ends, group, built)
                continue
            for batch, used in apply_features(self.features, chunk, rejects):
                if batch.size:
                    yield _Piece(batch, used.ends, group)

    def _cursor(self, position: StreamPosition, examples: int) -> Cursor:
        return {
            "source": f"follow {self.feed.kind}",
            "batch_size": self.batch_size,
            "address": self.feed.address,
            "examples": examples,
            "place": json.dumps(position, sort_keys=True),
        }

    def _find_start(self, cursor: Cursor | None) -> tuple[StreamPosition, int]:
        if cursor is None:
            return {}, 0
        mine = self._cursor({}, 0)
        if str(cursor.get("source")) in ("follow redis", "follow kafka"):  # old cursors had the login in the address
            cursor = {**cursor, "address": public(str(cursor.get("address")))}
        cures = {
            "source": "resume with the kind of source that made the cursor",
            "batch_size": f"pass batch_size={cursor.get('batch_size')}",
            "address": f"follow {cursor.get('address')!r} again, or start without a cursor",
        }
        match_cursor(cursor, {name: mine[name] for name in cures}, cures)
        if self.histories is not None:
            self.histories.check_cursor(cursor)
        try:
            position = {
                str(part): (str(name), int(row)) for part, (name, row) in json.loads(str(cursor["place"])).items()
            }
        except (KeyError, ValueError, TypeError, AttributeError):
            raise DataError(
                f"the cursor is damaged: its place is {cursor.get('place')!r}; pass a cursor as `batches` gave it"
            ) from None
        return position, cursor_number(cursor, "examples")


def _take(waiting: list[_Piece], size: int, position: StreamPosition) -> tuple[KeyedBatch, _Piece, int]:
    """Remove and return the first `size` examples, and advance `position` past them. Also the piece that the last one
    is in, and its number there."""
    taken: list[KeyedBatch] = []
    while size:
        piece = waiting[0]
        use = min(size, piece.batch.size)
        taken.append(slice_batch(piece.batch, 0, use))
        whole = use == piece.batch.size
        # Rows after the last example may enter histories: they are not passed before the examples after them.
        _advance(piece.messages, int(piece.rows[use - 1]), whole and piece.built is None, position)
        last, row = piece, piece.first + use - 1
        if whole:
            waiting.pop(0)
        else:
            rest = slice_batch(piece.batch, use, piece.batch.size)
            waiting[0] = _Piece(rest, piece.rows[use:], piece.messages, piece.built, piece.first + use)
        size -= use
    return join_batches(taken), last, row


def _advance(messages: list[Message], rows: int, whole: bool, position: StreamPosition) -> None:
    """Advance `position` past the first `rows` rows of these messages. With `whole`, the rest of them was refused."""
    for message in messages:
        count = message.table.num_rows
        if rows < count and not whole:
            if rows > 0:
                position[message.part] = (message.name, message.first + rows)
            return
        position[message.part] = (message.name, ALL if message.last else message.first + count)
        rows -= count


def _concat_tables(messages: list[Message]) -> Iterator[tuple[list[Message], pa.Table]]:
    """The messages as one table, in order; or one table for each, if a column's type differs between messages."""
    try:
        yield messages, pa.concat_tables([message.table for message in messages], promote_options="default")
    except pa.ArrowException:
        for message in messages:
            yield [message], message.table


_LOGIN = re.compile(r"\b((redis|rediss|kafka)://)\S*@")  # old journals had the login in the address


@dataclass
class Journal:
    """Where short batches ended: a file with the stream's name on the first line and a number of examples on each
    later line."""

    path: Path
    stream: str
    _ends: list[int] = field(default_factory=list)

    def after(self, examples: int) -> list[int]:
        """The ends after `examples`, in order."""
        lines = self.path.read_text().split("\n") if self.path.exists() else []
        if lines and (found := _LOGIN.sub(r"\1", json.loads(lines[0] or '""'))) != self.stream:
            raise DataError(
                f"{self.path} is the journal of another stream ({found!r}, not {self.stream!r}); give journal= a file "
                "of its own, or remove it together with the checkpoints beside it"
            )
        # The last element is empty, or a line that a crash cut short: its batch was never emitted.
        self._ends = sorted({int(line) for line in lines[1:-1]})
        return [end for end in self._ends if end > examples]

    def add(self, examples: int) -> None:
        """Write an end to disk. Returns after fsync."""
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
    histories: Histories | None = None,
) -> FollowSource:
    """A source that never ends: a folder of Parquet files, `redis://host/0?stream=name` or `kafka://host/topic`.

    A batch that is not full `flush` seconds after its first event is emitted short. `journal`, a file beside the
    checkpoints, records where, so that a resumed run cuts the same batches. `histories`: build histories from the
    events; they are saved in the trainer's checkpoints.

    >>> import tempfile, pyarrow.parquet as pq
    >>> from hotrow.features import Key
    >>> folder = tempfile.mkdtemp()
    >>> pq.write_table(pa.table({"user": [1, 2, 3], "click": [1, 0, 1]}), folder + "/0001.parquet")
    >>> source = follow(folder, FeatureSpec([Key("user")], label="click"), batch_size=2, flush=0.1)
    >>> stream = source.batches()
    >>> [next(stream)[0].size for _ in range(2)]
    [2, 1]
    """
    spec, position = check_features(features), os.fspath(address)
    feed: Feed
    if position.startswith(("redis://", "rediss://")):
        from hotrow.data.streams.redis import RedisFeed

        feed = RedisFeed(position)
    elif position.startswith("kafka://"):
        from hotrow.data.streams.kafka import KafkaFeed

        feed = KafkaFeed(position)
    else:
        from hotrow.data.streams.folder import FolderFeed

        feed = FolderFeed(position, needed_columns(spec, histories))
    return FollowSource(feed, spec, batch_size, on_error, flush, journal, histories)
