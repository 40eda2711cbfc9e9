"""Requests of several users joined into one batch: histories are neither repeated nor padded nor mixed."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frames import draw_ids, rows_of
from user_models import ask, batch_of, request_of, signature

import hotrow as hr
from hotrow.serve.protocol import frames, user_join
from hotrow.serve.protocol.request import Request, Signature

MODEL = Signature(("u0", "i0", "u1"), frozenset({"u1"}), 2, user=frozenset({"u0", "u1", "n0"}), numbers=("n0", "n1"))


def draw_request(data: st.DataObject) -> Request:
    rows = data.draw(st.integers(1, 7))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shared = data.draw(st.booleans())
    dense = rng.random((1 if shared else rows, 2), np.float32)
    if data.draw(st.integers(0, 3)) == 0:
        return Request("m", rows, (), dense, shared, matrix=rng.integers(0, 3, (rows, 5)))
    return Request("m", rows, tuple(draw_ids(data, rows, rng) for _ in range(5)), dense, shared)


def entry(batch: hr.KeyedBatch, name: str, row: int) -> tuple[list[int], list[float]]:
    """The ids and weights that a row reads."""
    column = batch.column(name)
    assert batch.user_of is not None
    place = int(batch.user_of[row]) if name in batch.user_features else row
    begin, end = (place, place + 1) if column.offsets is None else column.offsets[place : place + 2].tolist()
    weights = torch.ones(len(column.values)) if column.weights is None else column.weights
    return column.values[begin:end].tolist(), weights[begin:end].tolist()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_row_reads_what_its_request_has(data: st.DataObject) -> None:
    requests = [draw_request(data) for _ in range(data.draw(st.integers(1, 4)))]
    pad = data.draw(st.integers(0, 7))  # frames need not be aligned
    pieces, bounds = [], []
    for number, request in enumerate(requests):
        frame = bytes(pad) + frames.write_request(request, number, 1, MODEL.fingerprint, 0.0)
        first = data.draw(st.integers(0, request.rows - 1))
        rows = data.draw(st.integers(1, request.rows - first))
        pieces.append((frame, pad, len(frame) - pad, first, rows))
        bounds.append((request, first, rows))
    batch = user_join.join(pieces, MODEL, MODEL.fingerprint)
    assert batch.size == sum(rows for _, _, rows in bounds) and batch.user_features == MODEL.user
    assert batch.dense is not None and batch.user_of is not None
    row = 0
    users_before: set[int] = set()
    for request, first, rows in bounds:
        assert request.dense is not None
        for own in range(first, first + rows):
            for number, name in enumerate(MODEL.columns):
                assert entry(batch, name, row) == rows_of(request, number)[own]
            assert batch.dense[row].tolist() == request.dense[0 if request.dense_shared else own].tolist()
            row += 1
        users = set(batch.user_of[row - rows : row].tolist())
        assert not users & users_before  # requests never share a user
        users_before |= users
        sent_once = request.matrix is None and all(request.ids[number].shared for number in (0, 2, 3))
        assert len(users) == 1 if sent_once or rows == 1 else len(users) <= rows
    assert batch.users == len(users_before)


@pytest.mark.parametrize("shared", [True, False])
def test_a_history_is_in_the_batch_once(shared: bool) -> None:
    asks = [ask(1, rows=50, events=9), ask(2, rows=1, events=4), ask(3, rows=3, events=0)]
    mark = signature().fingerprint
    sent = [frames.write_request(request_of(one, shared=shared), 1, 1, mark, 0.0) for one in asks]
    pieces = [(frame, 0, len(frame), 0, one.rows) for frame, one in zip(sent, asks, strict=True)]
    batch = user_join.join([*pieces, (sent[0], 0, len(sent[0]), 10, 5)], signature(), mark)
    assert batch.users == 4 and batch.ids["seen_item"].lengths().tolist() == [9, 4, 0, 9]
    assert batch.numbers["seen_time"].lengths().tolist() == [9, 4, 0, 9]
    assert batch.user_of is not None and batch.user_of.bincount().tolist() == [50, 1, 3, 5]
    whole = batch_of(asks)
    assert batch.ids["item"].values[:54].equal(whole.ids["item"].values)


def test_a_model_of_one_part_gets_its_numbers_beside_its_ids() -> None:
    plain = Signature(("item", "seen"), frozenset({"seen"}), 0, numbers=("seen_at",), jagged=True)
    one = ask(1, rows=3, events=4)
    columns = request_of(one).ids
    request = Request("m", 3, (columns[1], columns[0], columns[5]))
    frame = frames.write_request(request, 1, 1, plain.fingerprint, 0.0)
    batch = user_join.join([(frame, 0, len(frame), 0, 3)], plain, plain.fingerprint)
    assert batch.user_of is None and set(batch.ids) == {"item", "seen"} and set(batch.numbers) == {"seen_at"}
    assert batch.numbers["seen_at"].values.tolist() == one.times * 3


def test_a_frame_that_does_not_match_is_an_error() -> None:
    mark = signature().fingerprint
    frame = frames.write_request(request_of(ask(1)), 1, 1, mark, 0.0)

    def join(first: int, rows: int, expected: int = mark, length: int = len(frame)) -> hr.KeyedBatch:
        return user_join.join([(frame, 0, length, first, rows)], signature(), expected)

    for wrong in ((0, 6), (5, 1), (0, 0)):
        with pytest.raises(frames.FrameError, match="outside of its request"):
            join(*wrong)
    with pytest.raises(frames.FrameError, match="another signature"):
        join(0, 1, expected=mark + 1)
    with pytest.raises(frames.FrameError, match="before its columns"):
        join(0, 1, length=len(frame) - 48)


def test_signatures_of_histories_have_other_fingerprints_and_plain_ones_keep_theirs() -> None:
    plain = Signature(("user", "item"), frozenset({"item"}), 3, 1)
    assert plain.fingerprint == _before(plain)
    marks = {
        plain.fingerprint,
        Signature(*_fields(plain), user=frozenset({"user"})).fingerprint,
        Signature(*_fields(plain), numbers=("at",)).fingerprint,
        Signature(*_fields(plain), aligned=(("item", "at"),)).fingerprint,
        Signature(*_fields(plain), max_lengths={"item": 5}).fingerprint,
        Signature(*_fields(plain), max_lengths={"item": 6}).fingerprint,
    }
    assert len(marks) == 6
    for one in (plain, signature()):
        assert Signature.from_json(one.as_json()) == one
    assert set(plain.as_json()) == {"features", "sequences", "dense", "tasks"}


def _fields(one: Signature) -> tuple[tuple[str, ...], frozenset[str], int, int]:
    return one.features, one.sequences, one.dense, one.tasks


def _before(one: Signature) -> int:
    """The fingerprint of earlier releases."""
    text = "\0".join([*one.features, "\1", *sorted(one.sequences), str(one.dense), str(one.tasks)])
    return zlib.crc32(text.encode())
