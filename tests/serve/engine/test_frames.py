"""Frames: `join` gives the columns that plain numpy gives, and a malformed frame is an error that touches nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow import _core
from hotrow.serve.protocol import frames
from hotrow.serve.protocol.request import Ids, RefusedError, Request, Signature

KEYS = st.integers(-(2**63), 2**63 - 1)


def draw_ids(data: st.DataObject, rows: int, rng: np.random.Generator) -> Ids:
    kind = data.draw(st.sampled_from(["one", "jagged", "ones", "shared", "shared one"]))
    lengths = rng.integers(0, 4, rows)
    count = {"one": rows, "ones": rows, "jagged": lengths.sum(), "shared": rng.integers(0, 5), "shared one": 1}[kind]
    values = rng.integers(-(2**63), 2**63 - 1, count)
    weights = rng.random(count, np.float32) if data.draw(st.booleans()) else None
    offsets = None
    if kind == "jagged":
        offsets = np.concatenate([[0], np.cumsum(lengths)])
    if kind == "ones":
        offsets = np.arange(rows + 1)
    return Ids(values, offsets, weights, shared=kind.startswith("shared"))


def draw_request(data: st.DataObject, features: int, dense: int) -> Request:
    rows = data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shared = data.draw(st.booleans())
    columns = rng.random((1 if shared else rows, dense), np.float32) if dense else None
    if features and data.draw(st.booleans()):
        matrix = rng.integers(-(2**63), 2**63 - 1, (rows, features))
        return Request("m", rows, (), columns, shared, matrix=matrix)
    return Request("m", rows, tuple(draw_ids(data, rows, rng) for _ in range(features)), columns, shared)


def rows_of(request: Request, feature: int) -> list[tuple[list[int], list[float]]]:
    """The plain reference: ids and weights of each row of a feature."""
    if request.matrix is not None:
        return [([key], [1.0]) for key in request.matrix[:, feature].tolist()]
    ids = request.ids[feature]
    weights = np.ones(len(ids.values), np.float32) if ids.weights is None else ids.weights
    if ids.shared:
        return [(ids.values.tolist(), weights.tolist())] * request.rows
    bounds = np.arange(request.rows + 1) if ids.offsets is None else ids.offsets
    return [(ids.values[a:b].tolist(), weights[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def signature_of(features: int, dense: int) -> Signature:
    return Signature(tuple(f"f{i}" for i in range(features)), frozenset(), dense)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_joined_batch_equals_plain_joining(data: st.DataObject) -> None:
    features, dense = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    signature = signature_of(features, dense)
    mark = signature.fingerprint
    requests = [draw_request(data, features, dense) for _ in range(data.draw(st.integers(1, 4)))]
    pad = data.draw(st.integers(0, 7))  # frames need not be aligned
    pieces: list[frames.Piece] = []
    bounds = []
    for number, request in enumerate(requests):
        frame = frames.write_request(request, number, 1, mark, 0.0)
        first = data.draw(st.integers(0, request.rows - 1))
        count = data.draw(st.integers(1, request.rows - first))
        pieces.append((b"\0" * pad + frame, pad, len(frame), first, count))
        bounds.append((request, first, count))
    if not features and not dense:
        return  # a batch of nothing has no size
    batch = frames.join(pieces, signature, mark)
    assert batch.size == sum(count for _, _, count in bounds)
    for feature in range(features):
        expected = [row for request, first, count in bounds for row in rows_of(request, feature)[first : first + count]]
        jagged = batch.ids[f"f{feature}"]
        assert jagged.lengths().tolist() == [len(keys) for keys, _ in expected]
        assert jagged.values.tolist() == [key for keys, _ in expected for key in keys]
        assert (jagged.offsets is None) == all(len(keys) == 1 for keys, _ in expected)
        weights = [weight for _, weights in expected for weight in weights]
        assert ([1.0] * len(weights) if jagged.weights is None else jagged.weights.tolist()) == weights
    if dense:
        assert batch.dense is not None
        rows = [
            np.broadcast_to(request.dense, (request.rows, dense))[first : first + count]
            for request, first, count in bounds
            if request.dense is not None
        ]
        np.testing.assert_array_equal(batch.dense.numpy(), np.concatenate(rows))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_frames_are_errors_or_requests_never_a_crash(data: st.DataObject) -> None:
    signature = signature_of(3, 2)
    mark = signature.fingerprint
    frame = bytearray(frames.write_request(draw_request(data, 3, 2), 7, 1, mark, 0.0))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(frame), 120) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for candidate in (bytes(frame), bytes(frame[:cut])):
        try:
            found, _, _ = frames.scan(candidate, 0, len(candidate))
        except frames.FrameError:
            found = []
        for entry in found:
            if entry[0] != frames.REQUEST or len(entry) == 5:
                continue
            scanned = frames.ScannedRequest(*entry)
            if scanned.rows > 1 << 16 or scanned.ids > 1 << 20:
                continue
            try:
                frames.join([(candidate, scanned.offset, scanned.length, 0, scanned.rows)], signature, mark)
            except ValueError:
                continue


def test_huge_shared_feature_is_refused_before_memory_is_taken() -> None:
    signature = signature_of(1, 0)
    rows = 1 << 20
    request = Request("m", rows, (Ids(np.arange(1 << 10), shared=True),))
    frame = frames.write_request(request, 1, 1, signature.fingerprint, 0.0)
    assert frames.ScannedRequest(*frames.scan(frame, 0, len(frame))[0][0]).ids == 1 << 30
    with pytest.raises(frames.FrameError, match="more than 134217728 ids"):
        frames.join([(frame, 0, len(frame), 0, rows)], signature, signature.fingerprint)


def test_frame_of_another_signature_is_named() -> None:
    request = Request("m", 1, (Ids(np.arange(1)),))
    frame = frames.write_request(request, 1, 1, 5, 0.0)
    with pytest.raises(frames.FrameError, match="another signature"):
        frames.join([(frame, 0, len(frame), 0, 1)], signature_of(1, 0), 6)


def test_scan_stops_at_a_cut_frame_and_says_how_much_it_wants() -> None:
    frame = frames.write_request(Request("m", 2, (Ids(np.arange(2)),), deadline=3.5, policy="default"), 9, 4, 5, 3.0)
    chunk = bytearray(frame * 3)
    found, rest, wanted = frames.scan(chunk, 0, len(chunk) - 1)
    assert [entry[2] for entry in found] == [0, len(frame)]
    assert (rest, wanted) == (2 * len(frame), len(frame))
    first = frames.ScannedRequest(*found[0])
    assert (first.id, first.model, first.fingerprint, first.rows, first.deadline_left) == (9, 4, 5, 2, 500_000)
    assert first.policy == 3


@pytest.mark.parametrize("length", [0, 8, 15, 17, 1 << 31])
def test_impossible_length_ends_the_connection(length: int) -> None:
    head = np.array([length, 1, 0, 0], np.uint32).tobytes()
    with pytest.raises(frames.FrameError, match="length field is"):
        frames.scan(head, 0, len(head))


@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_answers_come_back_as_they_were(tasks: int) -> None:
    logits = np.arange(10 * max(1, tasks), dtype=np.float32).reshape((10, tasks) if tasks else (10,))
    data = frames.write_answers([(3, 0, 3, 2), (4, 3, 7, 0)], logits, 6, 77, True)
    found, end, _ = frames.scan(data, 0, len(data))
    assert end == len(data)
    first, second = (frames.read_answer(data, entry[2]) for entry in found)
    assert [entry[1] for entry in found] == [3, 4]
    np.testing.assert_array_equal(np.concatenate([first.logits, second.logits]), logits)
    assert (first.version, first.publication, first.late_rows, first.compiled) == (6, 77, 2, True)


def test_answer_rows_must_lie_in_the_logits() -> None:
    with pytest.raises(frames.FrameError, match="not in the logits"):
        frames.write_answers([(3, 1, 3, 0)], np.zeros(3, np.float32), 1)
    with pytest.raises(TypeError):
        _core.make_answers([(3, 0, 3, 0)], np.zeros((3, 1)), 1, 1, 0, 0, 0, False)  # doubles


def test_refusal_comes_back_as_it_was() -> None:
    data = frames.write_refusal(8, RefusedError(429, "voll, später", 0.25))
    ((kind, id, offset, _),), _, _ = frames.scan(data, 0, len(data))
    back = frames.read_refusal(data, offset)
    assert (kind, id, back.status, back.message, back.retry_after) == (frames.REFUSAL, 8, 429, "voll, später", 0.25)
    assert frames.read_refusal(frames.write_refusal(8, RefusedError(400, "no")), 0).retry_after is None
