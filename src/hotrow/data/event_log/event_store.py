"""EventStore: the newest events of every user, in immutable sorted runs.

A run holds events of some users: by user, and for each user in the order of the log. Runs are ordered by age: all
events of a user in one run are older than those in the next. Events of the log are collected for BLOCK rows and then
become a run; a run that is at most twice as large as the one after it is merged with it, so there are few runs and an
event is copied a logarithmic number of times. Nothing changes in place: a state of the store is a tuple of runs, costs
nothing to keep, and can be saved while the log is read on.

Blocks begin at fixed row numbers of the log. So what is merged, cut and dropped when depends on the log alone, and
never on how it was cut into chunks or where a run was resumed: the same row has the same history always.

Of a user's events the newest `limit` are kept, and the newest `limit` before the newest event's time: an example of
that very time must not see its ties and still sees `limit` events.

(Dropped: a ring buffer for each user in a dict, which looped over users in Python; and one pool of linked events, which
took one numpy call for each event of the longest history.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hotrow.features.hashing import IntArray
from hotrow.features.keys import offsets_of

BLOCK = 16_384
"""Rows of the log that become one run."""

Values = npt.NDArray[np.int64]
"""[columns, events]; column 0 is the time in milliseconds."""


@dataclass(frozen=True)
class Run:
    """Events sorted by user. User number i, `users[i]`, has events offsets[i] to offsets[i + 1]. Users ascend."""

    users: IntArray
    offsets: IntArray
    values: Values

    @property
    def events(self) -> int:
        """How many events."""
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return int(self.users.nbytes + self.offsets.nbytes + self.values.nbytes)

    @cached_property
    def counts(self) -> IntArray:
        """How many events each user has."""
        return np.diff(self.offsets)

    @cached_property
    def newest(self) -> IntArray:
        """The time of each user's newest event."""
        times: IntArray = self.values[0][self.offsets[1:] - 1]
        return times

    def find(self, users: IntArray) -> tuple[IntArray, IntArray]:
        """Where the events of these users begin and end; equal for a user who is not in the run."""
        if not len(self.users):
            none = np.zeros(len(users), np.int64)
            return none, none
        place = np.minimum(np.searchsorted(self.users, users), len(self.users) - 1)
        known = self.users[place] == users
        begin = np.where(known, self.offsets[place], 0)
        return begin, np.where(known, self.offsets[place + 1], 0)


@dataclass(frozen=True)
class Events:
    """Events in the order of the log; `rows` are their row numbers."""

    users: IntArray
    values: Values
    rows: IntArray

    def until(self, row: int) -> Events:
        """Those up to and with row number `row`."""
        count = int(np.searchsorted(self.rows, row, side="right"))
        return Events(self.users[:count], self.values[:, :count], self.rows[:count])


def join_events(parts: tuple[Events, ...], columns: int) -> Events:
    """The events of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    none = np.zeros(0, np.int64)
    return Events(
        np.concatenate([none, *(part.users for part in parts)]),
        np.concatenate([np.zeros((columns, 0), np.int64), *(part.values for part in parts)], axis=1),
        np.concatenate([none, *(part.rows for part in parts)]),
    )


@dataclass(frozen=True)
class Limits:
    """What a store keeps: columns of an event, newest events of a user, bytes of all runs."""

    columns: int
    length: int
    bytes: int


@dataclass(frozen=True)
class State:
    """The store after `rows` rows of the log: its runs, oldest first, and the events since the last block ended."""

    rows: int = 0
    runs: tuple[Run, ...] = ()
    recent: tuple[Events, ...] = ()
    dropped_users: int = 0
    dropped_events: int = 0

    def advance(self, rows: int, events: Events, limits: Limits) -> State:
        """The store after row number rows - 1. Requires: no block ends before `rows`."""
        recent = (*self.recent, events) if len(events.users) else self.recent
        if rows % BLOCK or rows == self.rows:
            return replace(self, rows=rows, recent=recent)
        after = replace(self, rows=rows, recent=())
        if recent:
            newest = sort_events(join_events(recent, limits.columns))[0]
            after = replace(after, runs=_settle((*self.runs, cut_run(newest, limits.length)), limits.length))
        return after._drop(limits)

    def _drop(self, limits: Limits) -> State:
        """Without the users whose newest event is oldest, if the runs are over their bytes; then down to 3/4."""
        if sum(run.nbytes for run in self.runs) <= limits.bytes:
            return self
        runs = self.runs
        while len(runs) > 1:
            runs = (*runs[:-2], merge_runs(runs[-2], runs[-1], limits.length))
        run = runs[0]
        if run.nbytes <= limits.bytes:
            return replace(self, runs=runs)
        order = np.lexsort((run.users, -run.newest))  # the newest first
        sizes = run.counts[order] * (8 * limits.columns) + 16
        kept = np.sort(order[: int(np.searchsorted(np.cumsum(sizes), limits.bytes * 3 // 4, side="right"))])
        chosen = take_users(run, kept)
        return replace(
            self,
            runs=(chosen,) if len(kept) else (),
            dropped_users=self.dropped_users + len(run.users) - len(kept),
            dropped_events=self.dropped_events + run.events - chosen.events,
        )


def sort_events(events: Events) -> tuple[Run, IntArray]:
    """Events as a run, and the row number of each event of the run."""
    order = np.argsort(events.users, kind="stable")
    users, counts = np.unique(events.users, return_counts=True)
    return Run(users, offsets_of(counts), events.values[:, order]), events.rows[order]


def merge_runs(older: Run, newer: Run, length: int) -> Run:
    """One run of both, cut to what is kept."""
    users = np.union1d(older.users, newer.users)
    places = [np.searchsorted(users, run.users) for run in (older, newer)]
    counts = np.zeros((2, len(users)), np.int64)
    for run, place, count in zip((older, newer), places, counts, strict=True):
        count[place] = run.counts
    offsets = offsets_of(counts.sum(axis=0))
    values = np.empty((older.values.shape[0], int(offsets[-1])), np.int64)
    begins = (offsets[:-1], offsets[:-1] + counts[0])
    for run, place, begin in zip((older, newer), places, begins, strict=True):
        values[:, np.repeat(begin[place] - run.offsets[:-1], run.counts) + np.arange(run.events)] = run.values
    return cut_run(Run(users, offsets, values), length)


def cut_run(run: Run, length: int) -> Run:
    """Without the events that no later example of the user can see."""
    if not run.events or int(run.counts.max()) <= length:
        return run
    before_end = np.repeat(run.offsets[1:], run.counts) - np.arange(run.events)  # 1 for the user's newest event
    begin = run.offsets[:-1]
    earlier = count_below(run.values[0], begin, run.offsets[1:], run.newest)  # of each user, before the newest time
    ties = run.counts - earlier
    from_tie = before_end - np.repeat(ties, run.counts)
    keep = (before_end <= length) | ((from_tie >= 1) & (from_tie <= length))
    owners = np.repeat(np.arange(len(run.users)), run.counts)
    counts = np.bincount(owners[keep], minlength=len(run.users))
    return Run(run.users, offsets_of(counts), run.values[:, keep])


def take_users(run: Run, places: IntArray) -> Run:
    """The events of some users. Requires: ascending places."""
    counts = run.counts[places]
    offsets = offsets_of(counts)
    chosen = np.repeat(run.offsets[places] - offsets[:-1], counts) + np.arange(int(offsets[-1]))
    return Run(run.users[places], offsets, run.values[:, chosen])


def count_below(sorted_values: IntArray, begin: IntArray, end: IntArray, bound: IntArray) -> IntArray:
    """For each i, how many of sorted_values[begin[i]:end[i]] are below bound[i]; all searches at once.

    >>> count_below(np.array([1, 3, 5]), np.array([0, 1]), np.array([3, 3]), np.array([5, 2]))
    array([2, 0])
    """
    low, high = begin.copy(), end.copy()
    if not len(sorted_values):
        return low
    while (searching := low < high).any():
        middle = (low + high) >> 1
        below = searching & (sorted_values[np.minimum(middle, len(sorted_values) - 1)] < bound)
        low = np.where(below, middle + 1, low)
        high = np.where(searching & ~below, middle, high)
    return low - begin


def _settle(runs: tuple[Run, ...], length: int) -> tuple[Run, ...]:
    while len(runs) > 1 and runs[-2].events <= 2 * runs[-1].events:
        runs = (*runs[:-2], merge_runs(runs[-2], runs[-1], length))
    return runs
