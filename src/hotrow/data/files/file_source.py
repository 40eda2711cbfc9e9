"""FileSource: files → chunks → features → batches, each with a cursor.

All file formats share this path; a format is a Reader (parquet.py, text.py) that yields chunks from an offset on. A
batch may hold the end of one file and the start of the next, so how rows are divided into files changes no batch.

A cursor holds the file's name and size, the offset and number of the last row of its batch, the batch size, and the
stamp of all files. Memory is one chunk and one batch, whatever the size of the files.

`_read` decodes in this process; file_units.py decodes on workers. Both feed `_join`, which cuts batches and makes
cursors. Every N-th batch (strided_files.py) takes one path, whether it is decoded here or on workers. With `histories`
every row is read here, in order (event_log/).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hotrow.batch import KeyedBatch
from hotrow.data.event_log.options import Histories
from hotrow.data.event_log.resume import LogHistories
from hotrow.data.files.chunks import Reader
from hotrow.data.files.file_units import FileDecoder, Rows, apply_features, file_units, number_rows
from hotrow.data.files.listing import Files
from hotrow.data.files.strided_files import StridedDecoder, assemble_steps, strided_units
from hotrow.data.rebatch import rebatch
from hotrow.data.rejects import Rejects, check_policy
from hotrow.data.source import Cursor, check_batch_size, cursor_number, match_cursor
from hotrow.data.split import DecodedUnit, DecodedUnits, Unit
from hotrow.data.strided import Steps, stride_batches
from hotrow.errors import DataError
from hotrow.features import FeatureSpec


@dataclass(frozen=True)
class FilePosition:
    """A position in the stream: in file number `index`, at `offset`, after row `number`."""

    index: int = 0
    offset: int = 0
    number: int = 0


class FileSource:
    """Streams the batches of some files. Made by `hotrow.data.files.parquet` and `hotrow.data.files.text`."""

    def __init__(
        self,
        paths: tuple[str, ...],
        reader: Reader,
        features: FeatureSpec,
        batch_size: int,
        on_error: str,
        histories: Histories | None = None,
    ) -> None:
        self.paths = paths
        self.features = features
        self.histories = None if histories is None else LogHistories(histories, features)
        self.batch_size = check_batch_size(batch_size)
        self._reader = reader
        self._on_error = check_policy(on_error)
        self._rejects = Rejects(on_error, reader.unit)

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """Batches from the first file on, or after the batch that came with `cursor`."""
        files, start, rejects = self._begin(cursor)
        rows = self._read(start, rejects) if self.histories is None else self._build(start, cursor, rejects)
        return self._join(files, start, rows, rejects)

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit] | None:
        """The spans of files to decode after the cursor, or None if there are gzip files or histories to build."""
        if self.histories is not None:
            return None
        start = self._find_start(Files.stat(self.paths), cursor)
        return file_units(self._reader, self.paths, start.index, start.offset, start.number)

    def decoder(self) -> FileDecoder:
        """Decodes units."""
        return FileDecoder(self.paths, self._reader, self.features, self._on_error)

    def assemble(
        self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """The batches after the cursor, from the decoded units."""
        files, start, rejects = self._begin(cursor)
        return self._join(files, start, number_rows(parts, decode_now, start.index, start.number, rejects), rejects)

    def every(self, number: int, of: int, cursor: Cursor | None = None) -> Steps:
        """Batch `number` of every `of` batches, None where the files have ended before it, with the cursor after all.

        Rows of other batches are not decoded (strided_files.py), unless on_error="skip" or gzip files require it.
        """
        strided = self.strided(number, of)
        units = strided.units(cursor, small_units=True)
        if units is None:
            return stride_batches(self.batches(cursor), number, of)
        decode = strided.decoder().decode
        return strided.assemble(cursor, ((unit, decode(unit)) for unit in units), decode)

    def strided(self, number: int, of: int) -> StridedFiles:
        """Batch `number` of every `of` batches, as units that any worker can decode."""
        return StridedFiles(self, number, of)

    @property
    def dropped_users(self) -> int:
        """How many users' histories the latest pass has dropped to stay within the memory of `histories`."""
        return 0 if self.histories is None else self.histories.dropped_users

    @property
    def skipped(self) -> int:
        """How many rows the latest pass has skipped so far, with on_error="skip"."""
        return self._rejects.count

    @property
    def examples(self) -> int | None:
        """How many rows the files have, or None for text. Rows that will be skipped are counted."""
        if self.histories is not None and self.histories.options.examples is not None:
            return None
        return self._reader.count(self.paths)

    def describe(self) -> str:
        """One line for a log."""
        size = sum(Files.stat(self.paths).sizes)
        names = (
            self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} to {self.paths[-1]}, {len(self.paths)} files"
        )
        return f"{self._reader.kind}: {names}, {size:,} bytes, batches of {self.batch_size}"

    def _begin(self, cursor: Cursor | None) -> tuple[Files, FilePosition, Rejects]:
        files = Files.stat(self.paths)
        start = self._find_start(files, cursor)
        if self.histories is not None:
            self.histories.check_cursor(cursor)
        self._rejects = Rejects(self._on_error, self._reader.unit)
        return files, start, self._rejects

    def _read(self, start: FilePosition, rejects: Rejects) -> Iterator[Rows]:
        for index in range(start.index, len(self.paths)):
            here = start if index == start.index else FilePosition(index)
            for chunk in self._reader.chunks(self.paths[index], here.offset, here.number, rejects):
                for batch, used in apply_features(self.features, chunk, rejects):
                    yield Rows(index, batch, used.ends, used.numbers)

    def _build(self, start: FilePosition, cursor: Cursor | None, rejects: Rejects) -> Iterator[Rows]:
        """As `_read`, with the histories of every example. A cursor without their state replays the log before it."""
        assert self.histories is not None
        earlier = Rejects(self._on_error, self._reader.unit)  # of rows that this pass does not count
        paths = self.paths[: start.index + 1]
        builder = self.histories.begin(cursor, self._reader, paths, start.offset, earlier)
        for index in range(start.index, len(self.paths)):
            here = start if index == start.index else FilePosition(index)
            for chunk in self._reader.chunks(self.paths[index], here.offset, here.number, rejects):
                for piece in builder.pieces(chunk, rejects):
                    yield Rows(index, piece.batch, piece.chunk.ends, piece.chunk.numbers, piece)

    def _join(
        self, files: Files, start: FilePosition, rows: Iterator[Rows], rejects: Rejects
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        ends: deque[Rows] = deque()  # the pieces that are not used up yet

        def pieces() -> Iterator[KeyedBatch]:
            for piece in rows:
                if piece.batch.size:
                    ends.append(piece)
                    yield piece.batch

        oldest, empty = 0, start == FilePosition()
        for batch, cut in rebatch(pieces(), self.batch_size):
            while oldest < cut.piece:
                ends.popleft()
                oldest += 1
            last = ends[0]
            position = FilePosition(last.file, int(last.ends[cut.row]), int(last.numbers[cut.row]))
            after = self._cursor(files, position)
            if self.histories is not None and last.piece is not None:
                after = self.histories.cursor(after, last.piece, cut.row)
            yield batch, after
            empty = False
        if empty:
            rejects.check_some_passed()

    def _cursor(self, files: Files, position: FilePosition) -> Cursor:
        return {
            "source": self._reader.kind,
            "batch_size": self.batch_size,
            "file": files.names[position.index],
            "size": files.sizes[position.index],
            "files": files.stamp,
            "index": position.index,
            "offset": position.offset,
            "number": position.number,
        }

    def _find_start(self, files: Files, cursor: Cursor | None) -> FilePosition:
        if cursor is None:
            return FilePosition()
        mine = self._cursor(files, FilePosition())
        cures = {
            "source": "resume with the kind of source that made the cursor",
            "batch_size": f"pass batch_size={cursor.get('batch_size')}",
        }
        match_cursor(cursor, {name: mine[name] for name in cures}, cures)
        position = FilePosition(*(cursor_number(cursor, name) for name in ("index", "offset", "number")))
        if position.index >= len(files.paths):
            raise DataError(
                f"the cursor does not fit this source: it stands in file {position.index + 1} ({cursor.get('file')!r}) "
                f"and the source has {len(files.paths)} files; name the same files as before"
            )
        same_files = "name the same files, unchanged, or start without a cursor"
        cures = {
            "file": same_files,
            "size": f"the file {files.paths[position.index]} has changed; put the old one back, "
            "or start without a cursor",
            "files": f"some of the {len(files.paths)} files are other ones or have changed; {same_files}",
        }
        mine = self._cursor(files, position)
        match_cursor(cursor, {name: mine[name] for name in cures}, cures)
        return position


@dataclass(frozen=True)
class StridedFiles:
    """Batch `number` of every `of` batches of a source of files."""

    source: FileSource
    number: int
    of: int

    def units(self, cursor: Cursor | None = None, small_units: bool = False) -> Iterator[Unit] | None:
        """Spans of own batches after the cursor; None if only decoding tells which rows are in them."""
        source = self.source
        start = source._find_start(Files.stat(source.paths), cursor)
        if self.of == 1 or source._on_error == "skip" or source.histories is not None:
            return None
        if any(source._reader.spans(path, 0, 0) is None for path in source.paths[start.index :]):
            return None
        position = start.index, start.offset, start.number
        return strided_units(
            source._reader, source.paths, position, source.batch_size, self.number, self.of, small_units
        )

    def decoder(self) -> StridedDecoder:
        """Decodes units."""
        return StridedDecoder(self.source.paths, self.source._reader, self.source.features)

    def assemble(self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]) -> Steps:
        """The own batches after the cursor, from the decoded units."""
        files, _, _ = self.source._begin(cursor)
        for batch, position in assemble_steps(parts, self.source.batch_size):
            yield batch, self.source._cursor(files, FilePosition(*position))
