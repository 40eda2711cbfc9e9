"""HistoryBuilder: rows of an event log in, examples with their histories out.

A piece of a chunk is processed at once: the user, time and event values of its rows are read; each example is given the
number of events that it sees in every run of the store and among the events since the last block; those events are
gathered, and the rest of the feature spec is applied. The store itself is advanced afterwards, so a row that the spec
refuses is taken out and the piece is made again, without a trace of it.

An example sees an event of its user that comes before it in the log and has an earlier time. A row that is earlier than
its user's newest event is refused: the log must be in time order for each user (not over all users).

`Piece.moment` leads to the store right after an example. It does not depend on how the log is cut into chunks, so a
pass resumed from it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.data.event_log.event_store import (
    BLOCK,
    Events,
    Limits,
    Run,
    State,
    Values,
    count_below,
    join_events,
    sort_events,
)
from hotrow.data.event_log.options import Histories, selected
from hotrow.data.files.chunks import Chunk
from hotrow.data.rejects import Rejects
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec, RowError
from hotrow.features.columns import Column, read_columns
from hotrow.features.hashing import BoolArray, IntArray
from hotrow.features.histories import HistoryFeature
from hotrow.features.keys import column_keys, offsets_of
from hotrow.features.row_error import refuse_rows
from hotrow.features.times import event_time

PIECE_EVENTS = 1 << 20
"""About how many events of histories one piece has: 8 MiB for each column."""
LONG = 64
"""From this mean length on, a copy for each example is faster than one gather over all of their events."""


@dataclass(frozen=True)
class Moment:
    """A place in the log, after its first `rows` rows, and what the state there is computed from."""

    before: State
    events: Events
    rows: int
    limits: Limits

    def state(self) -> State:
        """The state."""
        return self.before.advance(self.rows, self.events.until(self.rows - 1), self.limits)


@dataclass(frozen=True)
class Piece:
    """Examples with their histories. `chunk` has their rows, `rows` their row numbers in the log from 0."""

    batch: KeyedBatch
    chunk: Chunk
    rows: IntArray
    before: State
    events: Events
    limits: Limits

    def moment(self, example: int) -> Moment:
        """The moment right after example number `example`."""
        return Moment(self.before, self.events, int(self.rows[example]) + 1, self.limits)


@dataclass(frozen=True)
class _Rows:
    """Rows of the log, read: who, when, what enters a history, which are examples."""

    columns: dict[str, Column]
    users: IntArray
    distinct: IntArray  # the users, each once, ascending
    who: IntArray  # of each row, the place of its user in `distinct`
    times: IntArray
    enters: BoolArray
    examples: BoolArray
    values: Values
    numbers: IntArray  # of the rows, in the log

    def events(self) -> Events:
        """The rows that enter a history."""
        return Events(self.users[self.enters], self.values[:, self.enters], self.numbers[self.enters])


@dataclass(frozen=True)
class _Part:
    """The events of one run that examples see: example i sees the last `counts[i]` before `ends[i]`."""

    values: Values
    ends: IntArray
    counts: IntArray


class HistoryBuilder:
    """Builds the histories of one pass over a log, from a state on."""

    def __init__(self, histories: Histories, features: FeatureSpec, state: State | None = None) -> None:
        self.histories, self.features, self.state = histories, features, state or State()
        self._built = histories.built(features)
        self._needed = dict.fromkeys(histories.needed(features), "the histories")
        # Features that read the same column in the same way share one column of the store; times are column 0.
        self._place: dict[str, int] = {}
        self._stored: dict[tuple[object, ...], HistoryFeature] = {}
        for history in self._built:
            for feature in history.features:
                if feature in history.times:
                    self._place[feature.name] = 0
                    continue
                key = histories.columns[feature.inputs()[0]], *_way_of_reading(feature)
                self._stored.setdefault(key, feature)
                self._place[feature.name] = 1 + list(self._stored).index(key)
        length = max(history.max_length for history in self._built)
        self.limits = Limits(1 + len(self._stored), length, histories.bytes // 2)
        smallest = 4 * BLOCK * (self.limits.columns + 2) * 8
        if histories.bytes < smallest:
            raise OptionError(f"histories: memory={histories.memory!r}; give at least {smallest // 1024} KiB")

    def pieces(self, chunk: Chunk, rejects: Rejects) -> Iterator[Piece]:
        """The chunk's examples, in order. Rows that cannot be used go to `rejects`."""
        while rows := len(chunk.numbers):
            taken = min(rows, BLOCK - self.state.rows % BLOCK)
            piece, taken = self._piece(chunk.slice(0, taken), rejects)
            chunk = chunk.slice(taken, rows)
            if piece is not None:
                yield piece

    def replay(self, chunk: Chunk, rejects: Rejects) -> None:
        """Enter the chunk's events without making examples. Requires: on_error="raise"."""
        while rows := len(chunk.numbers):
            taken = min(rows, BLOCK - self.state.rows % BLOCK)
            part = chunk.slice(0, taken)
            try:
                events = self._read(part, self._numbers(taken)).events()
            except RowError as error:
                rejects.add(part.path, int(part.numbers[error.rows[0]]), error.column, error.fact, len(error.rows))
                raise
            self.state = self.state.advance(self.state.rows + taken, events, self.limits)
            chunk = chunk.slice(taken, rows)

    def _piece(self, part: Chunk, rejects: Rejects) -> tuple[Piece | None, int]:
        """The examples of the first rows of a part of one block, and how many rows that is."""
        numbers, taken = self._numbers(len(part.numbers)), len(part.numbers)
        while True:
            try:
                rows = self._read(part, numbers)
                seen = self._see(rows)
                counts = np.sum([seen_part.counts for parts in seen for seen_part in parts], axis=0)
                fits = _fitting(counts, rows.examples)
                if fits < len(numbers):
                    taken = int(numbers[fits] - self.state.rows)
                    part, numbers = part.slice(0, fits), numbers[:fits]
                    continue
                chosen = np.flatnonzero(rows.examples)
                batch = self._apply(rows, chosen, seen)
            except RowError as error:
                first = int(error.rows[0])
                if rejects.on_error == "raise" and first:
                    taken = int(numbers[first] - self.state.rows)
                    part, numbers = part.slice(0, first), numbers[:first]
                    continue
                rejects.add(part.path, int(part.numbers[first]), error.column, error.fact, len(error.rows))
                part, numbers = part.without(error.rows), np.delete(numbers, error.rows)
            except DataError as error:
                raise DataError(f"{part.path}: {error}") from error
            else:
                break
        before, events = self.state, rows.events()
        self.state = before.advance(before.rows + taken, events, self.limits)
        if batch is None:
            return None, taken
        used = Chunk(part.path, part.table.slice(0, 0), part.numbers[chosen], part.ends[chosen])
        return Piece(batch, used, numbers[chosen], before, events, self.limits), taken

    def _numbers(self, rows: int) -> IntArray:
        return np.arange(self.state.rows, self.state.rows + rows)

    def _read(self, part: Chunk, numbers: IntArray) -> _Rows:
        """The rows of a part; raises a RowError for those without a user or a time, or out of order."""
        options = self.histories
        columns = read_columns(part.table, self._needed)
        users, missing = column_keys(columns[options.user], "auto", 0)
        if missing is not None:
            refuse_rows(options.user, missing, columns[options.user].array, "the user is missing; drop the row")
        assert self.features.time is not None
        times = event_time(columns[self.features.time])
        enters = selected("events", options.events, columns, len(numbers))
        examples = selected("examples", options.examples, columns, len(numbers))
        for feature in self._stored.values():
            present = feature.present(columns[options.columns[feature.inputs()[0]]].array)
            enters = enters if present is None else enters & present
        values = np.zeros((self.limits.columns, len(numbers)), np.int64)
        values[0] = times
        kept, one = pa.array(np.flatnonzero(enters)), np.ones(len(numbers), np.int64)
        for place, feature in enumerate(self._stored.values(), start=1):
            name = options.columns[feature.inputs()[0]]
            try:
                values[place, enters] = feature.values(name, columns[name].array.take(kept), one[: len(kept)])
            except RowError as error:  # its rows count the events that enter
                raise RowError(name, kept.to_numpy()[error.rows], error.fact) from error
        distinct, who = np.unique(users, return_inverse=True)
        rows = _Rows(columns, users, distinct, who.reshape(-1), times, enters, examples, values, numbers)
        self._check_order(rows)
        return rows

    def _check_order(self, rows: _Rows) -> None:
        """Refuse rows that are earlier than an event of the same user that came before them."""
        of_user = np.full(len(rows.distinct), np.iinfo(np.int64).min)
        for run in self.state.runs:
            begin, end = run.find(rows.distinct)
            known = end > begin
            of_user[known] = np.maximum(of_user[known], run.values[0][end[known] - 1])
        newest = of_user[rows.who]
        recent = join_events((*self.state.recent, rows.events()), self.limits.columns)
        if len(recent.users):
            run, at = sort_events(recent)
            ranks = np.unique(run.values[0], return_inverse=True)[1].reshape(-1)
            owners = np.repeat(np.arange(len(run.users)), run.counts) * (len(ranks) + 1)
            highest = np.maximum.accumulate(owners + ranks) - owners
            times = np.empty(len(ranks), np.int64)
            times[ranks] = run.values[0]
            begin, end = (place[rows.who] for place in run.find(rows.distinct))
            before = count_below(at, begin, end, rows.numbers)
            found = before > 0
            newest[found] = np.maximum(newest[found], times[highest[begin[found] + before[found] - 1]])
        bad = np.flatnonzero(rows.times < newest)
        if bad.size:
            row = int(bad[0])
            user = rows.columns[self.histories.user].array[row].as_py()
            raise RowError(
                str(self.features.time),
                bad,
                f"the event of user {user!r} is at {rows.times[row]} ms, and an earlier row of that user at "
                f"{newest[row]} ms; sort the log by time",
            )

    def _see(self, rows: _Rows) -> list[list[_Part]]:
        """For each history and each run, oldest first: the events that each example sees."""
        who, times, numbers = (of[rows.examples] for of in (rows.who, rows.times, rows.numbers))
        runs: list[tuple[Values, IntArray, IntArray]] = []  # values, where each example's visible events begin and end
        for run in self.state.runs:
            begin, end = (place[who] for place in run.find(rows.distinct))
            runs.append((run.values, begin, begin + count_below(run.values[0], begin, end, times)))
        recent, at = sort_events(join_events((*self.state.recent, rows.events()), self.limits.columns))
        begin, end = (place[who] for place in recent.find(rows.distinct))
        end = begin + count_below(at, begin, end, numbers)
        runs.append((recent.values, begin, begin + count_below(recent.values[0], begin, end, times)))
        seen = []
        for history in self._built:
            left = np.full(len(who), history.max_length)
            parts = []
            for values, begin, end in reversed(runs):
                counts = np.minimum(end - begin, left)
                left = left - counts
                parts.append(_Part(values, end, counts))
            seen.append(parts[::-1])
        return seen

    def _apply(self, rows: _Rows, chosen: IntArray, seen: list[list[_Part]]) -> KeyedBatch | None:
        """The batch of the chosen rows; a RowError counts all rows."""
        if not len(chosen):
            return None
        columns = rows.columns
        if len(chosen) < len(rows.users):
            places = pa.array(chosen)
            columns = {name: Column(name, column.array.take(places)) for name, column in columns.items()}
        made: dict[str, Jagged] = {}
        for history, parts in zip(self._built, seen, strict=True):
            lengths = np.sum([part.counts for part in parts], axis=0)
            wanted = sorted({self._place[feature.name] for feature in history.features})
            events = dict(zip(wanted, _gather(parts, lengths, wanted), strict=True))
            values = {feature.name: events[self._place[feature.name]] for feature in history.features}
            made |= history.features_of(values, lengths, rows.times[chosen])
        try:
            return self.features.apply_columns(columns, histories=made)
        except RowError as error:
            raise RowError(error.column, chosen[error.rows], error.fact) from error


def _way_of_reading(feature: HistoryFeature) -> tuple[object, ...]:
    """Two features with the same column and the same of these have the same values."""
    options = ("hash", "seed", "separator", "missing")
    return (type(feature).__name__, *(getattr(feature, option, None) for option in options))


def _gather(parts: list[_Part], lengths: IntArray, columns: list[int]) -> list[IntArray]:
    """Some columns of the events that the examples see, example by example, oldest first."""
    offsets = offsets_of(lengths)
    found = [np.empty(int(offsets[-1]), np.int64) for _ in columns]
    written = offsets[:-1]
    for part in parts:
        some = np.flatnonzero(part.counts)
        counts, begins, targets = part.counts[some], part.ends[some] - part.counts[some], written[some]
        written = written + part.counts
        total = int(counts.sum())
        if total > LONG * len(some):
            _copy_slices(part.values, begins, counts, targets, columns, found)
            continue
        shift = offsets_of(counts)[:-1]
        steps = np.arange(total)
        source, target = steps + np.repeat(begins - shift, counts), steps + np.repeat(targets - shift, counts)
        for column, into in zip(columns, found, strict=True):
            into[target] = part.values[column][source]
    return found


def _copy_slices(
    values: Values, begins: IntArray, counts: IntArray, targets: IntArray, columns: list[int], found: list[IntArray]
) -> None:
    for column, into in zip(columns, found, strict=True):
        source = values[column]
        for begin, count, target in zip(begins.tolist(), counts.tolist(), targets.tolist(), strict=True):
            into[target : target + count] = source[begin : begin + count]


def _fitting(counts: IntArray, examples: BoolArray) -> int:
    """How many rows make about PIECE_EVENTS events of histories, at least one example."""
    total = np.cumsum(counts)
    if not len(total) or total[-1] <= PIECE_EVENTS:
        return len(examples)
    fits = max(1, int(np.searchsorted(total, PIECE_EVENTS, side="right")))
    return int(np.flatnonzero(examples)[fits - 1]) + 1


def state_tensors(state: State, columns: int) -> dict[str, Tensor]:
    """The state as tensors, for a checkpoint. They share its memory, which never changes."""
    recent = join_events(state.recent, columns)
    tensors = {
        "counts": np.array([state.rows, len(state.runs), state.dropped_users, state.dropped_events]),
        "recent.users": recent.users,
        "recent.values": recent.values,
        "recent.rows": recent.rows,
    }
    for number, run in enumerate(state.runs):
        tensors |= {f"run.{number}.users": run.users, f"run.{number}.offsets": run.offsets}
        tensors[f"run.{number}.values"] = run.values
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}


def state_of(tensors: Mapping[str, Tensor], columns: int) -> State:
    """The state that `state_tensors` wrote."""
    try:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        rows, count, users, events = (int(number) for number in arrays["counts"])
        runs = tuple(
            Run(arrays[f"run.{n}.users"], arrays[f"run.{n}.offsets"], arrays[f"run.{n}.values"]) for n in range(count)
        )
        recent = Events(arrays["recent.users"], arrays["recent.values"], arrays["recent.rows"])
        if any(values.shape[0] != columns for values in (recent.values, *(run.values for run in runs))):
            raise KeyError("columns")
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"the histories saved with the cursor are damaged ({error}); resume from an earlier checkpoint"
        ) from None
    return State(rows, runs, (recent,) if len(recent.users) else (), users, events)
