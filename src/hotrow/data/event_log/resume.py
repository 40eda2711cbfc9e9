"""Resuming a pass that builds histories: what the cursor holds, and where the store comes from.

The cursor of such a source has two more fields: a stamp of all options that decide what a history is, and the number of
rows read. It carries the store as tensors (StatefulCursor), which a checkpoint saves beside it. A cursor alone, without
that state, is enough for files: the log before it is read again, without making examples. A stream may have forgotten
its beginning, so there it is an error.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hotrow.data.event_log import event_store
from hotrow.data.event_log.builder import HistoryBuilder, Moment, Piece, state_of, state_tensors
from hotrow.data.event_log.options import Histories
from hotrow.data.files.chunks import Chunk, Reader
from hotrow.data.files.listing import Files, find_files
from hotrow.data.rejects import Rejects
from hotrow.data.source import Cursor, StatefulCursor, States, cursor_number, match_cursor
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec


class LogHistories:
    """The histories of one source."""

    def __init__(self, options: Histories, features: FeatureSpec) -> None:
        if not isinstance(options, Histories):
            raise OptionError(f"histories={options!r}; pass hr.data.Histories(user=..., columns={{...}})")
        self.options, self.features = options, features
        self.dropped_users = 0
        self._before = () if options.before is None else find_files(options.before)
        self._columns = HistoryBuilder(options, features).limits.columns

    @property
    def stamp(self) -> str:
        """What a cursor must have been made with."""
        before = f" {Files.stat(self._before).stamp}" if self._before else ""
        return self.options.stamp(self.features, event_store.BLOCK) + before

    def check_cursor(self, cursor: Cursor | None) -> None:
        """Refuse a cursor of other histories."""
        if cursor is not None:
            cure = "pass the same histories=, features and memory as before, or start without a cursor"
            match_cursor(cursor, {"histories": self.stamp}, {"histories": cure})

    def builder(self, cursor: Cursor | None) -> HistoryBuilder:
        """A builder that continues after the cursor if that carries its state, else one that begins empty."""
        if not isinstance(cursor, StatefulCursor):
            return HistoryBuilder(self.options, self.features)
        return HistoryBuilder(self.options, self.features, state_of(cursor.state(), self._columns))

    def _check_rows(self, builder: HistoryBuilder, cursor: Cursor) -> None:
        """Refuse a state that is not that of the cursor."""
        rows = cursor_number(cursor, "rows")
        if builder.state.rows != rows:
            raise DataError(
                f"the histories are those after {builder.state.rows:,} rows of the log and the cursor is after "
                f"{rows:,}; pass a cursor as `batches` gave it, or resume from a checkpoint"
            )

    def begin(
        self, cursor: Cursor | None, reader: Reader, paths: tuple[str, ...], offset: int, rejects: Rejects
    ) -> HistoryBuilder:
        """A builder for the rows from `offset` of the last of these files on, which has all events before them."""
        builder = self.builder(cursor)
        if builder.state.rows == 0:
            for path in (*self._before, *(paths if cursor is not None else ())):
                for chunk in reader.chunks(path, 0, 0, rejects):
                    last = path == paths[-1] and cursor is not None
                    rows = int(np.searchsorted(chunk.ends, offset, side="right")) if last else len(chunk.ends)
                    self._replay(builder, chunk.slice(0, rows), rejects)
                    if rows < len(chunk.ends):
                        break
        if cursor is not None:
            self._check_rows(builder, cursor)
        return builder

    def begin_stream(self, cursor: Cursor | None) -> HistoryBuilder:
        """A builder for the rows after the cursor of a stream, which cannot be read from its beginning again."""
        if cursor is not None and not isinstance(cursor, StatefulCursor):
            raise DataError(
                "this cursor of a stream comes without the histories of its users; resume from a checkpoint, which has "
                "both (fit(resume=True)), or pass the cursor as `batches` gave it"
            )
        builder = self.builder(cursor)
        if cursor is not None:
            self._check_rows(builder, cursor)
        return builder

    def _replay(self, builder: HistoryBuilder, chunk: Chunk, rejects: Rejects) -> None:
        if rejects.on_error == "raise":
            builder.replay(chunk, rejects)
            return
        for _ in builder.pieces(chunk, rejects):  # to know which rows the features refuse
            pass

    def cursor(self, position: Cursor, piece: Piece, example: int) -> Cursor:
        """The cursor after an example of a piece, with the state."""
        self.dropped_users = piece.before.dropped_users
        moment = piece.moment(example)
        return StatefulCursor(position | {"histories": self.stamp, "rows": moment.rows}, partial(_tensors, moment))


def needed_columns(features: FeatureSpec, histories: Histories | None) -> tuple[str, ...]:
    """The raw columns that a source reads."""
    if histories is not None and not isinstance(histories, Histories):
        raise OptionError(f"histories={histories!r}; pass hr.data.Histories(user=..., columns={{...}})")
    return features.columns() if histories is None else histories.needed(features)


def _tensors(moment: Moment) -> States:
    return state_tensors(moment.state(), moment.limits.columns)
