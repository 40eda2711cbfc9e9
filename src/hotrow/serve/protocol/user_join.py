"""Joins requests for a two-part tower: a batch with users, in which a user's features are present once.

    request                                             becomes
    user features sent once for all rows, or one row    one user
    user features sent for each row                     one user for each distinct row
    a slice of a large request                          the same, for its rows

Users of different requests stay apart, in the order of the requests, so the rows of a user are adjacent. Histories are
jagged: nothing is padded, and nothing is repeated for each row. For a model without a user part `join` is frames.join.

Written in Python, other than frames.join: a batch of such a model has few requests, each with a long history, so the
cost of one array object for each column (about 1 us) is small beside that of the tower.

Every function here is pure; any thread may call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.jagged_groups import Column, group_equal
from hotrow.serve.protocol import frames
from hotrow.serve.protocol.frames import FrameError, Piece, RequestColumns
from hotrow.serve.protocol.request import Array, Ids, Signature


def join(pieces: Sequence[Piece], signature: Signature, fingerprint: int) -> KeyedBatch:
    """Join rows of several requests into one batch, in order: with users if the model has a user part. A frame that
    does not match is a FrameError."""
    if not signature.user:
        return frames.join(pieces, signature, fingerprint)
    columns = [_Column() for _ in signature.columns]
    of_user = [name in signature.user for name in signature.columns]
    dense: list[Array] = []
    user_of: list[Array] = []
    users = ids = 0
    for chunk, offset, length, first, rows in pieces:
        request = frames.read_request(chunk, offset, length)
        _check(request, signature, fingerprint, first, rows)
        wanted = slice(first, first + rows)
        entries, owners = _users_of(request, of_user, wanted)
        for column, one, is_user in zip(columns, request.ids, of_user, strict=True):
            ids += column.add(one, entries if is_user else np.arange(first, first + rows))
            if ids > frames.MOST_IDS:
                raise FrameError(f"the joined batch has more than {frames.MOST_IDS} ids")
        user_of.append(owners + users)
        users += len(entries)
        if request.dense is not None:
            one_row = len(request.dense) == 1 < request.rows
            dense.append(np.repeat(request.dense, rows, axis=0) if one_row else request.dense[wanted])
    jagged = {name: column.joined() for name, column in zip(signature.columns, columns, strict=True)}
    return KeyedBatch(
        {name: jagged[name] for name in signature.features},
        torch.from_numpy(np.concatenate(dense)) if dense else None,
        numbers={name: jagged[name] for name in signature.numbers},
        user_of=torch.from_numpy(np.concatenate(user_of)),
        user_features=signature.user,
    )


def _check(request: RequestColumns, signature: Signature, fingerprint: int, first: int, rows: int) -> None:
    width = 0 if request.dense is None else request.dense.shape[1]
    if request.fingerprint != fingerprint:
        raise FrameError("frame was made for another signature")
    if len(request.ids) != len(signature.columns):
        raise FrameError(f"frame has {len(request.ids)} features, the model {len(signature.columns)}")
    if width != signature.dense:
        raise FrameError(f"frame has {width} dense columns, the model {signature.dense}")
    if rows < 1 or first + rows > request.rows:
        raise FrameError("a slice's rows are outside of its request")


def _users_of(request: RequestColumns, of_user: Sequence[bool], wanted: slice) -> tuple[Array, Array]:
    """For these rows of a request: a row of each user, and the number of each row's user."""
    rows = wanted.stop - wanted.start
    sent = [ids for ids, is_user in zip(request.ids, of_user, strict=True) if is_user and not ids.shared]
    if not sent or rows == 1:
        return np.array([wanted.start]), np.zeros(rows, np.int64)
    every = np.arange(wanted.start, wanted.stop)
    user_of, first = group_equal([_rows_of(ids, every) for ids in sent], rows)
    return first.numpy() + wanted.start, user_of.numpy()


def _rows_of(ids: Ids, rows: Array) -> Column:
    column = _Column()
    column.add(ids, rows)
    joined = column.joined()
    return Column(joined.values, joined.offsets, joined.weights)


@dataclass
class _Column:
    """One column of a batch, to which the requests' parts are added."""

    values: list[Array] = field(default_factory=list)
    lengths: list[Array] = field(default_factory=list)
    weights: list[Array | None] = field(default_factory=list)
    one_per_row: bool = True

    def add(self, ids: Ids, rows: Array) -> int:
        """Add these rows of a request, which increase; returns how many ids they have."""
        if ids.shared:
            count = len(ids.values)
            values, weights = ids.values, ids.weights
            if len(rows) > 1:
                if count * len(rows) > frames.MOST_IDS:
                    raise FrameError(f"the joined batch has more than {frames.MOST_IDS} ids")
                values = np.tile(values, len(rows))
                weights = None if weights is None else np.tile(weights, len(rows))
            lengths = np.full(len(rows), count)
            self.one_per_row &= count == 1
        elif ids.offsets is None:
            values, weights = ids.values[rows], None if ids.weights is None else ids.weights[rows]
            lengths = np.ones(len(rows), np.int64)
        else:
            lengths = ids.offsets[rows + 1] - ids.offsets[rows]
            places = _places(ids.offsets, rows, lengths)
            values, weights = ids.values[places], None if ids.weights is None else ids.weights[places]
            self.one_per_row = False
        self.values.append(values)
        self.lengths.append(lengths)
        self.weights.append(weights)
        return len(values)

    def joined(self) -> Jagged:
        """The column. Weights of a request without any are 1."""
        values = torch.from_numpy(np.concatenate(self.values))
        offsets = None
        if not self.one_per_row:
            offsets = torch.from_numpy(np.concatenate([np.zeros(1, np.int64), *self.lengths]).cumsum())
        if all(weights is None for weights in self.weights):
            return Jagged(values, offsets)
        filled = [
            np.ones(len(values), np.float32) if weights is None else weights
            for weights, values in zip(self.weights, self.values, strict=True)
        ]
        return Jagged(values, offsets, torch.from_numpy(np.concatenate(filled)))


def _places(offsets: Array, rows: Array, lengths: Array) -> Array | slice:
    """Where the ids of these rows are."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return slice(int(offsets[rows[0]]), int(offsets[rows[-1] + 1]))
    starts = np.concatenate([np.zeros(1, np.int64), lengths]).cumsum()[:-1]
    return np.repeat(offsets[rows] - starts, lengths) + np.arange(int(lengths.sum()))
